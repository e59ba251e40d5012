"""A Ray that knows nothing of this checkout's environment: our package reaches it with the job alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import MlflowServer, own_settings

from eaglenest.services.kinds import settings_env
from eaglenest.settings import Settings

ROOT = Path(__file__).parents[2]


@dataclass
class Cluster:
    """A foreign Ray head, a registry, and the settings that name both."""

    settings: Settings
    pid: int

    def submit(self, arguments: list[str]) -> tuple[Any, str]:
        """Send `python jobs/distill.py ...` as `ray job submit` would; the client and the job's id."""
        from ray.job_submission import JobSubmissionClient

        from eaglenest.jobs_client import runtime_env

        client = JobSubmissionClient(self.settings.dashboard_url)
        entry = " ".join(["python", "jobs/distill.py", *arguments])
        job = client.submit_job(entrypoint=entry, runtime_env=runtime_env(ROOT, settings_env(self.settings)))
        return client, job

    def wait(self, client: Any, job: str, seconds: float) -> str:
        """The status the job ends with."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = client.get_job_status(job)
            if status.is_terminal():
                return str(status.value)
            time.sleep(1)
        raise AssertionError(f"still {status}: {client.get_job_logs(job)[-3000:]}")


@pytest.fixture(scope="module")
def cluster(mlflow_server: MlflowServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("e2e")
    settings = own_settings(folder, model_name="e2e-drafter", MLFLOW_TRACKING_URI=mlflow_server.uri)
    # Libraries by PYTHONPATH, whose .pth files are not read: the editable install of this checkout is not there.
    libraries = next(p for p in sys.path if p.endswith("site-packages"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"PYTHONPATH": libraries, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    # `python` of a job's entry point is found by PATH
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").symlink_to(sys._base_executable)
    env["PATH"] = f"{bin_folder}:{env['PATH']}"
    command = [sys._base_executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=3"]
    command += [f"--port={settings.ray_port}", f"--dashboard-port={settings.ray_dashboard_port}"]
    command += ["--node-ip-address=127.0.0.1", "--disable-usage-stats", "--object-store-memory=400000000"]
    command += [f"--temp-dir=/tmp/e{os.getpid()}"]
    with (folder / "ray.log").open("wb") as log:
        head = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(f"{settings.dashboard_url}/api/version", head, folder / "ray.log")
        yield Cluster(settings, head.pid)
    finally:
        head.terminate()
        head.wait(60)


def _wait_for(url: str, head: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(90):
        assert head.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file for jobs/distill.py: a few prompts, short answers, quick checkpoints."""
    folder = tmp_path_factory.mktemp("job")
    topics = ("copper", "tides", "bread", "chess", "glaciers", "violins", "bees", "maps")
    for name, chosen in (("train", topics[:6]), ("heldout", topics[6:])):
        lines = [json.dumps({"messages": [{"role": "user", "content": f"Tell me about {t}."}]}) for t in chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "prompts": str(folder / "train.jsonl"),
        "heldout": str(folder / "heldout.jsonl"),
        "answers": {"max_tokens": 24},
        "recipe": {"passes": 100000, "draft_vocab_size": 1024},
        "save_seconds": 6,
        "threads": 2,
    }
    file = folder / "job.json"
    file.write_text(json.dumps(config))
    return file
