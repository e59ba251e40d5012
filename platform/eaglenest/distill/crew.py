"""The actors of one distillation that hold the target: who writes the answers, and the teachers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglenest.distill.answers import Answer, AnswerSettings, EndpointAnswerer, EngineAnswerer
from eaglenest.distill.features import Document, Features
from eaglenest.distill.learner import fast_bfloat16
from eaglenest.distill.prompts import Prompt
from eaglenest.distill.self_prompts import Turn
from eaglenest.engine.environment import engine_env
from eaglenest.errors import EagleNestError
from eaglenest.settings import Dtype, Settings
from eaglenest.targets.resolve import Target

if TYPE_CHECKING:
    from eaglenest.distill.run import DistillJob
    from eaglenest.distill.stream import Packed


class AnswererActor:
    """An answering engine in an actor.

    It starts at the first call, not with the actor: what a call raises reaches the driver as it was raised, what a
    constructor raises only as text.
    """

    def __init__(self, path: Path, dtype: str, max_model_len: int) -> None:
        self._make = lambda: EngineAnswerer(path, dtype, max_model_len)

    @cached_property
    def _engine(self) -> EngineAnswerer:
        return self._make()

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        """One answer each, in order."""
        return self._engine.answer(prompts, settings)

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        """User turns of the target's own."""
        return self._engine.write(turn, seeds)


class TeacherActor:
    """A teacher in an actor: a thin shell that hands out each document's states by themselves.

    The target is loaded at the first call; see `AnswererActor`.

    Args:
        kind: transformers or vllm. path, aux_layer_ids, dtype: as of the teachers.
        max_length: of a document, in tokens. threads: of transformers on a CPU; None: one for each core.
        ranks: GPUs that a teacher on vLLM is spread over.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        aux_layer_ids: Sequence[int],
        dtype: str,
        *,
        max_length: int,
        threads: int | None = None,
        ranks: int = 1,
    ) -> None:
        self._make = partial(_make_teacher, kind, path, aux_layer_ids, dtype, max_length, threads, ranks)

    @cached_property
    def _teacher(self) -> Any:
        return self._make()

    def features(self, documents: Sequence[Document]) -> list[Packed]:
        """Packed states, one return value for each document."""
        return [f.pack() for f in self._teacher.features(documents)]

    def lone(self, document: Document) -> Packed:
        """Packed states of a single document."""
        return self.features([document])[0]

    def answer_and_features(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Any]:
        """The answers in a list, then each one's packed states: one return value more than prompts."""
        pairs = self._teacher.answer_and_features(prompts, settings)
        return [[answer for answer, _ in pairs], *(features.pack() for _, features in pairs)]

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        """User turns of the target's own; a teacher on vLLM only."""
        written: list[str | None] = self._teacher.write(turn, seeds)
        return written

    def ready(self) -> bool:
        """Loads the target."""
        return self._teacher is not None


def _make_teacher(
    kind: str, path: Path, ids: Sequence[int], dtype: str, max_length: int, threads: int | None, ranks: int
) -> Any:
    import torch

    from eaglenest.distill.teachers import EngineTeacher, TransformersTeacher

    if kind == "vllm":
        return EngineTeacher(path, ids, dtype, max_length, ranks)
    torch.set_num_threads(threads or own_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersTeacher(path, ids, getattr(torch, dtype), device)


class Crew:
    """Starts who is needed, when they are needed; itself an `Answerer` and a `Writer`.

    With teachers on vLLM the first of them writes the answers, too, and hands over their states in the same pass, up
    to `DistillJob.reuse_gib`; any other answerer is stopped before the teachers start.

    Attributes:
        captured: object references of packed states, by `Answer.key`; captured_bytes: their size.
    """

    def __init__(self, job: DistillJob, target: Target, settings: Settings, aux_layer_ids: Sequence[int]) -> None:
        self._job, self._target, self._settings = job, target, settings
        self._ids = tuple(aux_layer_ids)
        self._answerer: Any = None
        self._teachers: list[Any] = []
        self.captured: dict[str, Any] = {}
        self.captured_bytes = 0

    @property
    def captures(self) -> bool:
        """Whether answers bring their states along."""
        return self._job.teacher == "vllm" and self._job.answers_from is None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        """One answer each, in order.

        Raises:
            BadInput, EngineError: as of the answerers.
        """
        if self._job.answers_from:
            return EndpointAnswerer(self._job.answers_from).answer(prompts, settings)
        if self.captures:
            return self._answer_and_capture(prompts, settings)
        answers: list[Answer] = _told(self._engine().answer.remote(prompts, settings))
        return answers

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        """User turns of the target's own, one for each seed.

        Raises:
            EngineError: as of the answerers.
        """
        if self._job.answers_from:
            return EndpointAnswerer(self._job.answers_from).write(turn, seeds)
        written: list[str | None] = _told(self._engine().write.remote(turn, seeds))
        return written

    def teachers(self) -> list[Any]:
        """Handles of all teachers, ready to work."""
        self._stop_answerer()
        while len(self._teachers) < self._job.teachers:
            self._teachers.append(self._teacher())
        for teacher in self._teachers:
            _told(teacher.ready.remote())
        return self._teachers

    def close(self) -> None:
        """End all actors."""
        import ray

        self._stop_answerer()
        for teacher in self._teachers:
            ray.kill(teacher)
        self._teachers = []

    def _answer_and_capture(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        call = self._engine().answer_and_features.options(num_returns=len(prompts) + 1)
        first, *states = call.remote(prompts, settings)
        answers: list[Answer] = _told(first)
        for answer, reference in zip(answers, states, strict=True):
            length = len(answer.prompt_ids) + len(answer.answer_ids)
            size = Features.size(length, len(self._ids), self._target.hidden_size)
            whole = length <= self._job.recipe.max_length  # states of a cut document would be too many
            if whole and self.captured_bytes + size <= self._job.reuse_gib * 2**30:
                self.captured[answer.key] = reference
                self.captured_bytes += size
        return answers

    def _engine(self) -> Any:
        """The actor that holds a vLLM engine: the first teacher, or one that stops before the teachers start."""
        if self.captures:
            if not self._teachers:
                self._teachers.append(self._teacher())
            return self._teachers[0]
        if self._answerer is None:
            self._answerer = self._answering_engine()
        return self._answerer

    def _answering_engine(self) -> Any:
        import ray

        # the engine's environment must be there when its process starts
        options = {"runtime_env": {"env_vars": engine_env(self._settings)}, **self._resources(1)}
        dtype = _resolved(self._job.answer_dtype, self._job.gpu)
        actor: Any = ray.remote(AnswererActor).options(**options)
        return actor.remote(self._target.path, dtype, self._settings.max_model_len)

    def _teacher(self) -> Any:
        import ray

        job, vllm = self._job, self._job.teacher == "vllm"
        environment = engine_env(self._settings) if vllm else libraries_alone(self._settings)
        options = {"runtime_env": {"env_vars": environment}, "max_restarts": -1, "max_task_retries": -1}
        ranks = job.teacher_gpus if job.gpu else 1
        actor: Any = ray.remote(TeacherActor).options(**options, **self._resources(ranks))
        return actor.remote(
            job.teacher,
            self._target.path,
            self._ids,
            _resolved(job.teacher_dtype, job.gpu),
            max_length=max(job.recipe.max_length, self._settings.max_model_len),
            threads=job.threads,
            ranks=ranks,
        )

    def _resources(self, gpus: int) -> dict[str, Any]:
        return {"num_gpus": gpus} if self._job.gpu else {"num_cpus": 0}

    def _stop_answerer(self) -> None:
        import ray

        if self._answerer is not None:
            ray.kill(self._answerer)
            self._answerer = None


def own_cores() -> int:
    """Cores this process may run on. Torch's own choice would be a single one: Ray tells its workers so."""
    return len(os.sched_getaffinity(0))


def libraries_alone(settings: Settings) -> dict[str, str]:
    """The environment of a process that computes with torch: tcmalloc and Intel's OpenMP, as for an engine.

    Training is as fast again with them.
    """
    return {name: value for name, value in engine_env(settings).items() if name == "LD_PRELOAD"}


def _told(reference: Any) -> Any:
    """A result, or what its actor raised, as it raised it."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EagleNestError):
            raise error.cause from None
        raise


def _resolved(dtype: Dtype, gpu: bool) -> str:
    """`auto` is bfloat16 where the hardware is fast at it."""
    import torch

    if dtype != "auto":
        return dtype
    return "bfloat16" if fast_bfloat16(torch.device("cuda" if gpu else "cpu")) else "float32"
