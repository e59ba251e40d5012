"""The crew on a real Ray: what goes wrong in an actor reaches the driver as it was raised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from eaglenest.distill.answers import AnswerSettings
from eaglenest.distill.crew import Crew
from eaglenest.distill.prompts import load_prompts
from eaglenest.distill.run import DistillJob
from eaglenest.errors import EngineError, TargetError
from eaglenest.settings import Settings
from eaglenest.targets import Target, resolve_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def target() -> Target:
    return resolve_target()


@pytest.mark.parametrize("teacher", ["transformers", "vllm"])
def test_a_teacher_that_cannot_be_made_says_why(ray: Any, target: Target, settings: Settings, teacher: Any) -> None:
    job = DistillJob(name="o", target="t", teacher=teacher, threads=1)
    with Crew(job, target, settings, (2, 31)) as crew, pytest.raises(TargetError, match=r"31.*0 to 30"):
        crew.teachers()


def test_an_engine_that_does_not_start_says_so(ray: Any, target: Target, settings: Settings) -> None:
    gone = replace(target, path=settings.cache_dir / "gone")
    job = DistillJob(name="o", target="t")
    with Crew(job, gone, settings, (2, 15)) as crew, pytest.raises(EngineError, match="vLLM did not start"):
        crew.answer(load_prompts("builtin:heldout")[:2], AnswerSettings(max_tokens=8))
