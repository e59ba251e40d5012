"""The learner: it learns, it resumes to the bit, and a pack's loss is its documents'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eaglenest.distill.features import Document, Features
from eaglenest.distill.learner import Learner
from eaglenest.distill.recipe import Recipe
from eaglenest.distill.training_state import Progress, load_training_state, save_training_state
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.vocabulary import vocabulary_maps
from eaglenest.targets.head import TargetHead


def make(eagle: str = "3.1", **changes: Any) -> Learner:
    torch.manual_seed(0)
    newer = eagle == "3.1"
    config = DrafterConfig(
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=30,
        draft_vocab_size=20,
        aux_layer_ids=(1, 2),
        fc_norm=newer,
        norm_output=newer,
    )
    drafter = Eagle3Drafter(config, torch.randn(30, 16))
    d2t, t2d = vocabulary_maps(list(range(0, 20)), 30)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    head = TargetHead(torch.ones(16), torch.randn(20, 16), 1e-5)
    recipe = Recipe(ttt_steps=3, draft_vocab_size=64, pack_tokens=64, **{"learning_rate": 3e-3, **changes})
    return Learner(drafter, head, recipe)


def documents(count: int = 4) -> list[tuple[Document, Features]]:
    """Texts that count in a circle, with states that tell the token: learnable."""
    random = torch.Generator().manual_seed(1)
    table = torch.randn(20, 48, generator=random)
    out = []
    for number in range(count):
        ids = tuple((number * 3 + i) % 20 for i in range(14))
        states = table[list(ids)].bfloat16()
        out.append((Document(str(number), f"c{number % 2}", ids, 5), Features(states[:, :32], states[:, 32:])))
    return out


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


def test_a_pack_has_the_weighted_mean_loss_of_its_documents() -> None:
    learner = make(prompt_weight=0.0, precision="float32")
    items = documents(3)
    whole, _, rows = learner._forward(learner.batch(items))
    singles = [learner._forward(learner.batch([item])) for item in items]
    assert rows == sum(n for _, _, n in singles)
    mean = sum(float(loss) * n for loss, _, n in singles) / rows  # the documents are equally long
    assert float(whole) == pytest.approx(mean, rel=1e-5)


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
