"""Where a replica's drafter comes from, and which ones its engine can take."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from eaglenest.drafters.checkpoint import Manifest, read_manifest, verify_checkpoint
from eaglenest.errors import CheckpointError, EagleNestError, RegistryError
from eaglenest.registry import DrafterVersion, Registry


@dataclass(frozen=True)
class Contract:
    """What a running engine fixes of its drafters: they may be swapped only if they agree in this."""

    target_fingerprint: str
    signature: str
    d2t_sha256: str

    @classmethod
    def of(cls, manifest: Manifest) -> Contract:
        """The contract that an engine started with this drafter is bound to."""
        return cls(manifest.target_fingerprint, manifest.architecture_signature, manifest.d2t_sha256)

    def check(self, folder: Path) -> Manifest:
        """Verify a checkpoint to the last tensor, and that this engine can take it.

        Raises:
            CheckpointError: it is corrupt, or of another target, architecture or draft vocabulary.
        """
        manifest = verify_checkpoint(folder, target_fingerprint=self.target_fingerprint, signature=self.signature)
        if manifest.d2t_sha256 != self.d2t_sha256:
            raise CheckpointError(
                f"{folder} has another draft vocabulary (d2t {manifest.d2t_sha256[:16]})",
                f"d2t {self.d2t_sha256[:16]}, as the running drafter has",
                "distill further from the running version, which keeps its vocabulary, or restart the replicas",
            )
        return manifest


@dataclass(frozen=True)
class Start:
    """What a replica starts with.

    Attributes:
        folder: the verified checkpoint; version: its number, None when it is not the registry's.
        desired: the version the alias names, None when the registry was not reached.
        note: why it is not the desired one.
    """

    folder: Path
    version: int | None = None
    desired: int | None = None
    note: str | None = None


class DrafterSource:
    """The registered model a replica serves from, and this machine's copies of its versions.

    Args:
        registry: the registered model.
        alias: names the version to serve.
        root: folder of all downloads.
        target_fingerprint: of the target that is served.
    """

    def __init__(self, registry: Registry, alias: str, root: Path, target_fingerprint: str) -> None:
        self.registry, self.alias, self.root = registry, alias, root
        self.target_fingerprint = target_fingerprint
        self._memory = root / registry.model_name / "served.json"

    def desired(self) -> DrafterVersion:
        """The version the alias names now.

        Raises:
            RegistryError: the registry is unreachable, or there is no such alias.
        """
        return self.registry.resolve(self.alias)

    def fetch(self, version: DrafterVersion) -> Path:
        """The folder of a version on this machine.

        Raises:
            RegistryError, CheckpointError: see `Registry.download`.
        """
        return self.registry.download(version, self.root)

    def at_start(self) -> Start:
        """What to start the engine with: the version the alias names, else the last one this machine served.

        Raises:
            EagleNestError: why the alias's version cannot be served, when there is no other.
        """
        desired: int | None = None
        try:
            version = self.desired()
            desired = version.version
            folder = self.fetch(version)
            verify_checkpoint(folder, target_fingerprint=self.target_fingerprint)
            return Start(folder, desired, desired)
        except (RegistryError, CheckpointError) as error:
            last = self._last_served()
            if last is None:
                raise
            note = f"started with version {last.version}, the last one served here: {error}"
            return Start(last.folder, last.version, desired, note)

    def remember(self, version: int, folder: Path) -> None:
        """Note what is in service, for a start without the registry."""
        part = self._memory.with_name(f".served.{uuid.uuid4().hex[:8]}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"version": version, "folder": folder.name}))
        os.replace(part, self._memory)

    def _last_served(self) -> Start | None:
        try:
            noted = json.loads(self._memory.read_text())
            folder = self._memory.parent / str(noted["folder"])
            verify_checkpoint(folder, target_fingerprint=self.target_fingerprint)
            return Start(folder, int(noted["version"]))
        except (OSError, ValueError, KeyError, EagleNestError):
            return None


def from_folder(folder: Path, target_fingerprint: str) -> Start:
    """A drafter given by its path: ours is verified, a published one without a manifest is left to vLLM.

    Raises:
        CheckpointError: there is none, or it is corrupt, or of another target.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} holds no drafter", "a checkpoint folder", "check the argument `drafter`")
    if (folder / "manifest.json").exists():
        verify_checkpoint(folder, target_fingerprint=target_fingerprint)
    return Start(folder)


def contract_of(start: Start) -> Contract:
    """What the engine started with it is bound to."""
    return Contract.of(read_manifest(start.folder))
