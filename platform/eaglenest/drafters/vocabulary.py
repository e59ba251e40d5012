"""The draft vocabulary: which target tokens the drafter can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def choose_draft_vocabulary(
    answers: Iterable[Sequence[int]], size: int, vocab_size: int, always: Iterable[int] = ()
) -> list[int]:
    """The `size` target ids worth proposing, ascending.

    First `always` (end-of-turn tokens), then tokens of the target's own answers by frequency, then the lowest ids: a
    byte-pair vocabulary lists merges by the frequency of its training corpus, so low ids are common text that these
    few answers happened not to use.

    Args:
        answers: token ids of the target's answers.
        size: V_draft. vocab_size: of the target.
    """
    counts = Counter(token for answer in answers for token in answer)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys([*always, *ranked, *range(vocab_size)])
    return sorted(list(chosen)[: min(size, vocab_size)])


def vocabulary_maps(ids: Sequence[int], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Checkpoint form of a draft vocabulary.

    Args:
        ids: target ids, strictly ascending.

    Returns:
        d2t [V_draft] int64 offsets (target id = i + d2t[i]) and t2d [vocab] bool.
    """
    chosen = torch.tensor(ids, dtype=torch.int64)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(len(ids)), t2d


def draft_ids(d2t: Tensor) -> Tensor:
    """Target id of each draft id: [V_draft] int64."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t


def coverage(answers: Iterable[Sequence[int]], t2d: Tensor) -> float:
    """Share of answer tokens that the drafter could propose."""
    tokens = torch.tensor([token for answer in answers for token in answer], dtype=torch.int64)
    return float(t2d[tokens].float().mean()) if tokens.numel() else 0.0
