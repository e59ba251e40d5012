"""What a teacher hands to the trainer, and how documents become a pack.

Shift, once and for all. A document has tokens x[0..n), aux states g and last states s at each. Row p (0 <= p < n-1)
carries token x[p+1], aux g[p], position p. At step k it proposes x[p+2+k]; its label is the target's distribution at
position p+1+k, made from s[p+1+k]. A row is an answer row when x[p+1] is an answer token and x[p+2] exists: the first
one is the last prompt position, whose sampled token starts the answer, exactly where serving first drafts. The rows
before it, inside the prompt, may carry loss too: the target's distribution is known there as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eaglenest.drafters.attention import Span, query_blocks
from eaglenest.drafters.module import Pack


@dataclass(frozen=True)
class Document:
    """One prompt and the target's own answer, as token ids."""

    key: str
    category: str
    ids: tuple[int, ...]
    answer_start: int

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer's token ids."""
        return self.ids[self.answer_start :]


@dataclass(frozen=True)
class Features:
    """A document's hidden states.

    aux: [n, n_aux*Ht] bfloat16, at ascending layer ids. last: [n, Ht] bfloat16, the residual stream before the final
    norm.
    """

    aux: Tensor
    last: Tensor

    @property
    def nbytes(self) -> int:
        """Memory of both tensors, in bytes."""
        return self.aux.nbytes + self.last.nbytes

    @staticmethod
    def size(tokens: int, num_aux: int, hidden_size: int) -> int:
        """Memory of a document's states, in bytes."""
        return tokens * (num_aux + 1) * hidden_size * 2

    def pack(self) -> tuple[np.ndarray, np.ndarray]:
        """As int16 arrays: numpy has no bfloat16, and Ray shares numpy arrays without a copy."""
        return self.aux.view(torch.int16).numpy(), self.last.view(torch.int16).numpy()

    @classmethod
    def unpack(cls, arrays: tuple[np.ndarray, np.ndarray]) -> Features:
        """The inverse of `pack`."""
        aux, last = (torch.from_numpy(np.array(a)).view(torch.bfloat16) for a in arrays)
        return cls(aux, last)


@dataclass(frozen=True)
class Batch:
    """A pack and its labels.

    labels: [N, Ht], s[p+1] for row p, so that step k of row p reads labels[p+k]. nexts: [N] int64, the token that row
    p proposes at step 0, x[p+2]; step k is judged by nexts[p+k]. weights: [R] float32, 1 for answer rows. answers: [R]
    bool, the answer rows: only there is x[p+2] the target's own token.
    """

    pack: Pack
    labels: Tensor
    nexts: Tensor
    weights: Tensor
    answers: Tensor
    answer_tokens: int


def loss_rows(document: Document, steps: int, prompt: bool = False) -> tuple[list[int], list[int]]:
    """Rows of one document that carry loss, and how many steps of each have a label (at most `steps`).

    Args:
        prompt: the rows inside the prompt, too.
    """
    size = len(document.ids)
    rows = list(range(0 if prompt else max(0, document.answer_start - 1), size - 2))
    return rows, [min(steps, size - 2 - p) for p in rows]


def collate(
    items: Sequence[tuple[Document, Features]], steps: int, dtype: torch.dtype, prompt_weight: float = 0.0
) -> Batch:
    """Lay documents end to end.

    Args:
        items: documents with their states. steps: TTT steps. dtype: of the states in the pack.
        prompt_weight: of the rows inside the prompt; 0 leaves them out.
    """
    answers: list[bool] = []
    tokens, positions, aux, labels, nexts, rows, reach, spans = [], [], [], [], [], [], [], []
    offset = queries = 0
    for document, features in items:
        ids = torch.tensor(document.ids, dtype=torch.int64)
        size = ids.shape[0] - 1
        mine, far = loss_rows(document, steps, prompt_weight > 0)
        answers += [p + 1 >= document.answer_start for p in mine]
        tokens.append(ids[1:])
        nexts.append(torch.cat([ids[2:], ids[-1:]]))
        positions.append(torch.arange(size))
        aux.append(features.aux[:-1].to(dtype))
        labels.append(features.last[1:].to(dtype))
        rows += [offset + p for p in mine]
        reach += far
        spans.append(Span(offset, offset + size, queries, queries + len(mine)))
        offset, queries = offset + size, queries + len(mine)
    pack = Pack(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        aux=torch.cat(aux),
        rows=torch.tensor(rows, dtype=torch.int64),
        reach=torch.tensor(reach, dtype=torch.int64),
        spans=spans,
        blocks=query_blocks(rows, spans),
    )
    answer_tokens = sum(len(d.answer) for d, _ in items)
    answered = torch.tensor(answers, dtype=torch.bool)
    weights = torch.where(answered, 1.0, prompt_weight)
    return Batch(pack, torch.cat(labels), torch.cat(nexts), weights, answered, answer_tokens)
