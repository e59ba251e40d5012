"""The report's charts, each with the table that holds the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from eaglenest.bench.models import BenchResult, Percentiles, SwapResult
from eaglenest.report.models import DrafterReport, TrainPoint
from eaglenest.report.svg import Bars, Line, bar_chart, evenly, legend, line_chart

SHOWN_TRAIN_POINTS = 8
NBSP = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Table:
    """A table of ready strings; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A titled plot with its table beside it; either may be missing."""

    title: str
    plots: Sequence[Markup] = field(default_factory=tuple)
    table: Table | None = None
    note: str = ""
    key: Markup | str = ""


def number(value: float | None, digits: int = 2) -> str:
    """A number for a reader; a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: tuple[float, float] | None, digits: int = 2) -> str:
    """`1.52 (1.44 to 1.61)`; a line may break before the bracket, not within it."""
    if value is None or interval is None:
        return number(value, digits)
    low, high = (f"{end:.{digits}f}" for end in interval)
    return f"{value:.{digits}f} ({low}{NBSP}to{NBSP}{high})"


def name_of(drafter: DrafterReport) -> str:
    return f"v{drafter.version}"


def by_category(drafters: Sequence[DrafterReport]) -> Figure:
    """Acceptance length of each version in each category."""
    categories = sorted({name for drafter in drafters for name in drafter.accept_len_by_category})
    series = [
        Bars(
            name_of(drafter),
            [drafter.accept_len_by_category.get(name) for name in categories],
            [_category_interval(drafter, name) for name in categories],
        )
        for drafter in drafters
    ]
    rows = [["all", *(with_interval(d.accept_len, d.accept_len_interval) for d in drafters)]]
    rows += [
        [
            name,
            *(with_interval(d.accept_len_by_category.get(name), _category_interval(d, name)) for d in drafters),
        ]
        for name in categories
    ]
    return Figure(
        "Acceptance length by category",
        [bar_chart(categories, series, title="Acceptance length by category", x_label="acceptance length", start=1.0)],
        Table(["category", *map(name_of, drafters)], rows, "In brackets: 95%, bootstrap over prompts."),
        "Tokens per step of the target, served, on held-out prompts. 1 is a drafter that is never right.",
        legend([name_of(drafter) for drafter in drafters]),
    )


def _category_interval(drafter: DrafterReport, name: str) -> tuple[float, float] | None:
    found = drafter.served.by_category.get(name) if drafter.served else None
    return found.interval if found else None


def by_position(drafters: Sequence[DrafterReport]) -> Figure:
    """Conditional acceptance of each version at each draft position."""
    width = max((len(drafter.accept_by_position) for drafter in drafters), default=0)
    names = [f"position {k + 1}" for k in range(width)]

    def at(values: Sequence[float | None], k: int) -> float | None:
        return values[k] if k < len(values) else None

    series = [Bars(name_of(d), [at(d.accept_by_position, k) for k in range(width)]) for d in drafters]
    head = ["position"]
    for drafter in drafters:
        head += [name_of(drafter), f"{name_of(drafter)}, all"]
    rows = []
    for k in range(width):
        cells = [str(k + 1)]
        for drafter in drafters:
            cells.append(number(at(drafter.accept_by_position, k)))
            cells.append(number(at(drafter.served.unconditional, k) if drafter.served else None))
        rows.append(cells)
    return Figure(
        "Acceptance by draft position",
        [bar_chart(names, series, title="Acceptance by position", x_label="conditional acceptance", end=1.0)],
        Table(head, rows, "all: of all steps, whatever came before."),
        "Conditional: of the steps that accepted every draft token before this one.",
        legend([name_of(drafter) for drafter in drafters]),
    )


def throughput(bench: BenchResult) -> Figure:
    """Tokens per second of each configuration at each concurrency."""
    measured = [*bench.plain, *bench.speculative]
    levels = sorted({point.concurrency for m in measured for point in m.points})
    lines = [
        Line(m.name, [(float(levels.index(point.concurrency)), point.tokens_per_s) for point in m.points])
        for m in measured
    ]
    rows = [
        [m.name, *(number(point.tokens_per_s if (point := m.point(level)) else None, 1) for level in levels)]
        for m in measured
    ]
    return Figure(
        "Throughput by concurrency",
        [
            line_chart(
                lines,
                title="Throughput by concurrency",
                x_label="requests in flight",
                y_label="tokens/s",
                x_names=[str(level) for level in levels],
                y_from=0.0,
            )
        ],
        Table(["tokens/s at", *map(str, levels)], rows),
        "Tokens that arrived while so many requests were in flight, over that time.",
        legend([m.name for m in measured]),
    )


def speedups(bench: BenchResult) -> Table:
    """Time per token of every plain configuration over that of every speculative one, by concurrency."""
    levels = sorted({s.concurrency for s in bench.speedups})
    rows = []
    for spec, plain in dict.fromkeys((s.speculative, s.plain) for s in bench.speedups):
        found = {s.concurrency: s for s in bench.speedups if (s.speculative, s.plain) == (spec, plain)}
        cells = [with_interval(found[c].ratio, found[c].interval) if c in found else "–" for c in levels]
        rows.append([f"{spec} / {plain}", *cells])
    return Table(
        ["speedup at", *map(str, levels)],
        rows,
        "Time per token, plain over speculative, pooled over the same requests in both; in brackets 95% over requests.",
    )


def latency(bench: BenchResult) -> Table:
    """TTFT, gap between chunks and time per token, each p50 / p90 / p99."""

    def three(found: Percentiles | None) -> str:
        return "–" if found is None else f"{found.p50:.0f} / {found.p90:.0f} / {found.p99:.0f}".replace(" ", NBSP)

    rows = [
        [
            m.name,
            str(point.concurrency),
            three(point.ttft_ms),
            three(point.itl_ms),
            three(point.tpot_ms),
            str(point.requests),
            str(point.failed),
        ]
        for m in [*bench.plain, *bench.speculative]
        for point in m.points
    ]
    return Table(
        ["configuration", "in flight", "first token", "gap between chunks", "time per token", "requests", "failed"],
        rows,
        "Milliseconds, p50 / p90 / p99. A speculative step sends several tokens in one chunk: its gaps are longer than "
        "its time per token.",
    )


def training(drafters: Sequence[DrafterReport]) -> Figure | None:
    """Loss, simulated acceptance length and accuracy by step, over time; none when no version has a history."""
    trained = [drafter for drafter in drafters if drafter.history]
    if not trained:
        return None

    def over_time(title: str, unit: str, value: Callable[[TrainPoint], float | None]) -> Markup:
        lines = [Line(name_of(d), [(p.seconds, v) for p in d.history if (v := value(p)) is not None]) for d in drafters]
        plot = line_chart(lines, title=title, x_label="seconds of training", y_label=unit, height=190)
        return plot and _captioned(title, [line.name for line in lines], plot)

    plots = [
        over_time("Loss", "nats", lambda point: point.loss),
        over_time("Simulated acceptance length", "tokens/step", lambda point: point.sim_accept_len),
        *(_accuracy(drafter) for drafter in trained),
    ]
    width = max(len(point.accuracy) for drafter in trained for point in drafter.history)
    rows = [
        [
            name_of(drafter),
            f"{point.seconds:.0f}",
            f"{point.tokens:,}",
            number(point.loss),
            *(number(point.accuracy[k] if k < len(point.accuracy) else None) for k in range(width)),
            number(point.sim_accept_len),
        ]
        for drafter in trained
        for point in shown(drafter.history)
    ]
    head = ["version", "s", "tokens", "loss", *(f"acc. {k + 1}" for k in range(width)), "sim. AL"]
    return Figure(
        "",
        [plot for plot in plots if plot],
        Table(head, rows),
        "Accuracy at step k: share of rows whose draft equals the target's token, unrolled k steps.",
    )


def _accuracy(drafter: DrafterReport) -> Markup:
    width = max(len(point.accuracy) for point in drafter.history)
    lines = [
        Line(f"step {k + 1}", [(p.seconds, p.accuracy[k]) for p in drafter.history if k < len(p.accuracy)])
        for k in range(width)
    ]
    title = f"Accuracy by step, {name_of(drafter)}"
    plot = line_chart(lines, title=title, x_label="seconds of training", y_label="share", y_from=0.0, height=190)
    return plot and _captioned(title, [line.name for line in lines], plot)


def _captioned(title: str, names: Sequence[str], plot: Markup) -> Markup:
    return Markup("<figure><figcaption>{}</figcaption>{}{}</figure>").format(title, legend(names), plot)


def shown(history: Sequence[TrainPoint]) -> list[TrainPoint]:
    """A few points for the table: those with a simulated acceptance length, where there are any."""
    simulated = [point for point in history if point.sim_accept_len is not None]
    return evenly(simulated or history, SHOWN_TRAIN_POINTS)


def swap_timeline(swap: SwapResult) -> Figure:
    """The largest gap between chunks over the run, with its swaps."""
    bands = [(event.staging_s, event.first_token_s, event.version) for event in swap.events]
    rows = [
        [
            event.version,
            f"{event.staging_s:.1f}",
            f"{(event.done_s - event.staging_s) * 1000:.0f}",
            f"{event.gap_ms:.0f}",
            f"{event.floor_ms:.0f}",
            f"{event.pause_ms:.0f}",
            number(segment.tokens_per_chunk),
        ]
        for event, segment in zip(swap.events, swap.segments[1:], strict=False)
    ]
    return Figure(
        "Largest gap between chunks, tenth of a second by tenth",
        [
            line_chart(
                [Line("largest gap", swap.timeline_ms)],
                title="Largest gap between chunks over the run",
                x_label="seconds",
                y_label="ms",
                y_from=0.0,
                bands=bands,
                marks=False,
            )
        ],
        Table(
            ["to", "at, s", "took, ms", "gap, ms", "usual, ms", "pause, ms", "tokens/chunk after"],
            rows,
            "Pause: the largest gap while the swap went on, less the usual one of an equally long stretch.",
        ),
        "Shaded: from the start of staging to the first token after the swap.",
    )
