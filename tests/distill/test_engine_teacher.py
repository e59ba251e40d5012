"""The teacher on vLLM: the states of transformers, from a prefill, from the prefix cache and while answering."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from eaglenest.distill.answers import AnswerSettings, EngineAnswerer
from eaglenest.distill.features import Document, Features
from eaglenest.distill.prompts import Prompt, load_prompts
from eaglenest.distill.self_prompts import SelfPromptStore, self_prompts, user_turn
from eaglenest.distill.teachers import EngineTeacher, TransformersTeacher
from eaglenest.errors import EngineError, TargetError
from eaglenest.targets import Target, resolve_target
from eaglenest.targets.head import TargetHead

pytestmark = pytest.mark.slow

IDS = (2, 15, 27)
SETTINGS = AnswerSettings(max_tokens=24)


@pytest.fixture(scope="module")
def target() -> Target:
    return resolve_target()


@pytest.fixture(scope="module")
def teacher(target: Target) -> Iterator[EngineTeacher]:
    made = EngineTeacher(target.path, IDS, "float32", max_length=512)
    yield made
    made._engine.llm_engine.engine_core.shutdown()  # before pytest closes what it logs to


@pytest.fixture(scope="module")
def reference(target: Target) -> TransformersTeacher:
    return TransformersTeacher(target.path, IDS)


def documents(count: int, shared: int = 0) -> list[Document]:
    """Random tokens; the first `shared` of them are the same in all."""
    generator = torch.Generator().manual_seed(7)

    def some(size: int) -> list[int]:
        return torch.randint(20, 40_000, (size,), generator=generator).tolist()

    start = some(shared)
    return [Document(str(i), "x", tuple(start + some(9 + 31 * i)), 4) for i in range(count)]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Equal but for rounding: bfloat16's, and float32's in another order of sums."""
    found, wanted = found.float(), wanted.float()
    assert found.shape == wanted.shape
    spread = wanted.square().mean(-1, keepdim=True).sqrt()
    assert float(((found - wanted).abs() / spread).max()) < 0.02 * float((wanted.abs() / spread).max())
    assert float(torch.cosine_similarity(found, wanted, dim=-1).min()) > 0.9999


def assert_same_features(found: list[Features], wanted: list[Features]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.aux.dtype == a.last.dtype == torch.bfloat16
        for mine, theirs in zip(a.aux.chunk(len(IDS), -1), b.aux.chunk(len(IDS), -1), strict=True):
            assert_same(mine, theirs)
        assert_same(a.last, b.last)


def test_states_are_those_of_transformers(teacher: EngineTeacher, reference: TransformersTeacher) -> None:
    some = documents(9)
    assert_same_features(teacher.features(some), reference.features(some))


def test_what_the_prefix_cache_holds_comes_with_its_states(
    teacher: EngineTeacher, reference: TransformersTeacher
) -> None:
    some = documents(4, shared=100)
    wanted = reference.features(some)
    for found in (teacher.features(some[:1]) + teacher.features(some[1:]), teacher.features(some[::-1])[::-1]):
        assert_same_features(found, wanted)


def test_a_document_longer_than_a_step_comes_whole(target: Target, teacher: EngineTeacher) -> None:
    crowd = [Document(str(i), "x", tuple((7 * i + 3 * k) % 40_000 + 20 for k in range(500)), 4) for i in range(60)]
    assert [f.last.shape[0] for f in teacher.features(crowd)] == [500] * 60


def test_answers_bring_the_states_that_a_prefill_gives(
    target: Target, teacher: EngineTeacher, reference: TransformersTeacher
) -> None:
    prompts: list[Prompt] = load_prompts("builtin:heldout")[:20]
    pairs = teacher.answer_and_features(prompts, SETTINGS)
    made = [answer.document("x", 512) for answer, _ in pairs]
    wanted = reference.features(made)
    for document, (_, features), other in zip(made, pairs, wanted, strict=True):
        assert features.last.shape[0] == len(document.ids)
        assert not features.last[-1].any()
        assert_same(features.aux[:-1], other.aux[:-1])
        assert_same(features.last[:-1], other.last[:-1])
    # and they are the target's own greedy answers: the likeliest token everywhere, or as good as
    head = TargetHead.load(target.path, range(target.vocab_size))
    for document, other in zip(made, wanted, strict=True):
        logits = head(other.last[document.answer_start - 1 : -1])
        chosen = logits.gather(1, torch.tensor(document.answer)[:, None])[:, 0]
        assert float((logits.amax(-1) - chosen).max()) < 0.3  # of states in bfloat16


def test_answers_are_those_of_an_engine_that_keeps_no_states(target: Target, teacher: EngineTeacher) -> None:
    prompts = load_prompts("builtin:heldout")[20:30]
    wanted = EngineAnswerer(target.path, "float32", 513).answer(prompts, SETTINGS)
    found = teacher.answer(prompts, SETTINGS)
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= 9  # a near-tie may go either way


def test_states_are_handed_out_once_and_their_absence_is_told(teacher: EngineTeacher) -> None:
    with pytest.raises(EngineError, match="kept no states of 1 of 1"):
        teacher._features(["nobody"])
    assert teacher._engine.collective_rpc("take_states", args=(["nobody"],)) == [{}]


def test_an_id_outside_the_target_is_refused_before_vllm_starts(target: Target) -> None:
    with pytest.raises(TargetError, match="0 to 30"):
        EngineTeacher(target.path, (2, 31))


def test_the_target_writes_prompts_of_its_own(target: Target, teacher: EngineTeacher, tmp_path: Path) -> None:
    store = SelfPromptStore(tmp_path, target)
    turn = user_turn(AutoTokenizer.from_pretrained(str(target.path)))
    found = self_prompts(12, store, lambda: turn, teacher)
    words = [p.first_user_message for p in found]
    assert len({w.casefold() for w in words}) == 12
    assert not any("<|im_" in w for w in words)
    assert teacher.write(turn, range(4)) == teacher.write(turn, range(4))  # a seed stands for its prompt
    assert sum(len(w.split()) >= 4 for w in words) >= 8  # questions, not crumbs
