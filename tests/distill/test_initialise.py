"""The first weights of a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import END, VOCAB, tiny_drafter, tiny_target

from eaglenest.distill.initialise import (
    adapted,
    aux_scale,
    differences,
    drafter_config,
    from_state,
    from_target,
    reshaped,
)
from eaglenest.drafters.vocabulary import draft_ids
from eaglenest.errors import BadInput, CheckpointError
from eaglenest.targets import Target, resolve_target

IDS = [1, 5, 77, 200]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    tiny_target(tmp_path / "target", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    return resolve_target(str(tmp_path / "target"))


def test_a_drafter_has_the_shape_of_a_layer_of_its_target(target: Target) -> None:
    config = drafter_config(target, draft_vocab_size=100, eagle="3.1")
    assert (config.hidden_size, config.target_hidden_size, config.intermediate_size) == (64, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.draft_vocab_size, config.rope_theta) == (VOCAB, 100, 5000.0)
    assert (config.aux_layer_ids, config.eos_token_id) == (target.aux_layer_ids, END)
    assert (config.fc_norm, config.norm_output) == (True, True)
    older = drafter_config(target, draft_vocab_size=100, eagle="3", aux_layer_ids=[3, 1, 3])
    assert (older.fc_norm, older.norm_output, older.aux_layer_ids) == (False, False, (1, 3))


def test_the_draft_vocabulary_leaves_at_least_one_token_out(target: Target) -> None:
    """vLLM cannot load a map that names them all."""
    assert drafter_config(target, draft_vocab_size=10**6, eagle="3.1").draft_vocab_size == VOCAB - 1


# tied and untied lm_head; norms that multiply by w and by 1 + w
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_head_norm_and_embedding_are_the_targets(kind: str, tmp_path: Path) -> None:
    model = tiny_target(tmp_path, kind)
    target = resolve_target(str(tmp_path))
    config = drafter_config(target, draft_vocab_size=len(IDS), eagle="3.1")
    drafter = from_target(target, config, IDS, seed=0)
    assert draft_ids(drafter.d2t).tolist() == IDS
    assert drafter.t2d.nonzero().flatten().tolist() == IDS
    assert torch.equal(drafter.lm_head.weight, model.lm_head.weight[IDS])
    assert torch.equal(drafter.embed_tokens.weight, model.model.embed_tokens.weight)
    x = torch.randn(3, 64)
    torch.testing.assert_close(drafter.norm(x), model.model.norm(x), atol=1e-3, rtol=1e-3)


def test_the_seed_decides_the_random_part(target: Target) -> None:
    config = drafter_config(target, draft_vocab_size=len(IDS), eagle="3.1")
    one, same, other = (from_target(target, config, IDS, seed).fc.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 32}, {"fc_norm": False, "norm_output": False}])
def test_a_parents_weights_come_back_as_they_were(target: Target, changes: dict[str, Any]) -> None:
    parent = tiny_drafter(
        dtype=torch.float32,
        vocabulary=IDS,
        **({"hidden_size": 64, "target_hidden_size": 64, "vocab_size": VOCAB} | changes),
    )
    child = from_state(target, parent.config, parent.state_dict())
    assert set(child.state_dict()) == set(parent.state_dict())
    assert all(torch.equal(tensor, parent.state_dict()[name]) for name, tensor in child.state_dict().items())
    if parent.config.shares_embedding:
        assert torch.equal(child.embed_tokens.weight, from_target(target, parent.config, IDS, 0).embed_tokens.weight)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_a_parent_that_does_not_fit_is_refused_by_tensor(target: Target, fault: str) -> None:
    parent = tiny_drafter(hidden_size=64, target_hidden_size=64, vocab_size=VOCAB, dtype=torch.float32, vocabulary=IDS)
    state = parent.state_dict()
    if fault == "missing":
        del state["fc_norm.1.weight"]
    elif fault == "unknown":
        state["fc_norm.1.extra"] = torch.zeros(1)
    else:
        state["fc_norm.1.weight"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"fc_norm\.1"):
        from_state(target, parent.config, state)


def test_settings_of_a_nested_text_model_are_found(target: Target) -> None:
    config = json.loads((target.path / "config.json").read_text())
    plain = drafter_config(target, draft_vocab_size=100, eagle="3.1")
    (target.path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": config}))
    assert drafter_config(target, draft_vocab_size=100, eagle="3.1") == plain


def parent_of(target: Target, eagle: str = "3", seed: int = 3) -> tuple[Any, dict[str, torch.Tensor]]:
    config = drafter_config(target, draft_vocab_size=len(IDS), eagle=eagle)
    return config, dict(from_target(target, config, IDS, seed).state_dict())


def test_a_start_from_eagle_3_keeps_its_first_states_and_says_what_is_new(target: Target) -> None:
    config, state = parent_of(target)
    newer = reshaped(config, "3.1", None)
    aux = torch.randn(50, 64 * config.num_aux) * torch.arange(1, config.num_aux + 1).repeat_interleave(64)
    changed = adapted(target, state, config, newer, IDS, aux_scale(aux, config.num_aux))
    parent, child = from_state(target, config, state), from_state(target, newer, changed)
    # rows whose states are of the usual size are fused as before
    even = torch.cat([a / a.pow(2).mean(-1, keepdim=True).sqrt() for a in aux.chunk(config.num_aux, -1)], -1)
    usual = even * torch.tensor(aux_scale(aux, config.num_aux)).repeat_interleave(64)
    torch.testing.assert_close(child.fuse(usual), parent.fuse(usual), atol=1e-4, rtol=1e-3)
    said = "\n".join(differences(config, newer))
    assert "fc_norm is new" in said
    assert "normed states" in said
    assert "new line of versions" in said


def test_another_draft_vocabulary_keeps_the_rows_that_both_have(target: Target) -> None:
    config, state = parent_of(target, "3.1")
    state["lm_head.weight"] = torch.randn(len(IDS), 64)
    wider = config.model_copy(update={"draft_vocab_size": 5})
    ids = [1, 5, 9, 100, 200]  # 77 is left out, 9 and 100 are new
    child = from_state(target, wider, adapted(target, state, config, wider, ids, []))
    assert draft_ids(child.d2t).tolist() == ids
    assert torch.equal(child.lm_head.weight[[0, 1, 4]], state["lm_head.weight"][[0, 1, 3]])
    assert torch.equal(child.lm_head.weight[[2, 3]], from_target(target, wider, ids, 0).lm_head.weight[[2, 3]])
    assert "5 instead of 4" in differences(config, wider)[0]


def test_a_start_in_the_parents_shape_changes_and_says_nothing(target: Target) -> None:
    config, state = parent_of(target, "3.1")
    for eagle, size in ((None, None), ("3.1", len(IDS))):
        same = reshaped(config, eagle, size)
        assert same == config
        assert differences(config, same) == []
        assert adapted(target, state, config, same, IDS, []) == state


def test_there_is_no_way_back_from_eagle_31(target: Target) -> None:
    with pytest.raises(BadInput, match="from a parent of EAGLE"):
        reshaped(parent_of(target, "3.1")[0], "3", None)
