"""A replica's metrics, through Ray."""

from __future__ import annotations

from typing import Any

from eaglenest import metrics
from eaglenest.metrics import Metric, SwapOutcome
from eaglenest.serving.reconciler import Observer


class ReplicaMetrics(Observer):
    """The series of `eaglenest.metrics` that a replica emits. Make it inside the replica."""

    def __init__(self) -> None:
        from ray.serve.metrics import Counter, Gauge, Histogram

        self._actual = _made(Gauge, metrics.DRAFTER_VERSION)
        self._desired = _made(Gauge, metrics.DRAFTER_DESIRED_VERSION)
        self._swaps = _made(Counter, metrics.SWAPS)
        self._errors = _made(Counter, metrics.RECONCILE_ERRORS)
        self._stage = _made(Histogram, metrics.SWAP_STAGE_SECONDS, boundaries=list(metrics.SWAP_STAGE_SECONDS.buckets))
        self._pause = _made(Histogram, metrics.SWAP_PAUSE_SECONDS, boundaries=list(metrics.SWAP_PAUSE_SECONDS.buckets))

    def versions(self, desired: int | None, actual: int | None) -> None:
        self._actual.set(actual or 0)
        if desired is not None:
            self._desired.set(desired)

    def swap(self, outcome: SwapOutcome, stage_s: float, pause_s: float | None) -> None:
        self._swaps.inc(tags={"outcome": outcome})
        self._stage.observe(stage_s)
        if pause_s is not None:
            self._pause.observe(pause_s)

    def error(self) -> None:
        self._errors.inc()


def _made(kind: Any, metric: Metric, **extra: Any) -> Any:
    return kind(metric.name, description=metric.help, tag_keys=metric.labels, **extra)
