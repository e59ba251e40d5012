"""Ours are found and ended whole; nobody else's is touched."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eaglenest.errors import ServiceError
from eaglenest.services import processes
from eaglenest.services.processes import ProcessRecord

SLEEP = "import time; time.sleep(60)"
# a root whose child has a child: what Ray and MLflow look like
FAMILY = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); time.sleep(60)"])
time.sleep(60)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[ProcessRecord]:
    record = ProcessRecord(mark=uuid.uuid4().hex, log=tmp_path / "logs" / "service.log")
    yield record
    processes.end(record, patience_s=0)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of ours."""
    process = subprocess.Popen(python(SLEEP))
    yield process
    process.kill()
    process.wait()


def started(code: str, record: ProcessRecord, count: int = 1) -> ProcessRecord:
    """A service that has as many processes."""
    running = processes.start(python(code), os.environ, record)
    deadline = time.monotonic() + 10
    while len(processes.processes_of(running)) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes.processes_of(running)) == count
    return running


def test_a_service_is_ended_with_all_its_descendants(record: ProcessRecord) -> None:
    running = started(FAMILY, record, 3)
    family = processes.processes_of(running)

    assert processes.end(running) == 3
    assert processes.processes_of(running) == []
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_descendants_are_found_when_their_root_was_killed(record: ProcessRecord) -> None:
    running = started(FAMILY, record, 3)
    assert running.pid is not None
    os.kill(running.pid, signal.SIGKILL)
    time.sleep(0.2)

    assert processes.root_of(running) is None
    assert processes.end(running) == 2
    assert processes.processes_of(running) == []


def test_a_service_is_found_before_its_pid_was_written_down(record: ProcessRecord) -> None:
    """Should the command die between starting a service and saving its pid."""
    started(SLEEP, record)

    assert record.pid is None
    assert processes.end(record) == 1


def test_one_that_ignores_sigterm_is_killed(record: ProcessRecord) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True);" + SLEEP
    running = started(stubborn, record)
    while "x" not in running.log.read_text():
        time.sleep(0.02)

    assert processes.end(running, patience_s=0.2) == 1
    assert processes.processes_of(running) == []


def test_a_foreign_process_that_reused_the_pid_is_left_alone(
    record: ProcessRecord, stranger: subprocess.Popen[bytes]
) -> None:
    reused = record.model_copy(update={"pid": stranger.pid, "create_time": time.time() - 3600})

    assert processes.root_of(reused) is None
    assert processes.end(reused) == 0
    assert stranger.poll() is None


def test_the_root_is_known_by_its_start_time(record: ProcessRecord) -> None:
    running = started(SLEEP, record)

    root = processes.root_of(running)

    assert root is not None
    assert root.pid == running.pid


def test_a_service_that_dies_at_once_is_reported_with_the_end_of_its_log(record: ProcessRecord) -> None:
    running = processes.start(python("print('one'); raise SystemExit('two')"), os.environ, record)

    with pytest.raises(ServiceError, match=r"(?s)Tiny ended as it started.*one\n  two") as failure:
        processes.wait_until(lambda: False, running, "Tiny", 10)

    assert str(running.log) in str(failure.value)


def test_a_silent_service_is_given_up(record: ProcessRecord) -> None:
    running = started(SLEEP, record)

    with pytest.raises(ServiceError, match="did not answer within 0 s"):
        processes.wait_until(lambda: False, running, "Tiny", 0)


def test_a_command_that_is_not_there_is_a_service_error(record: ProcessRecord) -> None:
    with pytest.raises(ServiceError, match="no-such-command cannot be started"):
        processes.start(["no-such-command"], os.environ, record)


def test_a_taken_port_is_seen_and_its_holder_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not processes.port_is_free("127.0.0.1", port)
        assert f"pid {os.getpid()} (" in processes.port_holder(port)
    assert processes.port_is_free("127.0.0.1", port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tidying_up_is_finished_before_an_interrupt_takes_effect(number: int) -> None:
    steps = []

    def work() -> None:
        with processes.undisturbed():
            os.kill(os.getpid(), number)
            steps.append("tidied")
        time.sleep(1)
        steps.append("went on")

    with pytest.raises(KeyboardInterrupt), processes.sigterm_as_interrupt():
        work()

    assert steps == ["tidied"]


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    outcome: list[str] = []

    def work() -> None:
        with processes.undisturbed():
            outcome.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert outcome == ["done"]
