"""The reconciler, with a registry, a disk and an engine whose faults are forced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from eaglenest.engine.swapper import SwapReport, SwapRolledBack
from eaglenest.errors import CheckpointError, EngineError, RegistryError, SwapRefused
from eaglenest.registry import DrafterVersion
from eaglenest.serving.reconciler import Observer, Reconciler
from eaglenest.serving.status import ReplicaStatus


def version(number: int) -> DrafterVersion:
    return DrafterVersion.model_construct(version=number)


class World:
    """Registry, contract and engine in one; set `champion` and `faults`, read `done`."""

    def __init__(self) -> None:
        self.champion = 1
        self.faults: dict[str, Exception | None] = {}
        self.done: list[str] = []
        self.remembered: list[tuple[int, Path]] = []

    def _fault(self, where: str) -> None:
        if error := self.faults.get(where):
            raise error

    def desired(self) -> DrafterVersion:
        self._fault("desired")
        return version(self.champion)

    def fetch(self, wanted: DrafterVersion) -> Path:
        self.done.append(f"fetch {wanted.version}")
        self._fault("fetch")
        return Path(f"/cache/{wanted.version}")

    def check(self, folder: Path) -> None:
        self._fault("check")

    def remember(self, number: int, folder: Path) -> None:
        self.remembered.append((number, folder))

    async def swap(self, folder: Path, number: str) -> SwapReport:
        self.done.append(f"swap {number}")
        await asyncio.sleep(0)
        self._fault("swap")
        return SwapReport(number, 3, 0.01, 0.005, 0.02, ("lm_head",))


class Seen(Observer):
    def __init__(self) -> None:
        self.swaps: list[str] = []
        self.errors = 0
        self.last: tuple[int | None, int | None] = (None, None)

    def versions(self, desired: int | None, actual: int | None) -> None:
        self.last = (desired, actual)

    def swap(self, outcome: Any, stage_s: float, pause_s: float | None) -> None:
        self.swaps.append(outcome)

    def error(self) -> None:
        self.errors += 1


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def seen() -> Seen:
    return Seen()


Scenario = Callable[[Reconciler], Coroutine[Any, Any, Any]]


def run(world: World, seen: Seen, scenario: Scenario, **options: Any) -> Any:
    status = ReplicaStatus(
        replica_id="r1", desired_version=1, actual_version=1, since="2026-01-01T00:00:00+00:00", dtype="float32", k=3
    )

    async def main() -> Any:
        reconciler = Reconciler(world, world, world, status, observer=seen, **options)
        try:
            return await asyncio.wait_for(scenario(reconciler), 20)
        finally:
            reconciler.close()

    return asyncio.run(main())


def test_nothing_happens_while_the_champion_is_served(world: World, seen: Seen) -> None:
    status = run(world, seen, lambda r: r.reconcile())
    assert (status.actual_version, status.last_error, world.done) == (1, None, [])


def test_a_new_champion_is_fetched_checked_swapped_and_remembered(world: World, seen: Seen) -> None:
    world.champion = 2
    status = run(world, seen, lambda r: r.reconcile())
    assert world.done == ["fetch 2", "swap 2"]
    assert (status.desired_version, status.actual_version, status.last_error) == (2, 2, None)
    assert status.since > "2026-01-01"
    assert (status.pause_ms, status.stage_ms > 0) == (20.0, True)
    assert world.remembered == [(2, Path("/cache/2"))]
    assert (seen.swaps, seen.last) == (["swapped"], (2, 2))


def test_an_unreachable_registry_changes_nothing_and_is_said(world: World, seen: Seen) -> None:
    world.faults["desired"] = RegistryError("no MLflow server answers at http://x")

    async def twice(reconciler: Reconciler) -> tuple[ReplicaStatus, ReplicaStatus]:
        first = await reconciler.reconcile()
        world.faults.clear()
        return first, await reconciler.reconcile()

    away, back = run(world, seen, twice)
    assert (away.actual_version, away.desired_version) == (1, 1)
    assert "serving on" in (away.last_error or "")
    assert back.last_error is None
    assert seen.errors == 1


@pytest.mark.parametrize(
    ("where", "error", "outcome"),
    [
        ("fetch", CheckpointError("sha256 differs"), "refused"),
        ("check", CheckpointError("another architecture"), "refused"),
        ("swap", SwapRefused("lacks fc.weight"), "refused"),
        ("swap", SwapRolledBack("out of memory"), "rolled_back"),
    ],
)
def test_a_bad_version_is_tried_once_and_again_only_when_the_alias_has_moved(
    world: World, seen: Seen, where: str, error: Exception, outcome: str
) -> None:
    world.champion, world.faults[where] = 2, error

    async def scenario(reconciler: Reconciler) -> tuple[ReplicaStatus, list[str], ReplicaStatus]:
        await reconciler.reconcile()
        refused = await reconciler.reconcile()
        tried = list(world.done)
        world.champion = 1
        assert (await reconciler.reconcile()).last_error is None
        world.champion, world.faults[where] = 2, None
        return refused, tried, await reconciler.reconcile()

    refused, tried, mended = run(world, seen, scenario)
    assert tried.count("fetch 2") == 1
    assert refused.refuses(2)
    assert str(error.args[0]).rstrip(".") in (refused.last_error or "")
    assert refused.actual_version == 1
    assert (mended.actual_version, mended.last_error) == (2, None)
    assert seen.swaps == [outcome, "swapped"]


def test_a_registry_lost_during_the_download_is_asked_again(world: World, seen: Seen) -> None:
    world.champion, world.faults["fetch"] = 2, RegistryError("stopped answering")

    async def scenario(reconciler: Reconciler) -> ReplicaStatus:
        assert "could not be fetched" in ((await reconciler.reconcile()).last_error or "")
        world.faults.clear()
        return await reconciler.reconcile()

    assert run(world, seen, scenario).actual_version == 2


def test_an_engine_in_an_unknown_state_is_said_to_be_broken_and_left_alone(world: World, seen: Seen) -> None:
    world.champion, world.faults["swap"] = 2, EngineError("the old weights could not be put back")

    async def scenario(reconciler: Reconciler) -> str | None:
        await reconciler.reconcile()
        await reconciler.reconcile()
        return reconciler.broken

    assert "put back" in (run(world, seen, scenario) or "")
    assert world.done == ["fetch 2", "swap 2"]


def test_nudges_while_a_swap_runs_do_not_swap_twice(world: World, seen: Seen) -> None:
    world.champion = 2

    async def scenario(reconciler: Reconciler) -> None:
        await asyncio.gather(*(reconciler.reconcile() for _ in range(3)))

    run(world, seen, scenario)
    assert world.done == ["fetch 2", "swap 2"]


def test_the_loop_outlives_a_fault_nobody_thought_of(world: World, seen: Seen) -> None:
    world.champion, world.faults["desired"] = 2, ZeroDivisionError("who would have thought")

    async def scenario(reconciler: Reconciler) -> ReplicaStatus:
        loop = asyncio.create_task(reconciler.run())
        while seen.errors < 2:
            await asyncio.sleep(0.005)
        assert "ZeroDivisionError" in (reconciler.status.last_error or "")
        world.faults.clear()
        while reconciler.status.actual_version != 2:
            await asyncio.sleep(0.005)
        loop.cancel()
        return reconciler.status

    assert run(world, seen, scenario, poll_interval_s=0.01).last_error is None
