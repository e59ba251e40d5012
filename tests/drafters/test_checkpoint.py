"""A checkpoint is written whole or not at all, and every fault of a folder is named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglenest.drafters.checkpoint import (
    FileEntry,
    Manifest,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    sha256_of,
    verify_checkpoint,
)
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.weights import expected_tensors
from eaglenest.errors import CheckpointError

Make = Callable[..., Path]
MORE = {"target_name": "t", "target_fingerprint": "f" * 64, "prompts_digest": "a" * 64}


def config_of(folder: Path) -> DrafterConfig:
    return DrafterConfig.from_hf(json.loads((folder / "config.json").read_text()))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], *, relist: bool = True) -> None:
    """Change the tensors; `relist` makes the manifest agree, so that only the tensors are at fault."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    if relist:
        relisted(folder)


def relisted(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("config.json", "model.safetensors"):
        path = folder / name
        manifest["files"][name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


# --- what is written


def test_what_is_saved_is_loaded_back(make_checkpoint: Make) -> None:
    folder = make_checkpoint(seed=3, parent_version=7, figures={"accept_len": 1.5})
    config, tensors, manifest = load_checkpoint(folder)
    assert manifest is not None
    assert (manifest.parent_version, manifest.figures) == (7, {"accept_len": 1.5})
    assert config.signature() == manifest.architecture_signature
    assert sorted(os.listdir(folder)) == ["config.json", "manifest.json", "model.safetensors"]
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: shape for name, (shape, _) in expected_tensors(config).items()
    }
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("changes", [{}, {"fc_norm": False}, {"hidden_size": 8}, {"attention_bias": True}])
def test_the_module_saves_exactly_the_expected_tensors(
    tmp_path: Path, make_checkpoint: Make, changes: dict[str, Any]
) -> None:
    config, tensors, _ = load_checkpoint(make_checkpoint(**changes))
    module = Eagle3Drafter(config, torch.zeros(config.vocab_size, config.hidden_size))
    module.load_state_dict(tensors, strict=True)
    save_checkpoint(tmp_path / "again", config=config, state=module.state_dict(), **MORE)
    _, again, _ = load_checkpoint(tmp_path / "again")
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_float32_is_kept_when_asked_for(make_checkpoint: Make) -> None:
    _, tensors, _ = load_checkpoint(make_checkpoint(dtype="float32"))
    assert tensors["lm_head.weight"].dtype == torch.float32


def test_tensors_that_are_views_of_one_buffer_are_saved(tmp_path: Path, make_checkpoint: Make) -> None:
    config, tensors, _ = load_checkpoint(make_checkpoint())
    flat = torch.randn(2, config.hidden_size)
    tensors["norm.weight"], tensors["midlayer.hidden_norm.weight"] = flat[0], flat[1]
    tensors["lm_head.weight"] = torch.randn(config.hidden_size, config.draft_vocab_size).T
    save_checkpoint(tmp_path / "views", config=config, state=tensors, dtype="float32", **MORE)
    _, again, _ = load_checkpoint(tmp_path / "views")
    assert torch.equal(again["norm.weight"], flat[0])
    assert torch.equal(again["lm_head.weight"], tensors["lm_head.weight"])


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    before = sha256_of(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="exists already"):
        make_checkpoint(seed=1)
    assert sha256_of(folder / "model.safetensors") == before


def test_nothing_is_left_of_a_state_that_is_unsound(tmp_path: Path, make_checkpoint: Make) -> None:
    config, tensors, _ = load_checkpoint(make_checkpoint())
    tensors["fc.weight"][0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.weight has 1 infinite or NaN"):
        save_checkpoint(tmp_path / "nan", config=config, state=tensors, **MORE)
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks \['norm\.weight'\]"):
        save_checkpoint(tmp_path / "short", config=config, state=tensors, **MORE)
    assert os.listdir(tmp_path) == ["drafter"]


def test_a_disk_without_room_is_refused_before_writing(
    tmp_path: Path, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"\d+ bytes needed, 1000 bytes free"):
        make_checkpoint()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_while_writing_leaves_nothing(tmp_path: Path, make_checkpoint: Make) -> None:
    """A file-size limit makes the kernel refuse the write half way, as a full disk does."""
    source = make_checkpoint()
    code = """
import resource, sys
from pathlib import Path
from eaglenest.drafters.checkpoint import load_checkpoint, save_checkpoint
from eaglenest.errors import CheckpointError
config, state, _ = load_checkpoint(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_checkpoint(Path(sys.argv[2]), config=config, state=state, target_name="t", target_fingerprint="f",
                    prompts_digest="a")
except CheckpointError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "new")], capture_output=True, text=True, check=False
    )
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert "bytes needed" in done.stdout
    assert os.listdir(tmp_path) == ["drafter"]


def test_importing_and_verifying_needs_no_torch(make_checkpoint: Make) -> None:
    code = (
        "import sys; from pathlib import Path; from eaglenest.drafters.checkpoint import verify_checkpoint;"
        "verify_checkpoint(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(make_checkpoint())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- faults of the folder


def test_a_sound_folder_passes_with_every_demand(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    manifest = verify_checkpoint(folder, target_fingerprint="f" * 64, signature=config_of(folder).signature())
    assert manifest == read_manifest(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "manifest.json"])
def test_a_missing_file_is_named(make_checkpoint: Make, name: str) -> None:
    folder = make_checkpoint()
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        verify_checkpoint(folder)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        verify_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "message"),
    [("notes.txt", "notes.txt"), ("pytorch_model.bin", "can run code"), ("optimizer.pt", "can run code")],
)
def test_extra_files_are_refused(make_checkpoint: Make, name: str, message: str) -> None:
    folder = make_checkpoint()
    (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(folder)


def test_a_symbolic_link_is_refused(tmp_path: Path, make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    weights = (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(weights)
    with pytest.raises(CheckpointError, match="symbolic link"):
        verify_checkpoint(folder)


def test_a_truncated_file_says_so(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="truncated: 100 bytes"):
        verify_checkpoint(folder)


def test_a_truncated_file_is_refused_even_when_the_manifest_agrees(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 2)
    relisted(folder)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        verify_checkpoint(folder)


def test_one_flipped_bit_is_seen(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="has sha256"):
        verify_checkpoint(folder)


def test_a_file_over_the_limit_is_refused(make_checkpoint: Make) -> None:
    with pytest.raises(CheckpointError, match="at most 1000"):
        verify_checkpoint(make_checkpoint(), max_bytes=1000)


# --- faults of the manifest


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff", "[" * 200_000])
def test_a_manifest_that_is_no_json_object_is_refused(make_checkpoint: Make, text: str) -> None:
    folder = make_checkpoint()
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"manifest\.json (is not JSON|holds a JSON list)"):
        read_manifest(folder)


def test_an_unknown_format_is_refused_before_its_other_keys(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    relisted(folder, format=2, novelty=True)
    with pytest.raises(CheckpointError, match="has format 2"):
        read_manifest(folder)


def test_an_unknown_key_is_refused(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    relisted(folder, novelty=True)
    with pytest.raises(CheckpointError, match="novelty"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "sub/config.json", "..\\config.json", ".."])
def test_path_tricks_in_names_are_refused(make_checkpoint: Make, name: str) -> None:
    folder = make_checkpoint()
    files = json.loads((folder / "manifest.json").read_text())["files"]
    relisted(folder, files=files | {name: FileEntry(sha256="0" * 64, bytes=1).model_dump()})
    with pytest.raises(CheckpointError, match="plain file names"):
        verify_checkpoint(folder)


def test_a_manifest_must_list_each_file(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    files = json.loads((folder / "manifest.json").read_text())["files"]
    del files["config.json"]
    relisted(folder, files=files)
    with pytest.raises(CheckpointError, match=r"lists \['model\.safetensors'\]"):
        read_manifest(folder)


# --- another target, another architecture


def test_another_target_is_refused(make_checkpoint: Make) -> None:
    with pytest.raises(CheckpointError, match="distilled from tiny-target"):
        verify_checkpoint(make_checkpoint(), target_fingerprint="0" * 64)


def test_norm_output_alone_is_another_architecture(make_checkpoint: Make) -> None:
    old, new = make_checkpoint("old", norm_output=False), make_checkpoint("new", norm_output=True)
    shapes = [{n: t.shape for n, t in load_file(f / "model.safetensors").items()} for f in (old, new)]
    assert shapes[0] == shapes[1]
    with pytest.raises(CheckpointError, match="cannot be swapped in"):
        verify_checkpoint(new, signature=config_of(old).signature())


def test_an_edited_config_no_longer_matches_the_manifest(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"norm_output": False}))
    relisted(folder)
    with pytest.raises(CheckpointError, match="as the manifest says"):
        verify_checkpoint(folder)


# --- faults of the tensors, though every digest agrees


def drop(tensors: dict[str, Any]) -> None:
    del tensors["midlayer.hidden_norm.weight"]


def add(tensors: dict[str, Any]) -> None:
    tensors["fc.bias"] = torch.zeros(16)


def embed(tensors: dict[str, Any]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(64, 16)


def reshape(tensors: dict[str, Any]) -> None:
    tensors["norm.weight"] = torch.ones(17)


def retype(tensors: dict[str, Any]) -> None:
    tensors["norm.weight"] = torch.ones(16, dtype=torch.float64)


def retype_ids(tensors: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"].int()


def infinite(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"][3, 3] = float("-inf")


def half_nan(tensors: dict[str, Any]) -> None:
    tensors["norm.weight"] = torch.full((16,), float("nan"), dtype=torch.float16)


def beyond(tensors: dict[str, Any]) -> None:
    tensors["d2t"][-1] = 64 - 19


def negative(tensors: dict[str, Any]) -> None:
    tensors["d2t"][0] = -1


def repeated(tensors: dict[str, Any]) -> None:
    tensors["d2t"][5] = tensors["d2t"][4] - 1


def unmarked(tensors: dict[str, Any]) -> None:
    tensors["t2d"][3] = False


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop, r"lacks \['midlayer\.hidden_norm\.weight'\]"),
        (add, r"unknown tensors \['fc\.bias'\]"),
        (embed, r"target's embedding is shared"),
        (reshape, r"norm\.weight has shape \[17\]"),
        (retype, r"norm\.weight is F64"),
        (retype_ids, r"d2t is I32"),
        (infinite, r"lm_head\.weight has 1 infinite or NaN"),
        (half_nan, r"norm\.weight has 16 infinite or NaN"),
        (beyond, r"d2t maps 19 to 64"),
        (negative, r"d2t maps 0 to -1"),
        (repeated, r"d2t maps 5 to 12, after 12"),
        (unmarked, r"t2d marks 19 ids"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_at_fault_are_named(
    make_checkpoint: Make, fault: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = make_checkpoint()
    rewrite(folder, fault)
    if fault is not retype_ids:
        d2t = load_file(folder / "model.safetensors")["d2t"].numpy().tobytes()
        relisted(folder, d2t_sha256=hashlib.sha256(d2t).hexdigest())
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(folder)


def test_another_vocabulary_than_the_manifest_s_is_refused(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    relisted(folder, d2t_sha256="0" * 64)
    with pytest.raises(CheckpointError, match="d2t has sha256"):
        verify_checkpoint(folder)


def test_a_drafter_of_another_width_must_bring_its_embedding(make_checkpoint: Make) -> None:
    folder = make_checkpoint(hidden_size=8)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")

    def without(tensors: dict[str, Any]) -> None:
        del tensors["embed_tokens.weight"]

    rewrite(folder, without)
    with pytest.raises(CheckpointError, match=r"lacks \['embed_tokens\.weight'\]"):
        verify_checkpoint(folder)


# --- published checkpoints


def published(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    (folder / "README.md").write_text("someone's EAGLE 3 drafter")
    return folder


def test_a_published_checkpoint_without_manifest_loads(make_checkpoint: Make) -> None:
    folder = published(make_checkpoint(fc_norm=False, norm_output=False))
    rewrite(folder, embed, relist=False)
    config, tensors, manifest = load_checkpoint(folder)
    assert manifest is None
    assert not config.norm_output
    assert set(tensors) == set(expected_tensors(config))


def test_a_published_checkpoint_over_the_whole_vocabulary_needs_no_maps(make_checkpoint: Make) -> None:
    folder = published(make_checkpoint(draft_vocab_size=21, vocab_size=63))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"vocab_size": 21}))

    def without(tensors: dict[str, Any]) -> None:
        del tensors["d2t"], tensors["t2d"]

    rewrite(folder, without, relist=False)
    assert "d2t" not in load_checkpoint(folder)[1]


def test_a_published_checkpoint_is_checked_too(make_checkpoint: Make) -> None:
    folder = published(make_checkpoint())
    rewrite(folder, infinite, relist=False)
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        load_checkpoint(folder)


def test_a_published_pickle_is_refused(make_checkpoint: Make) -> None:
    folder = published(make_checkpoint())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="can run code"):
        load_checkpoint(folder)


def test_a_manifest_survives_its_json(make_checkpoint: Make) -> None:
    manifest = read_manifest(make_checkpoint(settings={"steps": 3, "names": ["a"]}))
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
