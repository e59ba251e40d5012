"""Real Ray, MLflow and Serve, started, reused, replaced and ended: one set of them for the module."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import own_settings

from eaglenest.errors import BadInput, ServiceError
from eaglenest.services import access, kinds, local, processes, serve_app, state
from eaglenest.settings import Settings

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TINY = "tiny_app:build"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings whose Ray and MLflow are up; ended at the end of the module, come what may."""
    settings = own_settings(tmp_path_factory.mktemp("services"))
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = str(HERE)  # Serve's workers find tiny_app there
    try:
        started = local.up(settings, serve=False).started
        assert started == ("mlflow", "ray")
        yield settings
    finally:
        local.down(settings)
        os.environ.clear()
        os.environ.update(before)


def command(settings: Settings, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "eaglenest.cli.main", *arguments]


def environment(settings: Settings) -> dict[str, str]:
    env = {**os.environ, **kinds.settings_env(settings)}
    del env["MLFLOW_TRACKING_URI"]
    return env


def config(word: str, name: str = "tiny") -> dict[str, Any]:
    return {
        "proxy_location": "HeadOnly",
        "applications": [{"name": name, "route_prefix": "/", "import_path": TINY, "args": {"word": word}}],
    }


def test_everything_listens_on_the_loopback_address_only(running: Settings) -> None:
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in local.our_processes(running)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }

    assert addresses == {"127.0.0.1"}


def test_ray_runs_nothing_for_who_has_no_token(running: Settings) -> None:
    url = f"{running.dashboard_url}/api/jobs/"

    assert httpx.get(url, trust_env=False).status_code == 401
    assert httpx.get(url, trust_env=False, headers=access.headers(running)).status_code == 200
    assert stat.S_IMODE(access.token_path(running).stat().st_mode) == 0o600


def test_a_second_up_keeps_what_is_healthy_and_is_quick(running: Settings) -> None:
    before = state.load(running)
    began = time.monotonic()

    again = local.up(running, serve=False)

    assert again.started == ()
    assert time.monotonic() - began < 5
    assert state.load(running) == before


def test_status_tells_where_each_service_is(running: Settings) -> None:
    found = local.status(running)

    assert found["ray"]["state"] == found["mlflow"]["state"] == "running"
    assert found["ray"]["url"] == running.dashboard_url
    assert found["serve"]["state"] == "stopped"
    assert found["ray"]["memory_mib"] > 100


def test_a_killed_mlflow_is_replaced_and_keeps_what_it_knew(running: Settings) -> None:
    api = f"{running.tracking_uri}/api/2.0/mlflow/experiments"
    httpx.post(f"{api}/create", json={"name": "kept"}, trust_env=False).raise_for_status()
    before = state.load(running).services
    assert before["mlflow"].pid is not None
    os.kill(before["mlflow"].pid, signal.SIGKILL)
    while processes.root_of(before["mlflow"]):
        time.sleep(0.05)
    assert local.status(running)["mlflow"]["state"] == "dead"

    again = local.up(running, serve=False)

    assert again.started == ("mlflow",)
    assert state.load(running).services["ray"] == before["ray"]
    found = httpx.get(f"{api}/get-by-name", params={"experiment_name": "kept"}, trust_env=False)
    assert found.status_code == 200


def test_a_port_in_foreign_hands_is_an_error_that_names_them(running: Settings, tmp_path: Path) -> None:
    """Another runs_dir: the MLflow on that port is not its own."""
    other = own_settings(tmp_path, mlflow_port=running.mlflow_port)

    with pytest.raises(ServiceError, match=rf"port {running.mlflow_port} for MLflow is taken by pid \d+ \(.*mlflow"):
        local.up(other, serve=False)

    assert state.load(other).services == {}
    assert local.status(running)["mlflow"]["state"] == "running"


def test_a_port_taken_by_another_program_stops_those_started_before_it(tmp_path: Path) -> None:
    settings = own_settings(tmp_path)
    with socket.socket() as taken:
        taken.bind((settings.host, settings.ray_dashboard_port))
        taken.listen()
        with pytest.raises(ServiceError, match="EAGLENEST_RAY_DASHBOARD_PORT"):
            local.up(settings, serve=False)

    assert state.load(settings).services == {}
    assert processes.port_is_free(settings.host, settings.mlflow_port)


def test_a_foreign_mlflow_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    settings = own_settings(tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9")

    with pytest.raises(ServiceError, match="MLFLOW_TRACKING_URI"):
        local.up(settings, serve=False)


def test_a_serve_application_comes_up_changes_and_goes(running: Settings) -> None:
    local.deploy_serve(running, config("one"))
    assert httpx.get(running.serve_url, trust_env=False).text == "one"

    local.deploy_serve(running, config("two"))
    assert httpx.get(running.serve_url, trust_env=False).text == "two"
    assert local.status(running)["serve"]["state"] == "running"

    local.delete_serve(running)
    assert serve_app.applications(running) == {}
    assert processes.port_is_free(running.host, running.serve_port)


def test_up_deploys_a_config_once_and_keeps_it(running: Settings, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config("first")))

    assert local.up(running, config=path).started == ("serve",)
    assert local.up(running, config=path).started == ()
    path.write_text(yaml.safe_dump(config("second")))
    assert local.up(running, config=path).started == ("serve",)
    assert httpx.get(running.serve_url, trust_env=False).text == "second"
    local.delete_serve(running)


def test_an_application_that_cannot_start_is_reported_with_its_reason(running: Settings) -> None:
    with pytest.raises(ServiceError, match=r"(?s)could not start tiny.*this one was told to fail"):
        local.deploy_serve(running, config("fail"))
    local.delete_serve(running)


def test_a_config_that_serve_refuses_is_bad_input(running: Settings) -> None:
    with pytest.raises(BadInput, match="Serve refuses the config"):
        local.deploy_serve(running, {"applications": [{"name": "no import path"}]})


def test_a_taken_serve_port_is_an_error_that_names_its_holder(running: Settings) -> None:
    with socket.socket() as taken:
        taken.bind((running.host, running.serve_port))
        taken.listen()
        with pytest.raises(ServiceError, match=rf"port {running.serve_port} for Serve is taken by pid {os.getpid()}"):
            local.deploy_serve(running, config("one"))


def test_a_job_is_followed_failed_and_stopped(running: Settings, tmp_path: Path) -> None:
    """`eaglenest distill` with a job of a few lines in the place of ours; Ctrl-C stops the job too."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "runtime_env.yaml").write_text("py_modules: []\n")
    (tmp_path / "jobs" / "distill.py").write_text(
        "import sys, time\nprint('hello from the job', sys.argv[1:], flush=True)\n"
        "name = sys.argv[sys.argv.index('--name') + 1]\n"
        "if name == 'fails': raise SystemExit('no')\nif name == 'waits': time.sleep(300)\n"
    )
    code = (
        "import pathlib, sys, eaglenest.jobs_client as jobs, eaglenest.cli.main as main\n"
        "jobs.project_root = lambda: pathlib.Path(sys.argv[1])\nmain.app(['distill', '--name', sys.argv[2]])"
    )

    def distill(name: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", code, str(tmp_path), name]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, env=environment(running), stdout=pipe, stderr=pipe, text=True)

    # one after the other: jobs that upload the same package at the same moment can trip over each other in Ray
    done = distill("done")
    said, error = done.communicate(timeout=90)
    assert done.returncode == 0, said + error
    assert "hello from the job ['--name', 'done']" in said

    fails = distill("fails")
    _, error = fails.communicate(timeout=90)
    assert fails.returncode == 1
    assert "ended as FAILED" in error

    waits = distill("waits")
    assert waits.stdout is not None
    while "hello" not in waits.stdout.readline():
        pass
    waits.send_signal(signal.SIGINT)
    waits.communicate(timeout=60)
    assert waits.returncode == 130
    jobs = httpx.get(f"{running.dashboard_url}/api/jobs/", trust_env=False, headers=access.headers(running)).json()
    assert sorted(job["status"] for job in jobs if job["type"] == "SUBMISSION") == ["FAILED", "STOPPED", "SUCCEEDED"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_no_process_behind(number: int, tmp_path: Path) -> None:
    settings = own_settings(tmp_path)
    up = subprocess.Popen(
        command(settings, "up", "--no-serve"), env=environment(settings), stderr=subprocess.PIPE, text=True
    )
    assert up.stderr is not None
    while "starting Ray" not in up.stderr.readline():
        assert up.poll() is None
    records = []
    while len(records) < 2:
        records = list(state.load(settings).services.values())
    time.sleep(1)
    up.send_signal(number)
    up.communicate(timeout=60)

    assert up.returncode == 130
    assert state.load(settings).services == {}
    assert [process for record in records for process in processes.processes_of(record)] == []


def test_down_from_another_process_ends_all_of_it_and_nothing_else(running: Settings) -> None:
    """Last: the module's services end here, a Serve application and a stray child of the job among them."""
    local.deploy_serve(running, config("one"))
    records = list(state.load(running).services.values())
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])

    down = subprocess.run(
        command(running, "down"), env=environment(running), capture_output=True, text=True, timeout=120
    )

    assert down.returncode == 0, down.stderr
    assert "ray: " in down.stdout
    assert [process for record in records for process in processes.processes_of(record)] == []
    assert state.load(running).services == {}
    assert not access.token_path(running).exists()
    ports = (running.serve_port, running.mlflow_port, running.ray_port, running.ray_dashboard_port)
    assert all(processes.port_is_free(running.host, port) for port in ports)
    assert local.down(running) == {}
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
