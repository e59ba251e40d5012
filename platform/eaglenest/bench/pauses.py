"""The pause of a swap, from the arrival times of tokens alone: pure functions, no clock and no network.

A gap is the time between two consecutive chunks of one stream. The statistic of a span of time is the largest gap, over
all streams, that overlaps it; a gap counts in full, also where it reaches beyond the span. The pause of a swap is the
statistic of its span less the median of the statistic over equally long spans without a swap (docs/measuring.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from eaglenest.bench.models import RequestRow

Span = tuple[float, float]
Streams = Sequence[Sequence[float]]
"""Arrival times of each stream's chunks, seconds on one clock."""

STEP_SHARE = 0.25
"""Spans without a swap start every quarter of their length."""


def arrivals(rows: Iterable[RequestRow]) -> list[list[float]]:
    """Chunk arrivals of each row that has any."""
    return [row.chunk_s for row in rows if row.chunk_s]


def largest_gap(streams: Streams, span: Span) -> float | None:
    """The largest gap that overlaps `span`, seconds; none when no stream has one there."""
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream)
        if earlier < span[1] and later > span[0]
    ]
    return max(gaps, default=None)


def swap_span(streams: Streams, staging_s: float, done_s: float) -> Span:
    """From the start of staging to the first token, of any stream, after the swap."""
    after = [at for stream in streams for at in stream if at > done_s]
    return staging_s, min(after, default=done_s)


def quiet_spans(streams: Streams, length_s: float, busy: Sequence[Span]) -> list[Span]:
    """Spans of `length_s` while tokens arrive that overlap none of `busy`."""
    times = [at for stream in streams for at in stream]
    if not times or length_s <= 0:
        return []
    start, end, spans = min(times), max(times), []
    count = int((end - start - length_s) / (length_s * STEP_SHARE)) + 1
    for i in range(max(0, count)):
        a = start + i * length_s * STEP_SHARE
        if not any(a < busy_end and a + length_s > busy_start for busy_start, busy_end in busy):
            spans.append((a, a + length_s))
    return spans


def floor_gap(runs: Sequence[tuple[Streams, Sequence[Span]]], length_s: float) -> float | None:
    """Median of the largest gap over spans of `length_s` without a swap; none when there is no such span.

    Args:
        runs: streams of a run, and the spans of its swaps; both the run without swaps and the one with them count.
    """
    found = [
        gap
        for streams, busy in runs
        for span in quiet_spans(streams, length_s, busy)
        if (gap := largest_gap(streams, span)) is not None
    ]
    return median(found) if found else None


def timeline(streams: Streams, bin_s: float = 0.1) -> list[tuple[float, float]]:
    """(time, largest gap that ends in the bin) for each bin of a run that has one: what a report plots, seconds."""
    bins: dict[int, float] = {}
    for stream in streams:
        for earlier, later in pairwise(stream):
            key = int(later / bin_s)
            bins[key] = max(bins.get(key, 0.0), later - earlier)
    return [(key * bin_s, gap) for key, gap in sorted(bins.items())]
