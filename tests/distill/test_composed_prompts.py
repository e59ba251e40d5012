"""Prompts composed from patterns, and from texts of the target."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglenest.distill.composed_prompts import (
    SHORT_KINDS,
    article_prompts,
    follow_ups,
    on_texts,
    patterns,
    short_prompts,
)
from eaglenest.distill.prompts import Prompt, load_prompts

LIKE_A_FIELD = re.compile(r"\{\w+\}")


def texts(prompts: list[Prompt]) -> list[str]:
    return [p.first_user_message for p in prompts]


@pytest.mark.parametrize("kind", SHORT_KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 300))
def test_as_many_as_asked_for_all_filled_and_none_twice(kind: str, seed: int, count: int) -> None:
    made = short_prompts(kind, count, seed)
    assert len(made) == len(set(texts(made))) == len({p.id for p in made}) == count
    assert all(p.category == kind for p in made)
    assert not [text for text in texts(made) if LIKE_A_FIELD.search(text)]
    assert made == short_prompts(kind, count, seed)
    assert made[: count // 2] == short_prompts(kind, count // 2, seed)


def test_patterns_that_give_no_more_end_the_list() -> None:
    made = short_prompts("qa", 10**6)
    assert 500 < len(made) < 10**6
    assert len(set(texts(made))) == len(made)


def test_another_seed_gives_others() -> None:
    assert texts(short_prompts("math", 50, 1)) != texts(short_prompts("math", 50, 2))
    assert texts(article_prompts(50, 1)) != texts(article_prompts(50, 2))


def test_every_field_of_every_pattern_is_a_word_list_or_a_range() -> None:
    words = patterns()["words"]
    for kind in (*SHORT_KINDS, "article"):
        for pattern in patterns()[kind]:
            for _, field, _, _ in string.Formatter().parse(pattern):
                if field and field not in words and field.rstrip(string.digits) not in words:
                    numbers = re.fullmatch(r"n[a-z]?(\d+)_(\d+)", field)
                    assert numbers, pattern
                    low, high = numbers.groups()
                    assert int(low) < int(high), pattern


def test_texts_are_summarised_and_asked_about_whole() -> None:
    bodies = ["A {strange} text with {n1_2} braces.", "Another one."]
    made = on_texts(bodies)
    assert [p.category for p in made] == ["summarization", "rag"] * 2
    assert all(body in p.first_user_message for body, p in zip([bodies[0]] * 2 + [bodies[1]] * 2, made, strict=True))


def test_a_conversation_goes_on_from_its_answer() -> None:
    asked = article_prompts(3)
    made = follow_ups(asked, ["one", "two", "three"])
    assert [[m.role for m in p.messages] for p in made] == [["user", "assistant", "user"]] * 3
    assert [p.messages[1].content for p in made] == ["one", "two", "three"]
    assert [p.messages[0] for p in made] == [p.messages[0] for p in asked]
    with pytest.raises(ValueError, match="shorter"):
        follow_ups(asked, ["one"])


def test_none_is_among_the_held_out() -> None:
    heldout = set(texts(load_prompts("builtin:heldout")))
    assert not heldout & {t for kind in SHORT_KINDS for t in texts(short_prompts(kind, 1000))}
