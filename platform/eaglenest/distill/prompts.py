"""Prompts, what the target is asked: the sets shipped with us, or JSONL; ordered, split and fingerprinted.

A prompt ends in a user turn. The target itself writes the answer, so a conversation that ends in somebody else's answer
loses it. `docs/prompts.md` describes the three forms of a line.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eaglenest.errors import BadInput

Role = Literal["system", "user", "assistant"]
Split = Literal["train", "heldout"]

MAX_LINE_BYTES = 1 << 20
HELDOUT_SHARE = 0.2
NO_CATEGORY = "uncategorised"

_ROLES: tuple[Role, ...] = get_args(Role)
_SPLITS: tuple[Split, ...] = get_args(Split)
_SHAREGPT_ROLES: dict[str, Role] = {"human": "user", "gpt": "assistant", "system": "system"}
_OWN_KEYS = {"id", "category", "topic", "messages"}
_MESSAGE_KEYS = {"role", "content"}
_TURNS = "an optional system message, then user and assistant in turn, the user first and last"


class Message(BaseModel):
    """One turn of a conversation, as chat templates and the OpenAI API take it: `dict(message)`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role
    content: str = Field(min_length=1)


class Prompt(BaseModel):
    """A conversation that ends in a user turn. `topic` is what keeps training and held-out prompts apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    category: str = Field(min_length=1)
    topic: str | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...]

    @field_validator("messages")
    @classmethod
    def _turns_alternate(cls, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        fault = _turn_fault([message.role for message in messages])
        if fault:
            raise ValueError(f"{fault}; expected {_TURNS}")
        return messages

    @property
    def first_user_message(self) -> str:
        return next(message.content for message in self.messages if message.role == "user")


def load_prompts(source: str | Path, split: Split | None = None) -> list[Prompt]:
    """Read prompts, in the order of the file.

    Args:
        source: "builtin:train", "builtin:heldout", or the path of a UTF-8 JSONL file in our own, the OpenAI `messages`
            or the ShareGPT form. The first line decides which, and every other line has to be of the same form.
        split: only this side of a file of the user's own (`split_by_topic`, a fifth held out, seed 0).

    Raises:
        BadInput: the file cannot be read or used; names the file and the line.
    """
    name = str(source)
    if split is not None and split not in _SPLITS:
        raise BadInput(f"There is no split {split!r}", " or ".join(_SPLITS))
    if name.startswith("builtin:"):
        return _builtin(name, split)
    path = Path(source).expanduser()
    prompts = _read(path)
    if split is None:
        return prompts
    train, heldout = split_by_topic(prompts)
    chosen = train if split == "train" else heldout
    if not chosen:
        raise BadInput(
            f"{path}: too few topics to split: nothing falls into {split!r}",
            "several topics (or first user messages, where there is no topic)",
            "add prompts, or keep the two sets in two files and name each of them",
        )
    return chosen


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """sha256 (64 hex digits) of a set of prompts, whatever their order: over the sorted canonical JSON of each."""
    lines = sorted(json.dumps(p.model_dump(), sort_keys=True, separators=(",", ":")) for p in prompts)
    return hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()


def split_by_topic(
    prompts: Sequence[Prompt], heldout_share: float = HELDOUT_SHARE, seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """Split into (training, held out) so that the two share no topic; each keeps the order of `prompts`.

    A topic's side depends on the topic, the share and the seed alone. So it stays where it is when the file grows, and
    a raised share only adds to the held-out side; the sizes are near the share, not exactly it. Prompts without a topic
    go by their first user message. Case and spacing make no difference.

    Raises:
        BadInput: `heldout_share` is not between 0 and 1.
    """
    if not 0 < heldout_share < 1:
        raise BadInput(f"The held-out share is {heldout_share}", "a number above 0 and below 1, such as 0.2")
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    for prompt in prompts:
        key = " ".join((prompt.topic or prompt.first_user_message).casefold().split())
        (heldout if _unit(seed, key) < heldout_share else train).append(prompt)
    return train, heldout


def interleave(prompts: Sequence[Prompt], seed: int = 0) -> list[Prompt]:
    """All of the prompts, shuffled, with the categories taking turns, so that any prefix covers them evenly.

    Every round takes one prompt of each category that has some left. The order depends on the seed, the categories and
    the ids, not on the order of `prompts`: a run that answers only part of the set can be repeated.
    """
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: (_unit(seed, p.category, p.id), p.id)):
        by_category[prompt.category].append(prompt)
    turns = [(turn, prompt) for queue in by_category.values() for turn, prompt in enumerate(queue)]
    turns.sort(key=lambda item: (item[0], _unit(seed, str(item[0]), item[1].category), item[1].category))
    return [prompt for _, prompt in turns]


def _unit(seed: int, *parts: str) -> float:
    """A number in [0, 1) that these parts and the seed decide, on every machine and in every Python."""
    text = json.dumps([seed, *parts]).encode("ascii")
    return (int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 11) / (1 << 53)


def _turn_fault(roles: Sequence[str]) -> str | None:
    start = 1 if roles and roles[0] == "system" else 0
    turns = roles[start:]
    if "user" not in turns:
        return "no user turn"
    for position, role in enumerate(turns):
        wanted = "assistant" if position % 2 else "user"
        if role != wanted:
            return f"the turns do not alternate: message {start + position + 1} is {role} where {wanted} was due"
    return None if turns[-1] == "user" else "the last turn is the assistant's"


# Reading files


def _builtin(name: str, split: Split | None) -> list[Prompt]:
    which = name.removeprefix("builtin:")
    if which not in _SPLITS:
        raise BadInput(f"There is no prompt set {name!r}", " or ".join(f"builtin:{s}" for s in _SPLITS))
    if split not in (None, which):
        raise BadInput(f"{name} has no {split!r} side", f"split {which!r} or none", f"ask for builtin:{split}")
    return _read(Path(str(files("eaglenest") / "data" / "prompts" / f"{which}.jsonl")))


class _Line:
    """One line of a prompt file: where it is, so that every error can say so, and what it holds."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.value: dict[str, Any] = {}

    def refuse(self, what: str, expected: str | None = None, fix: str | None = None) -> NoReturn:
        raise BadInput(f"{self.path}, line {self.number}: {what}", expected, fix)

    def text(self, value: object, name: str) -> str:
        """`value`, if it is text that can be used; a lone surrogate is JSON, but no tokenizer takes it."""
        if not isinstance(value, str) or not value.strip():
            found = "empty" if isinstance(value, str) else f"{type(value).__name__}, not text"
            self.refuse(f"{name} is {'missing' if value is None else found}", "a non-empty string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.refuse(
                f"{name} has half of a surrogate pair at character {error.start + 1}",
                "text that can be written as UTF-8",
                "write the whole character, or remove it",
            )
        return value


def _read(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    first: dict[str, int] = {}
    repeats: Counter[str] = Counter()
    form: str | None = None
    for line in _lines(path):
        form = form or _form(line)
        prompt = _prompt(line, form, repeats)
        if prompt.id in first:
            line.refuse(
                f"the id {prompt.id!r} was used before, on line {first[prompt.id]}",
                "an id of its own for each prompt",
                "change or remove one of the two lines",
            )
        first[prompt.id] = line.number
        prompts.append(prompt)
    if not prompts:
        raise BadInput(
            f"{path} is empty: there is no prompt in it",
            "one JSON object per line",
            'write lines such as {"messages": [{"role": "user", "content": "Hello"}]}',
        )
    return prompts


def _lines(path: Path) -> Iterator[_Line]:
    """The lines that are not blank, decoded; the file is read as bytes so that no line can fill the memory."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = _Line(path, number)
                if len(raw) > MAX_LINE_BYTES:
                    line.refuse(
                        f"longer than {MAX_LINE_BYTES:,} bytes",
                        "one prompt per line",
                        "cut the conversation; if the file is one JSON array, turn it into lines: jq -c '.[]' FILE",
                    )
                if raw.strip():
                    line.value = _parse(line, raw)
                    yield line
    except FileNotFoundError:
        raise BadInput(
            f"There is no prompt file {path}",
            "a JSONL file, builtin:train or builtin:heldout",
            "check the path; it is relative to the folder the command runs in",
        ) from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}", "a JSONL file that this user may read") from error


def _parse(line: _Line, raw: bytes) -> dict[str, Any]:
    try:
        # Editors on Windows put a byte order mark in front; it is no part of the JSON.
        text = raw.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line.refuse(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start + 1}",
            "a text file in UTF-8",
            "save it as UTF-8, or convert it: iconv -f CODING -t UTF-8 FILE",
        )
    try:
        value = json.loads(text)
    except RecursionError:
        line.refuse("not usable JSON: nested too deeply", "one JSON object per line")
    except ValueError as error:
        # A JSON document spread over lines breaks on its first one.
        line.refuse(
            f"not JSON: {error}",
            "one whole JSON object per line",
            "mend the line, or join a document that is spread over lines: jq -c . FILE (an array: jq -c '.[]' FILE)",
        )
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else f"a {type(value).__name__}"
        line.refuse(f"{kind} instead of an object", "one JSON object per line", "convert an array: jq -c '.[]' FILE")
    return cast(dict[str, Any], value)


# The three forms of a line


def _form(line: _Line) -> str:
    """The form that the first line gives the file: a topic makes it ours."""
    if "topic" in line.value:
        return "own"
    if "messages" in line.value:
        return "openai"
    if "conversations" in line.value:
        return "sharegpt"
    line.refuse(
        "neither 'messages' nor 'conversations'",
        "our own or the OpenAI form (messages), or ShareGPT (conversations)",
        "rename the key that holds the turns",
    )


def _prompt(line: _Line, form: str, repeats: Counter[str]) -> Prompt:
    """The prompt of a line. `repeats` counts conversations without an id, whose ids are made of their content."""
    value, own = line.value, form == "own"
    if own:
        unknown = sorted(value.keys() - _OWN_KEYS)
        if unknown:
            line.refuse(f"unknown key {unknown[0]!r}", f"the keys {', '.join(sorted(_OWN_KEYS))}", "remove it")
    elif "topic" in value:
        line.refuse("a topic, though the first line has none", "all lines of one form", "give every line a topic")
    messages = _messages(line, form)
    if not own and messages[-1].role == "assistant" and [m.role for m in messages[-2:-1]] != ["assistant"]:
        messages.pop()  # the target writes the last answer itself
    fault = _turn_fault([message.role for message in messages])
    if fault:
        line.refuse(fault, _TURNS, "mend or remove this conversation")
    category = value.get("category")
    if category is None and not own:
        category = NO_CATEGORY
    return Prompt(
        id=line.text(value.get("id"), "'id'") if own else _id(line, messages, repeats),
        category=line.text(category, "'category'"),
        topic=line.text(value.get("topic"), "'topic'") if own else None,
        messages=tuple(messages),
    )


def _id(line: _Line, messages: Sequence[Message], repeats: Counter[str]) -> str:
    """The line's own id, or one made of what is asked: it outlives insertions into the file, a line number does not."""
    given = line.value.get("id")
    if given is not None:
        return line.text(str(given) if isinstance(given, int) else given, "'id'")
    text = json.dumps([(message.role, message.content) for message in messages])
    name = hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
    repeats[name] += 1
    return name if repeats[name] == 1 else f"{name}-{repeats[name]}"


def _messages(line: _Line, form: str) -> list[Message]:
    """The turns of a line, each checked alone."""
    sharegpt = form == "sharegpt"
    holder, role_key, content_key = ("conversations", "from", "value") if sharegpt else ("messages", "role", "content")
    roles: dict[str, Role] = _SHAREGPT_ROLES if sharegpt else {role: role for role in _ROLES}
    turns = line.value.get(holder)
    if holder not in line.value:
        line.refuse(f"{holder!r} is missing", f"a list of messages, the file's first line being of the {form} form")
    if not isinstance(turns, list) or not turns:
        line.refuse(f"{holder!r} is empty or no list", f'a list of {{"{role_key}": ..., "{content_key}": ...}}')
    messages: list[Message] = []
    for position, turn in enumerate(turns, start=1):
        where = f"message {position}"
        if not isinstance(turn, dict):
            line.refuse(f"{where} is no object", f'{{"{role_key}": ..., "{content_key}": ...}}')
        if form == "own" and turn.keys() - _MESSAGE_KEYS:
            unknown = sorted(turn.keys() - _MESSAGE_KEYS)[0]
            line.refuse(f"{where} has the unknown key {unknown!r}", "the keys role and content", "remove or rename it")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            found = f"the unknown role {role!r}" if role_key in turn else f"no {role_key!r}"
            line.refuse(f"{where} has {found}", f"{role_key!r}: {', '.join(roles)}", "rename the role or drop the turn")
        content = line.text(turn.get(content_key), f"{content_key!r} of {where}")
        messages.append(Message(role=roles[role], content=content))
    return messages
