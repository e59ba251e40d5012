"""Swaps under streaming load, on a fake endpoint that can be made to stall, fail, or change a token."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from eaglenest.bench.models import RequestRow, SwapPlan, SwapTimes
from eaglenest.bench.swap_load import measure_swaps, segments
from eaglenest.errors import BenchError, SwapRefused

PLAN = SwapPlan(swaps=3, requests=24, concurrency=4, max_tokens=41, plain_step_ms=10.0)


@pytest.fixture
def swapper(endpoint: Any) -> Any:
    """A swap that stalls every stream for `stall_s` and changes how many drafts are accepted."""
    endpoint.step_s, endpoint.first_s = 0.01, 0.01

    class Swapper:
        stall_s = 0.0
        calls = 0
        clock = "monotonic"

        def __call__(self) -> SwapTimes:
            clock = time.time if self.clock == "wall" else time.monotonic
            self.calls += 1
            staging = clock()
            time.sleep(0.03)  # staging, off the path
            endpoint.stalled_until = time.monotonic() + self.stall_s
            endpoint.accepted = 2 if self.calls % 2 else 1
            time.sleep(self.stall_s)
            return SwapTimes(staging=staging, done=clock(), version=str(self.calls), clock=self.clock)  # type: ignore[arg-type]

    return Swapper()


def test_a_swap_that_holds_nothing_up_has_hardly_a_pause(endpoint: Any, make_prompts: Any, swapper: Any) -> None:
    result = measure_swaps(endpoint.url, None, make_prompts(6), swapper, PLAN)
    assert swapper.calls == result.swaps == 3
    assert (result.requests, result.failed_requests, result.changed_outputs, result.compared) == (24, 0, 0, 24)
    assert abs(result.pause_ms_p50) < 15


@pytest.mark.parametrize("clock", ["monotonic", "wall"])
def test_a_stall_of_known_length_is_the_pause(endpoint: Any, make_prompts: Any, swapper: Any, clock: str) -> None:
    swapper.stall_s, swapper.clock = 0.2, clock
    result = measure_swaps(endpoint.url, None, make_prompts(6), swapper, PLAN)
    assert result.pause_ms_p50 == pytest.approx(200, abs=60)
    assert result.pause_ms_p99 <= result.pause_ms_max <= result.max_itl_ms
    assert result.max_itl_ms >= 195 > result.max_itl_no_swap_ms
    assert result.pause_p99_plain_steps == pytest.approx(result.pause_ms_p99 / 10)
    for event in result.events:
        assert event.pause_ms == pytest.approx(event.gap_ms - event.floor_ms)
        assert event.staging_s < event.done_s <= event.first_token_s
    assert max(gap for _, gap in result.timeline_ms) == pytest.approx(result.max_itl_ms)


def test_swaps_are_spread_over_the_run_and_show_in_the_tokens_per_chunk(
    endpoint: Any, make_prompts: Any, swapper: Any
) -> None:
    result = measure_swaps(endpoint.url, None, make_prompts(6), swapper, PLAN)
    assert [segment.version for segment in result.segments] == [None, "1", "2", "3"]
    assert all(segment.chunks > 20 for segment in result.segments)
    wide = [segment.tokens_per_chunk for segment in result.segments]
    assert None not in wide
    assert wide[1] > 2.6 > 2.2 > wide[2] > 1.8  # type: ignore[operator]


def test_a_streams_first_chunk_says_nothing_of_the_drafter() -> None:
    row = RequestRow(
        prompt_id="p",
        category="c",
        concurrency=1,
        index=0,
        start_s=0.0,
        end_s=4.0,
        chunk_s=[1.0, 1.5, 3.0, 3.5],
        chunk_tokens=[1, 3, 2, 4],
    )
    before, after = segments([row], [SwapTimes(staging=2.0, done=2.5, version="7")])
    assert (before.version, before.chunks, before.tokens_per_chunk) == (None, 1, 3.0)
    assert (after.version, after.chunks, after.tokens_per_chunk) == ("7", 2, 3.0)


def test_failures_and_changed_tokens_are_counted(endpoint: Any, make_prompts: Any, swapper: Any) -> None:
    def swap() -> SwapTimes:
        endpoint.faults, endpoint.changed = {"p0": "dropped"}, {"p1": 3}
        return swapper()

    result = measure_swaps(endpoint.url, None, make_prompts(6), swap, PLAN.model_copy(update={"swaps": 2}))
    assert result.failures == {"dropped": result.failed_requests}
    assert result.failed_requests > 0
    assert result.changed_outputs == len(result.differences) > 0
    assert {difference.prompt_id for difference in result.differences} == {"p1"}
    assert result.compared == 24 - result.failed_requests


def test_a_flip_of_a_near_tie_is_counted_apart(endpoint: Any, make_prompts: Any, swapper: Any) -> None:
    def swap() -> SwapTimes:
        right = endpoint.answer("p1", 9)[3] % 5000
        endpoint.changed = {"p1": 3}
        endpoint.top = {f"token_id:{right}": -0.7, f"token_id:{right + 5000}": -0.70001}
        return swapper()

    result = measure_swaps(endpoint.url, None, make_prompts(6), swap, PLAN)
    assert result.changed_outputs == 0
    assert result.near_ties > 0


def test_an_async_swap_is_awaited(endpoint: Any, make_prompts: Any, swapper: Any) -> None:
    async def swap() -> SwapTimes:
        return await asyncio.to_thread(swapper)

    short = PLAN.model_copy(update={"swaps": 1, "requests": 8})
    assert measure_swaps(endpoint.url, None, make_prompts(6), swap, short).swaps == 1
    assert measure_swaps(endpoint.url, None, make_prompts(6), lambda: swap(), short).swaps == 1


def test_a_refused_swap_ends_the_measurement_and_its_streams(endpoint: Any, make_prompts: Any) -> None:
    def swap() -> SwapTimes:
        raise SwapRefused("version 9 is corrupt")

    endpoint.step_s = 0.01
    with pytest.raises(SwapRefused, match="version 9 is corrupt"):
        measure_swaps(endpoint.url, None, make_prompts(6), swap, PLAN)
    deadline = time.monotonic() + 5
    while endpoint.in_flight and time.monotonic() < deadline:
        time.sleep(0.02)
    assert endpoint.in_flight == 0


def test_a_load_too_short_for_its_swaps_is_refused(endpoint: Any, make_prompts: Any) -> None:
    def swap() -> SwapTimes:
        start = time.monotonic()
        time.sleep(1.0)
        return SwapTimes(staging=start, done=time.monotonic(), version="1")

    with pytest.raises(BenchError, match="the load ended after 1 of 6 swaps"):
        measure_swaps(endpoint.url, None, make_prompts(2), swap, SwapPlan(requests=4, concurrency=2, max_tokens=9))
