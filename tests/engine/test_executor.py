"""vLLM's own choice of OpenMP threads, for an engine that computes in its own process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from eaglenest.engine.arguments import IN_ENGINE
from eaglenest.engine.environment import on_cpu
from eaglenest.engine.launch import threads_for

NAMES = ("OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME")


def config(backend: str) -> SimpleNamespace:
    """What is read of a VllmConfig."""
    parallel = SimpleNamespace(
        distributed_executor_backend=backend, local_world_size=1, data_parallel_rank_local=None, _api_process_count=1
    )
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)


@pytest.mark.skipif(not on_cpu(), reason="a GPU engine has no OpenMP threads to choose")
def test_the_threads_are_in_the_environment_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/libiomp5.so")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with threads_for(config(IN_ENGINE)):
        inside = {name: os.environ[name] for name in NAMES}
    assert 1 <= int(inside["OMP_NUM_THREADS"]) <= (os.cpu_count() or 1)
    assert "proclist=[" in inside["KMP_AFFINITY"]
    assert not set(NAMES) & os.environ.keys()


def test_workers_choose_for_themselves() -> None:
    before = dict(os.environ)
    with threads_for(config("mp")):
        assert dict(os.environ) == before
