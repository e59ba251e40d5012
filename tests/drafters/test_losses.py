"""The fused loss against the plain formula and autograd."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglenest.drafters.losses import linear_soft_cross_entropy


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), chunk=st.integers(1, 10), seed=st.integers(0, 10**6), whole=st.booleans())
def test_value_and_gradients_equal_autograd_whatever_the_chunk(rows: int, chunk: int, seed: int, whole: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 5, generator=random, requires_grad=True)
    weight = torch.randn(7, 5, generator=random, requires_grad=True)
    targets = torch.rand(rows, 7, generator=random)
    targets = targets / targets.sum(-1, keepdim=True) * (1.0 if whole else 0.6)
    weights = torch.rand(rows, generator=random) * (torch.rand(rows, generator=random) > 0.3)
    ours, best = linear_soft_cross_entropy(hidden, weight, targets, weights, chunk)
    logits = hidden @ weight.t()
    plain = -(weights[:, None] * targets * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(best, logits.argmax(-1))
    grads = torch.autograd.grad(ours * 3, [hidden, weight]), torch.autograd.grad(plain * 3, [hidden, weight])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    loss, _ = linear_soft_cross_entropy(hidden, weight, torch.full((3, 6), 1 / 6), torch.ones(3))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_rows_without_weight_change_nothing() -> None:
    hidden, weight = torch.randn(4, 4, requires_grad=True), torch.randn(6, 4)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0])
    targets = torch.randn(4, 6).softmax(-1)
    loss, _ = linear_soft_cross_entropy(hidden, weight, targets, weights)
    only, _ = linear_soft_cross_entropy(hidden[[0, 2]], weight, targets[[0, 2]], torch.ones(2))
    torch.testing.assert_close(loss, only)
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad[[1, 3]].any()
