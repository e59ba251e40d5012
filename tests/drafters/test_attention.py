"""TTT attention against a naive reference that builds every step's keys and the whole mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eaglenest.drafters.attention import Span, ttt_attention


def layout(lengths: list[int], answers: list[int]) -> tuple[list[Span], Tensor]:
    """Documents end to end; the last `answers[i]` rows of each carry loss."""
    spans, rows, start = [], [], 0
    for length, answer in zip(lengths, answers, strict=True):
        mine = list(range(start + length - answer, start + length))
        spans.append(Span(start, start + length, len(rows), len(rows) + answer))
        rows += mine
        start += length
    return spans, torch.tensor(rows, dtype=torch.int64)


def naive(queries: list[Tensor], keys: list[Tensor], values: list[Tensor], rows: Tensor, document: Tensor) -> Tensor:
    """The last step's output, by one softmax over the keys of all steps with an explicit mask.

    keys[0], values[0]: [N, kv, d]; later ones: [R, kv, d].
    """
    query = queries[-1]
    group = query.shape[1] // keys[0].shape[1]
    k = torch.cat(keys).repeat_interleave(group, dim=1)
    v = torch.cat(values).repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,nhd->hrn", query, k) / query.shape[-1] ** 0.5
    n = keys[0].shape[0]
    at = torch.arange(n)
    allowed = [(at <= rows[:, None]) & (document[at] == document[rows][:, None])]
    allowed += [torch.eye(len(rows), dtype=torch.bool)] * (len(keys) - 1)
    scores = scores.masked_fill(~torch.cat(allowed, dim=1), float("-inf"))
    return torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_naive_mask_in_value_and_gradient(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    answers = [data.draw(st.integers(0, n)) for n in lengths]
    if not sum(answers):
        answers[0] = lengths[0]
    kv, group, steps = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)))
    spans, rows = layout(lengths, answers)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))

    def tensor(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 4, generator=random, dtype=torch.float64, requires_grad=True)

    query = tensor(len(rows), kv * group)
    keys = [tensor(sum(lengths), kv), *(tensor(len(rows), kv) for _ in range(steps - 1))]
    values = [tensor(sum(lengths), kv), *(tensor(len(rows), kv) for _ in range(steps - 1))]
    ours = ttt_attention(query, keys[0], values[0], keys[1:], values[1:], rows, spans)
    theirs = naive([query], keys, values, rows, document)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)  # the softmax runs in float32
    weight = torch.randn(ours.shape, generator=random, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), [query, *keys, *values], allow_unused=True),
        torch.autograd.grad((theirs * weight).sum(), [query, *keys, *values], allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("step", [0, 2])
def test_neither_the_future_nor_another_document_nor_another_row_is_seen(step: int) -> None:
    torch.manual_seed(0)
    spans, rows = layout([4, 5], [2, 3])
    query, keys, values = torch.randn(5, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    own = [torch.randn(5, 2, 4) for _ in range(step)]
    before = ttt_attention(query, keys, values, own, own, rows, spans)
    keys2, values2 = keys.clone(), values.clone()
    keys2[7:], values2[7:] = 9.0, 9.0  # after row 6, the first loss row of the second document
    own2 = [o.clone() for o in own]
    for o in own2:
        o[3:] = 9.0
    after = ttt_attention(query, keys2, values2, own2, own2, rows, spans)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])
