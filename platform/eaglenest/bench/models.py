"""What a measurement is made of: raw rows of requests, and the figures computed from them. All of it is plain JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Interval = tuple[float, float]
Dtype = Literal["float32", "bfloat16", "float16"]


class Record(BaseModel):
    """Base of every result: unknown keys are refused, a result does not change once written."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SpecSteps(Record):
    """Speculative steps of one request, as vLLM reports them in `metrics.speculative_decoding`.

    `histogram[j]` counts the steps that accepted exactly j draft tokens (the bonus token is not counted); `drafted` is
    the number of draft tokens proposed. The two ordered lists exist only at the server's `detailed` level.
    """

    histogram: list[int]
    drafted: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None

    @property
    def steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(j * count for j, count in enumerate(self.histogram))


class RequestRow(Record):
    """One request as the client saw it. Times are seconds from the start of its window, on one monotonic clock.

    A chunk is one streamed message that carries tokens: a speculative step puts several tokens into one chunk.
    """

    prompt_id: str
    category: str
    concurrency: int
    index: int = Field(description="place in the order of its window: what pairs a row with its like in another run")
    start_s: float
    end_s: float
    chunk_s: list[float] = Field(default_factory=list, description="arrival of each chunk that carries tokens")
    chunk_tokens: list[int] = Field(default_factory=list, description="tokens in each of those chunks")
    prompt_token_ids: list[int] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    finish_reason: str | None = None
    spec: SpecSteps | None = None
    error: str | None = Field(default=None, description="kind of failure; none: the stream ended as it should")
    detail: str | None = None

    @property
    def tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Percentiles(Record):
    """Percentiles of `count` observations, milliseconds, by linear interpolation."""

    p50: float
    p90: float
    p99: float
    max: float
    count: int


class CategoryAcceptance(Record):
    accept_len: float
    interval: Interval | None
    steps: int
    prompts: int


class Acceptance(Record):
    """Acceptance pooled over steps: AL = 1 + accepted / steps.

    `unconditional[k]`: share of steps whose draft token k (from 0) was accepted. `conditional[k]`: the same among the
    steps that accepted all before it; none where no step came so far. `interval`: 95%, bootstrap over prompts.
    `coarse`: taken from the server's counters, where per-request figures are missing: no categories, no interval.
    """

    accept_len: float
    interval: Interval | None
    steps: int
    accepted: int
    drafted: int
    unconditional: list[float]
    conditional: list[float | None]
    by_category: dict[str, CategoryAcceptance] = Field(default_factory=dict)
    coarse: bool = False


class Point(Record):
    """One window of closed-loop load at one concurrency.

    `tokens_per_s` counts the tokens that arrived while `concurrency` requests were in flight, over the length of that
    window (`window_s`). `ttft_ms`: request sent to first token. `itl_ms`: gap between two chunks of one stream, each of
    which may carry several tokens. `tpot_ms`: time per token of a request after its first chunk.
    """

    concurrency: int
    requests: int
    failed: int
    failures: dict[str, int]
    tokens: int = Field(description="all tokens received, also those outside the window")
    wall_s: float
    window_s: float
    window_tokens: int
    tokens_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    acceptance: Acceptance | None


class Configuration(Record):
    """An engine to measure: what `deploy` is given."""

    name: str
    dtype: Dtype
    speculation: bool
    eager: bool
    k: int | None = Field(default=None, ge=1, description="draft tokens a step; None: as the service has it")

    def same_mode(self, other: Configuration) -> bool:
        """True when the two differ at most in speculation: same dtype, same eager or compiled mode."""
        return (self.dtype, self.eager) == (other.dtype, other.eager)


class Plan(Record):
    """The load of one measurement: a window at each concurrency.

    Args:
        max_tokens: greedy tokens asked for in each request.
        requests_per_point: requests in a window: one number, or one for each concurrency; what is not given is
            `default_requests`.
        seconds_per_point: stop a window early: no new request after so long.
        seed: of the bootstrap, and sent with each request.
    """

    concurrencies: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 4, 8), min_length=1)
    max_tokens: int = Field(default=64, ge=2)
    requests_per_point: int | dict[int, int] | None = None
    seconds_per_point: float | None = Field(default=None, gt=0)
    seed: int = 0

    def sizes(self) -> dict[int, int]:
        """Requests at each concurrency."""
        if isinstance(self.requests_per_point, int):
            return dict.fromkeys(self.concurrencies, self.requests_per_point)
        chosen = self.requests_per_point or {}
        return {c: chosen.get(c, default_requests(c)) for c in self.concurrencies}


def default_requests(concurrency: int) -> int:
    """Requests of a window: a few hundred tokens at any concurrency, three rounds of a full batch."""
    return max(6, 3 * concurrency)


class Measurement(Record):
    """Every point of one endpoint, with the rows they were computed from."""

    name: str
    model: str
    plan: Plan
    configuration: Configuration | None = None
    points: list[Point]
    acceptance: Acceptance | None
    rows: list[RequestRow] = Field(default_factory=list)

    def point(self, concurrency: int) -> Point | None:
        return next((point for point in self.points if point.concurrency == concurrency), None)

    def without_rows(self) -> Measurement:
        """The same figures without the raw rows: what a report keeps."""
        return self.model_copy(update={"rows": []})


class Speedup(Record):
    """Time per token of plain decoding over that of speculation, pooled over paired requests; 95% over the pairs."""

    plain: str
    speculative: str
    concurrency: int
    ratio: float
    interval: Interval | None
    pairs: int


class Difference(Record):
    """The first token at which two greedy outputs of one prompt part.

    `gap`: how far the less likely of the two tokens lies below the target's most likely one, in logits; none when the
    target's top five do not hold both.
    """

    prompt_id: str
    position: int
    reference_token: int | None
    other_token: int | None
    gap: float | None
    near_tie: bool


class Equality(Record):
    """Greedy outputs compared token by token; a near-tie is a difference the target itself does not decide."""

    compared: int
    equal: int
    near_ties: int
    changed: int
    differences: list[Difference] = Field(default_factory=list)


class BenchResult(Record):
    """Plain against speculative configurations, measured in one run.

    The two headline ratios are those of the first speculative configuration at concurrency 1, or at the lowest one
    measured: against the plain one in the same mode, and against the fastest plain one.
    """

    plain: list[Measurement]
    speculative: list[Measurement]
    speedup_c1: float | None
    speedup_c1_interval: Interval | None = None
    speedup_c1_against: str | None = None
    speedup_c1_vs_best_plain: float | None
    speedup_c1_vs_best_plain_interval: Interval | None = None
    best_plain: str | None = None
    speedups: list[Speedup] = Field(default_factory=list)
    outputs: Equality | None = Field(
        default=None, description="speculative outputs against plain ones in the same mode"
    )

    def without_rows(self) -> BenchResult:
        """The same figures without the raw rows: what a report keeps."""
        return self.model_copy(
            update={
                "plain": [m.without_rows() for m in self.plain],
                "speculative": [m.without_rows() for m in self.speculative],
            }
        )


class SwapPlan(Record):
    """The load of a swap measurement. Swap i (from 1) begins when i / (swaps + 1) of the tokens have arrived.

    `plain_step_ms`: one step of plain decoding at this concurrency, measured by the caller, to express the pause in.
    """

    swaps: int = Field(default=6, ge=1)
    requests: int = Field(default=56, ge=1)
    concurrency: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=64, ge=2)
    plain_step_ms: float | None = Field(default=None, gt=0)


class SwapTimes(Record):
    """What a swap callable returns: when staging began and when the new drafter was in, seconds.

    `version`: what the report calls the new drafter, such as `v2`. `clock`: `monotonic` is `time.monotonic()` of any
    process on this host, `wall` is `time.time()`.
    """

    staging: float
    done: float
    version: str
    clock: Literal["monotonic", "wall"] = "monotonic"


class SwapEvent(Record):
    """One swap. Times are seconds from the start of the run; `pause_ms` = `gap_ms` - `floor_ms` (docs/measuring.md).

    A pause below zero says that this swap's gap was smaller than the usual one.
    """

    version: str
    staging_s: float
    done_s: float
    first_token_s: float
    gap_ms: float
    floor_ms: float
    pause_ms: float


class Segment(Record):
    """Between two swaps: tokens per chunk after the first one of each stream, which follows the acceptance length."""

    version: str | None = Field(description="none: whatever was served before the first swap")
    start_s: float
    end_s: float
    chunks: int
    tokens_per_chunk: float | None


class SwapResult(Record):
    """Swaps under streaming load, against a run of the same requests without a swap."""

    swaps: int
    requests: int
    failed_requests: int
    changed_outputs: int
    pause_ms_p50: float
    pause_ms_p99: float
    pause_ms_max: float
    max_itl_ms: float = Field(description="largest gap between chunks in the run with swaps")
    max_itl_no_swap_ms: float
    near_ties: int
    compared: int
    plan: SwapPlan
    pause_p99_plain_steps: float | None = None
    failures: dict[str, int] = Field(default_factory=dict)
    differences: list[Difference] = Field(default_factory=list)
    events: list[SwapEvent]
    segments: list[Segment]
    timeline_ms: list[tuple[float, float]] = Field(description="(seconds, largest gap in ms) per tenth of a second")
