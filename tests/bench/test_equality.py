"""Greedy outputs compared token by token, near-ties of the target apart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.bench.equality import compare_outputs, first_difference, tie_gap
from eaglenest.bench.models import Equality, RequestRow


def row(tokens: list[int], *, index: int = 0, error: str | None = None) -> RequestRow:
    return RequestRow(
        prompt_id=f"p{index}",
        category="c",
        concurrency=1,
        index=index,
        start_s=0,
        end_s=1,
        prompt_token_ids=[100, 101],
        token_ids=tokens,
        error=error,
    )


def compare(
    reference: list[RequestRow], other: list[RequestRow], top: dict[int, float] | None = None
) -> tuple[Equality, list[list[int]]]:
    asked: list[list[int]] = []

    async def probe(prefix: Sequence[int]) -> dict[int, float]:
        asked.append(list(prefix))
        return top or {}

    return asyncio.run(compare_outputs(reference, other, probe)), asked


def test_equal_outputs_ask_the_target_nothing() -> None:
    equality, asked = compare([row([1, 2, 3])], [row([1, 2, 3])])
    assert (equality.compared, equality.equal, equality.changed, equality.near_ties) == (1, 1, 0, 0)
    assert asked == []


@pytest.mark.parametrize(
    ("top", "near"),
    [
        ({2: -0.5, 9: -0.50005}, True),
        ({2: -0.5, 9: -0.5002}, False),
        ({2: -0.5, 7: -0.50001}, False),  # the token that was given is not among the target's best
        ({7: -0.1, 2: -0.5, 9: -0.50001}, False),  # the two are close to each other, far from the best
    ],
)
def test_a_difference_is_a_near_tie_only_if_the_target_can_hardly_tell(top: dict[int, float], near: bool) -> None:
    equality, asked = compare([row([1, 2, 3])], [row([1, 9, 4])], top)
    assert (equality.near_ties, equality.changed) == ((1, 0) if near else (0, 1))
    assert asked == [[100, 101, 1]]  # the prompt and the answer up to the first difference
    assert (equality.differences[0].position, equality.differences[0].other_token) == (1, 9)


def test_a_token_lost_or_added_is_a_change_that_no_tie_explains() -> None:
    equality, asked = compare([row([1, 2, 3])], [row([1, 2])], {3: -0.1, 2: -0.1})
    assert (equality.changed, asked) == (1, [])
    assert compare([row([1, 2])], [row([1, 2, 3])])[0].changed == 1


def test_only_rows_that_both_runs_completed_are_compared() -> None:
    reference = [row([1]), row([1], index=1, error="dropped"), row([1], index=2)]
    other = [row([1]), row([2], index=1), row([2], index=2, error="http 429"), row([2], index=3)]
    equality, _ = compare(reference, other)
    assert (equality.compared, equality.equal) == (1, 1)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_first_difference_is_where_common_prefixes_end(a: list[int], b: list[int]) -> None:
    position = first_difference(a, b)
    if position is None:
        assert a == b
    else:
        assert a[:position] == b[:position]
        assert a[position : position + 1] != b[position : position + 1]


def test_the_gap_is_from_the_targets_best_to_the_worse_of_the_two() -> None:
    assert tie_gap({1: -0.2, 2: -0.7, 3: -0.9}, [1, 3]) == pytest.approx(0.7)
    assert tie_gap({1: -0.2}, [1, 3]) is None
    assert tie_gap({1: -0.2}, [1, None]) is None
