"""Replayed acceptance against a served answer simulated token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.drafters.acceptance import Acceptance, replay


def served(answer: list[int], drafts: list[list[int]]) -> list[int]:
    """How many drafts each step of a server accepts while it writes `answer`.

    drafts[i]: what is drafted once answer[i] is the newest token.
    """
    written, taken = answer[:1], []  # the prompt's own step samples the first token
    while len(written) < len(answer):
        accepted = 0
        for draft in drafts[len(written) - 1]:
            if len(written) == len(answer) or draft != answer[len(written)]:
                break
            written.append(draft)
            accepted += 1
        if len(written) < len(answer):
            written.append(answer[len(written)])  # the target's own token after the last right draft
        taken.append(accepted)
    return taken


@given(data=st.data(), steps=st.integers(1, 4))
def test_replay_counts_what_a_server_would_accept(data: st.DataObject, steps: int) -> None:
    answer = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=25))
    drafts = [data.draw(st.lists(st.integers(0, 2), min_size=steps, max_size=steps)) for _ in answer]
    # row i proposes answer[i+1], answer[i+2], ... : the last K rows propose fewer than K tokens
    rows = [[d == t for d, t in zip(drafts[i], answer[i + 1 :], strict=False)] for i in range(len(answer) - 1)]
    taken = served(answer, drafts)
    result = replay(rows, steps)
    assert (result.steps, result.accepted) == (len(taken), sum(taken))
    assert result.by_position == [sum(n > k for n in taken) for k in range(steps)]
    assert result.rates() == [n / max(1, len(taken)) for n in result.by_position]
    assert 1 <= result.length <= 1 + steps


@given(first=st.lists(st.lists(st.booleans(), max_size=3), max_size=9), steps=st.integers(1, 3))
def test_pooling_is_over_steps_not_over_answers(first: list[list[bool]], steps: int) -> None:
    second = [[True] * steps] * 8
    pooled = Acceptance()
    for hits in (first, second):
        pooled.add(replay(hits, steps))
    alone = [replay(hits, steps) for hits in (first, second)]
    assert pooled.steps == sum(a.steps for a in alone)
    assert pooled.length == pytest.approx(1 + sum(a.accepted for a in alone) / pooled.steps)
    assert pooled.by_position == [sum(a.by_position[k] for a in alone) for k in range(steps)]


def test_replay_is_not_the_mean_over_positions() -> None:
    hits = [[True], [False], [False], [True], [False]]
    assert replay(hits, 1).length == 1 + 2 / 3
    assert 1 + sum(h[0] for h in hits) / len(hits) == 1.4


def test_nothing_served_is_the_floor() -> None:
    assert replay([], 3).length == Acceptance().length == 1.0
    assert replay([[False, True, True]] * 5, 3).length == 1.0  # a draft counts only after all before it
