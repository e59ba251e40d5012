"""The page: well-formed, self-contained, escaped, and true to report.json."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import ValidationError

from eaglenest.report import Command, Report, Stage, write_report
from eaglenest.report.page import render_page

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = "<script>alert('x')</script>&\"'<b>"


class Page(HTMLParser):
    """Elements, attributes and text of a page; fails on a tag that does not close where it should."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="session")
def page(report: Report) -> Page:
    return Page(render_page(report))


def test_report_json_holds_what_the_issue_names_and_no_raw_rows(report: Report, tmp_path: Path) -> None:
    assert write_report(report, tmp_path / "demo") == tmp_path / "demo" / "report.html"
    data = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert {"wall_s", "machine", "versions", "target", "drafters", "bench", "swap"} <= data.keys()
    drafter = data["drafters"][1]
    assert {"version", "accept_len", "accept_len_by_category", "accept_by_position", "train_tokens", "train_s"} <= set(
        drafter
    )
    assert {"plain", "speculative", "speedup_c1", "speedup_c1_vs_best_plain"} <= data["bench"].keys()
    assert {
        "swaps",
        "requests",
        "failed_requests",
        "changed_outputs",
        "pause_ms_p50",
        "pause_ms_p99",
        "max_itl_ms",
    } <= data["swap"].keys()
    assert data["bench"]["plain"][0]["rows"] == []
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["report.html", "report.json"]
    again = Report.model_validate(data)
    assert render_page(again) == (tmp_path / "demo" / "report.html").read_text()


def test_the_headline_figures_are_those_of_the_report(report: Report, page: Page) -> None:
    assert report.bench is not None
    assert report.swap is not None
    assert f"{report.bench.speedup_c1:.2f}×" in page.text
    assert f"{report.drafters[1].accept_len:.2f} acceptance length of drafter v2" in page.text
    assert f"{report.swap.pause_ms_p99:.0f} ms" in page.text
    assert "0 failed, 0 changed" in page.text
    assert "53 of 54 equal" in page.text


def test_every_point_of_every_configuration_is_in_a_table(report: Report, page: Page) -> None:
    assert report.bench is not None
    for measurement in [*report.bench.plain, *report.bench.speculative]:
        for point in measurement.points:
            assert f"{point.tokens_per_s:.1f}" in page.texts
    for drafter in report.drafters:
        for value in drafter.accept_len_by_category.values():
            assert any(text.startswith(f"{value:.2f} (") for text in page.texts)


def test_the_page_needs_nothing_from_anywhere(report: Report, page: Page) -> None:
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "base"}
    html = render_page(report)
    assert not re.search(r"url\(|@import|https?://(?!127\.0\.0\.1)", html)
    for _, attributes in page.tags:
        assert not {"href", "src", "srcset", "xlink:href", "onclick", "style"} & attributes.keys()


def test_plots_are_inline_svg_with_a_name_and_finite_coordinates(page: Page) -> None:
    charts = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(charts) == 8  # categories, positions, throughput, swaps; loss, simulated AL, accuracy of two versions
    assert all(chart["aria-label"] for chart in charts)
    # HTML parsers lower-case viewBox; browsers put it right.
    for chart in charts:
        width, height = map(float, (chart["viewbox"] or "").split()[2:])
        assert width == 360
        assert 100 < height < 500
    numbers = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in {"x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "width", "height", "points"}
    ]
    assert numbers
    for value in numbers:
        assert re.fullmatch(r"[-0-9., ]+", value or "")


def test_light_dark_phone_and_print_are_provided_for(report: Report, page: Page) -> None:
    html = render_page(report)
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_every_string_is_escaped(report: Report) -> None:
    data = report.model_dump(mode="json")
    data["title"] = data["machine"]["cpu"] = EVIL
    data["versions"][EVIL] = EVIL
    data["target"]["nested"] = {EVIL: [EVIL]}
    data["settings"][EVIL] = 1
    data["stages"].append({"name": EVIL, "seconds": 1})
    data["commands"].append({"text": EVIL, "command": EVIL})
    for drafter in data["drafters"]:
        drafter["accept_len_by_category"][EVIL] = 1.5
    for measurement in data["bench"]["plain"] + data["bench"]["speculative"]:
        measurement["name"] = measurement["model"] = measurement["name"] + EVIL
    for speedup in data["bench"]["speedups"]:
        speedup["plain"] += EVIL
        speedup["speculative"] += EVIL
    data["bench"]["best_plain"] = data["bench"]["speedup_c1_against"] = EVIL
    for event in data["swap"]["events"]:
        event["version"] = EVIL
    html = render_page(Report.model_validate(data))
    assert "<script" not in html
    assert "<b>&" not in html
    parsed = Page(html)  # the hostile text closes and opens nothing
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert sum(EVIL in text for text in parsed.texts) > 20


def test_what_was_not_measured_is_left_out(report: Report) -> None:
    bare = Report(created_at=report.created_at, wall_s=3.0, machine={}, versions={}, target={})
    page = Page(render_page(bare))
    assert not [tag for tag, _ in page.tags if tag == "svg"]
    assert "Swaps" not in page.text
    assert "0 min for the whole run" in page.text
    only_bench = Page(render_page(bare.model_copy(update={"bench": report.bench})))
    assert "Throughput by concurrency" in only_bench.text
    assert "Drafters" not in only_bench.text


def test_coarse_acceptance_without_categories_can_be_shown(report: Report) -> None:
    drafter = report.drafters[0].model_copy(update={"accept_len_by_category": {}, "served": None, "history": []})
    page = Page(render_page(report.model_copy(update={"drafters": [drafter]})))
    assert f"{drafter.accept_len:.2f}" in page.text


def test_a_mapping_with_an_unknown_key_is_refused_before_anything_is_written(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        write_report(report.model_dump() | {"surprise": 1}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_second_report_replaces_the_first(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    changed = report.model_copy(
        update={"title": "Again", "stages": [Stage(name="s", seconds=65)], "commands": [Command(text="a", command="b")]}
    )
    write_report(changed, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<h1>Again</h1>" in text
    assert "1 min 5 s" in text
