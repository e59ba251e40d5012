"""Without a registry there is an answer within seconds, and training goes on."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.conftest import stand_in

from eaglenest.errors import RegistryError
from eaglenest.registry import Registry, RunLogger, TrackedRun


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_uri() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def failing_uri(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers everything with one HTTP status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param)
            self.end_headers()
            self.wfile.write(b"no")

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with stand_in(Handler) as uri:
        yield uri


def quickly(call: Callable[[], object]) -> str:
    started = time.monotonic()
    with pytest.raises(RegistryError) as caught:
        call()
    assert time.monotonic() - started < 10
    assert caught.value.__cause__ is None, "MLflow's traceback belongs to MLflow"
    assert len(str(caught.value)) < 700
    return str(caught.value)


def test_every_operation_names_the_server_that_is_down(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    registry = Registry(uri, "drafter")
    folder = make_checkpoint()
    calls: list[Callable[[], object]] = [
        registry.ensure_ready,
        lambda: registry.resolve("champion"),
        lambda: registry.resolve(1),
        registry.versions,
        registry.aliases,
        lambda: registry.promote(1),
        registry.rollback,
        lambda: registry.download(1, tmp_path),
        lambda: registry.set_figures(1, {"accept_len": 2.0}),
        lambda: registry.register(folder, run_id="r", figures={}),
        TrackedRun(uri, "e", run_name="r").__enter__,
    ]
    for call in calls:
        message = quickly(call)
        assert f"no MLflow server answers at {uri} (connection refused)" in message
        assert "MLFLOW_TRACKING_URI" in message


def test_a_silent_server_is_given_up_on(silent_uri: str) -> None:
    assert "silent for 3 s" in quickly(Registry(silent_uri, "drafter").ensure_ready)


@pytest.mark.parametrize(
    ("failing_uri", "message"),
    [
        (500, "answers HTTP 500"),
        (503, "answers HTTP 503"),
        (401, "refuses us"),
        (403, "--allowed-hosts"),
        (404, "HTTP 404"),
    ],
    indirect=["failing_uri"],
)
def test_a_server_that_fails_is_told_from_one_that_refuses(failing_uri: str, message: str) -> None:
    assert message in quickly(lambda: Registry(failing_uri, "drafter").resolve("champion"))


@pytest.mark.parametrize("failing_uri", [200], indirect=True)
def test_a_page_that_is_not_mlflows_is_told(failing_uri: str) -> None:
    message = quickly(Registry(failing_uri, "drafter").ensure_ready)
    assert "is no MLflow server" in message
    assert "MLFLOW_TRACKING_URI" in message


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "nobody.invalid:{port}", "127.0.0.1:no-port"])
def test_credentials_in_the_uri_are_not_shown(host: str) -> None:
    message = quickly(Registry(f"http://anna:secret@{host.format(port=free_port())}", "drafter").ensure_ready)
    assert "secret" not in message
    assert "anna" not in message


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "mlruns", "databricks", "", "http://[::1", "http://"])
def test_what_is_no_server_is_refused(uri: str) -> None:
    assert "is no MLflow server" in quickly(Registry(uri, "drafter").ensure_ready)


def test_what_the_user_set_for_mlflow_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    quickly(Registry(f"http://127.0.0.1:{free_port()}", "drafter").ensure_ready)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"


def test_metrics_are_kept_while_the_server_is_down(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLogger(f"http://127.0.0.1:{free_port()}", "some-run")
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            log.metrics({"loss": 1.0}, step)
    assert len(caplog.records) == 1, "one try and one warning, then a pause"
    assert not log.flush()
    assert "100 metrics are kept" in caplog.records[-1].message


@pytest.mark.slow
def test_kept_metrics_arrive_once_the_server_answers(mlflow_server: object) -> None:
    import mlflow

    uri = mlflow_server.uri  # type: ignore[attr-defined]
    with TrackedRun(uri, "kept", run_name="r") as run:
        log = RunLogger(f"http://127.0.0.1:{free_port()}", run.run_id)
        log.metrics({"loss": 3.0}, step=1)
        log.tracking_uri = uri
        assert log.flush()
    history = mlflow.MlflowClient(uri).get_metric_history(run.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 3.0)]


def test_registry_and_rollout_are_imported_without_heavy_libraries() -> None:
    code = (
        "import sys, eaglenest.registry.flavor, eaglenest.registry, eaglenest.rollout;"
        "assert not {'torch', 'ray', 'vllm', 'mlflow', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
