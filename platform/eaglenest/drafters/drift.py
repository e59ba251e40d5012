"""Attention drift: with depth, a drafter may leave the prompt's first tokens for its own drafts, and its state grow.

What EAGLE 3.1 is to stop (arXiv 2605.09992): a steady drafter's curves are flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglenest.drafters.attention import ttt_weights
from eaglenest.drafters.module import Eagle3Drafter, Pack

SINKS = 4
"""How many of a document's first rows count as its sink."""


@dataclass(frozen=True)
class Drift:
    """By depth, from 0 (the first draft): share of attention on the sink, on the drafter's own later keys, and the root
    mean square of the state the layer is fed.
    """

    sink: list[float]
    own: list[float]
    magnitude: list[float]


@torch.no_grad()
def attention_drift(drafter: Eagle3Drafter, packs: Iterable[Pack], depths: int) -> Drift:
    """Means over heads and over the loss rows that reach the depth.

    Args:
        packs: with `reach` counted up to `depths`.
        depths: how many steps to look at; may be more than were trained.
    """
    totals = torch.zeros(3, depths, dtype=torch.float64)
    counts = torch.zeros(depths, dtype=torch.float64)
    for pack in packs:
        depth = 0

        def look(query: Tensor, keys: Tensor, own_keys: Sequence[Tensor], hidden: Tensor, pack: Pack = pack) -> None:
            nonlocal depth
            reached = pack.reach > depth
            for span, base, own in ttt_weights(query, keys, own_keys, pack.rows, pack.spans):
                mine = reached[span.query_start : span.query_end]
                totals[0, depth] += float(base[..., :SINKS].sum(-1).mean(0)[mine].sum())
                totals[1, depth] += float(own.sum(-1).mean(0)[mine].sum())
            totals[2, depth] += float(hidden.float().pow(2).mean(-1).sqrt()[reached].sum())
            counts[depth] += float(reached.sum())
            depth += 1

        for _ in drafter.ttt_steps(pack, depths, look):
            pass
    sink, own, magnitude = (totals / counts.clamp(min=1)).round(decimals=5).tolist()
    return Drift(sink, own, magnitude)
