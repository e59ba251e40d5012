"""Distillation losses on the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _LinearSoftCrossEntropy(torch.autograd.Function):
    """Sum of w * H(p, softmax(h W^T)) in chunks of rows; gradients are formed in the forward pass.

    Logits of one chunk live at a time, whatever the number of rows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float32)
        best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        for begin in range(0, hidden.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits = (hidden[rows] @ weight.t()).float()
            p, w = targets[rows].float(), row_weights[rows].float()
            best[rows] = logits.argmax(-1)
            lse = logits.logsumexp(-1)
            total += (w * (lse * p.sum(-1) - (p * logits).sum(-1))).sum()
            grad = (logits.sub_(lse[:, None]).exp_().mul_(p.sum(-1, keepdim=True)).sub_(p)).mul_(w[:, None])
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = None if grad_weight is None else (grad_weight * grad_total).to(grad_hidden.dtype)
        return grad_hidden * grad_total.to(grad_hidden.dtype), scaled, None, None, None


def linear_soft_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor, chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Soft cross entropy of `softmax(hidden @ weight.T)` against the target's distribution, fused with the linear.

    Minimising it minimises the forward KL; the difference is the target's own entropy.

    Args:
        hidden: [R, H].
        weight: [V_draft, H], the drafter's lm_head.
        targets: [R, V_draft], probabilities (rows may sum to less than one).
        row_weights: [R], 0 leaves a row out.
        chunk: rows whose logits live at once.

    Returns:
        the weighted sum (float32 scalar) and the drafter's best draft id of each row [R] int64.
    """
    total, best = _LinearSoftCrossEntropy.apply(hidden, weight, targets, row_weights, chunk)
    return total, best
