"""Does training report what serving will show? Simulated against served acceptance length, on the same answers.

    python benchmarks/simulated_acceptance.py --quick                    the champion, 24 prompts, K = 3
    python benchmarks/simulated_acceptance.py --drafter FOLDER --json out.json

A vLLM engine with the drafter answers held-out prompts greedily and says how many drafts each step accepted. The same
answers then go the way of training's evaluation: hidden states from a teacher, drafts by our module, replayed step by
step (`drafters.acceptance.replay`). The prompts are our held-out ones, or those of --prompts (docs/prompts.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglenest.distill.answers import render
from eaglenest.distill.features import Document
from eaglenest.distill.prompts import Prompt, interleave, load_prompts
from eaglenest.drafters.acceptance import Acceptance
from eaglenest.engine.environment import prepare_environment
from eaglenest.errors import EagleNestError
from eaglenest.settings import get_settings
from eaglenest.targets import Target, resolve_target

ALLOWED_PERCENT = 3.0


@dataclass
class Served:
    """An answer as the engine gave it: what was accepted of each step's drafts."""

    document: Document
    accepted: list[int]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 prompts and K = 3 only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--drafter", default="champion", help="checkpoint folder, version or alias")
    parser.add_argument("--target", help="embedded name, hub id or path; default: EAGLENEST_TARGET")
    parser.add_argument("--prompts", default="builtin:heldout")
    parser.add_argument("--count", type=int, default=96, help="prompts, a mixture of their categories")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5], help="drafts per step")
    return parser.parse_args()


def main() -> int:
    """Compare at each K; exit code 1 when a difference is too large."""
    given = _arguments()
    try:
        target, drafter = resolve_target(given.target), _drafter(given.drafter)
        prompts = interleave(load_prompts(given.prompts))[: 24 if given.quick else given.count]
        rows = [
            row
            for k in ([3] if given.quick else given.k)
            for row in _compare(target, drafter, prompts, k, given.max_tokens)
        ]
    except EagleNestError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{'K':>2} {'category':16} {'steps':>6} {'served':>7} {'simulated':>9} {'difference':>10}")
    for row in rows:
        print(
            f"{row['K']:>2} {row['category']:16} {row['steps']:>6} {row['served']:>7.3f} {row['simulated']:>9.3f} "
            f"{row['percent']:>+9.2f}%"
        )
    totals = [row for row in rows if row["category"] == "all"]
    goals = [
        {"name": f"simulated_K{r['K']}", "percent": abs(r["percent"]), "met": abs(r["percent"]) <= ALLOWED_PERCENT}
        for r in totals
    ]
    if given.json:
        settings = {"target": target.name, "drafter": str(drafter), "prompts": len(prompts), "max": given.max_tokens}
        given.json.write_text(json.dumps({"rows": rows, "goals": goals, "settings": settings}, indent=2))
    for goal in goals:
        verdict = "met" if goal["met"] else "short"
        print(f"goal {goal['name']} {goal['percent']:.2f}% <={ALLOWED_PERCENT:.0f}% {verdict}")
    return 0 if all(goal["met"] for goal in goals) else 1


def _drafter(given: str) -> Path:
    if Path(given).is_dir():
        return Path(given)
    from eaglenest.registry import Registry

    settings = get_settings()
    registry = Registry(settings.tracking_uri, settings.model_name)
    return registry.download(registry.resolve(given), settings.cache_dir / "drafters")


def _compare(target: Target, drafter: Path, prompts: Sequence[Prompt], k: int, max_tokens: int) -> list[dict[str, Any]]:
    """A row for each category, and one for all together."""
    served = _served(target, drafter, prompts, k, max_tokens)
    simulated, by_category = _simulated(target, drafter, [s.document for s in served], k)
    rows = []
    for category in [*sorted(by_category), "all"]:
        mine = [s for s in served if category in (s.document.category, "all")]
        counts = [n for s in mine for n in s.accepted]
        real = 1 + sum(counts) / len(counts)
        found = (simulated if category == "all" else by_category[category]).length
        rows.append(
            {
                "K": k,
                "category": category,
                "steps": len(counts),
                "served": real,
                "simulated": found,
                "percent": 100 * (found / real - 1),
            }
        )
    return rows


def _served(target: Target, drafter: Path, prompts: Sequence[Prompt], k: int, max_tokens: int) -> list[Served]:
    prepare_environment()
    import vllm

    from eaglenest.engine.arguments import EngineSpec, engine_arguments
    from eaglenest.engine.launch import threads_for

    spec = EngineSpec(target=target.path, drafter=drafter, num_speculative_tokens=k, spec_metrics="detailed")
    arguments = engine_arguments(spec)
    with threads_for(vllm.EngineArgs(**arguments).create_engine_config()):
        engine = vllm.LLM(**arguments, disable_log_stats=True)
    tokenizer = engine.get_tokenizer()
    asked = [render(tokenizer, prompt) for prompt in prompts]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in asked], sampling)
    found = []
    for prompt, ids, output in zip(prompts, asked, outputs, strict=True):
        answer: Any = output.outputs[0]
        document = Document(prompt.id, prompt.category, (*ids, *answer.token_ids), len(ids))
        if len(answer.token_ids) > 1:
            found.append(Served(document, list(answer.spec_decode_metrics.per_step_accepted)))
    return found


def _simulated(
    target: Target, drafter: Path, documents: Sequence[Document], k: int
) -> tuple[Acceptance, dict[str, Acceptance]]:
    from eaglenest.distill.initialise import from_state
    from eaglenest.distill.learner import Learner
    from eaglenest.distill.recipe import Recipe
    from eaglenest.distill.teachers import TransformersTeacher
    from eaglenest.drafters.checkpoint import load_checkpoint
    from eaglenest.drafters.vocabulary import draft_ids
    from eaglenest.targets.head import TargetHead

    config, state, _ = load_checkpoint(drafter)
    head = TargetHead.load(target.path, draft_ids(state["d2t"]).tolist())
    learner = Learner(from_state(target, config, state), head, Recipe())
    teacher = TransformersTeacher(target.path, config.aux_layer_ids)

    def items() -> Iterable[Any]:
        for document in documents:
            yield document, teacher.features([document])[0]

    return learner.evaluate(items(), k)


if __name__ == "__main__":
    sys.exit(main())
