"""The K that pays, against the plain formula and its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.bench.break_even import best_k
from eaglenest.bench.models import Acceptance, Measurement, Percentiles, Plan, Point


def measured(tokens_per_s: float, unconditional: list[float] | None = None) -> Measurement:
    times = Percentiles(p50=1, p90=1, p99=1, max=1, count=1)
    point = Point(
        concurrency=1, requests=1, failed=0, failures={}, tokens=1, wall_s=1, window_s=1, window_tokens=1,
        acceptance=None, tokens_per_s=tokens_per_s, ttft_ms=times, itl_ms=times, tpot_ms=times,
    )  # fmt: skip
    acceptance = unconditional and Acceptance(
        accept_len=1 + sum(unconditional), interval=None, steps=1, accepted=1, drafted=1,
        unconditional=unconditional, conditional=[None] * len(unconditional),
    )  # fmt: skip
    return Measurement(name="m", model="m", plan=Plan(), points=[point], acceptance=acceptance or None)


def served(step_ms: float, draft_ms: float, unconditional: list[float]) -> tuple[Measurement, Measurement]:
    """Plain and speculative measurements of an engine with these costs."""
    accept_len = 1 + sum(unconditional)
    step = step_ms + draft_ms * len(unconditional)
    return measured(1000 / step_ms), measured(1000 * accept_len / step, unconditional)


@pytest.mark.parametrize(
    ("draft_ms", "unconditional", "best"),
    [
        (4.0, [0.40, 0.18, 0.05], 2),  # a third draft is right too seldom for a tenth of a step
        (4.0, [0.70, 0.45, 0.30], 3),
        (4.0, [0.20, 0.02, 0.01], 1),
        (0.0, [0.20, 0.02, 0.01], 3),  # drafts that cost nothing are all welcome
    ],
)
def test_a_draft_is_worth_its_time_or_not_made(draft_ms: float, unconditional: list[float], best: int) -> None:
    assert best_k(*served(40.0, draft_ms, unconditional)) == best


@given(
    st.floats(5, 200), st.floats(0, 40), st.lists(st.floats(0.001, 0.999), min_size=1, max_size=8)
)  # fmt: skip
def test_no_other_k_is_expected_to_be_faster(step_ms: float, draft_ms: float, rates: list[float]) -> None:
    unconditional = sorted(rates, reverse=True)
    chosen = best_k(*served(step_ms, draft_ms, unconditional))

    def speed(k: int) -> float:
        return (1 + sum(unconditional[:k])) / (step_ms + k * draft_ms)

    assert speed(chosen) >= max(speed(k) for k in range(1, len(rates) + 1)) * (1 - 1e-9)
