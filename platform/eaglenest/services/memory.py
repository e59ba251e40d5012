"""Peak memory of a set of processes, sampled in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

import psutil


def own_tree() -> list[psutil.Process]:
    """This process and its descendants."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


class PeakMemory:
    """The peak of the summed memory of some processes while the context is open.

        with PeakMemory(lambda: [*own_tree(), *our_processes(settings)]) as peak:
            ...
        peak.peak_bytes

    Proportional set size is summed, so memory that processes share (libraries, Ray's object store) counts once.

    Args:
        find: the processes to watch, asked at each sample; one that is named twice counts once.
        interval_s: seconds between samples. A sample costs about a millisecond per process.
    """

    def __init__(self, find: Callable[[], Iterable[psutil.Process]] = own_tree, interval_s: float = 1.0) -> None:
        self._find, self._interval_s = find, interval_s
        self.peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.sample()

    def sample(self) -> int:
        """Look once. Returns the bytes in use now."""
        used = proportional_bytes(self._find())
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            with contextlib.suppress(psutil.Error):  # a process that ended meanwhile
                self.sample()


def proportional_bytes(found: Iterable[psutil.Process]) -> int:
    """The memory of some processes together; what they share among themselves counts once."""
    return sum(_bytes_of(process) for process in {p.pid: p for p in found}.values())


def _bytes_of(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            return int(process.memory_full_info().pss)
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
    return 0
