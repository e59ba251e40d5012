"""Names, units and help of every metric EagleNest emits, and of those of vLLM's that its dashboards and alerts read.

Emit them through Ray, so that each node's metrics port carries the series of every replica on it. Inside a replica:

    from ray.serve.metrics import Gauge

    gauge = Gauge(DRAFTER_VERSION.name, description=DRAFTER_VERSION.help, tag_keys=DRAFTER_VERSION.labels)

Ray puts `ray_` before the name. Ray Serve adds the labels of `SERVE_LABELS` by itself and refuses them as one's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]

SwapOutcome = Literal["swapped", "refused", "rolled_back"]
"""How an attempted swap ended. refused: the version failed a check before anything was exchanged; rolled_back: the
exchange failed and the old weights were put back. Either way the old version is still serving."""

SWAP_OUTCOMES: Final[tuple[str, ...]] = get_args(SwapOutcome)

SERVE_LABELS: Final = ("application", "deployment", "replica")
"""Labels that Ray Serve adds to every metric made inside a replica."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as its maker calls it; a counter's ends in `_total`.
        kind: counter, gauge or histogram.
        unit: of the value: "seconds", "tokens", "version", ...
        help: one sentence for the reader of a dashboard.
        labels: those the maker sets itself (of ours: without SERVE_LABELS).
        buckets: upper bounds of a histogram, in `unit`; empty for vLLM's, which fix their own.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def ray_name(self) -> str:
        """The name under which Ray's metrics port exports it: Ray allows no colon and puts `ray_` in front."""
        return "ray_" + self.name.replace(":", "_")

    def series(self, name: str | None = None) -> tuple[str, ...]:
        """The series a query can ask for under `name` (default: `self.name`): three for a histogram, one otherwise."""
        base = name or self.name
        if self.kind == "histogram":
            return (f"{base}_bucket", f"{base}_sum", f"{base}_count")
        return (base,)


DRAFTER_VERSION: Final = Metric(
    "eaglenest_drafter_version",
    "gauge",
    "version",
    "Registry version of the drafter this replica executes; 0 when it decodes without one.",
)
DRAFTER_DESIRED_VERSION: Final = Metric(
    "eaglenest_drafter_desired_version",
    "gauge",
    "version",
    "Registry version that the champion alias named when this replica last reached the registry.",
)
SWAPS: Final = Metric(
    "eaglenest_swaps_total",
    "counter",
    "swaps",
    "Swaps attempted by this replica, by outcome: swapped, refused or rolled_back.",
    labels=("outcome",),
)
SWAP_STAGE_SECONDS: Final = Metric(
    "eaglenest_swap_stage_seconds",
    "histogram",
    "seconds",
    "Time to download and verify a version beside the serving engine, before the exchange.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
SWAP_PAUSE_SECONDS: Final = Metric(
    "eaglenest_swap_pause_seconds",
    "histogram",
    "seconds",
    "Time the engine waited between two steps while the weights were exchanged, as the worker saw it.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
RECONCILE_ERRORS: Final = Metric(
    "eaglenest_reconcile_errors_total",
    "counter",
    "errors",
    "Reconciliations that failed, the registry out of reach among them; the replica kept the drafter it had.",
)

EAGLENEST_METRICS: Final = (
    DRAFTER_VERSION,
    DRAFTER_DESIRED_VERSION,
    SWAPS,
    SWAP_STAGE_SECONDS,
    SWAP_PAUSE_SECONDS,
    RECONCILE_ERRORS,
)

_ENGINE_LABELS: Final = ("model_name", "engine")

SPEC_DRAFTS: Final = Metric(
    "vllm:spec_decode_num_drafts_total", "counter", "steps", "Speculative steps: drafts verified.", _ENGINE_LABELS
)
SPEC_DRAFT_TOKENS: Final = Metric(
    "vllm:spec_decode_num_draft_tokens_total", "counter", "tokens", "Draft tokens proposed.", _ENGINE_LABELS
)
SPEC_ACCEPTED: Final = Metric(
    "vllm:spec_decode_num_accepted_tokens_total", "counter", "tokens", "Draft tokens accepted.", _ENGINE_LABELS
)
SPEC_ACCEPTED_PER_POS: Final = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "counter",
    "tokens",
    "Draft tokens accepted, by their place in the draft (0 is the first).",
    (*_ENGINE_LABELS, "position"),
)
GENERATION_TOKENS: Final = Metric(
    "vllm:generation_tokens_total", "counter", "tokens", "Tokens generated.", _ENGINE_LABELS
)
TTFT_SECONDS: Final = Metric(
    "vllm:time_to_first_token_seconds", "histogram", "seconds", "Time from arrival to first token.", _ENGINE_LABELS
)
ITL_SECONDS: Final = Metric(
    "vllm:inter_token_latency_seconds", "histogram", "seconds", "Time between a stream's outputs.", _ENGINE_LABELS
)
REQUESTS_RUNNING: Final = Metric(
    "vllm:num_requests_running", "gauge", "requests", "Requests in the engine's batch.", _ENGINE_LABELS
)
REQUESTS_WAITING: Final = Metric(
    "vllm:num_requests_waiting", "gauge", "requests", "Requests waiting for a place in the batch.", _ENGINE_LABELS
)

VLLM_METRICS: Final = (
    SPEC_DRAFTS,
    SPEC_DRAFT_TOKENS,
    SPEC_ACCEPTED,
    SPEC_ACCEPTED_PER_POS,
    GENERATION_TOKENS,
    TTFT_SECONDS,
    ITL_SECONDS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
)
"""Names as vLLM's `/metrics` route shows them (prometheus_client adds `_total` to counters)."""


def known_series() -> frozenset[str]:
    """Every series name a dashboard or alert may use: ours through Ray, vLLM's from `/metrics` and through Ray."""
    names: set[str] = set()
    for metric in EAGLENEST_METRICS:
        names.update(metric.series(metric.ray_name))
    for metric in VLLM_METRICS:
        names.update(metric.series())
        names.update(metric.series(metric.ray_name))
    return frozenset(names)
