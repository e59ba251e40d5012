"""The terminal's tables, and the training curves as files."""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError
from rich.console import Console

from eaglenest.report import Report, TrainPoint, render_bench, render_terminal
from eaglenest.report.training_plots import plot_drift, plot_training


def printed(renderable: object, width: int = 140) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


def test_the_terminal_shows_the_same_figures(report: Report) -> None:
    text = printed(render_terminal(report))
    assert report.bench is not None
    assert report.swap is not None
    for value in (
        f"{report.bench.speedup_c1:.2f}×",
        f"{report.drafters[0].accept_len:.2f}",
        f"{report.swap.pause_ms_p99:.0f} ms",
        "6 swaps",
        "53 of 54 equal",
        *(f"{point.tokens_per_s:.1f}" for point in report.bench.speculative[0].points),
    ):
        assert value in text


def test_square_brackets_in_a_name_are_no_markup(report: Report) -> None:
    assert report.bench is not None
    plain = report.bench.plain[0].model_copy(update={"name": "[red]plain[/red]"})
    text = printed(render_bench(report.bench.model_copy(update={"plain": [plain]})))
    assert "[red]plain[/red]" in text


def test_a_report_of_nothing_can_be_printed(report: Report) -> None:
    bare = Report(created_at=report.created_at, wall_s=60.0, machine={}, versions={}, target={})
    assert "1 min" in printed(render_terminal(bare))


def test_training_curves_become_an_svg_and_a_png(report: Report, tmp_path: Path) -> None:
    svg, png = plot_training(report.drafters[0].history, tmp_path / "plots")
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = ElementTree.parse(svg).getroot()
    assert texts.tag.endswith("svg")


def test_history_rows_may_be_plain_mappings_and_sparse(tmp_path: Path) -> None:
    rows = [{"seconds": 1.0, "tokens": 5, "loss": 3.0}, {"seconds": 2, "tokens": 9, "loss": 2.5, "accuracy": [0.2]}]
    assert len(plot_training(rows, tmp_path)) == 2
    assert plot_training([], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValidationError):
        plot_training([{"seconds": 1.0}], tmp_path)


def test_drift_is_drawn_where_a_version_knows_it(tmp_path: Path) -> None:
    shares = {"sink_attention_by_depth": [0.4, 0.3], "own_attention_by_depth": [0.0, 0.2]}
    svg, png = plot_drift({**shares, "state_rms_by_depth": [1.0, 1.1]}, tmp_path / "plots")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert plot_drift({"loss": 1.0}, tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_drafter_report_takes_its_flat_figures_from_the_measured_acceptance(report: Report) -> None:
    drafter = report.drafters[1]
    assert drafter.served is not None
    assert drafter.accept_len == drafter.served.accept_len
    assert drafter.accept_by_position == drafter.served.conditional
    assert drafter.accept_len_by_category == {k: v.accept_len for k, v in drafter.served.by_category.items()}
    assert isinstance(drafter.history[0], TrainPoint)
