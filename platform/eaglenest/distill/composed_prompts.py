"""Prompts composed from patterns and word lists, and from texts of the target: what one writes too few of by hand.

Word problems, short questions, German sentences to translate; and of the target's own texts: articles to summarise or
to answer questions from, and conversations that go on. All from a seed, so that the same call gives the same prompts.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from eaglenest.distill.prompts import Message, Prompt

SHORT_KINDS = ("math", "qa", "translation")


@cache
def patterns() -> dict[str, Any]:
    """The shipped patterns and words: `data/prompts/patterns.yaml`."""
    file = resources.files("eaglenest") / "data" / "prompts" / "patterns.yaml"
    found: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def short_prompts(kind: str, count: int, seed: int = 0) -> list[Prompt]:
    """Prompts of one of `SHORT_KINDS`, none twice.

    Args:
        count: how many; fewer come when the patterns give no more.
    """
    make = _filled(kind, random.Random(f"{seed} {kind}"))
    texts = itertools.islice(_fresh(make), count)
    return [_prompt(f"{kind}-composed-{n:05d}", kind, text) for n, text in enumerate(texts)]


def article_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Requests for articles: their answers are the texts for `on_texts`."""
    make = _filled("article", random.Random(f"{seed} article"))
    texts = itertools.islice(_fresh(make), count)
    return [_prompt(f"article-composed-{n:05d}", "writing", text) for n, text in enumerate(texts)]


def on_texts(texts: Sequence[str], seed: int = 0) -> list[Prompt]:
    """Two prompts for each text: to summarise it, and to answer a question from it."""
    rng, words = random.Random(f"{seed} texts"), patterns()
    found = []
    for n, text in enumerate(texts):
        short, ask = rng.choice(words["summarise"]), rng.choice(words["ask_of_text"])
        found.append(_prompt(f"summarization-composed-{n:05d}", "summarization", short.replace("{text}", text)))
        found.append(_prompt(f"rag-composed-{n:05d}", "rag", ask.replace("{text}", text)))
    return found


def follow_ups(asked: Sequence[Prompt], answers: Sequence[str], seed: int = 0) -> list[Prompt]:
    """Each conversation with its answer, gone on with."""
    rng, words = random.Random(f"{seed} follow-ups"), patterns()
    found = []
    for n, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        turns = (
            *prompt.messages,
            Message(role="assistant", content=answer),
            Message(role="user", content=rng.choice(words["follow_up"])),
        )
        found.append(Prompt(id=f"multi_turn-composed-{n:05d}", category="multi_turn", messages=turns))
    return found


def _prompt(name: str, category: str, text: str) -> Prompt:
    return Prompt(id=name, category=category, messages=(Message(role="user", content=text),))


def _filled(kind: str, rng: random.Random) -> Callable[[], str]:
    """Patterns of a kind with their fields filled: `{name}` from a list of words, `{n20_90}` by a number in between."""
    chosen, words = patterns()[kind], patterns()["words"]

    def fill(field: str, taken: dict[str, str]) -> str:
        if field not in taken:
            name = field if field in words else field.rstrip(string.digits)
            if name in words:
                left = [w for w in words[name] if w not in taken.values()]
                taken[field] = str(rng.choice(left or words[name]))
            else:
                low, high = field.lstrip(string.ascii_lowercase).split("_")
                taken[field] = str(rng.randint(int(low), int(high)))
        return taken[field]

    def make() -> str:
        taken: dict[str, str] = {}
        pieces = []
        for literal, field, _, _ in string.Formatter().parse(rng.choice(chosen)):
            pieces.append(literal)
            if field is not None:
                pieces.append(fill(field, taken))
        text = "".join(pieces)
        return text[0].upper() + text[1:]

    return make


def _fresh(make: Callable[[], str], patience: int = 2000) -> Iterator[str]:
    """What `make` gives, without repetition, until it gave nothing new so many times in a row."""
    seen: set[str] = set()
    idle = 0
    while idle < patience:
        text = make()
        idle = idle + 1 if text in seen else 0
        if not idle:
            seen.add(text)
            yield text
