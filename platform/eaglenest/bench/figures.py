"""Figures from raw rows: pure functions, no clock and no network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from eaglenest.bench.models import (
    Acceptance,
    CategoryAcceptance,
    Interval,
    Percentiles,
    Point,
    RequestRow,
    SpecSteps,
    Speedup,
)

RESAMPLES = 2000


def percentiles(values_ms: Sequence[float]) -> Percentiles | None:
    """Percentiles of observations in milliseconds; none when there are none."""
    if not values_ms:
        return None
    p50, p90, p99 = np.percentile(values_ms, [50, 90, 99]).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99, max=max(values_ms), count=len(values_ms))


def steady_window(rows: Sequence[RequestRow], concurrency: int) -> Interval:
    """Start and end, in seconds, of the time in which `concurrency` requests were in flight.

    A closed loop hands out its last request when all but `concurrency` have ended; the next one to end leaves a slot
    empty, and what comes after is measured at a lower concurrency. With n requests that is the (n - c + 1)-th end.
    """
    ends = sorted(row.end_s for row in rows)
    return min(row.start_s for row in rows), ends[max(0, len(ends) - concurrency)]


def tokens_until(rows: Iterable[RequestRow], end_s: float) -> int:
    """Tokens that had arrived by `end_s`."""
    return sum(count for row in rows for at, count in zip(row.chunk_s, row.chunk_tokens, strict=True) if at <= end_s)


def chunk_gaps_ms(rows: Iterable[RequestRow], end_s: float = float("inf")) -> list[float]:
    """Gaps between consecutive chunks of the same stream that end by `end_s`, in milliseconds."""
    return [(later - earlier) * 1000 for row in rows for earlier, later in pairwise(row.chunk_s) if later <= end_s]


def time_per_token_ms(row: RequestRow) -> float | None:
    """Milliseconds per token after the first chunk; none when all tokens came in one chunk."""
    later_tokens = row.tokens - row.chunk_tokens[0] if row.chunk_tokens else 0
    return (row.chunk_s[-1] - row.chunk_s[0]) * 1000 / later_tokens if later_tokens else None


def point_figures(
    rows: Sequence[RequestRow], concurrency: int, *, seed: int = 0, acceptance: Acceptance | None = None
) -> Point:
    """The figures of one window. `acceptance` stands in where the rows carry none (the coarse way)."""
    complete = [row for row in rows if row.error is None]
    start, end = steady_window(rows, concurrency)
    window_tokens = tokens_until(rows, end)
    return Point(
        concurrency=concurrency,
        requests=len(rows),
        failed=len(rows) - len(complete),
        failures=dict(Counter(row.error for row in rows if row.error is not None)),
        tokens=sum(row.tokens for row in rows),
        wall_s=max(row.end_s for row in rows) - start,
        window_s=end - start,
        window_tokens=window_tokens,
        tokens_per_s=window_tokens / (end - start) if end > start else 0.0,
        ttft_ms=percentiles([(row.chunk_s[0] - row.start_s) * 1000 for row in complete if row.chunk_s]),
        itl_ms=percentiles(chunk_gaps_ms(rows, end)),
        tpot_ms=percentiles([ms for row in complete if (ms := time_per_token_ms(row)) is not None]),
        acceptance=pool_acceptance(rows, seed=seed) or acceptance,
    )


def pool_acceptance(rows: Iterable[RequestRow], *, seed: int = 0) -> Acceptance | None:
    """Acceptance pooled over the steps of all rows that report any; none when no row does.

    Intervals resample whole prompts: steps of one prompt, and repeated requests for it, are not independent.
    """
    speculative = [(row.prompt_id, row.category, row.spec) for row in rows if row.spec is not None and row.spec.steps]
    if not speculative:
        return None
    specs = [spec for _, _, spec in speculative]
    unconditional, conditional = acceptance_by_position(specs)
    by_category: dict[str, list[tuple[str, SpecSteps]]] = defaultdict(list)
    for prompt_id, category, spec in speculative:
        by_category[category].append((prompt_id, spec))
    overall = _clustered([(prompt_id, spec) for prompt_id, _, spec in speculative], seed)
    return Acceptance(
        accept_len=overall.accept_len,
        interval=overall.interval,
        steps=overall.steps,
        accepted=sum(spec.accepted for spec in specs),
        drafted=sum(spec.drafted for spec in specs),
        unconditional=unconditional,
        conditional=conditional,
        by_category={name: _clustered(pairs, seed) for name, pairs in sorted(by_category.items())},
    )


def _clustered(pairs: Sequence[tuple[str, SpecSteps]], seed: int) -> CategoryAcceptance:
    """Acceptance length of (prompt id, steps) pairs with its interval over prompts."""
    accepted: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    for prompt_id, spec in pairs:
        accepted[prompt_id] += spec.accepted
        steps[prompt_id] += spec.steps
    ratio, interval = ratio_with_interval([accepted[p] for p in steps], list(steps.values()), seed=seed)
    return CategoryAcceptance(
        accept_len=1 + ratio,
        interval=None if interval is None else (1 + interval[0], 1 + interval[1]),
        steps=sum(steps.values()),
        prompts=len(steps),
    )


def acceptance_by_position(specs: Sequence[SpecSteps]) -> tuple[list[float], list[float | None]]:
    """Unconditional and conditional acceptance at each draft position (see `Acceptance`).

    With per-step lists, position k of a step counts only where a token was drafted there. With a histogram alone every
    step is taken to have drafted K tokens, which holds for a fixed K.
    """
    k_max = max(len(spec.histogram) for spec in specs) - 1
    reached, passed, drafted = np.zeros(k_max), np.zeros(k_max), np.zeros(k_max)
    for spec in specs:
        for accepted, proposed, count in _steps(spec, k_max):
            passed[:accepted] += count
            reached[: min(accepted + 1, proposed)] += count
            drafted[:proposed] += count
    unconditional = [float(p / d) if d else 0.0 for p, d in zip(passed, drafted, strict=True)]
    conditional = [float(p / r) if r else None for p, r in zip(passed, reached, strict=True)]
    return unconditional, conditional


def _steps(spec: SpecSteps, k_max: int) -> Iterable[tuple[int, int, int]]:
    """(accepted, drafted, how many steps) of one request."""
    if spec.per_step_accepted is not None and spec.per_step_drafted is not None:
        return [(a, d, 1) for a, d in zip(spec.per_step_accepted, spec.per_step_drafted, strict=True)]
    return [(accepted, k_max, count) for accepted, count in enumerate(spec.histogram)]


def ratio_with_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, Interval | None]:
    """sum(numerators) / sum(denominators) with a 95% percentile-bootstrap interval over the pairs.

    No interval from fewer than two pairs. Denominators are positive.
    """
    over, under = np.asarray(numerators, float), np.asarray(denominators, float)
    ratio = float(over.sum() / under.sum())
    if len(over) < 2:
        return ratio, None
    drawn = np.random.default_rng(seed).integers(len(over), size=(resamples, len(over)))
    low, high = np.percentile(over[drawn].sum(1) / under[drawn].sum(1), [2.5, 97.5]).tolist()
    return ratio, (low, high)


def paired_speedup(
    plain: Sequence[RequestRow],
    speculative: Sequence[RequestRow],
    concurrency: int,
    *,
    names: tuple[str, str] = ("plain", "speculative"),
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Speedup | None:
    """How much less time a token takes with speculation, at one concurrency; none without a pair.

    Pairs are the same prompt at the same place of both runs, completed in both:
    (sum of plain seconds / plain tokens) / (sum of speculative seconds / speculative tokens).
    """
    keyed = [
        {(row.index, row.prompt_id): row for row in rows if row.concurrency == concurrency and row.error is None}
        for rows in (plain, speculative)
    ]
    keys = sorted(key for key in keyed[0].keys() & keyed[1].keys() if keyed[0][key].tokens and keyed[1][key].tokens)
    if not keys:
        return None
    table = np.array(
        [(keyed[0][key].seconds, keyed[0][key].tokens, keyed[1][key].seconds, keyed[1][key].tokens) for key in keys]
    )

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    interval: Interval | None = None
    if len(keys) > 1:
        drawn = np.random.default_rng(seed).integers(len(keys), size=(resamples, len(keys)))
        low, high = np.percentile(ratio(table[drawn].sum(1)), [2.5, 97.5]).tolist()
        interval = (low, high)
    return Speedup(
        plain=names[0],
        speculative=names[1],
        concurrency=concurrency,
        ratio=float(ratio(table.sum(0))),
        interval=interval,
        pairs=len(keys),
    )
