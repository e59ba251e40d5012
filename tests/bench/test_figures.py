"""Figures are recomputed here from raw rows, by hand or the slow way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.bench.figures import (
    acceptance_by_position,
    chunk_gaps_ms,
    paired_speedup,
    percentiles,
    point_figures,
    pool_acceptance,
    ratio_with_interval,
    steady_window,
    time_per_token_ms,
    tokens_until,
)
from eaglenest.bench.models import RequestRow, SpecSteps


def row(
    *,
    prompt: str = "p",
    category: str = "c",
    index: int = 0,
    concurrency: int = 1,
    start: float = 0.0,
    chunks: list[tuple[float, int]] | None = None,
    end: float | None = None,
    spec: SpecSteps | None = None,
    error: str | None = None,
) -> RequestRow:
    chunks = chunks if chunks is not None else [(start + 0.1, 1), (start + 0.2, 2)]
    return RequestRow(
        prompt_id=prompt,
        category=category,
        concurrency=concurrency,
        index=index,
        start_s=start,
        end_s=end if end is not None else (chunks[-1][0] if chunks else start),
        chunk_s=[at for at, _ in chunks],
        chunk_tokens=[count for _, count in chunks],
        spec=spec,
        error=error,
    )


def test_throughput_counts_only_the_time_at_full_concurrency() -> None:
    # Two slots: rows 0 and 1 start together, row 2 takes the place of row 0; when row 1 ends at 3 s a slot stays empty.
    rows = [
        row(index=0, start=0, chunks=[(1.0, 10), (2.0, 10)]),
        row(index=1, start=0, chunks=[(1.0, 10), (3.0, 10)]),
        row(index=2, start=2, chunks=[(2.5, 5), (9.0, 100)]),
    ]
    assert steady_window(rows, 2) == (0, 3.0)
    point = point_figures(rows, 2)
    assert point.window_tokens == 45
    assert point.tokens_per_s == pytest.approx(15)
    assert (point.tokens, point.wall_s) == (145, 9.0)
    assert point.itl_ms is not None
    assert (point.itl_ms.count, point.itl_ms.max) == (2, pytest.approx(2000))  # row 2's long gap ends after the window


def test_one_request_at_a_time_measures_the_whole_run() -> None:
    rows = [row(index=0, start=0, chunks=[(1.0, 4)]), row(index=1, start=1, chunks=[(3.0, 5)])]
    assert steady_window(rows, 1) == (0, 3.0)
    assert point_figures(rows, 1).tokens_per_s == pytest.approx(3)


def test_chunk_gap_and_time_per_token_differ_where_a_step_yields_several_tokens() -> None:
    one = row(start=0, chunks=[(0.5, 1), (0.6, 3), (0.8, 1)])
    assert chunk_gaps_ms([one]) == pytest.approx([100, 200])
    assert time_per_token_ms(one) == pytest.approx(300 / 4)
    point = point_figures([one], 1)
    assert point.ttft_ms is not None
    assert point.ttft_ms.p50 == pytest.approx(500)
    assert point.itl_ms is not None
    assert point.itl_ms.max == pytest.approx(200)
    assert point.tpot_ms is not None
    assert point.tpot_ms.p50 == pytest.approx(75)


def test_an_answer_in_one_chunk_has_no_time_per_token() -> None:
    assert time_per_token_ms(row(chunks=[(1.0, 5)])) is None
    assert time_per_token_ms(row(chunks=[])) is None


def test_failures_are_counted_by_kind_and_left_out_of_latencies() -> None:
    rows = [row(index=0), row(index=1, error="http 429", chunks=[]), row(index=2, error="dropped")]
    point = point_figures(rows, 1)
    assert (point.requests, point.failed, point.failures) == (3, 2, {"http 429": 1, "dropped": 1})
    assert point.ttft_ms is not None
    assert point.ttft_ms.count == 1


def test_acceptance_is_pooled_over_steps_not_averaged_over_requests() -> None:
    rows = [
        row(prompt="a", category="x", spec=SpecSteps(histogram=[0, 0, 1], drafted=2)),  # one step, 2 accepted
        row(prompt="b", category="y", spec=SpecSteps(histogram=[9, 0, 0], drafted=18)),  # nine steps, none accepted
    ]
    pooled = pool_acceptance(rows)
    assert pooled is not None
    assert pooled.accept_len == pytest.approx(1 + 2 / 10)
    assert (pooled.steps, pooled.accepted, pooled.drafted) == (10, 2, 20)
    assert {name: c.accept_len for name, c in pooled.by_category.items()} == {"x": 3.0, "y": 1.0}
    assert pooled.interval is not None
    assert pooled.interval[0] <= pooled.accept_len <= pooled.interval[1]
    assert pooled.by_category["x"].interval is None  # one prompt says nothing of the spread


def test_rows_without_steps_have_no_acceptance() -> None:
    assert pool_acceptance([row(), row(spec=SpecSteps(histogram=[0, 0], drafted=0))]) is None


def test_the_interval_resamples_prompts_not_repeated_requests() -> None:
    """A prompt asked twenty times is one prompt: the interval must not shrink."""
    low, high = SpecSteps(histogram=[10, 0], drafted=10), SpecSteps(histogram=[0, 10], drafted=10)
    once = pool_acceptance([row(prompt="a", spec=low), row(prompt="b", spec=high)])
    often = pool_acceptance([row(prompt="a", spec=low), row(prompt="b", spec=high)] * 20)
    assert once is not None
    assert often is not None
    assert once.interval == often.interval == (1.0, 2.0)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(lambda h: sum(h) > 0))
def test_positions_agree_with_the_histogram(histogram: list[int]) -> None:
    unconditional, conditional = acceptance_by_position([SpecSteps(histogram=histogram, drafted=0)])
    steps = sum(histogram)
    for k, share in enumerate(unconditional):
        assert share == pytest.approx(sum(histogram[k + 1 :]) / steps)
    # The chain of conditional shares is the unconditional one, and the unconditional ones sum to AL - 1.
    product = 1.0
    for share, step in zip(unconditional, conditional, strict=True):
        product *= step if step is not None else 0.0
        assert product == pytest.approx(share)
    accepted = sum(j * count for j, count in enumerate(histogram))
    assert sum(unconditional) == pytest.approx(accepted / steps)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_per_step_lists_and_histogram_give_the_same_positions(accepted: list[int]) -> None:
    histogram = [accepted.count(j) for j in range(4)]
    detailed = SpecSteps(
        histogram=histogram,
        drafted=3 * len(accepted),
        per_step_accepted=accepted,
        per_step_drafted=[3] * len(accepted),
    )
    summary = SpecSteps(histogram=histogram, drafted=3 * len(accepted))
    assert acceptance_by_position([detailed]) == acceptance_by_position([summary])


def test_positions_never_drafted_do_not_count_as_rejected() -> None:
    detailed = SpecSteps(histogram=[0, 2, 0, 1], drafted=5, per_step_accepted=[1, 1, 3], per_step_drafted=[1, 1, 3])
    unconditional, conditional = acceptance_by_position([detailed])
    assert unconditional == [1.0, 1.0, 1.0]
    assert conditional == [1.0, 1.0, 1.0]


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_data(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 + 1e-9 <= found.p99 + 2e-9 <= found.max + 3e-9
    assert found.max == max(values)
    assert found.count == len(values)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=2, max_size=30), st.integers(0, 5))
def test_the_interval_lies_between_the_extreme_ratios(pairs: list[tuple[int, int]], seed: int) -> None:
    over, under = zip(*pairs, strict=True)
    ratio, interval = ratio_with_interval(over, under, seed=seed, resamples=200)
    assert ratio == pytest.approx(sum(over) / sum(under))
    assert interval is not None
    single = [a / b for a, b in pairs]
    assert min(single) - 1e-9 <= interval[0] <= interval[1] <= max(single) + 1e-9


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """95% over 40 prompts with a known acceptance: a bootstrap of a ratio undercovers a little, not a lot."""
    import numpy as np

    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        steps = rng.integers(20, 60, size=40)
        accepted = rng.binomial(steps, np.clip(rng.normal(0.5, 0.1, size=40), 0, 1))
        _, interval = ratio_with_interval(accepted.tolist(), steps.tolist(), seed=trial, resamples=300)
        assert interval is not None
        hits += interval[0] <= 0.5 <= interval[1]
    assert hits >= 178


def test_speedup_pairs_the_same_prompt_at_the_same_place() -> None:
    plain = [
        row(prompt="a", index=0, start=0, chunks=[(2.0, 10)]),
        row(prompt="b", index=1, start=2, chunks=[(4.0, 10)]),
        row(prompt="c", index=2, start=4, chunks=[(5.0, 10)]),  # no partner
        row(prompt="d", index=3, start=5, chunks=[(99.0, 1)], error="dropped"),
    ]
    fast = [
        row(prompt="a", index=0, start=0, chunks=[(1.0, 10)]),
        row(prompt="b", index=1, start=1, chunks=[(2.0, 10)]),
        row(prompt="x", index=2, start=2, chunks=[(3.0, 10)]),
        row(prompt="d", index=3, start=3, chunks=[(4.0, 10)]),
    ]
    speedup = paired_speedup(plain, fast, 1)
    assert speedup is not None
    assert (speedup.ratio, speedup.pairs) == (pytest.approx(2.0), 2)
    assert speedup.interval == pytest.approx((2.0, 2.0))
    assert paired_speedup(plain, fast, 4) is None


def test_speedup_is_per_token_when_answers_differ_in_length() -> None:
    plain = [row(index=0, start=0, chunks=[(2.0, 20)])]
    fast = [row(index=0, start=0, chunks=[(1.0, 5)])]
    speedup = paired_speedup(plain, fast, 1)
    assert speedup is not None
    assert speedup.ratio == pytest.approx(0.5)
    assert speedup.interval is None


@given(
    st.lists(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_the_window_never_outlasts_the_run_and_holds_no_more_than_all_tokens(
    gaps: list[list[float]], concurrency: int
) -> None:
    rows, free = [], [0.0] * concurrency
    for index, request in enumerate(gaps):  # a closed loop, replayed
        slot = free.index(min(free))
        at, chunks = free[slot], []
        for gap in request:
            at += gap
            chunks.append((at, 2))
        rows.append(row(index=index, concurrency=concurrency, start=free[slot], chunks=chunks))
        free[slot] = at
    start, end = steady_window(rows, concurrency)
    assert start == 0
    assert end <= max(r.end_s for r in rows)
    assert tokens_until(rows, end) <= sum(r.tokens for r in rows)
    for r in rows:  # every request has begun by then, so the load was never below `concurrency` before it
        assert r.start_s <= end or math.isclose(r.start_s, end)
    if len(rows) >= concurrency:
        in_flight = sum(r.start_s < end and r.end_s >= end for r in rows)
        assert in_flight == concurrency
