"""Attention of the training-time test: step-0 keys of the own document, then one's own later keys.

The query of row p at step k sees the step-0 keys of rows <= p of its document, and of the steps 1..k only the key of
row p itself (see `docs/distillation.md`). So K steps cost K*(T*T + K*T) scores instead of (K*T)^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One document's part of a pack: its rows, and which entries of the query list are its own."""

    start: int
    end: int
    query_start: int
    query_end: int


def rope_tables(head_dim: int, theta: float, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, each [length, head_dim/2] float32 (NeoX halves, as Llama)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [N, heads, head_dim] by its positions [N]."""
    cos, sin = (t[positions][:, None].to(x.dtype) for t in tables)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def query_blocks(rows: Sequence[int], spans: Sequence[Span], size: int = 256) -> list[Span]:
    """Cut long documents into blocks of at most `size` queries, each with only the keys that its last query may see.

    Args:
        rows: which row of the pack each query belongs to, ascending.
        spans: the documents.

    Returns:
        spans whose query ranges partition those of the documents that have any.
    """
    blocks = []
    for span in spans:
        for begin in range(span.query_start, span.query_end, size):
            end = min(begin + size, span.query_end)
            blocks.append(Span(span.start, rows[end - 1] + 1, begin, end))
    return blocks


class _BlockedAttention(torch.autograd.Function):
    """Softmax attention block by block. Scores are made anew going backward, so those of one block live at a time.

    The gradients are those of a softmax (Dao et al., arXiv 2205.14135, appendix B), with the row's own later keys as
    further columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        rows: Tensor,
        blocks: list[Span],
    ) -> Tensor:
        own = _own_scores(query, own_keys)
        out = torch.zeros_like(query)
        norm = own.new_zeros(query.shape[:3])
        for block in blocks:
            part = slice(block.query_start, block.query_end)
            q, k, v = _block(query, keys, values, block)
            scores = _scores(q, k, rows, block)  # [kv, group, r, t]
            mine = own[part].permute(1, 2, 0, 3)  # [kv, group, r, J]
            top = torch.cat([scores.amax(-1, keepdim=True), mine], dim=-1).amax(-1, keepdim=True)
            scores.sub_(top).exp_()
            weights = (mine - top).exp()
            total = scores.sum(-1, keepdim=True) + weights.sum(-1, keepdim=True)
            mixed = torch.bmm(scores.flatten(1, 2).to(v.dtype), v).view(*scores.shape[:3], -1)
            mixed = mixed + torch.einsum("kgrj,jrkd->kgrd", weights.to(v.dtype), own_values[:, part])
            out[part] = (mixed / total.to(v.dtype)).permute(2, 0, 1, 3)
            norm[part] = (top + total.log()).squeeze(-1).permute(2, 0, 1)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, rows, own, out, norm)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, rows, own, out, norm = ctx.saved_tensors
        # per row: what the softmax's normalisation takes from every score's gradient
        common = (grad.to(norm.dtype) * out.to(norm.dtype)).sum(-1)
        own_weights = (own - norm[..., None]).exp()
        own_grads = torch.einsum("rkgd,jrkd->rkgj", grad, own_values).to(norm.dtype)
        own_scores = (own_weights * (own_grads - common[..., None])).to(query.dtype)
        grad_query = torch.einsum("rkgj,jrkd->rkgd", own_scores, own_keys)
        grad_own_keys = torch.einsum("rkgj,rkgd->jrkd", own_scores, query)
        grad_own_values = torch.einsum("rkgj,rkgd->jrkd", own_weights.to(query.dtype), grad)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for block in ctx.blocks:
            part, seen = slice(block.query_start, block.query_end), slice(block.start, block.end)
            q, k, v = _block(query, keys, values, block)
            g = _heads_first(grad[part]).flatten(1, 2)
            weights = _scores(q, k, rows, block).sub_(norm[part].permute(1, 2, 0)[..., None]).exp_()
            grad_values[seen] += torch.bmm(weights.flatten(1, 2).transpose(1, 2).to(g.dtype), g).transpose(0, 1)
            scores = torch.bmm(g, v.transpose(1, 2)).view(weights.shape).to(norm.dtype)
            scores.sub_(common[part].permute(1, 2, 0)[..., None]).mul_(weights)
            flat = scores.flatten(1, 2).to(q.dtype)
            grad_query[part] += torch.bmm(flat, k).view(*scores.shape[:3], -1).permute(2, 0, 1, 3)
            grad_keys[seen] += torch.bmm(flat.transpose(1, 2), q).transpose(0, 1)
        return grad_query, grad_keys, grad_values, grad_own_keys, grad_own_values, None, None


def ttt_weights(
    query: Tensor, keys: Tensor, own_keys: Sequence[Tensor], rows: Tensor, spans: Sequence[Span]
) -> Iterator[tuple[Span, Tensor, Tensor]]:
    """The weights of `ttt_attention`, for looking at: a document at a time, all of its scores at once.

    Yields:
        the document, weights on its step-0 keys [heads, r, t], and on the row's own later keys [heads, r, J].
    """
    grouped = _grouped(query, keys)
    own = _own_scores(grouped, _stacked(own_keys, grouped))
    for span in spans:
        if span.query_end > span.query_start:
            q, k, _ = _block(grouped, keys, keys, span)
            mine = own[span.query_start : span.query_end].permute(1, 2, 0, 3)
            weights = torch.cat([_scores(q, k, rows, span), mine], dim=-1).softmax(-1).flatten(0, 1)
            yield span, weights[..., : k.shape[1]], weights[..., k.shape[1] :]


def _grouped(query: Tensor, keys: Tensor) -> Tensor:
    """Queries [R, heads, d] by the key head they read, scaled: [R, kv, group, d]."""
    count, heads, dim = query.shape
    return query.view(count, keys.shape[1], heads // keys.shape[1], dim) * dim**-0.5


def _stacked(own: Sequence[Tensor], grouped: Tensor) -> Tensor:
    """One's own keys or values of the later steps so far, [J, R, kv, d]; J may be 0."""
    count, kv_heads, _, dim = grouped.shape
    return torch.stack(list(own)) if own else grouped.new_zeros(0, count, kv_heads, dim)


def _heads_first(x: Tensor) -> Tensor:
    """[r, kv, group, d] -> [kv, group, r, d]."""
    return x.permute(1, 2, 0, 3)


def _block(query: Tensor, keys: Tensor, values: Tensor, block: Span) -> tuple[Tensor, Tensor, Tensor]:
    """A block's queries [kv, group*r, d], keys and values [kv, t, d]."""
    q = _heads_first(query[block.query_start : block.query_end]).flatten(1, 2)
    return q, keys[block.start : block.end].transpose(0, 1), values[block.start : block.end].transpose(0, 1)


def _scores(q: Tensor, k: Tensor, rows: Tensor, block: Span) -> Tensor:
    """Scores [kv, group, r, t] of a block, at least float32, -inf for what lies in a query's future."""
    mine = rows[block.query_start : block.query_end, None]
    scores = torch.bmm(q, k.transpose(1, 2)).view(q.shape[0], -1, mine.shape[0], k.shape[1])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill_(torch.arange(block.start, block.end, device=rows.device) > mine, float("-inf"))


def _own_scores(query: Tensor, own_keys: Tensor) -> Tensor:
    """Scores [R, kv, group, J] of each query with its row's own later keys, at least float32."""
    scores = torch.einsum("rkgd,jrkd->rkgj", query, own_keys)
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def ttt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    rows: Tensor,
    blocks: list[Span],
) -> Tensor:
    """Attention of one TTT step.

    Args:
        query: [R, heads, head_dim], one per loss row, rows ascending.
        keys, values: [N, kv_heads, head_dim] of step 0, for every row of the pack.
        own_keys, own_values: for each later step so far, [R, kv_heads, head_dim], row r's own.
        rows: [R] int64, which row of the pack each query belongs to.
        blocks: the documents, or `query_blocks` of them; their query ranges partition 0..R.

    Returns:
        [R, heads, head_dim].
    """
    grouped = _grouped(query, keys)
    out: Tensor = _BlockedAttention.apply(
        grouped,
        keys,
        values,
        _stacked(own_keys, grouped),
        _stacked(own_values, grouped),
        rows,
        [block for block in blocks if block.query_end > block.query_start],
    )
    return out.reshape(query.shape)
