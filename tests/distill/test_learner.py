"""The learner: it learns, it resumes to the bit, and a pack's loss is its documents'."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drafters.reference import SequentialDrafter
from tests.tiny import tiny_drafter

from eaglenest.distill.features import Document, Features
from eaglenest.distill.learner import Learner
from eaglenest.distill.recipe import Recipe
from eaglenest.distill.training_state import Progress, load_training_state, save_training_state
from eaglenest.targets.head import TargetHead

VOCABULARY = [0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 17, 18, 19, 22, 25, 28]


def make(eagle: str = "3.1", **changes: Any) -> Learner:
    newer = eagle == "3.1"
    drafter = tiny_drafter(
        dtype=torch.float32,
        vocabulary=VOCABULARY,
        vocab_size=30,
        intermediate_size=32,
        aux_layer_ids=(1, 2),
        fc_norm=newer,
        norm_output=newer,
    )
    random = torch.Generator().manual_seed(3)
    head = TargetHead(torch.rand(16, generator=random) + 0.5, torch.randn(20, 16, generator=random), 1e-5, cap=5.0)
    recipe = Recipe(ttt_steps=3, draft_vocab_size=64, pack_tokens=64, **{"learning_rate": 3e-3, **changes})
    return Learner(drafter, head, recipe)


def documents(count: int = 4, lengths: tuple[int, ...] = (14,)) -> list[tuple[Document, Features]]:
    """Texts that count in a circle, with states that tell the token: learnable."""
    random = torch.Generator().manual_seed(1)
    table = torch.randn(20, 48, generator=random)
    out = []
    for number in range(count):
        ids = tuple((number * 3 + i) % 20 for i in range(lengths[number % len(lengths)]))
        states = table[list(ids)].bfloat16()
        out.append((Document(str(number), f"c{number % 2}", ids, 5), Features(states[:, :32], states[:, 32:])))
    return out


def by_definition(learner: Learner, items: list[tuple[Document, Features]]) -> tuple[float, float, list[float]]:
    """Sum of weighted losses, sum of weights and accuracy per step, row by row and step by step in plain words."""
    recipe, head = learner.recipe, learner.head
    reference = SequentialDrafter(learner.drafter)
    total = weights = 0.0
    hits: list[list[bool]] = [[] for _ in range(recipe.ttt_steps)]
    for document, features in items:
        x, g, s = document.ids, features.aux.double(), features.last.double()
        for p in range(len(x) - 2):
            answer = p + 1 >= document.answer_start
            weight = 1.0 if answer else recipe.prompt_weight
            reach = min(recipe.ttt_steps, len(x) - 2 - p)
            drafts = reference.draft(x[1 : p + 2], g[: p + 1], reach, forced=x[p + 2 :])
            for k, logits in enumerate(drafts):
                state = s[p + 1 + k]
                normed = state * torch.rsqrt(state.pow(2).mean() + head.eps) * head.norm.double()
                wanted = 5.0 * torch.tanh(head.rows.double() @ normed / 5.0)
                entropy = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum()
                total += weight * recipe.step_decay**k * float(entropy)
                weights += weight * recipe.step_decay**k
                if answer:
                    hits[k].append(VOCABULARY[int(logits.argmax())] == x[p + 2 + k])
    return total, weights, [sum(h) / max(1, len(h)) for h in hits]


@pytest.mark.parametrize("eagle", ["3.1", "3"])
@pytest.mark.parametrize("prompt_weight", [0.0, 0.3, 1.0])
def test_a_steps_loss_and_accuracy_are_their_definition(eagle: str, prompt_weight: float) -> None:
    learner = make(eagle, prompt_weight=prompt_weight, precision="float32", step_decay=0.7)
    items = documents(3, lengths=(9, 14, 7))
    with torch.no_grad():
        total, weights, accuracy = by_definition(learner, items)
    figures = learner.step(learner.batch(items), 0.3)
    assert figures["loss"] == pytest.approx(total / weights, rel=1e-4)
    assert figures["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_a_pack_has_the_weighted_mean_loss_and_gradient_of_its_documents(prompt_weight: float) -> None:
    learner = make(prompt_weight=prompt_weight, precision="float32", clip_norm=1e9)
    items = documents(4, lengths=(9, 14, 7, 20))
    results = []
    for part in (items, *([item] for item in items)):
        learner.drafter.zero_grad()
        loss, _, _ = learner._forward(learner.batch(part))
        loss.backward()
        batch = learner.batch(part)
        weight = sum(float(((batch.pack.reach > k) * batch.weights).sum()) * 0.8**k for k in range(3))
        gradients = {name: p.grad.clone() for name, p in learner.drafter.named_parameters() if p.grad is not None}
        results.append((float(loss.detach()), weight, gradients))
    (whole, weight, gradients), singles = results[0], results[1:]
    assert weight == pytest.approx(sum(w for _, w, _ in singles))
    assert whole == pytest.approx(sum(loss * w for loss, w, _ in singles) / weight, rel=1e-5)
    assert set(gradients) == {name for name, p in learner.drafter.named_parameters() if p.requires_grad}
    for name, gradient in gradients.items():
        mean = sum(g[name] * w for _, w, g in singles) / weight
        torch.testing.assert_close(gradient, mean, atol=1e-5, rtol=1e-3)


def test_documents_without_anything_to_propose_neither_teach_nor_stop_the_run() -> None:
    learner = make(prompt_weight=0.0, precision="float32", weight_decay=0.0)
    (document, features), *_ = documents(1)
    silent = (Document("s", "c0", document.ids, 13), features)
    before = {name: t.clone() for name, t in learner.drafter.state_dict().items()}
    figures = learner.step(learner.batch([silent]), 0.3)
    assert (figures["loss"], figures["rows"], figures["accuracy"]) == (0.0, 0, [0.0, 0.0, 0.0])
    for name, tensor in learner.drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert learner.evaluate([silent], 3)[0].steps == 0
    beside = make(prompt_weight=0.0, precision="float32").step(learner.batch([silent, *documents(1)]), 0.3)
    alone = make(prompt_weight=0.0, precision="float32").step(learner.batch(documents(1)), 0.3)
    assert beside["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("eagle", ["3.1", "3"])
def test_the_loss_falls(eagle: str) -> None:
    learner = make(eagle)
    losses = [learner.step(learner.batch(documents()), 0.3)["loss"] for _ in range(60)]
    assert losses[-1] < 0.8 * losses[0]


def test_bfloat16_products_keep_float32_weights_and_learn() -> None:
    learner = make(precision="bfloat16")
    losses = [learner.step(learner.batch(documents()), 0.3)["loss"] for _ in range(60)]
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in learner.drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize("eagle", ["3.1", "3"])
def test_restoring_a_state_continues_bit_equal(eagle: str) -> None:
    through, resumed = make(eagle), make(eagle)
    for _ in range(4):
        through.step(through.batch(documents()), 0.2)
    resumed.restore(copy.deepcopy(through.state()))
    for progress in (0.4, 0.6):
        figures = [learner.step(learner.batch(documents()), progress) for learner in (through, resumed)]
        assert figures[0] == figures[1]
    assert through.updates == resumed.updates == 6
    for name, tensor in through.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name


def test_resuming_continues_bit_equal(tmp_path: Path) -> None:
    through, stopped = make(), make()
    for learner in (through, stopped):
        for _ in range(5):
            learner.step(learner.batch(documents()), 0.2)
    save_training_state(tmp_path, stopped.state(), Progress(passes=1, updates=5, seconds=2.5))
    resumed = make()
    state, progress = load_training_state(tmp_path, resumed.optimisers)
    resumed.restore(state)
    assert (progress.passes, progress.seconds, resumed.updates) == (1, 2.5, 5)
    for learner in (through, resumed):
        for _ in range(5):
            learner.step(learner.batch(documents()), 0.6)
    for name, tensor in through.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name


def test_a_frozen_head_and_the_embedding_stay() -> None:
    learner = make(train_lm_head=False)
    head, embedding = learner.drafter.lm_head.weight.clone(), learner.drafter.embed_tokens.weight.clone()
    learner.step(learner.batch(documents()), 0.2)
    assert torch.equal(head, learner.drafter.lm_head.weight)
    assert torch.equal(embedding, learner.drafter.embed_tokens.weight)


def test_evaluation_does_not_depend_on_its_packs_and_counts_answers_only() -> None:
    learner = make()
    for _ in range(30):
        learner.step(learner.batch(documents()), 0.3)
    together, categories = learner.evaluate(documents(), 3)
    alone = [learner.evaluate([item], 3)[0] for item in documents()]
    assert together.steps == sum(a.steps for a in alone)
    assert together.accepted == sum(a.accepted for a in alone)
    assert set(categories) == {"c0", "c1"}
    # 14 tokens, answer from 5: rows 4..11 propose x[6]..x[13]
    assert together.steps + together.accepted >= 4 * 8


@pytest.mark.parametrize("eagle", ["3.1", "3"])
def test_evaluation_gives_what_free_drafting_along_the_answers_gives(eagle: str) -> None:
    learner = make(eagle)
    items = documents(4, lengths=(14, 23, 9))
    for _ in range(25):
        learner.step(learner.batch(items), 0.3)
    steps = accepted = 0
    for document, features in items:
        ids, newest = document.ids, document.answer_start
        while newest < len(ids) - 1:
            drafts, _ = learner.drafter.draft(torch.tensor(ids[1 : newest + 1]), features.aux[:newest].float(), 3)
            taken = 0
            while taken < 3 and newest + 1 + taken < len(ids) and int(drafts[taken]) == ids[newest + 1 + taken]:
                taken += 1
            steps, accepted, newest = steps + 1, accepted + taken, newest + taken + 1
    pooled, _ = learner.evaluate(items, 3)
    assert (pooled.steps, pooled.accepted) == (steps, accepted)
    assert accepted > 0
