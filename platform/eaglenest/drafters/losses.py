"""Distillation losses on the draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Labels = Callable[[Tensor], Tensor]
"""Label numbers [n] int64 -> the target's distribution over the draft vocabulary [n, V_draft]."""


class _TttLoss(torch.autograd.Function):
    """Sum of w * H(p, softmax(h W^T)) over steps and rows, in chunks of rows; gradients are formed going forward.

    Logits and labels of one chunk and one step live at a time, whatever the number of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Labels,
        at: Tensor,
        row_weights: Tensor,
        chunk: int,
        best: Tensor,
    ) -> Tensor:
        dtype = _product_dtype(hidden)
        h, matrix = hidden.to(dtype), weight.to(dtype)
        grad_hidden = torch.empty_like(h)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        for begin in range(0, hidden.shape[1], chunk):
            rows = slice(begin, begin + chunk)
            needed, where = torch.unique(at[:, rows], return_inverse=True)
            every = labels(needed)
            for step in range(hidden.shape[0]):
                w = row_weights[step, rows].to(total.dtype)
                logits = h[step, rows] @ matrix.t()
                if best.numel():
                    best[step, rows] = logits.argmax(-1)
                logp = torch.log_softmax(logits, -1, dtype=total.dtype)
                p = every[where[step]].to(total.dtype)
                total -= torch.dot((p * logp).sum(-1), w)
                grad = logp.exp_().sub_(p).to(dtype)
                grad_hidden[step, rows] = (grad @ matrix) * w[:, None].to(dtype)
                if grad_weight is not None:
                    grad_weight += grad.t() @ (h[step, rows] * w[:, None].to(dtype))
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = None if grad_weight is None else grad_weight * grad_total.to(grad_weight.dtype)
        return grad_hidden * grad_total.to(grad_hidden.dtype), scaled, None, None, None, None, None


def _product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of x is computed in, autocast considered."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def ttt_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    at: Tensor,
    row_weights: Tensor,
    chunk: int = 256,
    *,
    want_best: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Soft cross entropy of `softmax(hidden @ weight.T)` against the target's distribution, fused with the linear.

    Minimising it minimises the forward KL; the difference is the target's own entropy.

    Args:
        hidden: [K, R, H], for each step what lm_head reads at each loss row.
        weight: [V_draft, H], the drafter's lm_head.
        labels: gives the target's distributions, rows that sum to one.
        at: [K, R] int64, which label each step of each row is judged by. Neighbouring rows share labels, so each is
            asked for once in a chunk.
        row_weights: [K, R], 0 leaves a row out.
        chunk: rows whose labels live at once.
        want_best: also find the best drafts, which takes another look at every logit.

    Returns:
        the weighted sum (scalar, at least float32) and the drafter's best draft ids [K, R] int64, or None.
    """
    best = torch.empty(hidden.shape[:2] if want_best else 0, dtype=torch.int64, device=hidden.device)
    total = _TttLoss.apply(hidden, weight, labels, at, row_weights, chunk, best)
    return total, best if want_best else None
