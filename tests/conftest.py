"""What several stages' tests share: surroundings of their own, a tiny drafter checkpoint, one real MLflow server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eaglenest.settings import Settings, get_settings

TARGET_FINGERPRINT = "f" * 64


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the developer's settings, services or caches reaches a test, nor the other way round."""
    # A shell that starts the tests in the background has SIGINT ignored, and every child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("EAGLENEST_", "MLFLOW_", "RAY_")):
                patch.delenv(name)
        patch.setenv("EAGLENEST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("EAGLENEST_RUNS_DIR", str(tmp_path_factory.mktemp("runs")))
        yield


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """A test that sets EAGLENEST_ variables is read as it means, and leaves nothing behind."""
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def stand_in(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address of a server on this machine that answers as `handler` does, for faults that must be forced."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def own_settings(folder: Path, **more: Any) -> Settings:
    """Settings with folders and ports of their own."""
    ports = {name: free_port() for name in ("serve_port", "mlflow_port", "ray_port", "ray_dashboard_port")}
    return Settings(**{"cache_dir": folder / "cache", "runs_dir": folder / "runs", **ports, **more})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with folders and ports of their own, for one test."""
    return own_settings(tmp_path)


def tiny_config(**changes: Any) -> Any:
    """A drafter of a few thousand weights."""
    from eaglenest.drafters.config import DrafterConfig

    sizes = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 64,
        "draft_vocab_size": 20,
        "aux_layer_ids": (1, 2, 3),
    }
    return DrafterConfig(**(sizes | changes))


def tiny_state(config: Any, seed: int = 0) -> dict[str, Any]:
    """A sound state of that config: random weights and every third token in the draft vocabulary."""
    import torch

    from eaglenest.drafters.vocabulary import vocabulary_maps
    from eaglenest.drafters.weights import expected_tensors

    random = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=random) for name, (shape, _) in expected_tensors(config).items()}
    ids = range(0, 3 * config.draft_vocab_size, 3)
    state["d2t"], state["t2d"] = vocabulary_maps(list(ids), config.vocab_size)
    return state


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny checkpoint: `make_checkpoint("name", seed=1, norm_output=False, parent_version=3)`."""

    def make(
        name: str = "drafter", *, seed: int = 0, target_fingerprint: str = TARGET_FINGERPRINT, **more: Any
    ) -> Path:
        from eaglenest.drafters.checkpoint import save_checkpoint
        from eaglenest.drafters.config import DrafterConfig

        changes = {key: more.pop(key) for key in list(more) if key in DrafterConfig.model_fields}
        config = tiny_config(**changes)
        fields: dict[str, Any] = {"target_name": "tiny-target", "prompts_digest": "a" * 64, "settings": {"lr": 0.001}}
        save_checkpoint(
            tmp_path / name,
            config=config,
            state=tiny_state(config, seed),
            target_fingerprint=target_fingerprint,
            **(fields | more),
        )
        return tmp_path / name

    return make


@dataclass(frozen=True)
class MlflowServer:
    """A running MLflow server and where it keeps its artifacts."""

    uri: str
    artifacts: Path


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One real MLflow server on a free port, with sqlite and a folder. Use a registered model of your own in it."""
    home = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{home / 'mlflow.db'}",
        "--artifacts-destination",
        str(home / "files"),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True)
    uri = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(uri, server, home / "log")
        yield MlflowServer(uri=uri, artifacts=home / "files")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def _wait_until_healthy(uri: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"no MLflow server at {uri}:\n{log.read_text()[-2000:]}")
