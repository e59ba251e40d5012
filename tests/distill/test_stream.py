"""The stream on a real Ray: every document once, in order, within its memory, whatever happens to a teacher."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from eaglenest.distill.features import Document
from eaglenest.distill.stream import Stream

pytestmark = pytest.mark.slow

DOCUMENTS = [Document(str(i), "x", tuple(range(i, i + 4)), 2) for i in range(11)]
SIZE = 4 * 3 * 2  # bytes of one document's states


class CountingTeacher:
    """States that tell the document; counts calls, and can be killed."""

    def __init__(self) -> None:
        self.made = 0

    def features(self, documents: Sequence[Document]) -> list[Any]:
        self.made += len(documents)
        return [
            (np.full((4, 2), int(d.key), dtype=np.int16), np.full((4, 1), int(d.key), dtype=np.int16))
            for d in documents
        ]

    def lone(self, document: Document) -> Any:
        return self.features([document])[0]

    def count(self) -> int:
        return self.made

    def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()


def teachers(ray: Any, count: int = 1) -> list[Any]:
    actor = ray.remote(CountingTeacher).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    return [actor.remote() for _ in range(count)]


def keys(found: Any) -> list[str]:
    pairs = list(found)
    import torch

    for document, features in pairs:
        assert features.aux.view(torch.int16).unique().tolist() == [int(document.key)]
    return [d.key for d, _ in pairs]


def test_each_document_comes_once_in_the_order_asked_for(ray: Any) -> None:
    stream = Stream(teachers(ray, 2), DOCUMENTS, batch=3, ahead=2, reuse_bytes=0)
    order = [4, 0, 10, 7, 1, 2, 9, 3, 8, 6, 5]
    assert keys(stream.features(order)) == [str(i) for i in order]


def test_what_fits_is_kept_and_the_rest_made_anew(ray: Any) -> None:
    (teacher,) = teachers(ray)
    stream = Stream([teacher], DOCUMENTS, batch=4, ahead=1, reuse_bytes=6 * SIZE)
    for _ in range(3):
        assert keys(stream.features(range(11))) == [d.key for d in DOCUMENTS]
    assert ray.get(teacher.count.remote()) == 11 + 5 + 5


def test_states_that_came_with_the_answers_need_no_teacher(ray: Any) -> None:
    (teacher,) = teachers(ray)
    known = {d.key: ray.put(CountingTeacher().lone(d)) for d in DOCUMENTS[::2]}
    stream = Stream([teacher], DOCUMENTS, batch=4, ahead=1, reuse_bytes=0, captured=known)
    assert keys(stream.features(range(11))) == [d.key for d in DOCUMENTS]
    assert ray.get(teacher.count.remote()) == 5


def test_a_killed_teacher_loses_and_doubles_nothing(ray: Any) -> None:
    (teacher,) = teachers(ray)
    stream = Stream([teacher], DOCUMENTS, batch=2, ahead=2, reuse_bytes=0)
    found = []
    for number, (document, _) in enumerate(stream.features(range(11))):
        found.append(document.key)
        if number == 3:
            teacher.die.options(max_task_retries=0).remote()
    assert found == [d.key for d in DOCUMENTS]
