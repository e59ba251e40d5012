"""Raise the drafter that ships with EagleNest, for the embedded target: prompts, answers, training, package data.

    python jobs/raise_shipped.py                  a few hours on two cores; goes on where it stopped
    python jobs/raise_shipped.py --seconds 600    of training

Prompts are ours, those the target writes itself, and composed ones (`distill/composed_prompts.py`), some of them on
articles and answers that the target wrote. Answers lie in the cache, checkpoints under `runs/training`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from eaglenest.distill.answers import AnswerSettings, AnswerStore, answer_prompts, prompt_key
from eaglenest.distill.composed_prompts import SHORT_KINDS, article_prompts, follow_ups, on_texts, short_prompts
from eaglenest.distill.crew import Crew
from eaglenest.distill.features import Document
from eaglenest.distill.prompts import Prompt, load_prompts
from eaglenest.distill.recipe import Recipe
from eaglenest.distill.run import DistillJob, distill
from eaglenest.distill.self_prompts import SelfPromptStore, self_prompts, user_turn
from eaglenest.settings import DEFAULT_TARGET, Settings, get_settings
from eaglenest.targets.resolve import Target, resolve_target

DEST = Path(__file__).parents[1] / "platform" / "eaglenest" / "data" / "drafter"
ARTICLES = AnswerSettings(max_tokens=448, temperature=0.8)  # varied texts; answers about them are greedy again


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="shipped", help="of the run; the same name goes on where it stopped")
    parser.add_argument("--seconds", type=float, default=5400.0, help="of training")
    parser.add_argument("--self-prompts", type=int, default=5000)
    parser.add_argument("--composed", type=int, default=600, help="prompts of each composed kind")
    parser.add_argument("--reuse-gib", type=float, default=5.0, help="hidden states kept for later passes")
    parser.add_argument("--dest", type=Path, default=DEST)
    return parser.parse_args()


def main() -> None:
    """Raise it and put it in its place."""
    import ray

    given, settings = _arguments(), get_settings()
    target = resolve_target(DEFAULT_TARGET, settings)
    job = DistillJob(
        name=given.name,
        target=DEFAULT_TARGET,
        recipe=Recipe(max_seconds=given.seconds, passes=50),
        heldout_prompts=100,
        reuse_gib=given.reuse_gib,
        save_seconds=300,
    )
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=int(given.reuse_gib * 2**30 * 1.3),
    )
    with Crew(job, target, settings, target.aux_layer_ids) as crew:
        prompts = _prompts(given, job, target, settings, crew, lambda line: print(line, flush=True))
    file = settings.runs_dir.resolve() / f"{given.name}.prompts.jsonl"
    lines = [json.dumps(p.model_dump(mode="json", exclude_none=True)) + "\n" for p in prompts]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines))
    made = distill(job.model_copy(update={"prompts": str(file)}), settings, say=lambda line: print(line, flush=True))
    shutil.rmtree(given.dest, ignore_errors=True)
    shutil.copytree(made.checkpoint, given.dest)
    with gzip.GzipFile(given.dest / "prompts.jsonl.gz", "wb", mtime=0) as packed:
        packed.write("".join(lines).encode())
    print(f"the drafter lies in {given.dest}: {made.figures}")


def _prompts(
    given: argparse.Namespace,
    job: DistillJob,
    target: Target,
    settings: Settings,
    crew: Crew,
    say: Callable[[str], None],
) -> list[Prompt]:
    """All prompts, with what they need of the target's texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(target.path))

    def answers(prompts: Sequence[Prompt], how: AnswerSettings) -> dict[str, str]:
        store = AnswerStore(settings.cache_dir / "answers", target, how)
        documents: list[Document] = answer_prompts(
            prompts,
            store,
            how,
            crew,
            max_length=2048,
            on_progress=lambda done, tokens: say(f"{done} texts, {tokens} tokens"),
        )
        return {d.key: tokenizer.decode(d.answer, skip_special_tokens=True).strip() for d in documents}

    own = self_prompts(
        given.self_prompts,
        SelfPromptStore(settings.cache_dir / "prompts", target),
        lambda: user_turn(tokenizer),
        crew,
        apart_from=load_prompts("builtin:heldout"),
        on_progress=lambda done: say(f"{done} prompts of the target's own"),
    )
    begun = own[: given.composed]
    said = answers(begun, job.answers)
    answered = [p for p in begun if prompt_key(p) in said]
    articles = list(answers(article_prompts(given.composed // 2), ARTICLES).values())
    return [
        *load_prompts("builtin:train"),
        *own,
        *(p for kind in SHORT_KINDS for p in short_prompts(kind, given.composed)),
        *on_texts(articles),
        *follow_ups(answered, [said[prompt_key(p)] for p in answered]),
    ]


if __name__ == "__main__":
    main()
