"""Hidden states on their way from teachers to a trainer: through Ray's object store, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eaglenest.distill.features import Document, Features

Packed = tuple[np.ndarray, np.ndarray]


class Stream:
    """Documents with their states, in any order asked for.

    Args:
        teachers: handles of `crew.TeacherActor`s. They restart and retry by Ray's own means; a document's states are
            asked for again when they were lost.
        documents: by index.
        batch: documents of one call. ahead: calls under way per teacher.
        reuse_bytes: states kept in the object store after their first use, so that later passes need no teacher; what
            does not fit is made anew.
        captured: states that are in the object store already, by document key; beside `reuse_bytes`.
    """

    def __init__(
        self,
        teachers: Sequence[Any],
        documents: Sequence[Document],
        *,
        batch: int,
        ahead: int,
        reuse_bytes: int,
        captured: Mapping[str, Any] | None = None,
    ) -> None:
        self._teachers, self.documents = list(teachers), documents
        self._batch, self._ahead, self._room = batch, ahead, reuse_bytes
        known = captured or {}
        self._kept = {i: known[d.key] for i, d in enumerate(documents) if d.key in known}
        self._turn = 0
        self.waited_s = 0.0

    def features(self, order: Sequence[int]) -> Iterator[tuple[Document, Features]]:
        """Yield the documents of `order` with their states, each exactly once, teachers working ahead."""
        waiting: deque[tuple[int, Any]] = deque()
        missing = deque(index for index in order if index not in self._kept)
        for index in order:
            while missing and len(waiting) < self._batch * self._ahead * len(self._teachers):
                waiting.extend(self._ask([missing.popleft() for _ in range(min(self._batch, len(missing)))]))
            if index in self._kept:
                reference = self._kept[index]
            else:
                asked, reference = waiting.popleft()
                assert asked == index, "states come in the order asked for"
            packed = self._take(index, reference)
            self._keep(index, reference, packed)
            yield self.documents[index], Features.unpack(packed)

    def gather(self) -> float:
        """Ask for all there is room for and wait for it; returns the seconds it took.

        Where teachers and trainer share processors this comes before training: threads of both at once wait for each
        other at every small operation, and are several times slower than one after the other.
        """
        began = time.monotonic()
        for _ in self.features(range(len(self.documents))):
            pass
        self.waited_s = 0.0
        return time.monotonic() - began

    def _ask(self, indices: list[int]) -> list[tuple[int, Any]]:
        teacher = self._teachers[self._turn % len(self._teachers)]
        self._turn += 1
        wanted = [self.documents[i] for i in indices]
        if len(wanted) == 1:  # Ray takes a single return value as it is: ask for it without its list
            return [(indices[0], teacher.lone.remote(wanted[0]))]
        references = teacher.features.options(num_returns=len(wanted)).remote(wanted)
        return list(zip(indices, references, strict=True))

    def _take(self, index: int, reference: Any) -> Packed:
        import ray

        began = time.monotonic()
        try:
            packed: Packed = ray.get(reference)
        except (ray.exceptions.ObjectLostError, ray.exceptions.ActorDiedError, ray.exceptions.OwnerDiedError):
            self._kept.pop(index, None)
            [(_, again)] = self._ask([index])
            packed = ray.get(again)
        self.waited_s += time.monotonic() - began
        return packed

    def _keep(self, index: int, reference: Any, packed: Packed) -> None:
        size = sum(array.nbytes for array in packed)
        if index not in self._kept and size <= self._room:
            self._room -= size
            self._kept[index] = reference
