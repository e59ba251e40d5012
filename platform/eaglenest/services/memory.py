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

    Args:
        find: the processes to watch; one that is named twice counts once. Asked at every tenth sample: looking through
            a machine's processes takes tens of milliseconds, which a client that is being timed would feel.
        interval_s: seconds between samples.
    """

    def __init__(self, find: Callable[[], Iterable[psutil.Process]] = own_tree, interval_s: float = 1.0) -> None:
        self._find, self._interval_s = find, interval_s
        self.peak_bytes = 0
        self._found: list[psutil.Process] = []
        self._samples = 0
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
        if self._samples % 10 == 0:
            self._found = list(self._find())
        self._samples += 1
        used = resident_bytes(self._found)
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            with contextlib.suppress(psutil.Error):  # a process that ended meanwhile
                self.sample()


def resident_bytes(found: Iterable[psutil.Process]) -> int:
    """The memory of some processes together: what is each one's own, and the most that one of them shares.

    Within a few percent of the sum of proportional set sizes (5.7 against 5.4 GiB with an engine up), which would cost
    a walk through every page, during which the process that looks can do nothing else.
    """
    own = shared = 0
    for process in {p.pid: p for p in found}.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_info()
            own += memory.rss - getattr(memory, "shared", 0)
            shared = max(shared, getattr(memory, "shared", 0))
    return own + shared
