"""The Ray Train loop: a learner fed by a stream, reporting and saving as it goes."""

from __future__ import annotations

import json
import logging
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eaglenest.distill.crew import own_cores
from eaglenest.distill.features import Document, Features
from eaglenest.distill.recipe import Recipe
from eaglenest.distill.stream import Stream
from eaglenest.distill.training_state import Progress, load_training_state, save_training_state
from eaglenest.drafters.acceptance import Acceptance
from eaglenest.drafters.config import DrafterConfig
from eaglenest.targets.resolve import Target

logger = logging.getLogger("eaglenest.distill")

HISTORY = "history.json"
REPORT_SECONDS = 10.0
JUDGE_SECONDS = 1.0
DRIFT_DEPTHS = 8


class MetricLog(Protocol):
    """Where figures go while training: the registry's run logger, or nothing. Travels to the worker by pickle."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Keep some values at a step; must not raise."""
        ...

    def flush(self) -> bool:
        """Deliver what is kept."""
        ...


@dataclass(frozen=True)
class TrainTask:
    """What every worker is given: small things by value, the rest by reference."""

    target: Target
    recipe: Recipe
    config: DrafterConfig
    vocabulary: list[int]
    documents: list[Document]
    heldout: list[Document]
    teachers: list[Any]
    captured: dict[str, Any]
    num_speculative_tokens: int
    parent: Path | None
    log: MetricLog | None
    threads: int | None
    reuse_bytes: int
    save_seconds: float
    gather_first: bool


@dataclass
class _Clock:
    """Training time across restarts; evaluation counts too."""

    before: float
    began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began


def train_loop(arguments: dict[str, Any]) -> None:
    """Entry point of each Ray Train worker; `arguments["task"]` is a `TrainTask`."""
    import ray.train
    import torch

    task: TrainTask = arguments["task"]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    context = ray.train.get_context()
    torch.set_num_threads(task.threads or max(1, own_cores() // context.get_local_world_size()))
    _Run(task, context.get_world_rank(), context.get_world_size()).run()


class _Run:
    """One worker's run."""

    def __init__(self, task: TrainTask, rank: int, world: int) -> None:
        import ray.train

        self.task, self.rank, self.world = task, rank, world
        self.learner = _learner(task)
        self.progress, self.history = Progress(), list[dict[str, Any]]()
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                state, self.progress = load_training_state(Path(folder), self.learner.optimisers)
                self.history = json.loads((Path(folder) / HISTORY).read_text())
            self.learner.restore(state)
            logger.info("goes on at pass %d, %.0f s", self.progress.passes + 1, self.progress.seconds)
        mine = task.documents[rank::world]
        share = task.reuse_bytes // world
        flow: dict[str, Any] = {"batch": 8, "ahead": 2, "captured": task.captured}
        self.stream = Stream(task.teachers, mine, reuse_bytes=share, **flow)
        self.heldout = Stream(task.teachers, task.heldout, reuse_bytes=share // 4, **flow)
        self.log = task.log if rank == 0 else None
        self.gathered_s = 0.0
        if task.gather_first:
            self.gathered_s = self.stream.gather() + self.heldout.gather()
            logger.info("pass 0: states of %d documents in %.0f s", len(mine), self.gathered_s)
        self.clock = _Clock(self.progress.seconds)
        self._said = self._saved = self.clock.seconds()
        self._tokens_at = self.progress.tokens
        self._judged, self._accuracy = float("-inf"), list[float]()

    def run(self) -> None:
        """Train to the end of the recipe, then report the last checkpoint with its simulated acceptance."""
        recipe = self.task.recipe
        last: dict[str, Any] = {}
        while not self._done():
            generator = random.Random(recipe.seed * 1000 + self.progress.passes)
            order = list(range(len(self.stream.documents)))
            generator.shuffle(order)
            group: list[tuple[Document, Features]] = []
            for item in self.stream.features(order[self.progress.used :]):
                if group and sum(len(d.ids) for d, _ in [*group, item]) > recipe.pack_tokens:
                    last = self._update(group)
                    group = []
                    if self._done():
                        break
                group.append(item)
            if self._done():
                break
            if group:
                last = self._update(group)
            self.progress.passes += 1
            self.progress.used = 0
        self._finish(last)

    def _share(self) -> float:
        """How much of the run is done, 0..1: by passes, or by time when that ends it sooner."""
        recipe = self.task.recipe
        within = self.progress.used / max(1, len(self.stream.documents))
        by_passes = (self.progress.passes + within) / recipe.passes
        by_time = self.clock.seconds() / recipe.max_seconds if recipe.max_seconds else 0.0
        return min(1.0, max(by_passes, by_time))

    def _done(self) -> bool:
        share = self._share()
        if self.world == 1:
            return share >= 1.0
        return _agree(share >= 1.0)  # clocks differ: all workers stop after the same update

    def _update(self, group: list[tuple[Document, Features]]) -> dict[str, Any]:
        batch = self.learner.batch(group)
        now = self.clock.seconds()
        judge = now - self._judged >= JUDGE_SECONDS
        figures = self.learner.step(batch, self._share(), judge=judge)
        if judge:
            self._judged, self._accuracy = now, figures["accuracy"]
        figures["accuracy"] = self._accuracy
        self.progress.used += len(group)
        self.progress.updates += 1
        self.progress.tokens += batch.answer_tokens * self.world
        self.progress.seconds = self.clock.seconds()
        if self.rank == 0 and self.progress.seconds - self._said >= REPORT_SECONDS:
            self._say(figures)
        if self._time_to_save():
            self._save(figures)
        return figures

    def _time_to_save(self) -> bool:
        due = self.progress.seconds - self._saved >= self.task.save_seconds
        return due if self.world == 1 else _agree(due)

    def _say(self, figures: dict[str, Any]) -> None:
        now = self.clock.seconds()
        share = self._share()
        rate = (self.progress.tokens - self._tokens_at) / max(now - self._said, 1e-6)
        waited = 100 * self.stream.waited_s / max(now - self.clock.before, 1e-6)
        accuracy = " ".join(f"{a:.2f}" for a in figures["accuracy"])
        left = now / max(share, 1e-6) * (1 - share)
        simulated = f" | AL {self.history[-1]['sim_accept_len']:.2f}" if self.history else ""
        logger.info(
            "pass %d | %3.0f%% | loss %.3f | accuracy %s%s | %.0f tokens/s | waiting for teachers %.0f%% | ETA %d:%02d",
            *(self.progress.passes + 1, 100 * share, figures["loss"], accuracy, simulated, rate, waited),
            *divmod(int(left), 60),
        )
        if self.log:
            values = {f"accuracy_{k}": a for k, a in enumerate(figures["accuracy"])}
            values |= {k: figures[k] for k in ("loss", "grad_norm", "learning_rate")}
            values |= {"tokens_per_s": rate, "teacher_wait_percent": waited}
            self.log.metrics(values, self.progress.updates)
        self._said, self._tokens_at = now, self.progress.tokens

    def _evaluate(self, figures: dict[str, Any]) -> tuple[Acceptance, dict[str, Acceptance]]:
        items = self.heldout.features(range(len(self.task.heldout)))
        pooled, categories = self.learner.evaluate(items, self.task.num_speculative_tokens)
        self.history.append(
            {
                "seconds": self.progress.seconds,
                "tokens": self.progress.tokens,
                "loss": figures.get("loss", 0.0),
                "accuracy": figures.get("accuracy", []),
                "sim_accept_len": pooled.length,
            }
        )
        if self.log:
            self.log.metrics({"simulated_accept_len": pooled.length}, self.progress.updates)
        return pooled, categories

    def _save(self, figures: dict[str, Any], final: bool = False) -> None:
        """Report to Ray Train, as often on every worker; rank 0 brings the checkpoint."""
        import ray.train

        metrics: dict[str, Any] = {"loss": figures.get("loss"), "updates": self.progress.updates}
        if self.rank:
            ray.train.report(metrics)
        else:
            pooled, categories = self._evaluate(figures)
            metrics |= {
                "simulated_accept_len": pooled.length,
                "simulated_by_position": pooled.rates(),
                "simulated_by_category": {name: a.length for name, a in sorted(categories.items())},
                "train_s": self.clock.seconds(),
                "tokens": self.progress.tokens,
                "passes": self.progress.passes,
                "teacher_s": self.gathered_s,
                "teacher_wait_s": self.stream.waited_s,
                "final": final,
            }
            if final:
                items = self.heldout.features(range(len(self.task.heldout)))
                drift = self.learner.drift(items, DRIFT_DEPTHS)
                metrics |= {
                    "sink_attention_by_depth": drift.sink,
                    "own_attention_by_depth": drift.own,
                    "state_rms_by_depth": drift.magnitude,
                }
            with tempfile.TemporaryDirectory() as folder:
                self.progress.seconds = self.clock.seconds()
                save_training_state(Path(folder), self.learner.state(), self.progress)
                (Path(folder) / HISTORY).write_text(json.dumps(self.history))
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        self._saved = self.clock.seconds()

    def _finish(self, figures: dict[str, Any]) -> None:
        self._save(figures, final=True)
        if self.log:
            self.log.flush()


def _learner(task: TrainTask) -> Any:
    import torch

    from eaglenest.distill.initialise import adapted, from_state, from_target
    from eaglenest.distill.learner import Learner
    from eaglenest.drafters.checkpoint import load_checkpoint
    from eaglenest.targets.head import TargetHead

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if task.parent is None:
        drafter = from_target(task.target, task.config, task.vocabulary, task.recipe.seed)
    else:
        config, state, _ = load_checkpoint(task.parent)
        scale = _aux_scale(task) if task.config.fc_norm and not config.fc_norm else []
        state = adapted(task.target, state, config, task.config, task.vocabulary, scale)
        drafter = from_state(task.target, task.config, state)
    head = TargetHead.load(task.target.path, task.vocabulary)
    return Learner(drafter.to(device), head.to(device), task.recipe)


def _aux_scale(task: TrainTask) -> list[float]:
    """The size of the target's states, taken from the first document."""
    import ray

    from eaglenest.distill.initialise import aux_scale

    sample = Features.unpack(ray.get(task.teachers[0].lone.remote(task.documents[0])))
    return aux_scale(sample.aux, task.config.num_aux)


def _agree(mine: bool) -> bool:
    """Whether any worker says so, told to all."""
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    vote = torch.tensor([float(mine)], device=device)
    dist.all_reduce(vote)
    return bool(vote.item())
