"""The driver of a swap, against an engine whose faults are forced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from eaglenest.engine.swapper import DrafterSwapper, SwapRolledBack, batches
from eaglenest.errors import EngineError, SwapRefused

FOLDER = Path("/drafters/7")


class Engine:
    """Two ranks that answer as `DrafterExtension` does; `answers` overrides one method's answer on rank 1."""

    def __init__(self, **answers: dict[str, Any] | Exception) -> None:
        self.answers = answers
        self.calls: list[str] = []

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(method.removeprefix("drafter_"))
        await asyncio.sleep(0)
        sound: dict[str, Any] = {"ok": True, "seconds": 0.001}
        if method == "drafter_begin":
            sound |= {"slices": [3 << 20, 3 << 20, 1], "parts": ["lm_head", "model.norm"]}
        if method == "drafter_proof":
            sound |= {"parts": {"lm_head": None, "model.norm": None}}
        other = self.answers.get(method.removeprefix("drafter_"), {})
        if isinstance(other, Exception):
            raise other
        return [sound | {"rank": 0}, sound | {"rank": 1} | other]


def swap(engine: Engine) -> Any:
    return asyncio.run(DrafterSwapper(engine).swap(FOLDER, "7"))


def test_a_swap_stages_in_slices_commits_once_proves_and_lets_go() -> None:
    engine = Engine(commit={"seconds": 0.25})
    report = swap(engine)
    assert engine.calls == ["begin", "stage", "stage", "commit", "proof", "finish"]
    assert (report.version, report.rpcs, report.proven) == ("7", 3, ("lm_head", "model.norm"))
    assert report.longest_call_s == report.commit_s == 0.25


@pytest.mark.parametrize("where", ["begin", "stage"])
def test_a_refusal_while_staging_never_reaches_the_exchange(where: str) -> None:
    engine = Engine(**{where: {"ok": False, "what": "lm_head is NaN", "fix": "train again"}})
    with pytest.raises(SwapRefused, match=r"lm_head is NaN.*train again") as caught:
        swap(engine)
    assert not isinstance(caught.value, SwapRolledBack)
    assert "commit" not in engine.calls
    assert engine.calls[-1] == "finish"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"commit": {"ok": False, "what": "out of memory"}}, "rank 1: out of memory"),
        ({"proof": {"parts": {"lm_head": "a probe differs"}}}, "rank 1: lm_head does not execute"),
        ({"proof": {"ok": False, "what": "no probe"}}, "rank 1: no probe"),
    ],
)
def test_a_fault_on_one_rank_restores_every_rank(fault: dict[str, Any], says: str) -> None:
    engine = Engine(**fault)
    with pytest.raises(SwapRolledBack, match=says):
        swap(engine)
    assert engine.calls[-2:] == ["restore", "finish"]


def test_a_failed_restore_is_not_taken_for_a_refusal() -> None:
    engine = Engine(commit={"ok": False, "what": "x"}, restore={"ok": False, "what": "y"})
    with pytest.raises(EngineError, match="replace this replica"):
        swap(engine)


def test_a_dead_engine_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="did not answer"):
        swap(Engine(begin=RuntimeError("gone"), finish=RuntimeError("gone")))


def test_swaps_wait_for_each_other() -> None:
    async def two() -> list[str]:
        engine = Engine()
        swapper = DrafterSwapper(engine)
        await asyncio.gather(swapper.swap(FOLDER, "7"), swapper.swap(FOLDER, "8"))
        return engine.calls

    calls = asyncio.run(two())
    assert calls.index("finish") < calls.index("begin", 1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([], []), ([9], [(0, 1)]), ([1, 2, 9, 1, 1], [(0, 2), (2, 3), (3, 5)]), ([2, 2, 2], [(0, 2), (2, 3)])],
)
def test_slices_are_batched_within_the_budget(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    assert list(batches(sizes, 4)) == expected
