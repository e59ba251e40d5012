"""report.json and report.html: one self-contained page, readable on a phone, in print, in light and in dark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from eaglenest.report import charts
from eaglenest.report.charts import Table, number, with_interval
from eaglenest.report.models import Facts, Report


@dataclass(frozen=True)
class Tile:
    """One headline figure."""

    value: str
    name: str
    note: str = ""


def write_report(report: Report | Mapping[str, Any], dest_dir: Path) -> Path:
    """Write `report.json` and `report.html` into `dest_dir` (made if missing); returns the page's path.

    Raises:
        pydantic.ValidationError: `report` is a mapping that is no `Report`.
    """
    checked = report if isinstance(report, Report) else Report.model_validate(report)
    if checked.bench is not None:
        checked = checked.model_copy(update={"bench": checked.bench.without_rows()})
    dest_dir.mkdir(parents=True, exist_ok=True)
    # Both are written beside their place and moved: a reader never sees half a file.
    _write(dest_dir / "report.json", checked.model_dump_json(indent=2) + "\n")
    page = dest_dir / "report.html"
    _write(page, render_page(checked))
    return page


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def render_page(report: Report) -> str:
    """The page as text. Every value from the report is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("eaglenest.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    bench, swap = report.bench, report.swap
    return environment.get_template("report.html.j2").render(
        report=report,
        tiles=headline(report),
        drafters=[charts.by_category(report.drafters), charts.by_position(report.drafters)] if report.drafters else [],
        provenance=_provenance(report),
        throughput=charts.throughput(bench) if bench else None,
        speedups=charts.speedups(bench) if bench and bench.speedups else None,
        latency=charts.latency(bench) if bench else None,
        equal=_equality(report),
        training=charts.training(report.drafters),
        swap_timeline=charts.swap_timeline(swap) if swap else None,
        swap_facts=_swap_facts(report),
        facts=[
            (name, facts_table(facts))
            for name, facts in (
                ("Machine", report.machine),
                ("Versions", report.versions),
                ("Target", report.target),
                ("Settings", report.settings),
            )
            if facts
        ],
        stages=_stages(report),
        duration=duration,
    )


def duration(seconds: float) -> str:
    """`23 min 4 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def headline(report: Report) -> list[Tile]:
    """The few figures a reader came for; those that were not measured are left out."""
    tiles: list[Tile] = []
    bench, swap = report.bench, report.swap
    if bench is not None and bench.speedup_c1 is not None:
        tiles.append(
            Tile(
                f"{bench.speedup_c1:.2f}×",
                "speed at one request, against plain in the same mode",
                _between(bench.speedup_c1_interval, bench.speedup_c1_against),
            )
        )
    if bench is not None and bench.speedup_c1_vs_best_plain is not None:
        tiles.append(
            Tile(
                f"{bench.speedup_c1_vs_best_plain:.2f}×",
                "against the fastest plain configuration",
                _between(bench.speedup_c1_vs_best_plain_interval, bench.best_plain),
            )
        )
    for drafter in report.drafters:
        tiles.append(
            Tile(
                f"{drafter.accept_len:.2f}",
                f"acceptance length of drafter v{drafter.version}, served",
                _between(drafter.accept_len_interval, None),
            )
        )
    if swap is not None:
        lost = f"{swap.failed_requests} failed, {swap.changed_outputs} changed"
        tiles.append(Tile(f"{swap.swaps} swaps", f"under {swap.requests} streaming requests", lost))
        steps = f"{swap.pause_p99_plain_steps:.1f} plain steps" if swap.pause_p99_plain_steps is not None else ""
        tiles.append(Tile(f"{swap.pause_ms_p99:.0f} ms", "pause of a swap, p99", steps))
    memory = f"at most {report.peak_memory_gib:.1f} GiB of memory" if report.peak_memory_gib is not None else ""
    tiles.append(Tile(f"{report.wall_s / 60:.0f} min", "for the whole run", memory))
    return tiles


def _between(interval: tuple[float, float] | None, name: str | None) -> str:
    parts = [f"95%: {interval[0]:.2f} to {interval[1]:.2f}"] if interval else []
    return ", ".join([*parts, *([name] if name else [])])


def _provenance(report: Report) -> Table | None:
    if not report.drafters:
        return None
    rows = [
        [
            f"v{d.version}",
            f"v{d.parent_version}" if d.parent_version is not None else "nothing",
            f"{d.train_tokens:,}",
            duration(d.train_s),
            number(d.sim_accept_len),
            with_interval(d.accept_len, d.accept_len_interval),
        ]
        for d in report.drafters
    ]
    return Table(["version", "raised from", "answer tokens", "training", "AL simulated", "AL served"], rows)


def _equality(report: Report) -> str:
    found = report.bench.outputs if report.bench else None
    if found is None:
        return ""
    return (
        f"Speculative answers against plain ones in the same mode, token by token: {found.equal} of {found.compared} "
        f"equal, {found.near_ties} part at a near-tie of the target's own logits, {found.changed} changed."
    )


def _swap_facts(report: Report) -> Table | None:
    swap = report.swap
    if swap is None:
        return None
    steps = number(swap.pause_p99_plain_steps, 1)
    rows = [
        ["swaps", str(swap.swaps)],
        ["streaming requests", f"{swap.requests}, {swap.plan.concurrency} at a time"],
        ["failed requests", str(swap.failed_requests)],
        ["changed outputs", f"{swap.changed_outputs} (near-ties: {swap.near_ties}) of {swap.compared}"],
        ["pause p50 / p99 / max", f"{swap.pause_ms_p50:.0f} / {swap.pause_ms_p99:.0f} / {swap.pause_ms_max:.0f} ms"],
        ["pause p99 in plain steps", steps],
        ["largest gap, with / without swaps", f"{swap.max_itl_ms:.0f} / {swap.max_itl_no_swap_ms:.0f} ms"],
    ]
    return Table(["figure", "value"], rows)


def _stages(report: Report) -> Table | None:
    if not report.stages:
        return None
    rows = [[stage.name, "reused" if stage.reused else duration(stage.seconds)] for stage in report.stages]
    return Table(["stage", "took"], rows)


def facts_table(facts: Facts) -> Table:
    """Names and values; what is not a plain value is shown as JSON."""

    def text(value: JsonValue) -> str:
        if value is None:
            return "none"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return Table(["", ""], [[name.replace("_", " "), text(value)] for name, value in facts.items()])
