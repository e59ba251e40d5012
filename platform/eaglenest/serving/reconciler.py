"""Keeps one replica's drafter at the version the registry asks for.

The registry's alias is the desired state. It is polled, with jitter, and looked at at once when someone nudges. A
version that cannot be served is remembered with its reason and not tried again until the alias has moved; a registry
that cannot be reached changes nothing but what the status says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

from eaglenest.engine.swapper import SwapReport, SwapRolledBack
from eaglenest.errors import CheckpointError, EngineError, RegistryError, SwapRefused
from eaglenest.metrics import SwapOutcome
from eaglenest.registry import DrafterVersion
from eaglenest.serving.status import ReplicaStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

NICENESS = 10
"""Added to the thread that downloads and verifies: on a small machine it must not take the engine's cores from it."""


class Source(Protocol):
    """What a reconciler needs of a registry: see `DrafterSource`."""

    def desired(self) -> DrafterVersion: ...
    def fetch(self, version: DrafterVersion) -> Path: ...
    def remember(self, version: int, folder: Path) -> None: ...


class Checks(Protocol):
    """What a reconciler needs of a contract: see `Contract`."""

    def check(self, folder: Path) -> object: ...


class Swaps(Protocol):
    """What a reconciler needs of an engine: see `DrafterSwapper`."""

    async def swap(self, folder: Path, version: str) -> SwapReport: ...


class Observer:
    """Told what happens; does nothing by itself."""

    def versions(self, desired: int | None, actual: int | None) -> None: ...
    def swap(self, outcome: SwapOutcome, stage_s: float, pause_s: float | None) -> None: ...
    def error(self) -> None: ...


@dataclass(frozen=True)
class _Refusal:
    version: int
    reason: str


class Reconciler:
    """One replica's. All coroutines run in one event loop; one reconciliation at a time.

    Args:
        source, contract, swapper: the registry, what the engine can take, and the engine.
        status: as the replica starts.
        poll_interval_s: mean seconds between looks at the alias.
        jitter: the wait is the interval times 1 - jitter to 1 + jitter.
    """

    def __init__(
        self,
        source: Source,
        contract: Checks,
        swapper: Swaps,
        status: ReplicaStatus,
        *,
        poll_interval_s: float = 15.0,
        jitter: float = 0.2,
        observer: Observer | None = None,
    ) -> None:
        self._source, self._contract, self._swapper = source, contract, swapper
        self._status = status
        self._interval, self._jitter = poll_interval_s, jitter
        self._observer = observer or Observer()
        self._refusal: _Refusal | None = None
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "drafter-staging", initializer=_be_nice)
        self.broken: str | None = None
        self._observer.versions(status.desired_version, status.actual_version)

    @property
    def status(self) -> ReplicaStatus:
        """As things are now."""
        return self._status

    async def run(self) -> None:
        """Reconcile for ever; ends only when cancelled."""
        while True:
            await asyncio.sleep(self._interval * random.uniform(1 - self._jitter, 1 + self._jitter))
            try:
                await self.reconcile()
            except Exception as error:  # a fault here must not end the replica's only loop
                logger.exception("reconciliation failed")
                self._report(last_error=f"{type(error).__name__}: {error}")
                self._observer.error()

    async def reconcile(self) -> ReplicaStatus:
        """Look at the alias and swap if it names another version; returns the status afterwards."""
        async with self._lock:
            if self.broken is None:
                await self._reconcile()
            return self._status

    def close(self) -> None:
        """Let go of the staging thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _reconcile(self) -> None:
        try:
            wanted = await self._aside(self._source.desired)
        except RegistryError as error:
            self._observer.error()
            self._report(last_error=f"the registry could not be asked, serving on: {error}")
            return
        number = wanted.version
        if self._refusal is not None and self._refusal.version != number:
            self._refusal = None
        refused = self._refusal.reason if self._refusal else None
        self._report(desired_version=number, last_error=refused)
        if number != self._status.actual_version and refused is None:
            await self._take(wanted)

    async def _take(self, wanted: DrafterVersion) -> None:
        number, began = wanted.version, time.perf_counter()
        stage_s = 0.0
        try:
            folder = await self._aside(lambda: self._staged(wanted))
            stage_s = time.perf_counter() - began
            report = await self._swapper.swap(folder, str(number))
        except RegistryError as error:  # the server went away midway: worth another try
            self._observer.error()
            self._report(last_error=f"version {number} could not be fetched: {error}")
        except (CheckpointError, SwapRefused) as error:
            self._refuse(number, error, stage_s or time.perf_counter() - began)
        except EngineError as error:
            self.broken = str(error)
            self._observer.error()
            self._report(last_error=str(error))
        else:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            pause_s = report.longest_call_s
            self._report(actual_version=number, since=now, stage_ms=stage_s * 1e3, pause_ms=pause_s * 1e3)
            self._observer.swap("swapped", stage_s, pause_s)
            logger.info(
                "drafter version %d in service: staged in %.2f s, paused %.1f ms", number, stage_s, pause_s * 1e3
            )
            await self._aside(lambda: self._source.remember(number, folder))

    def _staged(self, wanted: DrafterVersion) -> Path:
        folder = self._source.fetch(wanted)
        self._contract.check(folder)
        return folder

    def _refuse(self, number: int, error: Exception, stage_s: float) -> None:
        outcome: SwapOutcome = "rolled_back" if isinstance(error, SwapRolledBack) else "refused"
        reason = f"version {number} {outcome.replace('_', ' ')}: {error}"
        self._refusal = _Refusal(number, reason)
        self._observer.swap(outcome, stage_s, None)
        self._report(last_error=reason)
        logger.warning("%s", reason)

    def _report(self, **changes: object) -> None:
        self._status = self._status.model_copy(update=changes)
        self._observer.versions(self._status.desired_version, self._status.actual_version)

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _be_nice() -> None:
    thread = threading.get_native_id()  # on Linux a thread has a niceness of its own
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
