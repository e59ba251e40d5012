"""Single tensors of a target folder, whole or in shards, and the errors when they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_target

from eaglenest.errors import TargetError
from eaglenest.targets.head import TargetHead, load_embedding, load_final_norm, load_target_tensor


def test_tensors_are_found_in_shards_too(tmp_path: Path) -> None:
    model = tiny_target(tmp_path / "whole", "qwen3")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for folder in (tmp_path / "whole", tmp_path / "shards"):
        assert torch.equal(load_embedding(folder), model.model.embed_tokens.weight)
        assert torch.equal(load_final_norm(folder)[0], model.model.norm.weight)
        head = TargetHead.load(folder, [7, 9])
        torch.testing.assert_close(head.rows, model.lm_head.weight[[7, 9]])
        assert load_target_tensor(folder, ("no.such", "also.not")) is None


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = tiny_target(tmp_path, "llama")
    assert load_target_tensor(tmp_path, ("lm_head.weight",)) is None
    assert torch.equal(TargetHead.load(tmp_path, [3]).rows, model.model.embed_tokens.weight[[3]])


def test_the_language_model_inside_a_larger_one_is_found(tmp_path: Path) -> None:
    model = tiny_target(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    save_file(tensors, file)
    assert torch.equal(load_embedding(tmp_path), model.model.embed_tokens.weight)
    assert torch.equal(load_final_norm(tmp_path)[0], model.model.norm.weight)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tiny_target(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)
    with pytest.raises(TargetError, match=name):
        TargetHead.load(tmp_path, [1])
