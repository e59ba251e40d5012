"""Prompts: the shipped sets hold their promises, three forms are read, and every bad line is refused by its number."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eaglenest.distill.prompts import (
    MAX_LINE_BYTES,
    Message,
    Prompt,
    interleave,
    load_prompts,
    prompts_digest,
    split_by_topic,
)
from eaglenest.errors import BadInput

CATEGORIES = [
    "chat",
    "qa",
    "coding",
    "math",
    "summarization",
    "translation",
    "rag",
    "writing",
    "extraction",
    "multi_turn",
]
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be kind."}
OWN = {"id": "chat-0001", "category": "chat", "topic": "greetings", "messages": [USER]}


def write(path: Path, *lines: Any) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return file


def prompt(id: str, category: str = "chat", topic: str | None = None, text: str | None = None) -> Prompt:
    return Prompt(id=id, category=category, topic=topic, messages=(Message(role="user", content=text or id),))


# The shipped sets


@pytest.fixture(scope="module")
def train() -> list[Prompt]:
    return load_prompts("builtin:train")


@pytest.fixture(scope="module")
def heldout() -> list[Prompt]:
    return load_prompts("builtin:heldout")


def test_shipped_sets_cover_ten_categories_evenly(train: list[Prompt], heldout: list[Prompt]) -> None:
    assert Counter(p.category for p in train) == dict.fromkeys(CATEGORIES, 40)
    assert Counter(p.category for p in heldout) == dict.fromkeys(CATEGORIES, 10)


def test_no_topic_and_no_id_belongs_to_two_shipped_prompts(train: list[Prompt], heldout: list[Prompt]) -> None:
    both = train + heldout
    assert len({p.id for p in both}) == len(both)
    # compared as bags of words, so that another order or a plural does not pass for another topic
    bags = Counter(frozenset(word.rstrip("s") for word in (p.topic or "").lower().split()) for p in both)
    assert [bag for bag, count in bags.items() if count > 1] == []


def five_word_runs(prompt: Prompt) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", " ".join(m.content for m in prompt.messages if m.role != "system").lower())
    return set(zip(*(words[i:] for i in range(5)), strict=False))


def test_no_two_shipped_prompts_are_near_duplicates(train: list[Prompt], heldout: list[Prompt]) -> None:
    runs = [(p.id, five_word_runs(p)) for p in train + heldout]
    close = [(a, b) for (a, one), (b, two) in itertools.combinations(runs, 2) if len(one & two) > 0.1 * len(one | two)]
    assert close == []


def test_shipped_prompts_vary_in_length_opening_and_system_message(train: list[Prompt], heldout: list[Prompt]) -> None:
    for prompts in (train, heldout):
        lengths = [sum(len(m.content.split()) for m in p.messages if m.role == "user") for p in prompts]
        assert min(lengths) >= 10
        assert max(lengths) <= 150
        systems = [p.messages[0].content for p in prompts if p.messages[0].role == "system"]
        assert 0.2 < len(systems) / len(prompts) < 0.35
        assert len(set(systems)) == len(systems)
        openings = Counter(" ".join(p.first_user_message.split()[:3]).lower() for p in prompts)
        assert max(openings.values()) <= len(prompts) / 25


def test_passages_and_turns_are_where_the_category_promises_them(train: list[Prompt], heldout: list[Prompt]) -> None:
    for p in train + heldout:
        assert (len(p.messages) > 2) == (p.category == "multi_turn"), p.id
        if p.category in ("summarization", "rag", "extraction"):
            assert len(p.first_user_message.split()) >= 70, p.id


def test_a_builtin_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match=r"builtin:dev.*builtin:train or builtin:heldout"):
        load_prompts("builtin:dev")
    with pytest.raises(BadInput, match="has no 'heldout' side"):
        load_prompts("builtin:train", split="heldout")
    assert load_prompts("builtin:heldout", split="heldout") == load_prompts("builtin:heldout")


# The three forms


def test_our_own_form_is_read_as_written(tmp_path: Path) -> None:
    prompts = load_prompts(
        write(tmp_path, OWN, {**OWN, "id": "chat-0002", "messages": [SYSTEM, USER, ASSISTANT, USER]})
    )
    assert [p.id for p in prompts] == ["chat-0001", "chat-0002"]
    assert prompts[0].topic == "greetings"
    assert [dict(m) for m in prompts[1].messages] == [SYSTEM, USER, ASSISTANT, USER]


def test_prompts_written_out_read_back_the_same(tmp_path: Path, heldout: list[Prompt]) -> None:
    assert load_prompts(write(tmp_path, *(p.model_dump() for p in heldout))) == heldout


def test_openai_form_loses_the_last_answer_and_ignores_other_keys(tmp_path: Path) -> None:
    line = {"messages": [SYSTEM, {**USER, "name": "Ann"}, ASSISTANT], "tools": []}
    [one] = load_prompts(write(tmp_path, line))
    assert [dict(m) for m in one.messages] == [SYSTEM, USER]
    assert (one.category, one.topic) == ("uncategorised", None)


def test_openai_form_keeps_given_id_and_category(tmp_path: Path) -> None:
    [one, two] = load_prompts(
        write(tmp_path, {"id": 7, "category": "qa", "messages": [USER]}, {"id": "x", "messages": [USER]})
    )
    assert (one.id, one.category, two.id) == ("7", "qa", "x")


def test_sharegpt_form_is_translated_and_loses_the_last_answer(tmp_path: Path) -> None:
    turns = [("system", "Be kind."), ("human", "Hello"), ("gpt", "Hi"), ("human", "Hello"), ("gpt", "Bye")]
    [one] = load_prompts(write(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in turns]}))
    assert [dict(m) for m in one.messages] == [SYSTEM, USER, ASSISTANT, USER]


def test_an_id_made_by_us_outlives_a_new_line_and_repeats_are_kept(tmp_path: Path) -> None:
    before = load_prompts(write(tmp_path, {"messages": [USER]}))
    after = load_prompts(write(tmp_path, {"messages": [SYSTEM, USER]}, {"messages": [USER]}, {"messages": [USER]}))
    assert after[1].id == before[0].id
    assert after[2].id == before[0].id + "-2"
    assert len({p.id for p in after}) == 3


def test_a_byte_order_mark_windows_line_ends_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(OWN).encode() + b"\r\n\r\n  \n")
    assert [p.id for p in load_prompts(str(file))] == ["chat-0001"]


def test_a_line_may_be_as_long_as_the_limit(tmp_path: Path) -> None:
    empty = len(json.dumps({"messages": [{"role": "user", "content": ""}]})) + 1
    line = {"messages": [{"role": "user", "content": "a" * (MAX_LINE_BYTES - empty)}]}
    assert len(load_prompts(write(tmp_path, line))) == 1


# Bad input: (lines, the line blamed, what the message says)

BAD: dict[str, tuple[list[Any], int, str]] = {
    "bad JSON": ([OWN, '{"id": \n'], 2, "not JSON"),
    "a document over several lines": (["[\n", json.dumps(OWN) + "\n]\n"], 1, r"not JSON.*jq -c"),
    "JSON nested too deeply": (["[" * 200_000 + "\n"], 1, "nested too deeply"),
    "a number longer than Python reads": (["9" * 5000 + "\n"], 1, "not JSON"),
    "an array": ([[OWN]], 1, r"an array instead of an object.*jq -c"),
    "a string": (['"hello"\n'], 1, "a str instead of an object"),
    "no turns under any known key": ([{"turns": [USER]}], 1, "neither 'messages' nor 'conversations'"),
    "another form than the first line": ([{"messages": [USER]}, {"conversations": []}], 2, "'messages' is missing"),
    "a topic further down": ([{"messages": [USER]}, OWN], 2, "a topic, though the first line has none"),
    "own: unknown key": ([{**OWN, "tags": []}], 1, "unknown key 'tags'"),
    "own: unknown key in a message": ([{**OWN, "messages": [{**USER, "name": "A"}]}], 1, "unknown key 'name'"),
    "own: no topic further down": ([OWN, {**OWN, "id": "b", "topic": None}], 2, "'topic' is missing"),
    "own: no id": ([{**OWN, "id": None}], 1, "'id' is missing"),
    "own: a number for an id": ([{**OWN, "id": 3}], 1, "'id' is int, not text"),
    "own: empty category": ([{**OWN, "category": " "}], 1, "'category' is empty"),
    "own: ends in an answer": ([{**OWN, "messages": [USER, ASSISTANT]}], 1, "the last turn is the assistant's"),
    "duplicate id": ([OWN, {**OWN, "id": "b"}, OWN], 3, "'chat-0001' was used before, on line 1"),
    "messages no list": ([{"messages": "Hello"}], 1, "'messages' is empty or no list"),
    "messages empty": ([{"messages": []}], 1, "'messages' is empty or no list"),
    "a message no object": ([{"messages": ["Hello"]}], 1, "message 1 is no object"),
    "unknown role": (
        [OWN, {**OWN, "messages": [{"role": "bot", "content": "x"}]}],
        2,
        "unknown role 'bot'.*system, user",
    ),
    "unknown role, openai": ([{"messages": [USER, {"role": "tool", "content": "x"}]}], 1, "message 2 has the unknown"),
    "unknown role, sharegpt": (
        [{"conversations": [{"from": "user", "value": "x"}]}],
        1,
        "unknown role 'user'.*human, gpt",
    ),
    "no role": ([{"messages": [{"content": "x"}]}], 1, "message 1 has no 'role'"),
    "missing content": ([{"messages": [{"role": "user"}]}], 1, "'content' of message 1 is missing"),
    "missing value": ([{"conversations": [{"from": "human"}]}], 1, "'value' of message 1 is missing"),
    "blank content": ([{"messages": [{"role": "user", "content": " \n"}]}], 1, "'content' of message 1 is empty"),
    "content in parts": ([{"messages": [{"role": "user", "content": [{"type": "text"}]}]}], 1, "is list, not text"),
    "half a surrogate pair": (
        [{"messages": [{"role": "user", "content": "a\ud83d"}]}],
        1,
        "surrogate pair at character 2",
    ),
    "not alternating": ([{"messages": [USER, USER]}], 1, "message 2 is user where assistant was due"),
    "two answers at the end": ([{"messages": [USER, ASSISTANT, ASSISTANT]}], 1, "message 3 is assistant where user"),
    "starts with an answer": ([{"messages": [SYSTEM, ASSISTANT, USER]}], 1, "message 2 is assistant where user"),
    "a late system message": ([{"messages": [USER, SYSTEM, USER]}], 1, "message 2 is system where assistant"),
    "no user turn": ([{"messages": [SYSTEM]}], 1, "no user turn"),
    "nothing but an answer": ([{"messages": [ASSISTANT]}], 1, "no user turn"),
    "a line too long": (
        [OWN, json.dumps({**OWN, "id": "x" * MAX_LINE_BYTES}) + "\n"],
        2,
        "longer than 1,048,576 bytes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_file_line_and_what_was_expected(case: str, tmp_path: Path) -> None:
    lines, number, message = BAD[case]
    file = write(tmp_path, *lines)
    with pytest.raises(BadInput) as caught:
        load_prompts(file)
    assert str(caught.value).startswith(f"{file}, line {number}: ")
    assert re.search(message, str(caught.value))
    assert caught.value.expected


@pytest.mark.parametrize("coding", ["utf-16", "latin-1"])
def test_a_file_in_another_encoding_is_refused(tmp_path: Path, coding: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(json.dumps({"messages": [{"role": "user", "content": "où?"}]}, ensure_ascii=False).encode(coding))
    with pytest.raises(BadInput, match=r"line 1: not UTF-8: byte 0x\w\w at position.*iconv"):
        load_prompts(file)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match=r"prompts\.jsonl is empty.*messages"):
        load_prompts(write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no prompt file .*absent\.jsonl"):
        load_prompts(tmp_path / "absent.jsonl")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        load_prompts(tmp_path)


def test_a_prompt_made_in_code_is_held_to_the_same_turns() -> None:
    with pytest.raises(ValidationError, match="no user turn"):
        Prompt(id="a", category="chat", messages=(Message(role="system", content="x"),))
    with pytest.raises(ValidationError, match="frozen"):
        prompt("a").id = "b"  # type: ignore[misc]


# Digest, split, order

relaxed = settings(deadline=None, max_examples=60)  # a busy machine is no failure
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
prompt_lists = st.lists(
    st.builds(prompt, words, st.sampled_from("abc"), st.none() | st.sampled_from(["t", "T ", "u", "v w"]), words),
    max_size=20,
    unique_by=lambda p: p.id,
)


@relaxed
@given(prompt_lists, st.randoms(use_true_random=False))
def test_digest_ignores_the_order_and_nothing_else(prompts: list[Prompt], rng: random.Random) -> None:
    shuffled = rng.sample(prompts, len(prompts))
    assert prompts_digest(shuffled) == prompts_digest(prompts)
    assert re.fullmatch("[0-9a-f]{64}", prompts_digest(prompts))
    if prompts:
        changed = prompts[0].model_copy(update={"messages": (Message(role="user", content="\n" + prompts[0].id),)})
        assert (prompts_digest([changed, *prompts[1:]]) == prompts_digest(prompts)) == (changed == prompts[0])
        assert prompts_digest(prompts[1:]) != prompts_digest(prompts)


def topic_key(p: Prompt) -> str:
    return " ".join((p.topic or p.first_user_message).casefold().split())


@relaxed
@given(prompt_lists, st.floats(0.05, 0.95), st.integers(0, 9))
def test_split_is_complete_repeatable_and_shares_no_topic(prompts: list[Prompt], share: float, seed: int) -> None:
    train, heldout = split_by_topic(prompts, share, seed)
    assert (train, heldout) == split_by_topic(prompts, share, seed)
    assert {topic_key(p) for p in train}.isdisjoint({topic_key(p) for p in heldout})
    chosen = set(heldout)
    assert train == [p for p in prompts if p not in chosen]
    assert heldout == [p for p in prompts if p in chosen]


@relaxed
@given(prompt_lists, prompt_lists)
def test_a_topic_keeps_its_side_when_the_file_grows(prompts: list[Prompt], more: list[Prompt]) -> None:
    before, after = split_by_topic(prompts)[1], split_by_topic(prompts + more)[1]
    assert before == after[: len(before)]


def test_split_holds_out_about_the_share_asked_for_and_depends_on_the_seed(train: list[Prompt]) -> None:
    sizes = {share: len(split_by_topic(train, share)[1]) for share in (0.1, 0.2, 0.5)}
    assert all(abs(size / len(train) - share) < 0.07 for share, size in sizes.items())
    assert split_by_topic(train, seed=1) != split_by_topic(train, seed=2)


@pytest.mark.parametrize("share", [0, 1, -0.1, 20, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match="a number above 0 and below 1"):
        split_by_topic([prompt("a")], share)


def test_a_users_file_gives_one_side_of_its_split(tmp_path: Path, train: list[Prompt]) -> None:
    file = write(tmp_path, *(p.model_dump() for p in train))
    assert (load_prompts(file, "train"), load_prompts(file, "heldout")) == split_by_topic(train)


def test_a_users_file_with_one_topic_cannot_be_split(tmp_path: Path) -> None:
    file = write(tmp_path, OWN, {**OWN, "id": "b"})
    empty = "heldout" if split_by_topic(load_prompts(file))[0] else "train"
    with pytest.raises(BadInput, match="too few topics to split"):
        load_prompts(file, empty)


def test_a_split_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no split 'dev'.*train or heldout"):
        load_prompts(write(tmp_path, OWN), split="dev")  # type: ignore[arg-type]


@relaxed
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.randoms(use_true_random=False))
def test_interleaved_prefixes_cover_equal_categories_equally(
    categories: int, size: int, seed: int, rng: random.Random
) -> None:
    prompts = [prompt(f"{c}-{i}", str(c)) for c in range(categories) for i in range(size)]
    order = interleave(prompts, seed)
    assert sorted(p.id for p in order) == sorted(p.id for p in prompts)
    assert order == interleave(rng.sample(prompts, len(prompts)), seed)
    for n in range(size + 1):
        counts = Counter(p.category for p in order[: n * categories])
        assert [counts[str(c)] for c in range(categories)] == [n] * categories


@relaxed
@given(prompt_lists, st.integers(0, 9))
def test_interleaved_categories_of_any_size_take_turns(prompts: list[Prompt], seed: int) -> None:
    order = interleave(prompts, seed)
    assert Counter(order) == Counter(prompts)
    total, seen = Counter(p.category for p in prompts), Counter[str]()
    for p in order:
        seen[p.category] += 1
        # nobody gets a second turn before everyone who still has prompts got one
        assert all(seen[other] >= min(count, seen[p.category] - 1) for other, count in total.items())


def test_interleave_depends_on_the_seed(train: list[Prompt]) -> None:
    assert interleave(train, 1) != interleave(train, 2)


def test_reading_prompts_imports_nothing_heavy() -> None:
    code = "import sys, eaglenest.distill.prompts; print({'torch', 'ray', 'vllm', 'mlflow'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
