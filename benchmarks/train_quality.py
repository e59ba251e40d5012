"""Held-out acceptance length against training time: our training against the EAGLE 3 model of `speculators`.

    python benchmarks/train_quality.py --quick            one seed, a minute each, few prompts
    python benchmarks/train_quality.py                    20 minutes, three seeds; goes on after the last finished run

Every variant sees the same documents in the same packs, its time is that of training alone (answers, states and
judging are not counted), and its learning rate follows the same schedule over its time:

    ours     EAGLE 3.1 as a distillation does by default
    ours-3   the same as EAGLE 3
    peer     the peer's 3.1 model, first weights and optimiser, with its default settings

A finished run is a line in --rows, and is not made again. Acceptance is simulated on held-out prompts of topics that
are never trained on; benchmarks/simulated_acceptance.py shows that this is what vLLM serves. The last run's drafter is
kept beside the rows, to be served.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VARIANTS = ("ours", "peer", "ours-3")
MARKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # shares of the time at which held-out answers are judged
GOAL_LENGTH, GOAL_SHARE = 2.0, 0.4


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 60 seconds, 200 of the target's own prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and goals there")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "results" / "train_quality.jsonl")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1200.0, help="of training")
    parser.add_argument("--self-prompts", type=int, default=4000, help="beside the 400 built in")
    parser.add_argument("--answer-length", type=int, default=96, help="tokens of an answer at most")
    parser.add_argument("--runs", type=int, help="stop after so many new runs")
    parser.add_argument("--answers-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.seconds, given.self_prompts = 1, 60.0, 200
        given.rows = given.rows.with_name("train_quality.quick.jsonl")
    return given


def main() -> int:
    """Make the missing runs; exit code 1 when a goal is missed."""
    given = _arguments()
    if given.answers_only:
        _documents(given)
        return 0
    from eaglenest.engine.environment import engine_env
    from eaglenest.settings import get_settings

    answers = [sys.executable, *sys.argv, "--answers-only"]
    subprocess.run(answers, env=os.environ | engine_env(get_settings()), check=True)
    made = 0
    for seed in range(given.seeds):
        for variant in given.variants:
            if _row(given, variant, seed) is None and (given.runs is None or made < given.runs):
                row = _run(given, variant, seed)
                given.rows.parent.mkdir(parents=True, exist_ok=True)
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                made += 1
    rows = _rows(given)
    for row in rows:
        curve = "  ".join(f"{s / 60:.1f} min {a:.3f}" for s, a in row["curve"])
        print(f"{row['variant']:9} seed {row['seed']}  {row['tokens_per_s']:5.0f} tokens/s  {curve}")
    goals = _goals(rows, given.seconds)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "goals": goals}, indent=2))
    for goal in goals:
        print(f"goal {goal['name']} {goal['measured']} {goal['wanted']} {'met' if goal['met'] else 'short'}")
    return 0 if all(goal["met"] for goal in goals) else 1


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    """What rows must share to be compared."""
    return {
        "seconds": given.seconds,
        "self_prompts": given.self_prompts,
        "answer_length": given.answer_length,
        "cores": len(os.sched_getaffinity(0)),
    }


def _rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    if not given.rows.exists():
        return []
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    return [row for row in rows if row["settings"] == _settings(given)]


def _row(given: argparse.Namespace, variant: str, seed: int) -> dict[str, Any] | None:
    return next((r for r in _rows(given) if (r["variant"], r["seed"]) == (variant, seed)), None)


def _goals(rows: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Medians over the seeds; a goal without its rows is missed."""

    def median(variant: str) -> list[tuple[float, float]]:
        curves = [row["curve"] for row in rows if row["variant"] == variant]
        columns = zip(*curves, strict=True)
        return [tuple(map(statistics.median, zip(*c, strict=True))) for c in columns]  # type: ignore[misc]

    ours = median("ours")
    peer = median("peer")
    reached = next((s for s, a in ours if peer and a >= peer[-1][1]), None)
    limit = GOAL_SHARE * seconds
    last = ours[-1][1] if ours else None
    return [
        {
            "name": "seconds_to_the_peers_last",
            "measured": "-" if reached is None else f"{reached:.0f}",
            "wanted": f"<={limit:.0f}",
            "met": reached is not None and reached <= limit * 1.02,  # a mark is passed by the update that reaches it
        },
        {
            "name": "accept_len",
            "measured": "-" if last is None else f"{last:.3f}",
            "wanted": f">={GOAL_LENGTH}",
            "met": last is not None and last >= GOAL_LENGTH,
        },
    ]


# Documents: the same for every run.


def _documents(given: argparse.Namespace) -> tuple[Any, list[Any], list[Any]]:
    """The target, documents to train on, documents to judge by. With `engine_env`, what is missing is answered."""
    from transformers import AutoTokenizer

    from eaglenest.distill.answers import AnswerSettings, AnswerStore, EngineAnswerer, answer_prompts
    from eaglenest.distill.prompts import interleave, load_prompts
    from eaglenest.distill.self_prompts import SelfPromptStore, self_prompts, user_turn
    from eaglenest.settings import get_settings
    from eaglenest.targets import resolve_target

    target, cache = resolve_target(), get_settings().cache_dir
    settings = AnswerSettings(max_tokens=given.answer_length)

    class Lazy:
        """An engine that starts when it is needed."""

        engine: Any = None

        def __getattr__(self, name: str) -> Any:
            self.engine = self.engine or EngineAnswerer(target.path)
            return getattr(self.engine, name)

    lazy: Any = Lazy()
    tokenizer = AutoTokenizer.from_pretrained(str(target.path))
    heldout = interleave(load_prompts("builtin:heldout"))
    own = self_prompts(
        given.self_prompts,
        SelfPromptStore(cache / "prompts", target),
        lambda: user_turn(tokenizer),
        lazy,
        apart_from=heldout,
        on_progress=lambda done: print(f"prompts of the target's own: {done}", flush=True),
    )
    store = AnswerStore(cache / "answers", target, settings)
    told = {"on_progress": lambda done, tokens: print(f"answers: {done}, {tokens} tokens", flush=True)}
    training = [*interleave(load_prompts("builtin:train")), *own]
    return (
        target,
        answer_prompts(training, store, settings, lazy, max_length=1024, **told),
        answer_prompts(heldout, store, settings, lazy, max_length=1024),
    )


# One run.


def _run(given: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    import torch

    from eaglenest.distill.initialise import drafter_config, from_target
    from eaglenest.distill.learner import Learner
    from eaglenest.distill.recipe import Recipe
    from eaglenest.distill.teachers import TransformersTeacher
    from eaglenest.drafters.vocabulary import choose_draft_vocabulary
    from eaglenest.targets.head import TargetHead

    target, training, judged = _documents(given)
    eagle: Any = "3" if variant.endswith("-3") else "3.1"
    config = drafter_config(target, draft_vocab_size=8192, eagle=eagle)
    vocabulary = choose_draft_vocabulary((d.answer for d in training), 8192, config.vocab_size, [])
    recipe = Recipe(seed=seed, max_seconds=given.seconds)
    torch.manual_seed(seed)
    learner = Learner(from_target(target, config, vocabulary, seed), TargetHead.load(target.path, vocabulary), recipe)
    update = learner.step if variant.startswith("ours") else _Peer(learner, target.path)
    teacher = TransformersTeacher(target.path, config.aux_layer_ids, torch.bfloat16)
    states: dict[int, Any] = {}

    def features(index: int) -> Any:
        if index not in states:
            states[index] = teacher.features([training[index]])[0]
        return states[index]

    known = [(document, teacher.features([document])[0]) for document in judged]
    spent = tokens = 0.0
    updates, curve, marks = 0, list[tuple[float, float]](), [m * given.seconds for m in MARKS]
    for group in _packs(training, recipe.pack_tokens, seed):
        batch = learner.batch([(training[i], features(i)) for i in group])
        began = time.monotonic()
        update(batch, spent / given.seconds, judge=False)
        spent += time.monotonic() - began
        updates, tokens = updates + 1, tokens + batch.pack.tokens.shape[0]
        if spent >= marks[len(curve)]:
            if isinstance(update, _Peer):
                update.copy()
            length = learner.evaluate(known, 3)[0].length
            curve.append((spent, length))
            print(f"{variant} seed {seed}: {spent:.0f} s, acceptance length {length:.3f}", flush=True)
            if len(curve) == len(marks):
                break
    _keep(given.rows.with_name(f"{variant}-{seed}"), learner.drafter, target)
    return {
        "variant": variant,
        "seed": seed,
        "settings": _settings(given),
        "documents": len(training),
        "answer_tokens": sum(len(d.answer) for d in training),
        "updates": updates,
        "tokens_per_s": tokens / spent,
        "curve": curve,
    }


def _packs(documents: list[Any], tokens: int, seed: int) -> Iterator[list[int]]:
    """Indices of documents, pass after pass, in packs of at most so many tokens."""
    for number in range(10_000):
        order = list(range(len(documents)))
        random.Random(seed * 1000 + number).shuffle(order)
        group: list[int] = []
        for index in order:
            if group and sum(len(documents[i].ids) for i in [*group, index]) > tokens:
                yield group
                group = []
            group.append(index)
        yield group


def _keep(folder: Path, drafter: Any, target: Any) -> None:
    from eaglenest.drafters.checkpoint import save_checkpoint

    save_checkpoint(
        folder,
        config=drafter.config,
        state=drafter.state_dict(),
        target_name=target.name,
        target_fingerprint=target.fingerprint,
    )


class _Peer:
    """A step of the peer's model, from its own first weights, with its own optimiser and settings."""

    def __init__(self, learner: Any, target: Path) -> None:
        from speculators.train.config.schema import OptimizerArgs
        from speculators.train.optimizers import build_optimizers

        sys.path.insert(0, str(ROOT))
        from benchmarks.peer import peer_of

        self.learner, self.model = learner, peer_of(learner.drafter, target, weights=False)
        settings = OptimizerArgs()
        settings.muon_lr = settings.muon_lr or settings.lr  # as its command does
        self.optimisers = build_optimizers(self.model, settings)
        self.peaks = [group["lr"] for optimiser in self.optimisers for group in optimiser.param_groups]

    def __call__(self, batch: Any, progress: float, *, judge: bool) -> None:
        import torch
        from benchmarks.peer import LOSS, peer_inputs

        from eaglenest.distill.learner import fast_bfloat16

        groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]
        for group, peak in zip(groups, self.peaks, strict=True):
            group["lr"] = peak * self.learner.rate(progress)
        self.model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16(torch.device("cpu"))):
            _, loss, _ = self.model(**peer_inputs(batch), ttt_steps=self.learner.recipe.ttt_steps, loss_config=LOSS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        for optimiser in self.optimisers:
            optimiser.step()

    def copy(self) -> None:
        """The peer's weights into our drafter, to be judged."""
        mine = self.learner.drafter.state_dict()
        theirs = {name.replace("layers.0.", "midlayer."): t for name, t in self.model.state_dict().items()}
        self.learner.drafter.load_state_dict({name: theirs.get(name, tensor) for name, tensor in mine.items()})


if __name__ == "__main__":
    sys.exit(main())
