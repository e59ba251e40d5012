"""Answers: nothing is asked twice, nothing is lost, the budget holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.conftest import free_port

from eaglenest.distill.answers import (
    CHUNK,
    Answer,
    AnswerSettings,
    AnswerStore,
    EndpointAnswerer,
    answer_prompts,
    prompt_key,
    render,
)
from eaglenest.distill.prompts import Message, Prompt
from eaglenest.errors import BadInput, EngineError
from eaglenest.targets import Target

SETTINGS = AnswerSettings(max_tokens=10)


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", category="c", topic=None, messages=(Message(role="user", content=f"question {i}"),))
        for i in range(count)
    ]


@pytest.fixture
def store(tmp_path: Path) -> AnswerStore:
    return AnswerStore(tmp_path, target(tmp_path), SETTINGS)


def target(folder: Path, fingerprint: str = "f" * 64) -> Target:
    return Target("tiny", folder, fingerprint, 8, 4, 50, (1, 2))


class Scripted:
    """Answers with ten tokens, notes what it was asked, and may be interrupted."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.stop_after = stop_after

    def answer(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[Answer]:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += [p.id for p in prompts]
        return [Answer(key=prompt_key(p), prompt_ids=(1, 2, 3), answer_ids=tuple(range(10))) for p in prompts]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, store: AnswerStore) -> None:
    everything = prompts(CHUNK + 20)
    first = Scripted(stop_after=CHUNK)
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(everything, store, SETTINGS, first, max_length=99)
    with store.path.open("a") as file:
        file.write('{"key": "torn')  # the process died in the middle of a line
    again, second = AnswerStore(tmp_path, target(tmp_path), SETTINGS), Scripted()
    documents = answer_prompts(everything, again, SETTINGS, second, max_length=99)
    assert len(documents) == CHUNK + 20
    assert second.asked == [p.id for p in everything[CHUNK:]]
    third = Scripted()
    whole = AnswerStore(tmp_path, target(tmp_path), SETTINGS)
    assert answer_prompts(everything, whole, SETTINGS, third, max_length=99) == documents
    assert third.asked == []


def test_the_budget_is_never_exceeded_and_nearly_used(store: AnswerStore) -> None:
    scripted = Scripted()
    documents = answer_prompts(prompts(100), store, SETTINGS, scripted, budget=123, max_length=99)
    assert sum(len(d.answer) for d in documents) == 120
    assert len(scripted.asked) <= 13


def test_answers_of_another_target_or_other_settings_are_not_taken(tmp_path: Path, store: AnswerStore) -> None:
    answer_prompts(prompts(2), store, SETTINGS, Scripted(), max_length=99)
    assert AnswerStore(tmp_path, target(tmp_path, "e" * 64), SETTINGS).get(prompts(1)[0]) is None
    assert AnswerStore(tmp_path, target(tmp_path), AnswerSettings(max_tokens=11)).get(prompts(1)[0]) is None


def test_a_long_document_is_cut_at_its_end(store: AnswerStore) -> None:
    documents = answer_prompts(prompts(1), store, SETTINGS, Scripted(), max_length=7)
    assert documents[0].ids == (1, 2, 3, 0, 1, 2, 3)
    assert documents[0].answer_start == 3


@pytest.mark.parametrize("budget", [None, 123])
def test_documents_cut_down_to_one_answer_token_are_left_out(store: AnswerStore, budget: int | None) -> None:
    """Nothing can be proposed in them. With this budget it runs out inside a chunk."""
    cut, kept = (
        answer_prompts(prompts(20), store, SETTINGS, Scripted(), budget=budget, max_length=length) for length in (4, 5)
    )
    assert cut == []
    assert kept


def test_a_template_that_refuses_a_prompt_names_it() -> None:
    class Strict:
        def apply_chat_template(self, messages: object, **_: object) -> list[int]:
            raise ValueError("System role not supported")

    with pytest.raises(BadInput, match=r"p0.*System role not supported"):
        render(Strict(), prompts(1)[0])


def test_an_endpoint_that_is_down_says_what_to_do() -> None:
    answerer = EndpointAnswerer(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineError, match="eaglenest status"):
        answerer.answer(prompts(1), SETTINGS)
