"""The fused loss against the plain formula and autograd."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eaglenest.drafters.losses import ttt_loss


def one_step(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """The loss of a single step whose row i is judged by targets[i]."""
    at = torch.arange(hidden.shape[0])
    total, best = ttt_loss(hidden[None], weight, lambda which: targets[which], at[None], row_weights[None], chunk)
    return total, best[0]


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), steps=st.integers(1, 4), chunk=st.integers(1, 10), seed=st.integers(0, 10**6))
def test_value_and_gradients_equal_autograd_whatever_the_chunk(rows: int, steps: int, chunk: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(steps, rows, 5, generator=random, requires_grad=True)
    weight = torch.randn(7, 5, generator=random, requires_grad=True)
    targets = torch.randn(rows + steps, 7, generator=random).softmax(-1)
    at = torch.arange(rows) + torch.arange(steps)[:, None]
    weights = torch.rand(steps, rows, generator=random) * (torch.rand(steps, rows, generator=random) > 0.3)
    asked: list[int] = []

    def labels(which: Tensor) -> Tensor:
        asked.extend(which.tolist())
        return targets[which]

    ours, best = ttt_loss(hidden, weight, labels, at, weights, chunk)
    logits = hidden @ weight.t()
    plain = -(weights[..., None] * targets[at] * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(best, logits.argmax(-1))
    grads = torch.autograd.grad(ours * 3, [hidden, weight]), torch.autograd.grad(plain * 3, [hidden, weight])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    chunks = -(-rows // chunk)
    assert len(asked) <= rows + chunks * (steps - 1)  # what neighbouring rows and steps share is made once a chunk


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    loss, _ = one_step(hidden, weight, torch.full((3, 6), 1 / 6), torch.ones(3))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_rows_without_weight_change_nothing() -> None:
    hidden, weight = torch.randn(4, 4, requires_grad=True), torch.randn(6, 4)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0])
    targets = torch.randn(4, 6).softmax(-1)
    loss, _ = one_step(hidden, weight, targets, weights)
    only, _ = one_step(hidden[[0, 2]], weight, targets[[0, 2]], torch.ones(2))
    torch.testing.assert_close(loss, only)
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad[[1, 3]].any()


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), chunk=st.integers(1, 41), seed=st.integers(0, 10**6))
def test_the_chunk_changes_nothing(rows: int, chunk: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    targets, weights = torch.randn(rows, 7, generator=random).softmax(-1), torch.rand(rows, generator=random)
    results = []
    for size in (chunk, rows):
        random.manual_seed(seed + 1)
        hidden = torch.randn(rows, 5, generator=random, requires_grad=True)
        weight = torch.randn(7, 5, generator=random, requires_grad=True)
        loss, best = one_step(hidden, weight, targets, weights, size)
        results.append((loss, best, *torch.autograd.grad(loss, [hidden, weight])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_huge_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 1e3, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    loss, _ = one_step(hidden, weight, torch.full((2, 6), 1 / 6), torch.ones(2))
    loss.backward()
    assert all(t is not None and t.isfinite().all() for t in (loss, hidden.grad, weight.grad))


def test_the_loss_is_least_at_the_targets_distribution_where_it_is_the_entropy() -> None:
    targets = torch.randn(3, 6).softmax(-1)
    right = targets.log()  # hidden states and an identity head whose logits are the target's
    loss, _ = one_step(right, torch.eye(6), targets, torch.ones(3))
    torch.testing.assert_close(loss, -(targets * targets.log()).sum())
    worse, _ = one_step(right + torch.randn(3, 6), torch.eye(6), targets, torch.ones(3))
    assert worse > loss


def test_no_rows_give_a_loss_of_zero_that_can_be_differentiated() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    loss, best = one_step(hidden, weight, torch.zeros(0, 6), torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert best.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_the_best_drafts_are_looked_for_only_when_wanted() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.randn(5, 11, generator=generator).softmax(-1)
    at, weights = torch.arange(5).expand(2, 5), torch.ones(2, 5)
    with_best, best = ttt_loss(hidden, weight, lambda which: targets[which], at, weights)
    without, none = ttt_loss(hidden, weight, lambda which: targets[which], at, weights, want_best=False)
    assert best is not None
    assert torch.equal(best, (hidden @ weight.t()).argmax(-1))
    assert none is None
    assert torch.equal(with_best, without)
