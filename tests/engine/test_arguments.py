"""From an EngineSpec to vLLM's arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from eaglenest.engine import arguments
from eaglenest.engine.arguments import EXTENSION, IN_ENGINE, EngineSpec, engine_arguments
from eaglenest.errors import EngineError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name, config in {
        "target": {"hidden_size": 576, "vocab_size": 49152},
        "drafter": {"hidden_size": 288, "target_hidden_size": 576, "vocab_size": 49152},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path / "target", tmp_path / "drafter"


def test_a_drafter_brings_speculation_and_the_swap(folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    made = engine_arguments(EngineSpec(target=target, drafter=drafter, num_speculative_tokens=5))
    assert made["speculative_config"] == {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
    }
    assert made["worker_extension_cls"] == EXTENSION
    assert made["per_request_spec_decode_metrics"] == "summary"
    assert made["trust_remote_code"] is False
    assert made["load_format"] == "safetensors"


def test_plain_decoding_has_neither(folders: tuple[Path, Path]) -> None:
    assert not {"speculative_config", "worker_extension_cls"} & engine_arguments(EngineSpec(target=folders[0])).keys()


@pytest.mark.parametrize(("cpu", "ranks", "in_engine"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_a_cpu_engine_of_one_rank_computes_in_its_own_process(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, cpu: bool, ranks: int, in_engine: bool
) -> None:
    monkeypatch.setattr(arguments, "on_cpu", lambda: cpu)
    made = engine_arguments(EngineSpec(target=folders[0], tensor_parallel_size=ranks))
    assert made.get("distributed_executor_backend") == (IN_ENGINE if in_engine else None)


@pytest.mark.parametrize(("cpu", "dtype", "eager"), [(True, "float32", True), (False, "bfloat16", False)])
def test_dtype_and_mode_follow_the_device(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, cpu: bool, dtype: str, eager: bool
) -> None:
    monkeypatch.setattr(arguments, "on_cpu", lambda: cpu)
    made = engine_arguments(EngineSpec(target=folders[0]))
    assert (made["dtype"], made["enforce_eager"]) == (dtype, eager)
    assert ("gpu_memory_utilization" in made) is not cpu
    assert engine_arguments(EngineSpec(target=folders[0], dtype="float16"))["dtype"] == "float16"


def test_a_missing_folder_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere"):
        engine_arguments(EngineSpec(target=folders[0], drafter=tmp_path / "nowhere"))


def test_a_drafter_of_another_target_is_refused(folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    (drafter / "config.json").write_text(json.dumps({"hidden_size": 960, "vocab_size": 49152}))
    with pytest.raises(EngineError, match="hidden size 960"):
        engine_arguments(EngineSpec(target=target, drafter=drafter))


def test_unknown_keys_are_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValidationError, match="max_len"):
        EngineSpec.model_validate({"target": folders[0], "max_len": 5})
