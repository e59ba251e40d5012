"""Charts: where values land, and what happens at the edges."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglenest.report.svg import Bars, Line, bar_chart, evenly, label, legend, line_chart, ticks


def root(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_are_round_few_and_cover_the_range(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 9
    assert found == sorted(set(found))
    slack = 1e-6 * (found[1] - found[0])
    assert found[0] <= low + slack
    assert found[-1] >= low + span - slack


def test_a_bar_is_as_long_as_its_value_above_the_start() -> None:
    svg = bar_chart(["a", "b"], [Bars("x", [1.2, 1.8])], title="t", x_label="AL", start=1.0, end=2.0)
    widths = [float(bar.attrib["width"]) for bar in root(svg).iter("rect")]
    assert widths[1] / widths[0] == pytest.approx(4, rel=0.02)


def test_a_missing_value_has_no_bar_and_a_spread_has_a_whisker() -> None:
    svg = bar_chart(["a", "b"], [Bars("x", [None, 1.5], [None, (1.2, 1.9)])], title="t", x_label="AL", start=1.0)
    assert len(list(root(svg).iter("rect"))) == 1
    assert len(list(root(svg).iter("path"))) == 1


def test_a_line_rises_where_its_values_rise() -> None:
    svg = line_chart([Line("l", [(0, 1.0), (1, 3.0)])], title="t", x_label="x", y_label="y", y_from=0.0)
    points = next(iter(root(svg).iter("polyline"))).attrib["points"].split()
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points)
    assert x1 < x2
    assert y1 > y2  # the drawing's y grows downwards


def test_nothing_to_draw_draws_nothing() -> None:
    assert line_chart([Line("l", [])], title="t", x_label="x", y_label="y") == ""
    assert bar_chart([], [Bars("x", [])], title="t", x_label="x") == ""
    assert bar_chart(["a"], [Bars("x", [None])], title="t", x_label="x") == ""


def test_a_single_point_and_equal_values_can_be_drawn() -> None:
    for points in ([(5.0, 2.0)], [(0.0, 2.0), (1.0, 2.0)], [(0.0, 0.0), (0.0, 0.0)]):
        assert "nan" not in line_chart([Line("l", points)], title="t", x_label="x", y_label="y")


@given(st.text(max_size=30))
def test_any_text_stays_text(text: str) -> None:
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "", text)  # no XML holds these
    drawn = bar_chart([text], [Bars(text, [1.0])], title=text, x_label=text)
    assert root(drawn).attrib["aria-label"] == text.replace("\r\n", " ").replace("\r", " ").replace("\n", " ").replace(
        "\t", " "
    )
    root(legend([text]))
    root(
        line_chart([Line(text, [(0, 1)])], title=text, x_label=text, y_label=text, x_names=[text], bands=[(0, 1, text)])
    )


def test_series_differ_in_shape_as_well_as_in_colour() -> None:
    keys = [svg for svg in root(f"<div>{legend(['a', 'b', 'c', 'd'])}</div>").iter("svg")]
    assert len({child.attrib.get("points") for key in keys for child in key}) == 4


def test_long_lines_carry_a_few_marks() -> None:
    svg = line_chart([Line("l", [(i, i) for i in range(500)])], title="t", x_label="x", y_label="y")
    assert len(list(root(svg).iter("circle"))) == 8
    assert evenly([1, 2, 3], 8) == [1, 2, 3]
    assert evenly(list(range(100)), 3) == [0, 50, 99]


def test_large_numbers_are_shortened() -> None:
    assert [label(v) for v in (0.25, 5.0, 1500, 20000)] == ["0.25", "5", "1500", "20k"]
