"""Prompts that the target writes itself: its chat template up to where a user speaks, and it goes on from there.

An instruction-tuned target has learned what users say as well as what to answer (Xu et al., arXiv 2406.08464). So a
drafter can be distilled on as many prompts as one likes, of the target's own kind, without any data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from eaglenest.distill.prompts import Message, Prompt
from eaglenest.errors import BadInput
from eaglenest.targets.resolve import Target

CATEGORY = "self-written"
MAX_TOKENS = 160  # of one prompt
CHUNK = 96  # asked at once
LEAST_USABLE = 0.05  # a target that ends fewer of its turns writes no prompts

_MARK = "\ue000user\ue000"  # private use: in no template


class Turn(BaseModel):
    """Where a user's turn begins and ends in a target's chat template, as token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: tuple[int, ...]
    end: int
    max_tokens: int = MAX_TOKENS


class Writer(Protocol):
    """Anything through which the target goes on with a user's turn."""

    def write(self, turn: Turn, seeds: Sequence[int]) -> list[str | None]:
        """A text for each seed, sampled at temperature 1; None where it did not end."""
        ...


def user_turn(tokenizer: Any) -> Turn:
    """The turn of a user, from the target's own template.

    Raises:
        BadInput: the template does not end a user's turn with a token of its own.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = text.partition(_MARK)
    rest = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    if not found or not rest or rest[0] not in special:
        raise BadInput(
            "the target's chat template ends a user's turn with ordinary text",
            "a special token there, by which the target can end a prompt of its own",
            "leave self_prompts out, and give prompts of yours (--prompts FILE)",
        )
    return Turn(before=tuple(tokenizer(before, add_special_tokens=False)["input_ids"]), end=rest[0])


class SelfPromptStore:
    """A target's own prompts on disk, a JSON line each; an interrupted run goes on after the last one.

    Args:
        folder: where the files lie. target: whose prompts these are.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.path = folder / f"{target.name}-{target.fingerprint[:12]}.jsonl"
        self.prompts: list[Prompt] = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    self.prompts.append(Prompt.model_validate_json(line))
                except ValidationError:
                    continue  # the last line of an interrupted write: it will be written again

    @property
    def next_seed(self) -> int:
        """The first seed that has not been tried, as far as is known."""
        return int(self.prompts[-1].id.rpartition("-")[2]) + 1 if self.prompts else 0

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Keep prompts, on disk before this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = list(prompts)
        with self.path.open("a") as file:
            if file.tell() and not self.path.read_bytes().endswith(b"\n"):
                file.write("\n")
            file.writelines(json.dumps(p.model_dump(mode="json")) + "\n" for p in fresh)
            file.flush()
            os.fsync(file.fileno())
        self.prompts += fresh


def self_prompts(
    count: int,
    store: SelfPromptStore,
    turn: Callable[[], Turn],
    writer: Writer,
    *,
    apart_from: Iterable[Prompt] = (),
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Prompt]:
    """The first `count` prompts of the target's own, from the store where it has them; no two are the same.

    Args:
        turn: asked only when something is missing, as is `writer`.
        apart_from: held-out prompts, which are left out whatever the store holds.
        on_progress: told how many there are.

    Raises:
        BadInput: of `user_turn`; or the target ends hardly any turn.
    """
    avoided = {_key(p.first_user_message) for p in apart_from}
    known = {_key(p.first_user_message) for p in store.prompts}
    usable = [p for p in store.prompts if _key(p.first_user_message) not in avoided]
    seed = store.next_seed
    where = turn() if len(usable) < count else None
    while where and len(usable) < count:
        seeds = range(seed, seed + CHUNK)
        fresh = []
        for number, text in zip(seeds, writer.write(where, seeds), strict=True):
            words = (text or "").strip()
            if words and _key(words) not in known:
                known.add(_key(words))
                message = Message(role="user", content=words)
                fresh.append(Prompt(id=f"self-{number}", category=CATEGORY, messages=(message,)))
        store.add(fresh)
        usable += [p for p in fresh if _key(p.first_user_message) not in avoided]
        seed += CHUNK
        if len(fresh) < LEAST_USABLE * CHUNK:
            raise BadInput(
                f"of {CHUNK} prompts that the target wrote {len(fresh)} are new and end by themselves",
                f"at least {LEAST_USABLE:.0%}",
                f"ask for fewer than {count} (it wrote {len(usable)}), or give prompts of yours (--prompts FILE)",
            )
        on_progress(min(len(usable), count))
    return usable[:count]


def _key(text: str) -> str:
    return " ".join(text.casefold().split())
