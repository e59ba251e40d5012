"""The pause of a swap, from arrival times alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.bench import pauses


def regular(start: float, end: float, step: float = 0.1) -> list[float]:
    count = round((end - start) / step)
    return [start + i * step for i in range(count + 1)]


def test_a_gap_counts_in_full_where_it_reaches_beyond_the_span() -> None:
    streams = [[0.0, 1.0, 5.0, 6.0]]
    assert pauses.largest_gap(streams, (2.0, 3.0)) == 4.0
    assert pauses.largest_gap(streams, (0.2, 0.3)) == 1.0
    assert pauses.largest_gap(streams, (7.0, 8.0)) is None


def test_the_span_of_a_swap_ends_with_the_first_token_after_it_on_any_stream() -> None:
    streams = [[0.0, 4.0], [0.0, 2.5, 4.1]]
    assert pauses.swap_span(streams, 1.0, 2.0) == (1.0, 2.5)
    assert pauses.swap_span(streams, 1.0, 9.0) == (1.0, 9.0)


def test_a_stall_of_known_length_is_found() -> None:
    before, after = regular(0, 5), regular(5.7, 12)  # one step is 0.1 s, the swap holds it up by 0.6 s
    streams = [before + after, [t + 0.01 for t in before + after]]
    span = pauses.swap_span(streams, 4.95, 5.65)
    gap, floor = pauses.largest_gap(streams, span), pauses.floor_gap([(streams, [span])], span[1] - span[0])
    assert gap == pytest.approx(0.7)
    assert floor == pytest.approx(0.1)


def test_the_floor_is_that_of_equally_long_spans() -> None:
    """A prefill holds up the streams once a second: a span of 1.2 s always meets one, one of 0.05 s hardly ever."""
    stream, at = [], 0.0
    for i in range(200):
        at += 0.4 if i % 8 == 0 else 0.1
        stream.append(at)
    assert pauses.floor_gap([([stream], [])], 1.2) == pytest.approx(0.4)
    assert pauses.floor_gap([([stream], [])], 0.05) == pytest.approx(0.1)


def test_spans_with_a_swap_are_no_part_of_the_floor() -> None:
    stream = regular(0, 5) + regular(6, 11)
    quiet = pauses.quiet_spans([stream], 0.5, [(4.8, 6.2)])
    assert quiet
    assert all(end <= 4.8 or start >= 6.2 for start, end in quiet)
    assert pauses.floor_gap([([stream], [(0.0, 11.0)])], 0.5) is None


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=2, max_size=20), min_size=1, max_size=4),
    st.floats(0, 9),
    st.floats(0.01, 3),
    st.floats(0, 3),
)
def test_a_longer_span_never_has_a_smaller_largest_gap(
    streams: list[list[float]], start: float, length: float, more: float
) -> None:
    ordered = [sorted(stream) for stream in streams]
    short = pauses.largest_gap(ordered, (start, start + length))
    longer = pauses.largest_gap(ordered, (start, start + length + more))
    assert short is None or (longer is not None and longer >= short)


def test_the_timeline_keeps_the_largest_gap_of_each_bin() -> None:
    assert pauses.timeline([[0.0, 0.03, 0.09, 0.55]], 0.1) == [
        (0.0, pytest.approx(0.06)),
        (0.5, pytest.approx(0.46)),
    ]
