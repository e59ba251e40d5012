"""The draft vocabulary and the replayed acceptance."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.drafters.acceptance import replay
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
    assert t2d.nonzero().flatten().tolist() == chosen


@given(answers=answers, size=st.integers(1, 50))
def test_frequent_tokens_come_first(answers: list[list[int]], size: int) -> None:
    chosen = set(choose_draft_vocabulary(answers, size, 50))
    said = [t for a in answers for t in a]
    count = {t: said.count(t) for t in range(50)}
    assert min((count[t] for t in chosen), default=0) >= max(
        (count[t] for t in range(50) if t not in chosen), default=0
    )


def test_coverage_counts_tokens_not_kinds() -> None:
    _, t2d = vocabulary_maps([1, 3], 6)
    assert coverage([[1, 1, 1, 2]], t2d) == 0.75
    assert coverage([], t2d) == 0.0


@given(hits=st.lists(st.lists(st.booleans(), min_size=0, max_size=5), max_size=30), steps=st.integers(1, 5))
def test_replay_walks_as_a_server_does(hits: list[list[bool]], steps: int) -> None:
    result = replay(hits, steps)
    position = rounds = accepted = 0
    by_position = [0] * steps
    while position < len(hits):
        run = 0
        for hit in hits[position][:steps]:
            if not hit:
                break
            by_position[run] += 1
            run += 1
        rounds, accepted, position = rounds + 1, accepted + run, position + run + 1
    assert (result.steps, result.accepted, result.by_position) == (rounds, accepted, by_position)
    assert 1 <= result.length <= 1 + steps
    assert sum(result.by_position) == result.accepted


def test_replay_is_not_the_mean_over_positions() -> None:
    hits = [[True], [False], [False], [True], [False]]
    assert replay(hits, 1).length == 1 + 2 / 3
    assert 1 + sum(h[0] for h in hits) / len(hits) == 1.4


def test_maps_are_the_types_of_a_checkpoint() -> None:
    d2t, t2d = vocabulary_maps([0, 5], 6)
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert d2t.tolist() == [0, 4]
