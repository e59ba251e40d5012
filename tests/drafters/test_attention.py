"""TTT attention against the whole (K*T) x (K*T) mask, which it never builds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eaglenest.drafters.attention import Span, apply_rope, query_blocks, rope_tables, ttt_attention


def layout(lengths: list[int], answers: list[int]) -> tuple[list[Span], Tensor]:
    """Documents end to end; the last `answers[i]` rows of each carry loss."""
    spans, rows, start = [], [], 0
    for length, answer in zip(lengths, answers, strict=True):
        mine = list(range(start + length - answer, start + length))
        spans.append(Span(start, start + length, len(rows), len(rows) + answer))
        rows += mine
        start += length
    return spans, torch.tensor(rows, dtype=torch.int64)


def whole(queries: Tensor, keys: Tensor, values: Tensor, document: list[int]) -> Tensor:
    """All K steps of all T rows by one masked softmax.

    queries: [K, T, heads, d]; keys, values: [K, T, kv, d]; document: which one each row belongs to. Returns
    [K, T, heads, d].
    """
    steps, count, heads, dim = queries.shape
    allowed = torch.zeros(steps, count, steps, count, dtype=torch.bool)
    for k in range(steps):
        for p in range(count):
            for q in range(p + 1):
                allowed[k, p, 0, q] = document[p] == document[q]
            for j in range(1, k + 1):
                allowed[k, p, j, p] = True
    allowed = allowed.view(steps * count, steps * count)
    out = []
    for head in range(heads):
        kv = head * keys.shape[2] // heads
        q, k, v = queries[:, :, head].flatten(0, 1), keys[:, :, kv].flatten(0, 1), values[:, :, kv].flatten(0, 1)
        scores = (q @ k.t() / dim**0.5).masked_fill(~allowed, float("-inf"))
        out.append(scores.softmax(-1) @ v)
    return torch.stack(out, dim=1).view(steps, count, heads, dim)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_step_equals_the_whole_mask_in_value_and_gradient(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    answers = [data.draw(st.integers(0, n)) for n in lengths]
    if not sum(answers):
        answers[0] = lengths[0]
    kv, group, steps = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)))
    spans, rows = layout(lengths, answers)
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    blocks = query_blocks(rows.tolist(), spans, data.draw(st.integers(1, 8)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    shape = (steps, sum(lengths))

    def tensor(heads: int) -> Tensor:
        return torch.randn(*shape, heads, 4, generator=random, dtype=torch.float64, requires_grad=True)

    queries, keys, values = tensor(kv * group), tensor(kv), tensor(kv)
    ours = torch.stack(
        [
            ttt_attention(
                queries[k, rows],
                keys[0],
                values[0],
                [keys[j, rows] for j in range(1, k + 1)],
                [values[j, rows] for j in range(1, k + 1)],
                rows,
                blocks,
            )
            for k in range(steps)
        ]
    )
    theirs = whole(queries, keys, values, document)[:, rows]
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    weight = torch.randn(ours.shape, generator=random, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), [queries, keys, values]),
        torch.autograd.grad((theirs * weight).sum(), [queries, keys, values]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_neither_the_future_nor_another_document_nor_another_row_is_seen(step: int) -> None:
    torch.manual_seed(0)
    spans, rows = layout([4, 5], [2, 3])  # rows 2, 3 and 6, 7, 8
    query, keys, values = torch.randn(5, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    own = [torch.randn(5, 2, 4) for _ in range(step)]
    before = ttt_attention(query, keys, values, own, own, rows, spans)

    def changed(key_rows: list[int], own_rows: list[int]) -> list[bool]:
        """Which queries notice another key and value in these rows."""
        k, v, mine = keys.clone(), values.clone(), [o.clone() for o in own]
        k[key_rows], v[key_rows] = 3.0, 3.0
        for o in mine:
            o[own_rows] = 3.0
        after = ttt_attention(query, k, v, mine, mine, rows, spans)
        return [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]

    assert changed([0], []) == [True, True, False, False, False]
    assert changed([3], []) == [False, True, False, False, False]
    assert changed([4], []) == [False, False, True, True, True]
    assert changed([8], []) == [False, False, False, False, True]
    for query_number in range(5):
        assert changed([], [query_number]) == [step > 0 and query_number == n for n in range(5)]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_blocks_hold_every_query_once_and_no_key_that_none_of_theirs_may_see(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    spans, rows = layout(lengths, [data.draw(st.integers(0, n)) for n in lengths])
    size = data.draw(st.integers(1, 12))
    blocks = query_blocks(rows.tolist(), spans, size)
    assert [q for b in blocks for q in range(b.query_start, b.query_end)] == list(range(len(rows)))
    for block in blocks:
        assert 1 <= block.query_end - block.query_start <= size
        assert block.end == int(rows[block.query_end - 1]) + 1
        assert any(s.start == block.start and s.query_start <= block.query_start < s.query_end for s in spans)


def test_a_pack_without_loss_rows_gives_nothing_and_no_error() -> None:
    spans, rows = layout([3, 2], [0, 0])
    keys = torch.randn(5, 2, 4)
    assert ttt_attention(torch.randn(0, 6, 4), keys, keys, [], [], rows, spans).shape == (0, 6, 4)


def test_rotation_is_of_halves_and_turns_with_the_position() -> None:
    tables = rope_tables(4, 100.0, 8, torch.device("cpu"))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = apply_rope(x, torch.tensor([3]), tables)[0, 0]
    # dimension i turns with i + d/2, by position * theta^(-2i/d)
    for i, angle in enumerate((3.0, 3.0 / 10)):
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        torch.testing.assert_close(turned[i], x[0, 0, i] * cos - x[0, 0, i + 2] * sin)
        torch.testing.assert_close(turned[i + 2], x[0, 0, i + 2] * cos + x[0, 0, i] * sin)
    assert torch.equal(apply_rope(x, torch.tensor([0]), tables), x)
