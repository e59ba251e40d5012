"""The shift, the loss mask and packing, position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.distill.answers import Answer
from eaglenest.distill.features import Document, Features, collate, loss_rows


def document(length: int, answer_start: int, base: int = 0) -> tuple[Document, Features]:
    """A document whose states tell their position: aux[i] = base + i, last[i] = base + i + 0.5."""
    ids = tuple(range(base, base + length))
    at = torch.arange(base, base + length, dtype=torch.float32)
    aux, last = at[:, None].repeat(1, 2), (at + 0.5)[:, None]
    return Document(str(base), "x", ids, answer_start), Features(aux.bfloat16(), last.bfloat16())


def test_the_first_row_sits_on_the_last_prompt_token_and_the_last_proposes_the_last_token() -> None:
    doc, _ = document(10, 6)  # prompt 0..5, answer 6..9
    rows, reach = loss_rows(doc, 3)
    assert rows == [5, 6, 7]
    # row 5 carries x[6] and proposes x[7], x[8], x[9]; row 7 proposes x[9] only
    assert reach == [3, 2, 1]


def test_a_row_carries_the_next_token_this_state_and_the_next_distribution() -> None:
    batch = collate([document(10, 6)], 3, torch.float32)
    row = batch.pack.rows[0]
    assert int(row) == 5
    assert int(batch.pack.tokens[row]) == 6
    assert batch.pack.aux[row].tolist() == [5.0, 5.0]
    assert int(batch.pack.positions[row]) == 5
    assert float(batch.labels[row]) == 6.5
    assert int(batch.nexts[row]) == 7
    assert float(batch.labels[row + 2]) == 8.5
    assert int(batch.nexts[row + 2]) == 9


def test_prompt_rows_carry_their_own_weight() -> None:
    batch = collate([document(8, 5)], 2, torch.float32, prompt_weight=0.5)
    assert batch.pack.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.weights.tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    assert batch.answers.tolist() == [False, False, False, False, True, True]


@given(length=st.integers(2, 12), answer_start=st.integers(1, 14), steps=st.integers(1, 5), prompt=st.booleans())
def test_a_row_carries_loss_where_its_token_is_an_answer_token_and_something_follows(
    length: int, answer_start: int, steps: int, prompt: bool
) -> None:
    doc, _ = document(length, answer_start)
    rows, reach = loss_rows(doc, steps, prompt)
    # row p carries x[p+1] and proposes x[p+2], x[p+3], ...
    wanted = [p for p in range(length) if p + 2 < length and (prompt or p + 1 >= answer_start)]
    assert rows == wanted
    assert reach == [sum(p + 2 + k < length for k in range(steps)) for p in rows]


def test_a_document_cut_inside_its_answer_ends_with_its_last_token() -> None:
    answer = Answer(key="k", prompt_ids=(0, 1, 2), answer_ids=(3, 4, 5, 6, 7))
    doc = answer.document("x", 6)
    assert (doc.ids, doc.answer) == ((0, 1, 2, 3, 4, 5), (3, 4, 5))
    assert loss_rows(doc, 3) == ([2, 3], [2, 1])  # row 3 carries x[4] and proposes x[5], the last one left


@pytest.mark.parametrize(("length", "answer_start"), [(6, 5), (6, 6), (6, 9), (2, 1)])
def test_a_document_in_which_nothing_can_be_proposed_has_no_rows(length: int, answer_start: int) -> None:
    batch = collate([document(length, answer_start)], 3, torch.float32)
    assert batch.pack.rows.tolist() == batch.pack.reach.tolist() == batch.weights.tolist() == []
    assert batch.pack.rows.dtype == torch.int64
    assert len(batch.pack.tokens) == length - 1


@given(
    shapes=st.lists(st.tuples(st.integers(2, 9), st.integers(1, 9)), min_size=1, max_size=4),
    steps=st.integers(1, 4),
    prompt_weight=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_pack_is_its_documents_end_to_end(shapes: list[tuple[int, int]], steps: int, prompt_weight: float) -> None:
    items = [document(n, min(a, n - 1), 20 * i) for i, (n, a) in enumerate(shapes)]
    whole = collate(items, steps, torch.float32, prompt_weight)
    offset = queries = 0
    for item, span in zip(items, whole.pack.spans, strict=True):
        one = collate([item], steps, torch.float32, prompt_weight)
        size = len(item[0].ids) - 1
        part = slice(offset, offset + size)
        for name in ("tokens", "positions", "aux"):
            assert torch.equal(getattr(whole.pack, name)[part], getattr(one.pack, name))
        assert torch.equal(whole.labels[part], one.labels)
        mine = slice(span.query_start, span.query_end)
        assert torch.equal(whole.pack.rows[mine] - offset, one.pack.rows)
        assert torch.equal(whole.pack.reach[mine], one.pack.reach)
        assert torch.equal(whole.weights[mine], one.weights)
        assert torch.equal(whole.answers[mine], one.answers)
        assert torch.equal(whole.nexts[part], one.nexts)
        assert (span.start, span.end, span.query_start) == (offset, offset + size, queries)
        offset, queries = offset + size, span.query_end
    assert whole.answer_tokens == sum(len(d.answer) for d, _ in items)


def test_states_survive_the_trip_as_int16() -> None:
    _, features = document(5, 2)
    back = Features.unpack(features.pack())
    assert torch.equal(back.aux, features.aux)
    assert torch.equal(back.last, features.last)
    assert back.nbytes == 5 * 3 * 2
