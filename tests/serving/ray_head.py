"""A Ray head of our own, and the shipped configs served on it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass
class RayHead:
    """A head node in processes of its own, told apart from any other Ray on this machine by its ports."""

    env: dict[str, str]
    home: Path
    gcs: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.gcs}"

    @contextmanager
    def running(self) -> Iterator[RayHead]:
        command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats"]
        command += [f"--port={self.gcs}", f"--dashboard-port={self.dashboard}", "--node-ip-address=127.0.0.1"]
        command += [f"--temp-dir={self.home}", "--object-store-memory=300000000"]
        with (self.home / "log").open("wb") as log:
            head = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: self._applications() == {}, 90)
            yield self
        finally:
            head.terminate()
            try:
                head.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)

    def deploy(self, config: dict[str, Any], seconds: float) -> None:
        """`serve deploy`, and wait until the application runs."""
        file = self.home / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        url = f"http://127.0.0.1:{self.dashboard}"
        subprocess.run([str(BIN / "serve"), "deploy", "-a", url, str(file)], env=self.env, check=True, timeout=60)

        def up() -> bool:
            state = self._applications().get("eaglenest", {})
            assert state.get("status") != "DEPLOY_FAILED", state
            return bool(state.get("status") == "RUNNING")

        wait_for(up, seconds)

    def _applications(self) -> dict[str, Any]:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        client = ServeSubmissionClient(f"http://127.0.0.1:{self.dashboard}")
        return dict(client.get_serve_details()["applications"])


def wait_for(true: Callable[[], bool], seconds: float, every: float = 0.5) -> None:
    """Wait until it holds; an endpoint that does not answer yet counts as not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except (httpx.HTTPError, ConnectionError):
            pass
        time.sleep(every)
    raise AssertionError(f"still not so after {seconds:g} s")


def shipped(name: str, port: int, **args: Any) -> dict[str, Any]:
    """A config of `serve_configs/` on another port, with arguments changed."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_configs" / name).read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"].update(args)
    return config
