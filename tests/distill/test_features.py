"""The shift, the loss mask and packing, position by position."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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


@given(
    shapes=st.lists(st.tuples(st.integers(3, 9), st.integers(1, 9)), min_size=1, max_size=4), steps=st.integers(1, 4)
)
def test_a_pack_is_its_documents_end_to_end(shapes: list[tuple[int, int]], steps: int) -> None:
    items = [document(n, min(a, n - 1), 20 * i) for i, (n, a) in enumerate(shapes)]
    whole = collate(items, steps, torch.float32)
    offset = queries = 0
    for item, span in zip(items, whole.pack.spans, strict=True):
        one = collate([item], steps, torch.float32)
        size = len(item[0].ids) - 1
        part = slice(offset, offset + size)
        for name in ("tokens", "positions", "aux"):
            assert torch.equal(getattr(whole.pack, name)[part], getattr(one.pack, name))
        assert torch.equal(whole.labels[part], one.labels)
        mine = slice(span.query_start, span.query_end)
        assert torch.equal(whole.pack.rows[mine] - offset, one.pack.rows)
        assert torch.equal(whole.pack.reach[mine], one.pack.reach)
        assert (span.start, span.end, span.query_start) == (offset, offset + size, queries)
        offset, queries = offset + size, span.query_end
    assert whole.answer_tokens == sum(len(d.answer) for d, _ in items)


def test_states_survive_the_trip_as_int16() -> None:
    _, features = document(5, 2)
    back = Features.unpack(features.pack())
    assert torch.equal(back.aux, features.aux)
    assert torch.equal(back.last, features.last)
    assert back.nbytes == 5 * 3 * 2
