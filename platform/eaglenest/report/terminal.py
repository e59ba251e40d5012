"""The same figures as tables for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from eaglenest.bench.models import BenchResult
from eaglenest.report import charts
from eaglenest.report.models import Report
from eaglenest.report.page import headline


def render_terminal(report: Report) -> RenderableType:
    """Headline figures, drafters, throughput, speedups and swaps, as far as measured: print it with rich."""
    parts: list[RenderableType] = [_headline(report)]
    if report.drafters:
        parts.append(_table("Acceptance length by category (95%)", charts.by_category(report.drafters).table))
    if report.bench is not None:
        parts.append(render_bench(report.bench))
    if report.swap is not None:
        parts.append(_table("Swaps under load", charts.swap_timeline(report.swap).table))
    return Group(*parts)


def render_bench(bench: BenchResult) -> RenderableType:
    """Throughput, speedups, latency and equality of one comparison."""
    parts: list[RenderableType] = [_table("Throughput", charts.throughput(bench).table)]
    if bench.speedups:
        parts.append(_table("Speedup (95%)", charts.speedups(bench)))
    parts.append(_table("Latency, ms: p50 / p90 / p99", charts.latency(bench)))
    if bench.outputs is not None:
        found = bench.outputs
        parts.append(
            Text(
                f"outputs against plain: {found.equal} of {found.compared} equal, {found.near_ties} near-ties, "
                f"{found.changed} changed",
                style="red" if found.changed else "",
            )
        )
    return Group(*parts)


def _headline(report: Report) -> RichTable:
    out = RichTable(title=Text(report.title), show_header=False, title_justify="left")
    for tile in headline(report):
        out.add_row(Text(tile.value, style="bold"), Text(tile.name), Text(tile.note, style="dim"))
    return out


def _table(title: str, table: charts.Table | None) -> RichTable:
    # Text, not str: rich would read square brackets in a value as markup.
    out = RichTable(title=Text(title), title_justify="left")
    if table is None:
        return out
    for i, name in enumerate(table.head):
        out.add_column(Text(name), justify="right" if i else "left")
    for row in table.rows:
        out.add_row(*(Text(cell) for cell in row))
    return out
