"""One running endpoint measured: windows of closed-loop load, one at each concurrency."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import httpx

from eaglenest.bench import coarse
from eaglenest.bench.figures import point_figures, pool_acceptance
from eaglenest.bench.load import Ask, closed_loop, open_client, served_model
from eaglenest.bench.models import Acceptance, Configuration, Measurement, Plan, Point, RequestRow
from eaglenest.distill.prompts import Prompt
from eaglenest.errors import BenchError

WARM_UP_TOKENS = 8

Progress = Callable[[str], None]


def interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, one of each category in turn, so that any stretch of them is a fair mixture."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    queues = list(by_category.values())
    longest = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def slices(prompts: Sequence[Prompt], sizes: Mapping[int, int]) -> dict[int, list[Prompt]]:
    """Prompts for each concurrency: consecutive stretches of the mixture.

    No prompt is asked twice while there are enough, and every endpoint is asked the same ones in the same order.
    """
    mixture, begin, out = interleave(prompts), 0, {}
    for concurrency, size in sizes.items():
        out[concurrency] = [mixture[(begin + i) % len(mixture)] for i in range(size)]
        begin += size
    return out


def measure(
    url: str,
    model: str | None,
    prompts: Sequence[Prompt],
    plan: Plan | None = None,
    *,
    name: str = "endpoint",
    configuration: Configuration | None = None,
    on_progress: Progress | None = None,
) -> Measurement:
    """Measure a running endpoint, idle but for us, with greedy streamed chat completions.

    Args:
        url: root of the endpoint, without `/v1`.
        model: the served name; none: the first one served.
        prompts: asked in a mixture of their categories (see `slices`).
        plan: concurrencies, tokens and requests; default `Plan()`.
        on_progress: called with one line after each window.

    Raises:
        BenchError: no endpoint, no prompts, or a window in which every request failed.
    """
    return asyncio.run(
        measure_async(url, model, prompts, plan, name=name, configuration=configuration, on_progress=on_progress)
    )


async def measure_async(
    url: str,
    model: str | None,
    prompts: Sequence[Prompt],
    plan: Plan | None = None,
    *,
    name: str = "endpoint",
    configuration: Configuration | None = None,
    on_progress: Progress | None = None,
) -> Measurement:
    """As `measure`, inside a running event loop."""
    if not prompts:
        raise BenchError("there are no prompts to measure with", "at least one prompt")
    plan = plan or Plan()
    points: list[Point] = []
    rows: list[RequestRow] = []
    async with open_client(url) as client:
        served = await served_model(client, model)
        for concurrency, chosen in slices(prompts, plan.sizes()).items():
            window, server = await _window(client, served, chosen, concurrency, plan)
            point = point_figures(window, concurrency, seed=plan.seed, acceptance=server)
            _refuse_all_failed(point, window)
            points.append(point)
            rows += window
            if on_progress is not None:
                on_progress(describe(name, point))
    return Measurement(
        name=name,
        model=served,
        plan=plan,
        configuration=configuration,
        points=points,
        acceptance=pool_acceptance(rows, seed=plan.seed) or _pooled_counters(points),
        rows=rows,
    )


async def _window(
    client: httpx.AsyncClient, model: str, prompts: Sequence[Prompt], concurrency: int, plan: Plan
) -> tuple[list[RequestRow], Acceptance | None]:
    """Warm up, then one window: its rows, and what the server's counters say of it."""
    # Each window has a salt of its own: it must not find its prompts in the prefix cache of an earlier one.
    warm = Ask(model, min(WARM_UP_TOKENS, plan.max_tokens), plan.seed, cache_salt=uuid.uuid4().hex)
    await closed_loop(client, warm, prompts[:concurrency], concurrency)
    before = await coarse.read_counters(client)
    ask = Ask(model, plan.max_tokens, plan.seed, cache_salt=uuid.uuid4().hex)
    rows = await closed_loop(client, ask, prompts, concurrency, seconds=plan.seconds_per_point, origin=time.monotonic())
    after = await coarse.read_counters(client) if before is not None else None
    return rows, coarse.coarse_acceptance(before, after)


def _refuse_all_failed(point: Point, rows: Sequence[RequestRow]) -> None:
    if point.failed == point.requests:
        first = next(row for row in rows if row.error is not None)
        raise BenchError(
            f"every request at concurrency {point.concurrency} failed: {point.failures} ({first.detail})",
            "completed requests",
            "look into the service's log",
        )


def _pooled_counters(points: Sequence[Point]) -> Acceptance | None:
    """Acceptance over all windows where only the server's counters speak."""
    parts = [point.acceptance for point in points if point.acceptance is not None]
    passed = [[share * part.steps for share in part.unconditional] for part in parts]
    return coarse.acceptance_from_counts(
        steps=sum(part.steps for part in parts),
        accepted=sum(part.accepted for part in parts),
        drafted=sum(part.drafted for part in parts),
        passed=[sum(counts) for counts in zip(*passed, strict=False)],
    )


def describe(name: str, point: Point) -> str:
    """One line on a point, for a log."""
    accept = f", acceptance length {point.acceptance.accept_len:.2f}" if point.acceptance else ""
    failed = f", {point.failed} FAILED" if point.failed else ""
    return f"{name}: {point.tokens_per_s:.1f} tokens/s at concurrency {point.concurrency}{accept}{failed}"
