"""Prompts of the target's own: where a user's turn lies, none twice, none lost, none that is held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiny import END, START, tiny_tokenizer

from eaglenest.distill.prompts import Message, Prompt
from eaglenest.distill.self_prompts import CHUNK, SelfPromptStore, Turn, self_prompts, user_turn
from eaglenest.errors import BadInput
from eaglenest.targets import Target

TURN = Turn(before=(1,), end=2)


class Scripted:
    """Writes "question <seed // 2>", so every text twice; every fifth does not end; may be interrupted."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seeds: list[int] = []
        self.stop_after = stop_after

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        if self.stop_after is not None and len(self.seeds) >= self.stop_after:
            raise KeyboardInterrupt
        self.seeds += seeds
        return [None if seed % 5 == 0 else f" Question  {seed // 2}" for seed in seeds]


class Silent:
    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        return [None for _ in seeds]


def store(folder: Path, fingerprint: str = "f" * 64) -> SelfPromptStore:
    return SelfPromptStore(folder, Target("tiny", folder, fingerprint, 8, 4, 50, (1, 2)))


def texts(prompts: list[Prompt]) -> list[str]:
    return [p.first_user_message for p in prompts]


def test_the_turn_is_what_the_template_puts_around_a_users_words() -> None:
    turn = user_turn(tiny_tokenizer())
    assert turn.before == (START, *tiny_tokenizer()("user\n")["input_ids"])
    assert turn.end == END


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with pytest.raises(BadInput, match=r"ordinary text.*special token.*--prompts FILE"):
        user_turn(tokenizer)


def test_no_prompt_comes_twice_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    found = self_prompts(100, store(tmp_path), lambda: TURN, Scripted())
    assert len(found) == 100
    assert len(set(texts(found))) == 100
    assert all(text == text.strip() for text in texts(found))


def test_an_interrupted_run_ends_with_the_same_prompts(tmp_path: Path) -> None:
    whole = self_prompts(100, store(tmp_path / "whole"), lambda: TURN, Scripted())
    with pytest.raises(KeyboardInterrupt):
        self_prompts(100, store(tmp_path / "torn"), lambda: TURN, Scripted(stop_after=CHUNK))
    with (tmp_path / "torn" / store(tmp_path).path.name).open("a") as file:
        file.write('{"id": "self-torn')  # the process died in the middle of a line
    second = Scripted()
    assert self_prompts(100, store(tmp_path / "torn"), lambda: TURN, second) == whole
    assert min(second.seeds) >= CHUNK - 1
    third = Scripted()
    assert self_prompts(90, store(tmp_path / "torn"), lambda: TURN, third) == whole[:90]
    assert third.seeds == []


def test_held_out_prompts_are_left_out_even_when_stored(tmp_path: Path) -> None:
    first = self_prompts(50, store(tmp_path), lambda: TURN, Scripted())
    heldout = [Prompt(id="h", category="c", messages=(Message(role="user", content="question   3"),))]
    assert "Question  3" in texts(first)
    again = self_prompts(50, store(tmp_path), lambda: TURN, Scripted(), apart_from=heldout)
    assert len(again) == 50
    assert "Question  3" not in texts(again)


def test_another_target_writes_its_own(tmp_path: Path) -> None:
    self_prompts(10, store(tmp_path), lambda: TURN, Scripted())
    assert store(tmp_path, "e" * 64).prompts == []


def test_a_target_that_ends_no_turn_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"of 96 prompts.* 0 .*--prompts FILE"):
        self_prompts(10, store(tmp_path), lambda: TURN, Silent())
