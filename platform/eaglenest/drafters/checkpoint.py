"""A drafter on disk: config.json, model.safetensors, manifest.json. Written whole or not at all.

Nothing here unpickles, and nothing but `save_checkpoint` and `load_checkpoint` needs torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import uuid
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eaglenest import __version__
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.weights import SafetensorsFile, check_structure, check_values, draft_ids_digest
from eaglenest.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "manifest.json"
LISTED = (CONFIG, WEIGHTS)
FORMAT = 1
MAX_BYTES = 8 << 30
_MAX_JSON_BYTES = 1 << 20
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib"}

SaveDtype = Literal["bfloat16", "float16", "float32"]


class FileEntry(BaseModel):
    """Digest and size of one file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(BaseModel):
    """What a checkpoint says of itself: its files, what it imitates, what it came from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    files: dict[str, FileEntry]
    target_name: str
    target_fingerprint: str
    architecture_signature: str = Field(description="DrafterConfig.signature(): norm_output is seen only here")
    d2t_sha256: str = Field(description="of the draft vocabulary's offsets, int64 little-endian")
    prompts_digest: str
    parent_version: int | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    figures: dict[str, Any] = Field(default_factory=dict)
    created_at: str = Field(description="ISO 8601, UTC")
    eaglenest_version: str

    @property
    def drafter_sha256(self) -> str:
        """Digest of the weights file."""
        return self.files[WEIGHTS].sha256


def save_checkpoint(
    dest: Path,
    *,
    config: DrafterConfig,
    state: Mapping[str, Tensor],
    target_name: str,
    target_fingerprint: str,
    prompts_digest: str,
    parent_version: int | None = None,
    settings: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
    dtype: SaveDtype = "bfloat16",
) -> Manifest:
    """Write a checkpoint folder, verify it, and only then give it its name.

    Args:
        dest: the folder to make; it must not exist.
        state: every tensor of `weights.expected_tensors(config)`, on any device; floats are saved as `dtype`,
            `d2t` as int64, `t2d` as bool.
        dtype: of the saved floats.

    Raises:
        CheckpointError: `dest` exists, the disk is full, or the state is not a sound drafter of this config. Nothing is
            left behind.
    """
    if dest.exists():
        raise CheckpointError(f"{dest} exists already", "a new folder", "choose another name or remove it")
    tensors = _on_cpu(state, dtype)
    need = sum(t.numel() * t.element_size() for t in tensors.values()) + _MAX_JSON_BYTES
    part = dest.parent / f".{dest.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir(parents=True)
        _refuse_without_room(part, need)
        _write_weights(part / WEIGHTS, tensors)
        _write_json(part / CONFIG, config.to_hf())
        with SafetensorsFile(part / WEIGHTS) as weights:
            check_structure(weights, config)
            d2t_sha256 = draft_ids_digest(weights)
        manifest = Manifest(
            files={
                name: FileEntry(sha256=sha256_of(part / name), bytes=(part / name).stat().st_size) for name in LISTED
            },
            target_name=target_name,
            target_fingerprint=target_fingerprint,
            architecture_signature=config.signature(),
            d2t_sha256=d2t_sha256,
            prompts_digest=prompts_digest,
            parent_version=parent_version,
            settings=dict(settings or {}),
            figures=dict(figures or {}),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            eaglenest_version=__version__,
        )
        _write_json(part / MANIFEST, manifest.model_dump(mode="json"))
        verify_checkpoint(part)
        _sync_folder(part)
        os.rename(part, dest)
        _sync_folder(dest.parent)
    except OSError as error:
        raise _disk_error(dest, need, str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and validate `manifest.json`, without believing it: see `verify_checkpoint`.

    Raises:
        CheckpointError: it is missing, not JSON, of an unknown format, or lists a name that is no plain file of ours.
    """
    raw = _read_json(folder / MANIFEST)
    if raw.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / MANIFEST} has format {raw.get('format')!r}",
            f"format {FORMAT}",
            "use the EagleNest version that wrote it, or save the drafter again",
        )
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{folder / MANIFEST}: {where}: {first['msg']}", "a manifest of format 1") from error
    for name in manifest.files:
        if name != PurePosixPath(name).name or "\\" in name or name in {".", ".."}:
            raise CheckpointError(f"{folder / MANIFEST} lists {name!r}", "plain file names, without a path")
    if set(manifest.files) != set(LISTED):
        raise CheckpointError(f"{folder / MANIFEST} lists {sorted(manifest.files)}", f"exactly {sorted(LISTED)}")
    return manifest


def verify_checkpoint(
    folder: Path, *, target_fingerprint: str | None = None, signature: str | None = None, max_bytes: int = MAX_BYTES
) -> Manifest:
    """Check all there is to check of a checkpoint folder, the cheap things first.

    Args:
        target_fingerprint: the target it must have been distilled from.
        signature: the architecture (`DrafterConfig.signature()`) it must have.
        max_bytes: the largest weights file accepted.

    Raises:
        CheckpointError: with what is wrong.
    """
    _check_listing(folder)
    manifest = read_manifest(folder)
    config = DrafterConfig.from_hf(_read_json(folder / CONFIG))
    if target_fingerprint is not None and manifest.target_fingerprint != target_fingerprint:
        raise CheckpointError(
            f"{folder} was distilled from {manifest.target_name} with fingerprint {manifest.target_fingerprint}",
            f"target fingerprint {target_fingerprint}",
            "use a drafter of this very target, or distill one",
        )
    if manifest.architecture_signature != config.signature():
        raise CheckpointError(
            f"{folder}: config.json has signature {config.signature()}",
            f"{manifest.architecture_signature}, as the manifest says",
            "config.json was changed after saving: take the checkpoint from its origin again",
        )
    if signature is not None and config.signature() != signature:
        raise CheckpointError(
            f"{folder} has architecture {config.signature()} "
            f"(norm_output {config.norm_output}, fc_norm {config.fc_norm})",
            f"architecture {signature}",
            "another architecture needs a new engine: it cannot be swapped in",
        )
    _check_files(folder, manifest, max_bytes)
    with SafetensorsFile(folder / WEIGHTS) as weights:
        check_structure(weights, config)
        if draft_ids_digest(weights) != manifest.d2t_sha256:
            raise CheckpointError(f"{folder}: d2t has sha256 {draft_ids_digest(weights)}", f"{manifest.d2t_sha256}")
        check_values(weights, config)
    return manifest


def load_checkpoint(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor], Manifest | None]:
    """Verify and load a checkpoint, ours or a published EAGLE 3 one that has no manifest.

    Returns:
        the config, the tensors on the CPU in the dtypes of the file, and the manifest (None for a published one, of
        which an embedding that is the target's is left out).

    Raises:
        CheckpointError: see `verify_checkpoint`; without a manifest all but the digests is checked.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    manifest = None
    if (folder / MANIFEST).exists():
        manifest = verify_checkpoint(folder)
    config = DrafterConfig.from_hf(_read_json(folder / CONFIG))
    if manifest is None:
        if not (folder / WEIGHTS).exists():
            _refuse_pickles(folder, os.listdir(folder))
        _plain_file(folder / WEIGHTS)
        with SafetensorsFile(folder / WEIGHTS) as weights:
            check_structure(weights, config, published=True)
            check_values(weights, config)
    tensors = load_file(folder / WEIGHTS)
    if config.shares_embedding:
        tensors.pop("embed_tokens.weight", None)
    return config, tensors, manifest


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_listing(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder", f"a checkpoint folder with {CONFIG}, {WEIGHTS}, {MANIFEST}")
    names = sorted(os.listdir(folder))
    _refuse_pickles(folder, names)
    for name in (MANIFEST, CONFIG, WEIGHTS):
        if name not in names:
            raise CheckpointError(f"{folder} has no {name}", f"{CONFIG}, {WEIGHTS} and {MANIFEST}")
    if extra := [name for name in names if name not in (MANIFEST, *LISTED)]:
        raise CheckpointError(f"{folder} holds {extra}", f"only {CONFIG}, {WEIGHTS} and {MANIFEST}", "remove the rest")
    for name in names:
        _plain_file(folder / name)


def _refuse_pickles(folder: Path, names: list[str]) -> None:
    for name in names:
        if Path(name).suffix in _PICKLES:
            raise CheckpointError(f"{folder} holds {name}, a format that can run code when read", "safetensors only")


def _plain_file(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
        raise CheckpointError(f"{path} is {kind}", "a regular file")


def _check_files(folder: Path, manifest: Manifest, max_bytes: int) -> None:
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{folder / name} has {size} bytes", f"at most {max_bytes}")
        if size != entry.bytes:
            verdict = "is truncated" if size < entry.bytes else "is too long"
            raise CheckpointError(f"{folder / name} {verdict}: {size} bytes", f"{entry.bytes} bytes", "copy it again")
    for name, entry in manifest.files.items():
        if (digest := sha256_of(folder / name)) != entry.sha256:
            raise CheckpointError(f"{folder / name} has sha256 {digest}", entry.sha256, "it was altered: copy it again")


def _read_json(path: Path) -> dict[str, Any]:
    _plain_file(path)
    if (size := path.stat().st_size) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes", f"at most {_MAX_JSON_BYTES}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", "a JSON object") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__}", "a JSON object")
    return raw


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _on_cpu(state: Mapping[str, Tensor], dtype: SaveDtype) -> dict[str, Tensor]:
    import torch

    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    floats = getattr(torch, dtype)
    # copied even when already right: views of one buffer share storage, which safetensors refuses
    return {
        name: tensor.detach().to("cpu", kinds.get(name, floats), copy=True).contiguous()
        for name, tensor in state.items()
    }


def _write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its form of OSError
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _refuse_without_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{free} bytes free")


def _disk_error(dest: Path, need: int, why: str) -> CheckpointError:
    free: int | str = "unknown"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(next(p for p in dest.parents if p.exists())).free
    return CheckpointError(
        f"{dest} could not be written ({why}): {need} bytes needed, {free} bytes free",
        "a writable folder with room",
        "free some space or choose another folder",
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
