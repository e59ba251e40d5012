"""Attention of the training-time test: step-0 keys of the own document, then one's own later keys.

The query of row p at step k sees the step-0 keys of rows <= p of its document, and of the steps 1..k only the key of
row p itself (see `docs/distillation.md`). So K steps cost K*(T*T + K*T) scores instead of (K*T)^2.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def ttt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    rows: Tensor,
    spans: list[Span],
) -> Tensor:
    """Attention of one TTT step.

    Args:
        query: [R, heads, head_dim], one per loss row, rows ascending.
        keys, values: [N, kv_heads, head_dim] of step 0, for every row of the pack.
        own_keys, own_values: for each later step so far, [R, kv_heads, head_dim], row r's own.
        rows: [R] int64, which row of the pack each query belongs to.
        spans: the documents; their query ranges partition 0..R.

    Returns:
        [R, heads, head_dim].
    """
    count, heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(count, kv_heads, heads // kv_heads, dim) * dim**-0.5
    own = [(grouped * k[:, :, None]).sum(-1) for k in own_keys]  # each [R, kv, group]
    pieces = [query.new_empty(0, kv_heads, heads // kv_heads, dim)]
    for span in spans:
        part = slice(span.query_start, span.query_end)
        size = span.query_end - span.query_start
        if not size:
            continue
        q = grouped[part].permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [kv, group*r, d]
        k = keys[span.start : span.end].permute(1, 2, 0)  # [kv, d, t]
        v = values[span.start : span.end].transpose(0, 1)  # [kv, t, d]
        scores = torch.bmm(q, k).view(kv_heads, -1, size, span.end - span.start)
        future = torch.arange(span.start, span.end, device=rows.device) > rows[part, None]  # [r, t]
        scores = scores.masked_fill(future, float("-inf"))
        mine = [o[part].permute(1, 2, 0)[..., None] for o in own]  # each [kv, group, r, 1]
        weights = torch.cat([scores, *mine], dim=-1).float().softmax(-1).to(query.dtype)
        base, *rest = weights.split([span.end - span.start] + [1] * len(mine), dim=-1)
        out = torch.bmm(base.reshape(kv_heads, -1, base.shape[-1]), v).view(kv_heads, -1, size, dim)
        for weight, value in zip(rest, own_values, strict=True):
            out = out + weight * value[part].transpose(0, 1)[:, None]
        pieces.append(out.permute(2, 0, 1, 3))  # [r, kv, group, d]
    return torch.cat(pieces).reshape(count, heads, dim)
