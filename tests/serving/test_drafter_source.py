"""Which drafter a replica starts with, and which ones its engine can take. Real checkpoints, tiny."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eaglenest.drafters.checkpoint import read_manifest
from eaglenest.errors import CheckpointError, RegistryError
from eaglenest.registry import DrafterVersion
from eaglenest.serving.drafter_source import Contract, DrafterSource, from_folder

FINGERPRINT = "f" * 64
Make = Callable[..., Path]


@pytest.fixture
def contract(make_checkpoint: Make) -> Contract:
    return Contract.of(read_manifest(make_checkpoint("running")))


def test_another_drafter_of_the_same_kind_is_accepted(contract: Contract, make_checkpoint: Make) -> None:
    assert contract.check(make_checkpoint("next", seed=1)).architecture_signature == contract.signature


def test_another_target_architecture_or_vocabulary_is_refused(contract: Contract, make_checkpoint: Make) -> None:
    with pytest.raises(CheckpointError, match="target fingerprint"):
        contract.check(make_checkpoint("alien", target_fingerprint="e" * 64))
    with pytest.raises(CheckpointError, match="norm_output False"):  # the same names and shapes
        contract.check(make_checkpoint("older", norm_output=False))
    with pytest.raises(CheckpointError, match="architecture"):
        contract.check(make_checkpoint("smaller", draft_vocab_size=10))
    other = Contract(contract.target_fingerprint, contract.signature, "0" * 64)
    with pytest.raises(CheckpointError, match="draft vocabulary"):
        other.check(make_checkpoint("words"))


def test_a_damaged_checkpoint_is_refused(contract: Contract, make_checkpoint: Make) -> None:
    cut = make_checkpoint("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        contract.check(cut.parent)
    altered = make_checkpoint("altered", seed=2) / "model.safetensors"
    data = bytearray(altered.read_bytes())
    data[-1] ^= 1
    altered.write_bytes(data)
    with pytest.raises(CheckpointError, match="sha256"):
        contract.check(altered.parent)


class OneVersion:
    """A registry with one version, or none to be reached."""

    model_name = "m"

    def __init__(self, folder: Path | None, number: int = 5) -> None:
        self.folder, self.number = folder, number

    def resolve(self, ref: str) -> DrafterVersion:
        if self.folder is None:
            raise RegistryError("no MLflow server answers")
        return DrafterVersion.model_construct(version=self.number)

    def download(self, version: DrafterVersion, root: Path) -> Path:
        assert self.folder is not None
        return self.folder


def source(registry: OneVersion, root: Path) -> DrafterSource:
    return DrafterSource(registry, "champion", root, FINGERPRINT)  # type: ignore[arg-type]


def test_a_replica_starts_with_what_the_alias_names(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint()
    start = source(OneVersion(folder), tmp_path / "cache").at_start()
    assert (start.folder, start.version, start.desired, start.note) == (folder, 5, 5, None)


def test_without_the_registry_it_starts_with_the_last_one_served_here(make_checkpoint: Make, tmp_path: Path) -> None:
    cache = tmp_path / "m"
    served = make_checkpoint("m/4-abc")
    with pytest.raises(RegistryError):
        source(OneVersion(None), cache.parent).at_start()
    source(OneVersion(None), cache.parent).remember(4, served)
    start = source(OneVersion(None), cache.parent).at_start()
    assert (start.folder, start.version, start.desired) == (served, 4, None)
    assert "no MLflow server answers" in (start.note or "")


def test_a_damaged_champion_is_passed_over_for_the_last_one_served(make_checkpoint: Make, tmp_path: Path) -> None:
    bad = make_checkpoint("bad")
    (bad / "config.json").write_text("{}")
    served = make_checkpoint("m/4-abc")
    here = source(OneVersion(bad), tmp_path)
    here.remember(4, served)
    start = here.at_start()
    assert (start.version, start.desired) == (4, 5)


def test_a_damaged_memory_is_no_memory(make_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "served.json").write_text(json.dumps({"version": 4, "folder": "gone"}))
    with pytest.raises(RegistryError):
        source(OneVersion(None), tmp_path).at_start()


def test_a_folder_is_checked_for_the_target(make_checkpoint: Make, tmp_path: Path) -> None:
    assert from_folder(make_checkpoint("mine"), FINGERPRINT).version is None
    with pytest.raises(CheckpointError, match="fingerprint"):
        from_folder(make_checkpoint("theirs", target_fingerprint="e" * 64), FINGERPRINT)
    with pytest.raises(CheckpointError, match="no drafter"):
        from_folder(tmp_path / "nowhere", FINGERPRINT)
