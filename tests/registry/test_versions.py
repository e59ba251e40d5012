"""Versions on a real MLflow server: registered, resolved, downloaded, promoted, rolled back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eaglenest.drafters.checkpoint import read_manifest, verify_checkpoint
from eaglenest.errors import BadInput, CheckpointError, RegistryError
from eaglenest.registry import DrafterVersion, Registry, TrackedRun
from eaglenest.registry.flavor import load_model

pytestmark = pytest.mark.slow

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def run_id(mlflow_server: Any) -> str:
    with TrackedRun(mlflow_server.uri, "distill", run_name="raise-1", params={"lr": 0.001}) as run:
        return run.run_id


@pytest.fixture
def registry(mlflow_server: Any, request: pytest.FixtureRequest) -> Registry:
    """A registered model of this test's own."""
    return Registry(mlflow_server.uri, f"drafter-{abs(hash(request.node.nodeid))}")


@pytest.fixture
def register(registry: Registry, run_id: str, make_checkpoint: Make) -> Callable[..., DrafterVersion]:
    def add(seed: int = 0, figures: dict[str, Any] | None = None, **more: Any) -> DrafterVersion:
        return registry.register(make_checkpoint(f"v{seed}", seed=seed), run_id=run_id, figures=figures or {}, **more)

    return add


def stored_weights(server: Any, version: DrafterVersion) -> Path:
    (path,) = server.artifacts.rglob(f"{version.model_id}/artifacts/checkpoint/model.safetensors")
    return path


# --- registering


def test_a_version_carries_its_provenance_figures_and_run(
    mlflow_server: Any, registry: Registry, run_id: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    folder = make_checkpoint(figures={"train_tokens": 1000, "accept_len": 9.0})
    plot = tmp_path / "loss.svg"
    plot.write_text("<svg/>")
    figures = {"accept_len": 1.5234567, "accept_len_by_category": {"chat|qa": 1.25}, "accept_by_position": [0.5, 0.25]}
    version = registry.register(folder, run_id=run_id, figures=figures, plots=[plot], extra_tags={"job": "j1"})
    manifest = read_manifest(folder)

    assert (version.version, version.aliases, version.run_id, version.status) == (1, ("challenger",), run_id, "READY")
    assert version.figures == figures | {"train_tokens": 1000}
    expected = {
        "target": "tiny-target",
        "target_fingerprint": "f" * 64,
        "drafter": "EAGLE 3.1",
        "drafter_sha256": manifest.drafter_sha256,
        "architecture": manifest.architecture_signature,
        "prompts_digest": "a" * 64,
        "accept_len": "1.523",
        "train_tokens": "1000",
        "gate": "not run",
        "job": "j1",
    }
    assert expected.items() <= version.tags.items()
    assert "| accept_len | 1.523 |" in version.description
    assert "| chat\\|qa | 1.25 |" in version.description
    assert f"{mlflow_server.uri}/#/experiments/" in version.description
    assert f"/runs/{run_id}" in version.description
    assert "`eaglenest promote 1`" in version.description
    assert "`eaglenest rollback`" in version.description

    import mlflow

    client = mlflow.MlflowClient(mlflow_server.uri)
    assert [a.path for a in client.list_artifacts(run_id, "plots")] == ["plots/loss.svg"]
    logged = client.get_logged_model(version.model_id)
    assert (logged.status, logged.source_run_id, logged.params["lr"]) == ("READY", run_id, "0.001")
    assert {m.key: m.value for m in logged.metrics}["accept_len"] == 1.5234567
    assert [o.model_id for o in client.get_run(run_id).outputs.model_outputs] == [version.model_id]


def test_a_second_version_names_its_parent_and_takes_the_alias(
    registry: Registry, register: Callable[..., DrafterVersion]
) -> None:
    register(0)
    second = register(1, parent_version=1)
    assert second.tags["parent_version"] == "1"
    assert "distilled further from version 1" in second.description
    listed = registry.versions()
    assert [(v.version, v.aliases) for v in listed] == [(2, ("challenger",)), (1, ())]
    assert listed[0].figures == second.figures


def test_a_parent_that_is_not_there_is_refused(registry: Registry, register: Callable[..., DrafterVersion]) -> None:
    with pytest.raises(RegistryError, match="no version 41 to be the parent"):
        register(0, parent_version=41)
    assert registry.versions() == []


def test_the_wrong_folder_registers_nothing(
    registry: Registry, run_id: str, tmp_path: Path, make_checkpoint: Make
) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        registry.register(tmp_path, run_id=run_id, figures={})
    folder = make_checkpoint()
    os.truncate(folder / "model.safetensors", 99)
    with pytest.raises(CheckpointError, match="truncated"):
        registry.register(folder, run_id=run_id, figures={})
    assert registry.versions() == []


def test_a_run_that_is_not_there_registers_nothing(registry: Registry, make_checkpoint: Make) -> None:
    with pytest.raises(RegistryError, match="has no run 0123"):
        registry.register(make_checkpoint(), run_id="0123" * 8, figures={})
    assert registry.versions() == []


def test_figures_cannot_pose_as_provenance(registry: Registry, register: Callable[..., DrafterVersion]) -> None:
    with pytest.raises(BadInput, match=r"\['target'\] have the names of provenance tags"):
        register(0, figures={"target": "another"})
    register(1)
    with pytest.raises(BadInput, match="drafter_sha256"):
        registry.set_figures(1, {"drafter_sha256": "0"})


def test_later_figures_are_merged_and_shown(registry: Registry, register: Callable[..., DrafterVersion]) -> None:
    register(0, figures={"accept_len": 1.25, "loss": 3.5})
    registry.set_figures("challenger", {"accept_len": 1.5, "speedup": 1.2})
    version = registry.set_figures(1, {"gate": "passed", "speedup": 1.3})
    assert version.figures == {"accept_len": 1.5, "loss": 3.5, "speedup": 1.3, "gate": "passed"}
    assert (version.tags["accept_len"], version.tags["speedup"], version.tags["gate"]) == ("1.5", "1.3", "passed")
    assert version.tags["target"] == "tiny-target"
    assert "| speedup | 1.3 |" in version.description
    assert "- Gate: passed" in version.description


# --- resolving


def test_versions_and_aliases_that_are_not_there_are_named(
    registry: Registry, register: Callable[..., DrafterVersion]
) -> None:
    with pytest.raises(RegistryError, match=f"no alias champion of {registry.model_name}"):
        registry.resolve("champion")
    assert registry.aliases() == {}
    register(0)
    assert registry.resolve("challenger").version == registry.resolve(1).version == registry.resolve("1").version == 1
    with pytest.raises(RegistryError, match=f"no alias champion of {registry.model_name}"):
        registry.resolve("champion")
    for ref in (7, "7"):
        with pytest.raises(RegistryError, match=f"no version 7 of {registry.model_name}"):
            registry.resolve(ref)
    with pytest.raises(RegistryError, match="no version 7"):
        registry.promote(7)


# --- downloading


def test_a_download_is_the_registered_checkpoint_and_is_reused(
    registry: Registry, register: Callable[..., DrafterVersion], tmp_path: Path
) -> None:
    version = register(5)
    folder = registry.download("challenger", tmp_path / "cache")
    assert verify_checkpoint(folder) == verify_checkpoint(tmp_path / "v5")
    inode = (folder / "model.safetensors").stat().st_ino
    assert registry.download(version, tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_ino == inode
    assert os.listdir(folder.parent) == [folder.name]


def test_a_damaged_download_is_fetched_again(
    registry: Registry, register: Callable[..., DrafterVersion], tmp_path: Path
) -> None:
    version = register(0)
    folder = registry.download(version, tmp_path / "cache")
    os.truncate(folder / "model.safetensors", 50)
    assert registry.download(version, tmp_path / "cache") == folder
    verify_checkpoint(folder)


def test_downloads_at_the_same_time_share_one_folder(
    registry: Registry, register: Callable[..., DrafterVersion], tmp_path: Path
) -> None:
    version = register(0)
    with ThreadPoolExecutor(4) as pool:
        folders = {f.result() for f in [pool.submit(registry.download, version, tmp_path / "c") for _ in range(4)]}
    (folder,) = folders
    verify_checkpoint(folder)
    assert os.listdir(folder.parent) == [folder.name]


def test_bytes_changed_in_the_artifact_store_are_refused(
    mlflow_server: Any, registry: Registry, register: Callable[..., DrafterVersion], tmp_path: Path
) -> None:
    version = register(0)
    stored = stored_weights(mlflow_server, version)
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has sha256"):
        registry.download(version, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / registry.model_name) == []


def test_a_checkpoint_exchanged_for_another_sound_one_is_refused(
    mlflow_server: Any,
    registry: Registry,
    register: Callable[..., DrafterVersion],
    make_checkpoint: Make,
    tmp_path: Path,
) -> None:
    version = register(0)
    stored = stored_weights(mlflow_server, version).parent
    for path in make_checkpoint("forged", seed=9).iterdir():
        (stored / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="as registered"):
        registry.download(version, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / registry.model_name) == []


@pytest.mark.parametrize("fault", ["missing", "extra"])
def test_a_file_lost_or_added_in_the_artifact_store_is_refused(
    mlflow_server: Any, registry: Registry, register: Callable[..., DrafterVersion], tmp_path: Path, fault: str
) -> None:
    version = register(0)
    stored = stored_weights(mlflow_server, version)
    if fault == "missing":
        stored.unlink()
    else:
        (stored.parent / "extra.pkl").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no model.safetensors" if fault == "missing" else "can run code"):
        registry.download(version, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / registry.model_name) == []


def test_a_version_that_another_tool_registered_is_refused(
    mlflow_server: Any, registry: Registry, register: Callable[..., DrafterVersion], tmp_path: Path
) -> None:
    import mlflow

    first = register(0)
    client = mlflow.MlflowClient(mlflow_server.uri)
    client.create_model_version(registry.model_name, f"models:/{first.model_id}", model_id=first.model_id)
    with pytest.raises(RegistryError, match="version 2 has no tag manifest_sha256"):
        registry.download(2, tmp_path / "cache")


def test_the_flavour_is_read_back_by_mlflow(
    mlflow_server: Any, register: Callable[..., DrafterVersion], tmp_path: Path, make_checkpoint: Make
) -> None:
    version = register(0)
    folder = load_model(str(stored_weights(mlflow_server, version).parent.parent))
    assert read_manifest(folder) == read_manifest(tmp_path / "v0")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["MLmodel", "checkpoint"]


# --- promoting


def test_promotions_and_rollbacks_move_both_aliases(
    registry: Registry, register: Callable[..., DrafterVersion]
) -> None:
    for seed in range(3):
        register(seed, alias=None)
    assert registry.promote(1) == (None, 1)
    assert registry.aliases() == {"champion": 1}
    with pytest.raises(RegistryError, match="no champion before version 1"):
        registry.rollback()
    assert registry.promote(2) == (1, 2)
    assert registry.promote(2) == (2, 2)
    assert registry.aliases() == {"champion": 2, "previous_champion": 1}
    assert registry.promote("3") == (2, 3)
    assert registry.rollback() == (3, 2)
    assert registry.aliases() == {"champion": 2, "previous_champion": 3}
    assert registry.resolve("champion").version == 2


def test_a_promotion_is_undone_unless_someone_promoted_since(
    registry: Registry, register: Callable[..., DrafterVersion]
) -> None:
    for seed in range(3):
        register(seed, alias=None)
    registry.promote(1)
    assert registry.restore({}, replacing=1)
    assert registry.aliases() == {}
    registry.promote(1)
    registry.promote(2)
    before = registry.aliases()
    registry.promote(3)
    assert registry.restore(before, replacing=3)
    assert registry.aliases() == before == {"champion": 2, "previous_champion": 1}
    registry.promote(3)
    assert not registry.restore(before, replacing=1)
    assert registry.aliases() == {"champion": 3, "previous_champion": 2}


def test_concurrent_promotions_leave_two_different_champions(
    registry: Registry, register: Callable[..., DrafterVersion]
) -> None:
    for seed in range(4):
        register(seed, alias=None)
    registry.promote(1)
    start = threading.Barrier(3)

    def promote(version: int) -> tuple[int | None, int]:
        start.wait()
        return registry.promote(version)

    with ThreadPoolExecutor(3) as pool:
        moves = [future.result() for future in [pool.submit(promote, v) for v in (2, 3, 4)]]
    aliases = registry.aliases()
    assert sorted(new for _, new in moves) == [2, 3, 4]
    assert aliases["champion"] in (2, 3, 4)
    assert aliases["previous_champion"] in {old for old, _ in moves}
    assert aliases["previous_champion"] != aliases["champion"]


# --- runs


def test_a_run_ends_as_its_body_did(mlflow_server: Any) -> None:
    import mlflow

    client = mlflow.MlflowClient(mlflow_server.uri)
    endings: dict[str, type[BaseException] | None] = {
        "FINISHED": None,
        "FAILED": ValueError,
        "KILLED": KeyboardInterrupt,
    }
    for status, error in endings.items():
        run = TrackedRun(mlflow_server.uri, "endings", run_name=status)
        try:
            with run:
                run.metrics({"loss": 2.0}, step=3)
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            assert error is not None
        found = client.get_run(run.run_id)
        assert (found.info.status, found.data.metrics) == (status, {"loss": 2.0})
        assert run.url.endswith(f"/runs/{run.run_id}")


def test_a_run_names_its_data_and_keeps_files(mlflow_server: Any, tmp_path: Path) -> None:
    import mlflow

    (tmp_path / "report.json").write_text("{}")
    with TrackedRun(mlflow_server.uri, "data", run_name="r", params={"k": 3}, tags={"job": "j"}) as run:
        run.log_data("prompts", "d" * 64, "prompts.jsonl", context="training", profile=json.dumps({"prompts": 12}))
        run.log_file(tmp_path / "report.json")
    client = mlflow.MlflowClient(mlflow_server.uri)
    found = client.get_run(run.run_id)
    (data,) = found.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("prompts", "d" * 36, "training")
    assert (found.data.params, found.data.tags["job"]) == ({"k": "3"}, "j")
    assert [a.path for a in client.list_artifacts(run.run_id)] == ["report.json"]


def test_one_operation_costs_little(registry: Registry, register: Callable[..., DrafterVersion]) -> None:
    """A replica resolves the champion at every poll: that must stay cheap."""
    register(0, alias="champion")
    started = time.monotonic()
    for _ in range(10):
        registry.resolve("champion")
    assert (time.monotonic() - started) / 10 < 0.5
