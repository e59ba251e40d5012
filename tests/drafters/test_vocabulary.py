"""The draft vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.drafters.vocabulary import choose_draft_vocabulary, coverage, draft_ids, vocabulary_maps

answers = st.lists(st.lists(st.integers(0, 49), max_size=12), max_size=6)


@given(answers=answers, size=st.integers(1, 60), always=st.lists(st.integers(0, 49), max_size=2))
def test_a_vocabulary_is_ascending_full_and_holds_what_it_must(
    answers: list[list[int]], size: int, always: list[int]
) -> None:
    chosen = choose_draft_vocabulary(answers, size, 50, always)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(size, 50)
    if size >= len(set(always)):
        assert set(always) <= set(chosen)
    d2t, t2d = vocabulary_maps(chosen, 50)
    assert draft_ids(d2t).tolist() == chosen
    assert [i + offset for i, offset in enumerate(d2t.tolist())] == chosen  # offsets, not ids
    assert t2d.nonzero().flatten().tolist() == chosen


@given(answers=answers, size=st.integers(1, 50))
def test_frequent_tokens_come_first(answers: list[list[int]], size: int) -> None:
    chosen = set(choose_draft_vocabulary(answers, size, 50))
    said = [t for a in answers for t in a]
    count = {t: said.count(t) for t in range(50)}
    assert min((count[t] for t in chosen), default=0) >= max(
        (count[t] for t in range(50) if t not in chosen), default=0
    )


@given(answers=answers, size=st.integers(1, 50))
def test_coverage_is_the_share_of_tokens_that_can_be_proposed(answers: list[list[int]], size: int) -> None:
    chosen = choose_draft_vocabulary(answers, size, 50)
    said = [t for a in answers for t in a]
    expected = sum(t in chosen for t in said) / len(said) if said else 0.0
    assert coverage(answers, vocabulary_maps(chosen, 50)[1]) == pytest.approx(expected)
    assert coverage(answers, vocabulary_maps(range(50), 50)[1]) == (1.0 if said else 0.0)


def test_the_rest_is_filled_with_the_lowest_ids() -> None:
    assert choose_draft_vocabulary([[40, 40, 30, 20]], 5, 50, always=[49]) == [0, 20, 30, 40, 49]
    assert choose_draft_vocabulary([[40, 40, 30, 20]], 3, 50, always=[49]) == [20, 40, 49]  # ties: the lower id


def test_coverage_counts_tokens_not_kinds() -> None:
    _, t2d = vocabulary_maps([1, 3], 6)
    assert coverage([[1, 1, 1, 2]], t2d) == 0.75
    assert coverage([], t2d) == 0.0


def test_maps_are_the_types_of_a_checkpoint() -> None:
    d2t, t2d = vocabulary_maps([0, 5], 6)
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert d2t.tolist() == [0, 4]
