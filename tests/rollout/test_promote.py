"""A promotion reaches every replica or is undone. The registry is real; the replicas fail on purpose."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eaglenest.errors import RegistryError, ServiceError, SwapRefused
from eaglenest.registry import Registry, TrackedRun
from eaglenest.rollout import RolloutResult, promote, rollback
from eaglenest.serving.status import ReplicaStatus

pytestmark = pytest.mark.slow


class Fleet:
    """Replicas that follow the champion when nudged, each in its own way.

    Args:
        ways: per replica what it says to a version: None takes it, text refuses it for that reason, "later" waits.
        hook: called at each nudge with its number.
    """

    def __init__(
        self,
        registry: Registry,
        *ways: Callable[[int], str | None],
        serving: int | None = 1,
        hook: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.registry, self.ways, self.hook = registry, ways, hook
        self.nudges = 0
        self.replicas = [
            ReplicaStatus(
                replica_id=f"r{i}",
                desired_version=serving,
                actual_version=serving,
                since="2026-01-01T00:00:00+00:00",
                dtype="float32",
                k=3,
            )
            for i in range(len(ways))
        ]

    def status(self) -> list[ReplicaStatus]:
        return list(self.replicas)

    def nudge(self) -> None:
        self.nudges += 1
        self.hook(self.nudges)
        desired = self.registry.aliases().get("champion")
        for i, (way, old) in enumerate(zip(self.ways, self.replicas, strict=True)):
            answer = None if desired in (None, old.actual_version) else way(desired)
            changes: dict[str, Any] = {"desired_version": desired, "last_error": None}
            if answer is None:
                changes["actual_version"] = old.actual_version if desired is None else desired
            elif answer != "later":
                changes["last_error"] = answer
            self.replicas[i] = old.model_copy(update=changes)


def takes(_: int) -> str | None:
    return None


def refuses_2(version: int) -> str | None:
    return "shapes differ" if version == 2 else None


def later(_: int) -> str | None:
    return "later"


@pytest.fixture
def registry(mlflow_server: Any, request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Registry:
    """Three sound versions of one architecture; version 1 is the champion."""
    registry = Registry(mlflow_server.uri, f"drafter-{abs(hash(request.node.nodeid))}")
    with TrackedRun(mlflow_server.uri, "rollout", run_name="r") as run:
        for seed in range(3):
            registry.register(make_checkpoint(f"v{seed}", seed=seed), run_id=run.run_id, figures={}, alias=None)
    registry.promote(1)
    return registry


@pytest.fixture
def add(registry: Registry, make_checkpoint: Callable[..., Path]) -> Callable[..., int]:
    """Register another version."""

    def register(**changes: Any) -> int:
        with TrackedRun(registry.tracking_uri, "rollout", run_name="r") as run:
            folder = make_checkpoint("other", **changes)
            return registry.register(folder, run_id=run.run_id, figures={}, alias=None).version

    return register


def test_every_replica_takes_the_promoted_version(registry: Registry, tmp_path: Path) -> None:
    fleet = Fleet(registry, takes, takes)
    result = promote(registry, 2, fleet, cache_dir=tmp_path)
    assert (result.old, result.new) == (1, 2)
    assert [status.actual_version for status in result.replicas] == [2, 2]
    assert registry.aliases() == {"champion": 2, "previous_champion": 1}
    assert RolloutResult.model_validate_json(result.model_dump_json()) == result

    back = rollback(registry, fleet, cache_dir=tmp_path)
    assert (back.old, back.new) == (2, 1)
    assert registry.aliases() == {"champion": 1, "previous_champion": 2}


def test_promoting_the_champion_changes_nothing_but_waits_for_the_replicas(registry: Registry, tmp_path: Path) -> None:
    fleet = Fleet(registry, takes, serving=None)
    result = promote(registry, 1, fleet, cache_dir=tmp_path)
    assert (result.old, result.new, result.replicas[0].actual_version) == (1, 1, 1)
    assert registry.aliases() == {"champion": 1}


def test_without_a_service_only_the_alias_moves(registry: Registry, tmp_path: Path) -> None:
    assert promote(registry, 2, None, cache_dir=tmp_path).replicas == []
    assert promote(registry, 3, Fleet(registry), cache_dir=tmp_path).replicas == []
    assert registry.aliases() == {"champion": 3, "previous_champion": 2}


def test_a_refusal_restores_the_alias_and_the_replicas_that_had_swapped(registry: Registry, tmp_path: Path) -> None:
    fleet = Fleet(registry, takes, refuses_2)
    with pytest.raises(SwapRefused) as caught:
        promote(registry, 2, fleet, cache_dir=tmp_path)
    assert "1 of 2 replicas refuse version 2: r1: shapes differ. version 1 is the champion again" in str(caught.value)
    assert registry.aliases() == {"champion": 1}
    assert [status.actual_version for status in fleet.replicas] == [1, 1]


def test_a_refused_first_champion_leaves_none(registry: Registry, tmp_path: Path) -> None:
    registry.restore({}, replacing=1)
    with pytest.raises(SwapRefused, match="there is no champion again"):
        promote(registry, 2, Fleet(registry, refuses_2, serving=None), cache_dir=tmp_path)
    assert registry.aliases() == {}


def test_an_error_that_passes_is_no_refusal(registry: Registry, tmp_path: Path) -> None:
    answers = iter(["could not be fetched", None])
    fleet = Fleet(registry, lambda _: next(answers))
    assert promote(registry, 2, fleet, cache_dir=tmp_path).new == 2
    assert fleet.nudges == 2


def test_replicas_that_are_slow_keep_the_alias(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="1 of 2 replicas do not serve version 2 yet: r1: wants 2, serves 1"):
        promote(registry, 2, Fleet(registry, takes, later), cache_dir=tmp_path, timeout_s=1.5)
    assert registry.aliases()["champion"] == 2


def test_one_refusal_among_slow_replicas_undoes_it_at_the_timeout(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(SwapRefused, match=r"r0: shapes differ; r1: wants 2, serves 1.*version 1 is the champion again"):
        promote(registry, 2, Fleet(registry, refuses_2, later), cache_dir=tmp_path, timeout_s=1.5)
    assert registry.aliases() == {"champion": 1}


def test_replicas_that_do_not_answer_are_asked_again(registry: Registry, tmp_path: Path) -> None:
    def silent_at_first(nudge: int) -> None:
        if nudge < 3:
            raise ServiceError("a replica did not answer")

    fleet = Fleet(registry, takes, hook=silent_at_first)
    assert promote(registry, 2, fleet, cache_dir=tmp_path).replicas[0].actual_version == 2

    def silent(_: int) -> None:
        raise ServiceError("a replica did not answer")

    with pytest.raises(ServiceError, match="did not answer"):
        promote(registry, 3, Fleet(registry, takes, serving=2, hook=silent), cache_dir=tmp_path, timeout_s=1)


def test_a_service_that_cannot_be_asked_stops_it_before_the_alias(registry: Registry, tmp_path: Path) -> None:
    class Gone(Fleet):
        def status(self) -> list[ReplicaStatus]:
            raise ServiceError("no application")

    with pytest.raises(ServiceError, match="no application"):
        promote(registry, 2, Gone(registry, takes), cache_dir=tmp_path)
    assert registry.aliases() == {"champion": 1}


def test_a_promotion_that_is_overtaken_leaves_the_later_one(registry: Registry, tmp_path: Path) -> None:
    def someone_else(nudge: int) -> None:
        if nudge == 1:
            registry.promote(3)

    with pytest.raises(SwapRefused, match="overtaken: version 3 was promoted meanwhile"):
        promote(registry, 2, Fleet(registry, takes, hook=someone_else), cache_dir=tmp_path)
    assert registry.aliases() == {"champion": 3, "previous_champion": 2}


def test_a_refusal_does_not_undo_what_someone_else_promoted(registry: Registry, tmp_path: Path) -> None:
    class Deaf(Fleet):
        """Its replica goes on refusing version 2 though the alias has moved."""

        def nudge(self) -> None:
            if self.nudges == 2:
                return
            super().nudge()
            if self.nudges == 2:
                registry.promote(3)

    with pytest.raises(SwapRefused, match="another version was promoted meanwhile, and stays"):
        promote(registry, 2, Deaf(registry, refuses_2), cache_dir=tmp_path)
    assert registry.aliases()["champion"] == 3


def test_another_target_is_refused_even_without_a_service(
    registry: Registry, add: Callable[..., int], tmp_path: Path
) -> None:
    version = add(target_fingerprint="0" * 64)
    with pytest.raises(SwapRefused, match=f"version {version} was distilled from tiny-target"):
        promote(registry, version, None, cache_dir=tmp_path)
    assert registry.aliases() == {"champion": 1}


def test_a_champion_that_is_not_ours_can_be_replaced(registry: Registry, tmp_path: Path) -> None:
    """Someone may move the alias in MLflow's own pages; the way back must stay open."""
    import mlflow

    client = mlflow.MlflowClient(registry.tracking_uri, registry_uri=registry.tracking_uri)
    run_id = registry.resolve(1).run_id
    foreign = client.create_model_version(registry.model_name, f"runs:/{run_id}/nothing", run_id).version
    client.set_registered_model_alias(registry.model_name, "champion", foreign)

    fleet = Fleet(registry, takes)
    assert promote(registry, 2, fleet, cache_dir=tmp_path).replicas[0].actual_version == 2


def test_another_architecture_needs_new_replicas(registry: Registry, add: Callable[..., int], tmp_path: Path) -> None:
    version = add(norm_output=False)
    fleet = Fleet(registry, takes)
    with pytest.raises(SwapRefused, match=rf"rolling replacement.*`eaglenest promote {version}`, `eaglenest up`"):
        promote(registry, version, fleet, cache_dir=tmp_path)
    assert (registry.aliases(), fleet.nudges) == ({"champion": 1}, 0)
    assert promote(registry, version, None, cache_dir=tmp_path).new == version


def test_a_corrupt_version_is_refused_before_the_alias(mlflow_server: Any, registry: Registry, tmp_path: Path) -> None:
    model_id = registry.resolve(2).model_id
    (stored,) = mlflow_server.artifacts.rglob(f"{model_id}/artifacts/checkpoint/model.safetensors")
    os.truncate(stored, 77)
    fleet = Fleet(registry, takes)
    with pytest.raises(SwapRefused, match=r"version 2 was not promoted: .*truncated") as caught:
        promote(registry, 2, fleet, cache_dir=tmp_path)
    assert str(caught.value).count("to mend it") == 1
    assert (registry.aliases(), fleet.nudges) == ({"champion": 1}, 0)


def test_versions_that_are_not_there_are_named(registry: Registry, tmp_path: Path) -> None:
    fleet = Fleet(registry, takes)
    with pytest.raises(RegistryError, match="no version 99"):
        promote(registry, 99, fleet, cache_dir=tmp_path)
    with pytest.raises(RegistryError, match="no alias challenger"):
        promote(registry, "challenger", fleet, cache_dir=tmp_path)
    with pytest.raises(RegistryError, match="no champion before version 1"):
        rollback(registry, fleet, cache_dir=tmp_path)
    assert fleet.nudges == 0
