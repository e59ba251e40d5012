"""One distillation, driven: answers, teachers, Ray Train, and in the end a drafter checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eaglenest.distill.answers import AnswerSettings, AnswerStore, answer_prompts
from eaglenest.distill.crew import Crew, libraries_alone
from eaglenest.distill.features import Document
from eaglenest.distill.initialise import DRAFT_VOCAB_SIZE, differences, drafter_config, reshaped
from eaglenest.distill.loop import HISTORY, MetricLog, TrainTask, train_loop
from eaglenest.distill.prompts import Prompt, interleave, load_prompts, prompts_digest
from eaglenest.distill.recipe import Recipe
from eaglenest.distill.self_prompts import SelfPromptStore, self_prompts, user_turn
from eaglenest.distill.training_state import TENSORS, drafter_tensors
from eaglenest.drafters.checkpoint import load_checkpoint, save_checkpoint
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.vocabulary import choose_draft_vocabulary, coverage, draft_ids
from eaglenest.errors import BadInput, CheckpointError
from eaglenest.settings import Dtype, Settings
from eaglenest.targets.resolve import Target, resolve_target

logger = logging.getLogger("eaglenest.distill")

FEW_HELDOUT = 10


class DistillJob(BaseModel):
    """What is distilled from what. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the same name goes on where it stopped")
    target: str
    prompts: str = Field(default="builtin:train", description="builtin:train, or a JSONL file")
    self_prompts: int = Field(default=0, ge=0, description="prompts that the target writes itself, beside `prompts`")
    heldout: str | None = Field(
        default="builtin:heldout", description="prompts to judge by; None: a fifth of the topics of `prompts`"
    )
    answer_tokens: int | None = Field(default=None, gt=0, description="answer tokens to train on at most; None: all")
    heldout_prompts: int = Field(default=30, ge=1, description="how many held-out prompts the simulation replays")
    answers: AnswerSettings = AnswerSettings()
    answers_from: str | None = Field(default=None, description="URL of a running endpoint; None: an engine of our own")
    answer_dtype: Dtype = Field(default="auto", description="auto: bfloat16 where the hardware is fast at it")
    recipe: Recipe = Recipe()
    num_speculative_tokens: int = Field(default=3, ge=1, le=16, description="K of the simulated acceptance")
    workers: int = Field(default=1, ge=1)
    teachers: int = Field(default=1, ge=1)
    teacher: Literal["transformers", "vllm"] = Field(
        default="transformers", description="vllm: also writes the answers, and keeps their states in the same pass"
    )
    teacher_gpus: int = Field(default=1, ge=1, description="that a teacher on vLLM is spread over")
    teacher_dtype: Dtype = Field(default="auto", description="auto: bfloat16 where the hardware is fast at it")
    cpus_per_worker: float = Field(default=1, ge=0)
    threads: int | None = Field(default=None, ge=1, description="of each trainer and teacher; None: all cores")
    gpu: bool = False
    save_seconds: float = Field(default=45.0, gt=0, description="between checkpoints and evaluations")
    retries: int = Field(default=3, ge=0, description="restarts after a lost worker")
    reuse_gib: float = Field(default=0.6, ge=0, description="hidden states kept for later passes, in GiB")


@dataclass(frozen=True)
class Distilled:
    """A finished distillation.

    figures: single values, tables and lists, as they go to the registry. history: rows for the training plots.
    """

    checkpoint: Path
    config: DrafterConfig
    figures: dict[str, Any]
    history: list[dict[str, Any]]
    prompts_digest: str


def distill(
    job: DistillJob,
    settings: Settings,
    *,
    parent: Path | None = None,
    parent_version: int | None = None,
    log: MetricLog | None = None,
    say: Callable[[str], None] = logger.info,
) -> Distilled:
    """Distill a drafter. Needs a running Ray (`ray.init` done by the caller).

    Args:
        parent: checkpoint folder to start from, whose draft vocabulary is kept; None: from the target alone.
        log: where figures go while training.
        say: told of each stage.

    Raises:
        BadInput, TargetError, CheckpointError, EngineError: with what is wrong.
    """
    target = resolve_target(job.target, settings)
    say(f"target {target.name}: {target.num_layers} layers, states {target.aux_layer_ids}")
    training, heldout = _prompts(job, say)
    config, vocabulary = _shape(job, target, parent, say)
    with Crew(job, target, settings, config.aux_layer_ids) as crew:
        if job.self_prompts:
            training += _own_prompts(job, target, settings, heldout, crew, say)
        documents, judged = _answered(job, target, settings, training, heldout, crew, say)
        vocabulary = vocabulary or _vocabulary(config, documents)
        figures: dict[str, Any] = {
            "train_answer_tokens": sum(len(d.answer) for d in documents),
            "train_prompts": len(documents),
            "draft_vocab_coverage": _covered(judged, vocabulary),
        }
        say(
            f"{figures['train_answer_tokens']} answer tokens of {len(documents)} prompts; the draft vocabulary covers "
            f"{100 * figures['draft_vocab_coverage']:.1f}% of held-out answers"
        )
        if crew.captured:
            say(f"{len(crew.captured)} answers came with their states ({crew.captured_bytes / 2**20:.0f} MiB)")
        folder, metrics, history = _train(
            job, target, settings, config, vocabulary, documents, judged, parent, crew, log
        )
    figures |= _final_figures(metrics)
    digest = prompts_digest(training)
    checkpoint = settings.runs_dir.resolve() / "drafters" / job.name
    fresh = checkpoint.with_name(f".{job.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    save_checkpoint(
        fresh,
        config=config,
        state=_trained(folder),
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        prompts_digest=digest,
        parent_version=parent_version,
        settings=json.loads(job.model_dump_json()),
        figures=figures,
    )
    # the one before goes when this one is whole: a full disk must not cost both
    shutil.rmtree(checkpoint, ignore_errors=True)
    fresh.rename(checkpoint)
    checkpoint.with_name(f"{job.name}.history.json").write_text(json.dumps(history))
    say(f"simulated acceptance length {figures['simulated_accept_len']:.3f} after {figures['train_s']:.0f} s")
    return Distilled(checkpoint, config, figures, history, digest)


def _prompts(job: DistillJob, say: Callable[[str], None]) -> tuple[list[Prompt], list[Prompt]]:
    if job.heldout is None:
        training, heldout = load_prompts(job.prompts, "train"), load_prompts(job.prompts, "heldout")
    else:
        training, heldout = load_prompts(job.prompts), load_prompts(job.heldout)
        asked = {tuple(map(tuple, (dict(m).items() for m in p.messages))) for p in training}
        if any(tuple(map(tuple, (dict(m).items() for m in p.messages))) in asked for p in heldout):
            raise BadInput("a held-out prompt is among the training prompts", "sets that share no prompt")
    if len(heldout) < FEW_HELDOUT:
        say(f"only {len(heldout)} held-out prompts: acceptance figures of so few say little")
    return interleave(training), interleave(heldout)[: job.heldout_prompts]


def _own_prompts(
    job: DistillJob,
    target: Target,
    settings: Settings,
    heldout: list[Prompt],
    crew: Crew,
    say: Callable[[str], None],
) -> list[Prompt]:
    """Prompts that the target writes itself; they come after the others, so that a budget reaches those first."""
    from transformers import AutoTokenizer

    began = time.monotonic()
    store = SelfPromptStore(settings.cache_dir / "prompts", target)
    return self_prompts(
        job.self_prompts,
        store,
        lambda: user_turn(AutoTokenizer.from_pretrained(str(target.path))),
        crew,
        apart_from=heldout,
        on_progress=lambda done: say(f"prompts of the target's own: {done}, {time.monotonic() - began:.0f} s"),
    )


def _answered(
    job: DistillJob,
    target: Target,
    settings: Settings,
    training: list[Prompt],
    heldout: list[Prompt],
    crew: Crew,
    say: Callable[[str], None],
) -> tuple[list[Document], list[Document]]:
    """Documents to train on and to judge by."""
    store = AnswerStore(settings.cache_dir / "answers", target, job.answers)
    began = time.monotonic()

    def told(what: str) -> Callable[[int, int], None]:
        return lambda done, tokens: say(
            f"answers, {what}: {done} prompts, {tokens} tokens, {time.monotonic() - began:.0f} s"
        )

    limits = {"max_length": job.recipe.max_length}
    judged = answer_prompts(heldout, store, job.answers, crew, on_progress=told("held-out"), **limits)
    documents = answer_prompts(
        training, store, job.answers, crew, budget=job.answer_tokens, on_progress=told("training"), **limits
    )
    if not documents:
        raise BadInput("no prompt got an answer to train on", "at least one", "raise answer_tokens, or max_length")
    if not judged:
        raise BadInput(
            "no held-out prompt got an answer to judge by", "at least one", "name other held-out prompts, or max_length"
        )
    return documents, judged


def _shape(
    job: DistillJob, target: Target, parent: Path | None, say: Callable[[str], None]
) -> tuple[DrafterConfig, list[int] | None]:
    """The drafter's config and draft vocabulary: new ones, or the parent's, changed as the recipe says.

    A vocabulary of None is to be made from the answers.
    """
    recipe = job.recipe
    if parent is None:
        config = drafter_config(
            target,
            draft_vocab_size=recipe.draft_vocab_size or DRAFT_VOCAB_SIZE,
            eagle=recipe.eagle or "3.1",
            aux_layer_ids=recipe.aux_layer_ids,
        )
        return config, None
    config, state, manifest = load_checkpoint(parent)
    if manifest is not None and manifest.target_fingerprint != target.fingerprint:
        raise CheckpointError(
            f"the parent {parent} was distilled from {manifest.target_name} ({manifest.target_fingerprint[:12]})",
            f"{target.name} ({target.fingerprint[:12]})",
            "start from nothing (--from-nothing), or from a version of this target",
        )
    if job.recipe.aux_layer_ids and tuple(job.recipe.aux_layer_ids) != config.aux_layer_ids:
        raise BadInput(
            f"aux layer ids {job.recipe.aux_layer_ids} with a parent that has {config.aux_layer_ids}",
            "the parent's",
            "leave them out, or start from nothing",
        )
    changed = reshaped(config, recipe.eagle, recipe.draft_vocab_size)
    for line in differences(config, changed):
        say(line)
    if changed.draft_vocab_size != config.draft_vocab_size:
        return changed, None
    return changed, draft_ids(state["d2t"]).tolist()


def _vocabulary(config: DrafterConfig, documents: list[Document]) -> list[int]:
    """A new draft vocabulary, from the answers."""
    ends = config.eos_token_id
    always = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return choose_draft_vocabulary((d.answer for d in documents), config.draft_vocab_size, config.vocab_size, always)


def _covered(judged: list[Document], vocabulary: list[int]) -> float:
    import torch

    t2d = torch.zeros(max(vocabulary) + 1 + max(max(d.ids) for d in judged), dtype=torch.bool)
    t2d[torch.tensor(vocabulary)] = True
    return coverage((d.answer for d in judged), t2d)


def _train(
    job: DistillJob,
    target: Target,
    settings: Settings,
    config: DrafterConfig,
    vocabulary: list[int],
    documents: list[Document],
    judged: list[Document],
    parent: Path | None,
    crew: Crew,
    log: MetricLog | None,
) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Run Ray Train; gives the folder of the last checkpoint, its metrics and the history."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    task = TrainTask(
        target=target,
        recipe=job.recipe,
        config=config,
        vocabulary=vocabulary,
        documents=documents,
        heldout=judged,
        teachers=crew.teachers(),
        captured=crew.captured,
        num_speculative_tokens=job.num_speculative_tokens,
        parent=parent,
        log=log,
        threads=job.threads,
        reuse_bytes=int(job.reuse_gib * 2**30) - crew.captured_bytes,
        save_seconds=job.save_seconds,
        gather_first=not job.gpu,
    )
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"task": task},
        scaling_config=ScalingConfig(
            num_workers=job.workers, use_gpu=job.gpu, resources_per_worker={"CPU": job.cpus_per_worker}
        ),
        run_config=RunConfig(
            name=job.name,
            storage_path=str(settings.runs_dir.resolve() / "training"),
            failure_config=FailureConfig(max_failures=job.retries),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            worker_runtime_env={"env_vars": libraries_alone(settings)},
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    assert result.metrics is not None
    folder = Path(result.checkpoint.path)
    return folder, dict(result.metrics), json.loads((folder / HISTORY).read_text())


def _final_figures(metrics: dict[str, Any]) -> dict[str, Any]:
    names = (
        "simulated_accept_len",
        "simulated_by_position",
        "simulated_by_category",
        "train_s",
        "tokens",
        "passes",
        "updates",
        "teacher_s",
        "teacher_wait_s",
        "loss",
        "sink_attention_by_depth",
        "own_attention_by_depth",
        "state_rms_by_depth",
    )
    return {name: metrics[name] for name in names if metrics.get(name) is not None}


def _trained(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return drafter_tensors(load_file(folder / TENSORS))
