"""What an engine's process is started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eaglenest.engine import environment
from eaglenest.engine.environment import engine_env, prepare_environment
from eaglenest.settings import Settings


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found = [tmp_path / environment.TCMALLOC, tmp_path / environment.IOMP]
    monkeypatch.setattr(environment, "find_tcmalloc", lambda: found[0])
    monkeypatch.setattr(environment, "find_iomp", lambda: found[1])
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return found


def test_a_cpu_engine_gets_its_libraries_and_cache(libraries: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "on_cpu", lambda: True)
    env = engine_env(Settings(kv_cache_gib=3))
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["LD_PRELOAD"] == ":".join(map(str, libraries))
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == "1"


def test_a_gpu_engine_gets_nothing_of_a_cpus(libraries: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "on_cpu", lambda: False)
    assert not [name for name in engine_env(Settings()) if "CPU" in name or name == "LD_PRELOAD"]


def test_a_hub_target_may_be_fetched(libraries: list[Path]) -> None:
    assert "HF_HUB_OFFLINE" not in engine_env(Settings(), local_target=False)


def test_what_is_preloaded_already_stays_and_comes_once(libraries: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "on_cpu", lambda: True)
    monkeypatch.setenv("LD_PRELOAD", f"/opt/mine.so:{libraries[1]}")
    assert engine_env(Settings())["LD_PRELOAD"].split(":") == ["/opt/mine.so", str(libraries[1]), str(libraries[0])]


def test_what_the_user_has_set_is_not_overridden(libraries: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "on_cpu", lambda: True)
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "7"})
    prepare_environment(Settings(kv_cache_gib=3))
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert os.environ["LD_PRELOAD"] == ":".join(map(str, libraries))


def niceness_after(setup: str, call: str) -> str:
    """What a process of two threads prints: the call's answer, and the niceness of its threads."""
    code = (
        "import os, threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start();"
        f"from eaglenest.engine import environment; {setup};"
        f"print({call}, {{os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')}})"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_niceness_of_rays_workers_is_undone_where_that_is_allowed() -> None:
    printed = niceness_after("os.nice(15)", "environment.take_normal_priority()")
    assert printed in ("True {0}", "False {0, 15}", "False {15}")
    if os.geteuid() == 0:
        assert printed == "True {0}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take a priority above the normal one")
def test_a_priority_above_the_normal_one_is_left_alone() -> None:
    assert (
        niceness_after(
            "[os.setpriority(os.PRIO_PROCESS, int(t), -3) for t in os.listdir('/proc/self/task')]",
            "environment.take_normal_priority()",
        )
        == "True {-3}"
    )
