"""Processes that we start and end: found again by a mark in their environment, never by a bare pid.

A pid is reused by the kernel; a mark is a random word that only the service and what it started inherit. So a service
is"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from pydantic import BaseModel, ConfigDict

from eaglenest.errors import ServiceError

MARK = "_EAGLENEST_SERVICE"
# The root's start time must agree to this many seconds; the kernel counts in hundredths.
_SAME_TIME_S = 0.1

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)

# Python reaps a child only through its Popen, so those of this process are kept.
_children: list[subprocess.Popen[bytes]] = []


class ProcessRecord(BaseModel):
    """What is written down of a service so that it can be found again."""

    model_config = ConfigDict(extra="forbid")

    mark: str
    log: Path
    pid: int | None = None  # None: about to be started
    create_time: float | None = None  # seconds since the epoch


def start(command: Sequence[str], env: Mapping[str, str], record: ProcessRecord) -> ProcessRecord:
    """Start a service in a session of its own, so that a Ctrl-C in our terminal does not reach it.

    Returns:
        The record with pid and start time.

    Raises:
        ServiceError: the command cannot be run.
    """
    record.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with record.log.open("ab") as log:
            child = subprocess.Popen(
                command,
                env={**env, MARK: record.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise ServiceError(f"{command[0]} cannot be started: {error}", None, "run `make setup`") from error
    _children.append(child)
    try:
        created = psutil.Process(child.pid).create_time()
    except psutil.NoSuchProcess:
        created = time.time()
    return record.model_copy(update={"pid": child.pid, "create_time": created})


def root_of(record: ProcessRecord) -> psutil.Process | None:
    """The service's first process if it lives: same pid and same start time, and no zombie."""
    if record.pid is None or record.create_time is None:
        return None
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.create_time) < _SAME_TIME_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def processes_of(record: ProcessRecord) -> list[psutil.Process]:
    """Every living process of a service: its root, all that carry its mark, and their descendants."""
    found = {process.pid: process for process in _marked(record.mark)}
    if root := root_of(record):
        found[root.pid] = root
    for process in list(found.values()):
        # A worker that set its own title has overwritten the environment that carries the mark.
        with contextlib.suppress(psutil.Error):
            found.update((child.pid, child) for child in process.children(recursive=True))
    return [process for process in found.values() if _alive(process)]


def end(record: ProcessRecord, patience_s: float = 20.0) -> int:
    """End a service: SIGTERM to its root, which ends its own; then SIGTERM and SIGKILL to whatever is left.

    Returns:
        How many processes there were.
    """
    seen = {process.pid: process for process in processes_of(record)}
    if root := root_of(record):
        _send(root, signal.SIGTERM)
        _wait([root], patience_s)
    for stop_signal, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0), (signal.SIGKILL, 5.0)):
        seen |= {process.pid: process for process in processes_of(record)}
        left = [process for process in seen.values() if _alive(process)]
        if not left:
            break
        for process in left:
            _send(process, stop_signal)
        _wait(left, wait_s)
    for child in _children[:]:
        if child.poll() is not None:
            _children.remove(child)
    return len(seen)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        # NoSuchProcess, AccessDenied and a zombie's unreadable environment: none of ours, or none any more
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                yield process


def _alive(process: psutil.Process) -> bool:
    try:
        # is_running also compares start times, so a reused pid is not taken for the process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _wait(processes: list[psutil.Process], seconds: float) -> None:
    """Until none of them lives, zombies apart: those of a parent that does not reap are nothing to wait for."""
    deadline = time.monotonic() + seconds
    while any(_alive(process) for process in processes) and time.monotonic() < deadline:
        for child in _children:
            child.poll()
        time.sleep(0.05)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM are put off until the end: for steps that, half done, would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():  # only that one is ever interrupted
        yield
        return
    put_off: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: put_off.append(number)) for n in _INTERRUPTS}
    try:
        yield
    finally:
        for interrupt, handler in before.items():
            signal.signal(interrupt, handler if handler is not None else signal.SIG_DFL)
        for number in put_off[:1]:
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt meanwhile, so that it tidies up as Ctrl-C does. For the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A port on which nobody listens now, chosen by the kernel."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_pid(port: int) -> int | None:
    """The process that listens on a port; None where nobody does, or a process that we may not look at."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return connection.pid
    return None


def port_holder(port: int) -> str:
    """Who listens on a port, in words: "pid 4711 (python -m http.server 8000)"."""
    longest = 160
    pid = port_pid(port)
    if pid is None:
        return "a process of another user"
    try:
        program, *arguments = psutil.Process(pid).cmdline() or [psutil.Process(pid).name()]
    except psutil.Error:
        return f"pid {pid}"
    command = " ".join([Path(program).name, *arguments])
    return f"pid {pid} ({command if len(command) <= longest else command[: longest - 3] + '...'})"


def wait_until(ready: Callable[[], bool], record: ProcessRecord, name: str, seconds: float) -> None:
    """Wait for a service to answer.

    Raises:
        ServiceError: it died or stayed silent; the message ends with the last lines of its log.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        ended = root_of(record) is None
        if ended or time.monotonic() > deadline:
            raise ServiceError(
                f"{name} ended as it started" if ended else f"{name} did not answer within {seconds:.0f} s",
                None,
                f"run `eaglenest doctor`, and read the log {record.log}, which ends with{log_tail(record.log)}",
            )
        time.sleep(0.2)


def log_tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, indented, beginning with a line break."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"\n  (unreadable: {error.strerror})"
    last = [line for line in text.splitlines() if line.strip()][-lines:]
    return "".join(f"\n  {line[:300]}" for line in last) or "\n  (nothing)"
