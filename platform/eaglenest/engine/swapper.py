"""The engine side of a swap, driven from the process that holds the engine client.

Staging is cut into slices, each one RPC that runs between two engine steps and is short beside one; the exchange itself
is another. The scheduler is never paused and no request is touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eaglenest.errors import EngineError, SwapRefused

SLICE_BYTES = 4 << 20
"""Weights staged in one RPC, unless a single tensor is larger."""


class CollectiveRpc(Protocol):
    """What a swap needs of an engine: `AsyncLLM` has it."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]: ...


class SwapRolledBack(SwapRefused):
    """The exchange failed or could not be proven, and the old weights were put back."""


@dataclass(frozen=True)
class SwapReport:
    """One successful swap.

    Attributes:
        version: now in service.
        rpcs: how many calls staged it.
        stage_s: seconds the worker spent staging, in all; longest_stage_s: in its longest call.
        commit_s: seconds of the exchange, the slowest rank's.
        proven: layers whose executed output or digest was compared with the staged weights, on every rank.
    """

    version: str
    rpcs: int
    stage_s: float
    longest_stage_s: float
    commit_s: float
    proven: tuple[str, ...]

    @property
    def longest_call_s(self) -> float:
        """The longest the engine waited between two steps, as its worker saw it."""
        return max(self.longest_stage_s, self.commit_s)


class DrafterSwapper:
    """Swaps the drafter of one engine; one swap at a time.

    Args:
        engine: started with `EngineSpec.drafter`.
        timeout_s: of a single call, beside the engine step it may wait for.
    """

    def __init__(self, engine: CollectiveRpc, *, timeout_s: float = 60.0) -> None:
        self._engine = engine
        self._timeout = timeout_s
        self._lock = asyncio.Lock()

    async def swap(self, folder: Path, version: str) -> SwapReport:
        """Put the checkpoint in `folder` into service. It should have been verified before: see `verify_checkpoint`.

        Raises:
            SwapRefused: the engine would not take it; the old drafter was in service throughout.
            SwapRolledBack: the exchange failed; the old drafter is in service again.
            EngineError: the engine does not answer, or is left in an unknown state: replace it.
        """
        async with self._lock:
            try:
                return await self._swap(folder, version)
            finally:
                # also when cancelled: a half-staged version must not keep its memory
                await asyncio.shield(self._call("drafter_finish"))

    async def rehearse(self, folder: Path) -> None:
        """Stage a checkpoint and drop it: what a first swap would have to warm up is warm afterwards.

        Raises:
            SwapRefused: this engine's drafter cannot be swapped.
        """
        async with self._lock:
            try:
                await self._stage(folder, "rehearsal")
            finally:
                await asyncio.shield(self._call("drafter_finish"))

    async def state(self) -> list[dict[str, Any]]:
        """Each rank's version in service (None: the one it was started with) and the one being staged."""
        return await self._call("drafter_state")

    async def _stage(self, folder: Path, version: str) -> tuple[list[str], list[float]]:
        """Returns the layers staged and the seconds of each call."""
        begun = await self._all_ok("drafter_begin", str(folder), version)
        spent = [_slowest(begun)]
        for first, last in batches(begun[0]["slices"], SLICE_BYTES):
            spent.append(_slowest(await self._all_ok("drafter_stage", first, last)))
        return begun[0]["parts"], spent

    async def _swap(self, folder: Path, version: str) -> SwapReport:
        parts, spent = await self._stage(folder, version)
        committed = await self._call("drafter_commit", version)
        if failure := _failure(committed):
            await self._restore(failure, committed)
        proofs = await self._call("drafter_proof")
        if failure := _failure(proofs) or _unproven(proofs):
            await self._restore(failure, proofs)
        return SwapReport(
            version=version,
            rpcs=len(spent),
            stage_s=sum(spent),
            longest_stage_s=max(spent),
            commit_s=_slowest(committed),
            proven=tuple(sorted(parts)),
        )

    async def _restore(self, failure: str, answers: Sequence[dict[str, Any]]) -> None:
        restored = await self._call("drafter_restore")
        if worse := _failure(restored):
            raise EngineError(
                f"the exchange failed ({failure}) and so did putting the old weights back ({worse})",
                "the old drafter in service",
                "replace this replica: what its drafter computes is unknown, though its output is still the target's",
            )
        raise SwapRolledBack(failure, answers[0].get("expected"), answers[0].get("fix"))

    async def _all_ok(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers = await self._call(method, *args)
        for answer in answers:
            if not answer["ok"]:
                raise SwapRefused(answer["what"], answer.get("expected"), answer.get("fix"))
        return answers

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        try:
            answers = await self._engine.collective_rpc(method, timeout=self._timeout, args=args)
        except Exception as error:
            raise EngineError(
                f"the engine did not answer {method} ({type(error).__name__}: {error})",
                "a running engine with the drafter extension",
                "replace this replica; its log says why the engine stopped",
            ) from error
        return list(answers)


def batches(sizes: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    """Cut consecutive slices into ranges [first, last) of at most `budget` bytes, or of one slice that is larger."""
    first, held = 0, 0
    for index, size in enumerate(sizes):
        if index > first and held + size > budget:
            yield first, index
            first, held = index, 0
        held += size
    if first < len(sizes):
        yield first, len(sizes)


def _slowest(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(answer["seconds"]) for answer in answers)


def _failure(answers: Sequence[dict[str, Any]]) -> str | None:
    return next((f"rank {a['rank']}: {a['what']}" for a in answers if not a["ok"]), None)


def _unproven(answers: Sequence[dict[str, Any]]) -> str | None:
    for answer in answers:
        for layer, wrong in answer["parts"].items():
            if wrong:
                return f"rank {answer['rank']}: {layer or 'the drafter'} does not execute the new weights: {wrong}"
    return None
