"""Swaps under streaming load: does any request fail, does any token change, how long is the pause?"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx

from eaglenest.bench import pauses
from eaglenest.bench.equality import compare_outputs, endpoint_probe
from eaglenest.bench.figures import chunk_gaps_ms, percentiles
from eaglenest.bench.load import Ask, closed_loop, open_client, served_model
from eaglenest.bench.measure import Progress, interleave
from eaglenest.bench.models import Equality, RequestRow, Segment, SwapEvent, SwapPlan, SwapResult, SwapTimes
from eaglenest.distill.prompts import Prompt
from eaglenest.errors import BenchError

Swap = Callable[[], SwapTimes | Awaitable[SwapTimes]]
"""Puts another drafter version into service and says when; a plain function runs in a thread of its own."""


def measure_swaps(
    url: str,
    model: str | None,
    prompts: Sequence[Prompt],
    swap: Swap,
    plan: SwapPlan | None = None,
    *,
    on_progress: Progress | None = None,
) -> SwapResult:
    """Stream the same greedy requests twice, without a swap and with some, and compare the two runs.

    Args:
        prompts: asked in a mixture of their categories; repeated when the plan asks more requests.
        swap: called one time after the other. What it imports for the first time holds up the load's clock, too.
        plan: default `SwapPlan()`.

    Raises:
        BenchError: no endpoint, a load that ended before its swaps, or one too short to tell a swap's gap from others.
        Whatever `swap` raises: the load is then given up.
    """
    return asyncio.run(measure_swaps_async(url, model, prompts, swap, plan, on_progress=on_progress))


async def measure_swaps_async(
    url: str,
    model: str | None,
    prompts: Sequence[Prompt],
    swap: Swap,
    plan: SwapPlan | None = None,
    *,
    on_progress: Progress | None = None,
) -> SwapResult:
    """As `measure_swaps`, inside a running event loop."""
    if not prompts:
        raise BenchError("there are no prompts to measure with", "at least one prompt")
    plan = plan or SwapPlan()
    say = on_progress or (lambda _line: None)
    mixture = interleave(prompts)
    chosen = [mixture[i % len(mixture)] for i in range(plan.requests)]
    async with open_client(url) as client:
        served = await served_model(client, model)
        # A cold engine's gaps would be counted among those that the swaps' gaps are compared with.
        await closed_loop(client, _ask(served, 8), chosen[: plan.concurrency], plan.concurrency)
        reference = await closed_loop(client, _ask(served, plan.max_tokens), chosen, plan.concurrency)
        expected = sum(row.tokens for row in reference)
        say(f"run without a swap: {plan.requests} requests, {expected} tokens")
        rows, times = await _run_with_swaps(client, served, chosen, swap, plan, expected, say)
        equality = await compare_outputs(reference, rows, endpoint_probe(client, served))
    return summarise(reference, rows, times, equality, plan)


def _ask(model: str, max_tokens: int) -> Ask:
    return Ask(model, max_tokens, cache_salt=uuid.uuid4().hex)


async def _run_with_swaps(
    client: httpx.AsyncClient,
    model: str,
    prompts: Sequence[Prompt],
    swap: Swap,
    plan: SwapPlan,
    expected_tokens: int,
    say: Progress,
) -> tuple[list[RequestRow], list[SwapTimes]]:
    """The rows of the run, and its swaps with times relative to the rows' zero."""
    count = _TokenCount()
    origin = time.monotonic()
    load = asyncio.create_task(
        closed_loop(client, _ask(model, plan.max_tokens), prompts, plan.concurrency, origin=origin, on_tokens=count.add)
    )
    times: list[SwapTimes] = []
    try:
        for number in range(1, plan.swaps + 1):
            await count.wait_for(expected_tokens * number / (plan.swaps + 1), load)
            if load.done():
                raise BenchError(
                    f"the load ended after {number - 1} of {plan.swaps} swaps",
                    "streams during every swap",
                    "ask more requests, or fewer swaps",
                )
            made = await _call(swap)
            shift = origin if made.clock == "monotonic" else origin + time.time() - time.monotonic()
            times.append(SwapTimes(staging=made.staging - shift, done=made.done - shift, version=made.version))
            say(f"swap {number} of {plan.swaps}: version {made.version} in {made.done - made.staging:.2f} s")
        return await load, times
    finally:
        load.cancel()  # does nothing to a load that has ended
        await asyncio.gather(load, return_exceptions=True)


async def _call(swap: Swap) -> SwapTimes:
    made = await (swap() if inspect.iscoroutinefunction(swap) else asyncio.to_thread(swap))
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(made, SwapTimes):
        raise BenchError(f"the swap returned {type(made).__name__}", "SwapTimes")
    return made


class _TokenCount:
    """Counts tokens and wakes whoever waits for a number of them."""

    def __init__(self) -> None:
        self._tokens = 0
        self._goal = float("inf")
        self._reached = asyncio.Event()

    def add(self, count: int) -> None:
        self._tokens += count
        if self._tokens >= self._goal:
            self._reached.set()

    async def wait_for(self, goal: float, load: asyncio.Task[list[RequestRow]]) -> None:
        """Return once `goal` tokens have arrived, or the load has ended."""
        self._goal = goal
        self._reached.clear()
        self.add(0)
        reached = asyncio.create_task(self._reached.wait())
        try:
            await asyncio.wait({reached, load}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()


def summarise(
    reference: Sequence[RequestRow],
    rows: Sequence[RequestRow],
    times: Sequence[SwapTimes],
    equality: Equality,
    plan: SwapPlan,
) -> SwapResult:
    """The figures of a run with swaps, from the raw rows of both runs; `times` are relative to the rows' zero.

    Raises:
        BenchError: no gap to compare: the run is too short for its swaps, or no stream ran during one.
    """
    still, moving = pauses.arrivals(reference), pauses.arrivals(rows)
    spans = [pauses.swap_span(moving, made.staging, made.done) for made in times]
    events = []
    for made, span in zip(times, spans, strict=True):
        gap = pauses.largest_gap(moving, span)
        floor = pauses.floor_gap([(still, []), (moving, spans)], span[1] - span[0])
        if gap is None or floor is None:
            raise BenchError(
                f"the pause of the swap at {made.staging:.1f} s cannot be told",
                "streams during the swap, and undisturbed stretches as long as it",
                "ask more requests, or fewer swaps",
            )
        events.append(
            SwapEvent(
                version=made.version,
                staging_s=made.staging,
                done_s=made.done,
                first_token_s=span[1],
                gap_ms=gap * 1000,
                floor_ms=floor * 1000,
                pause_ms=(gap - floor) * 1000,
            )
        )
    pause = percentiles([event.pause_ms for event in events])
    assert pause is not None  # there is at least one swap
    failures = Counter(row.error for row in rows if row.error is not None)
    return SwapResult(
        swaps=len(events),
        requests=len(rows),
        failed_requests=failures.total(),
        changed_outputs=equality.changed,
        pause_ms_p50=pause.p50,
        pause_ms_p99=pause.p99,
        pause_ms_max=pause.max,
        max_itl_ms=max(chunk_gaps_ms(rows), default=0.0),
        max_itl_no_swap_ms=max(chunk_gaps_ms(reference), default=0.0),
        near_ties=equality.near_ties,
        compared=equality.compared,
        plan=plan,
        pause_p99_plain_steps=pause.p99 / plan.plain_step_ms if plan.plain_step_ms else None,
        failures=dict(failures),
        differences=equality.differences,
        events=events,
        segments=segments(rows, times),
        timeline_ms=[(at, gap * 1000) for at, gap in pauses.timeline(moving)],
    )


def segments(rows: Sequence[RequestRow], times: Sequence[SwapTimes]) -> list[Segment]:
    """Tokens per chunk before, between and after the swaps: what shows that each took effect."""
    end = max(row.end_s for row in rows)
    starts = [(None, 0.0), *((made.version, made.done) for made in times)]
    stops = [*(made.staging for made in times), end]
    out = []
    for (version, start), stop in zip(starts, stops, strict=True):
        counts = [
            count
            for row in rows
            for at, count in list(zip(row.chunk_s, row.chunk_tokens, strict=True))[1:]
            if start < at <= stop
        ]
        out.append(
            Segment(
                version=version,
                start_s=start,
                end_s=stop,
                chunks=len(counts),
                tokens_per_chunk=sum(counts) / len(counts) if counts else None,
            )
        )
    return out
