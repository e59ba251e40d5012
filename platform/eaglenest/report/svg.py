"""Small charts as inline SVG: text stays text, colours are the page's CSS variables, every string is escaped.

The drawing is 360 units wide, about a phone's width, so that its 12-unit labels stay readable there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from markupsafe import Markup, escape

WIDTH = 360
COLOURS = 6
"""Colours s0 to s5 of the page (Okabe and Ito); shapes of the marks tell series apart without them."""

Point = tuple[float, float]
MARKS = 8
"""Marks on a line of many points: enough to know it by its shape."""

T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """A named series of (x, y)."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Bars:
    """A named series of one value per group; none: no value. `spread`: low and high end of each value's interval."""

    name: str
    values: Sequence[float | None]
    spread: Sequence[tuple[float, float] | None] = field(default_factory=tuple)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]: first at or below `low`, last at or above `high`."""
    if high - low <= 1e-6 * max(abs(low), 1e-3):  # equal, but for rounding
        high = low + (abs(low) if abs(low) > 1e-6 else 1.0)
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (count - 1))] for i in range(count)]


def label(value: float) -> str:
    """A tick's number, without needless digits."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def legend(names: Sequence[str]) -> Markup:
    """The key of a chart: a list with each series' mark and name."""
    items = Markup("").join(
        Markup('<li><svg class="key" viewBox="0 0 14 14" aria-hidden="true">{}</svg>{}</li>').format(
            _mark(7, 7, i, 5), name
        )
        for i, name in enumerate(names)
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_names: Sequence[str] | None = None,
    y_from: float | None = None,
    bands: Sequence[tuple[float, float, str]] = (),
    marks: bool = True,
    height: int = 220,
) -> Markup:
    """Lines over a numeric axis, or over equally spaced names when `x_names` is given (x is then the name's index).

    Args:
        y_from: where the y axis begins; default: by the data.
        bands: (from, to, name) stretches of x to shade.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return Markup("")
    ys = [y for line in drawn for _, y in line.points]
    y_ticks = ticks(min(ys) if y_from is None else y_from, max(ys))
    if x_names is None:
        xs = [x for line in drawn for x, _ in line.points]
        x_ticks = ticks(min(xs), max(xs))
        x_low, x_high = x_ticks[0], max(x_ticks[-1], max(xs))
        x_marks = [(tick, label(tick)) for tick in x_ticks]
    else:
        x_low, x_high = -0.25, len(x_names) - 0.75
        x_marks = [(float(i), name) for i, name in enumerate(x_names)]
    frame = _Frame(x_low, x_high, y_ticks[0], y_ticks[-1], height, left=16 + 7 * max(len(label(t)) for t in y_ticks))
    parts = [_band(frame, *band) for band in bands]
    parts += [frame.horizontal(tick) for tick in y_ticks]
    parts += [frame.x_tick(at, text) for at, text in x_marks]
    for i, line in enumerate(drawn):
        parts.append(_polyline(frame, line.points, i))
        if marks:
            parts += [_mark(frame.x(x), frame.y(y), i, 3.5) for x, y in evenly(line.points, MARKS)]
    parts.append(frame.axis_names(x_label, y_label))
    return _svg(title, height, parts)


def bar_chart(
    groups: Sequence[str],
    series: Sequence[Bars],
    *,
    title: str,
    x_label: str,
    start: float = 0.0,
    end: float | None = None,
) -> Markup:
    """Horizontal bars: for each group one bar per series, from `start`, with whiskers where a spread is given."""
    highs = [pair[1] for bars in series for pair in bars.spread if pair is not None]
    values = [value for bars in series for value in bars.values if value is not None]
    if not groups or not values:
        return Markup("")
    x_ticks = ticks(start, max([*values, *highs]) if end is None else end, about=4)
    bar = 11
    block = bar * len(series) + 9
    height = block * len(groups) + 44
    left = 10 + 6.4 * min(20, max(len(group) for group in groups))
    frame = _Frame(start, x_ticks[-1], 0, 1, height, left=left, top=4)
    parts = [frame.vertical(tick) for tick in x_ticks if tick >= start]
    for g, group in enumerate(groups):
        top = frame.top + 5 + g * block
        shown = group if len(group) <= 20 else group[:19] + "…"
        parts.append(_text(left - 6, top + bar * len(series) / 2 + 4, shown, "end"))
        for s, bars in enumerate(series):
            value = bars.values[g]
            if value is not None:
                parts.append(_bar(frame, start, value, top + s * bar, bar - 2, s))
                if len(bars.spread) > g and (pair := bars.spread[g]) is not None:
                    parts.append(_whisker(frame, pair, top + s * bar + bar / 2 - 1))
    parts.append(_text((frame.left + frame.right) / 2, height - 5, x_label, "middle", "axis"))
    return _svg(title, height, parts)


@dataclass(frozen=True)
class _Frame:
    """The plotting area and its two scales."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: float
    left: float = 44
    top: float = 24
    right: float = WIDTH - 12

    @property
    def bottom(self) -> float:
        return self.height - 38

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / ((self.x_high - self.x_low) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / ((self.y_high - self.y_low) or 1) * (self.bottom - self.top)

    def horizontal(self, value: float) -> Markup:
        y = self.y(value)
        return _rule(self.left, y, self.right, y) + _text(self.left - 6, y + 4, label(value), "end")

    def vertical(self, value: float) -> Markup:
        x = self.x(value)
        return _rule(x, self.top, x, self.bottom + 2) + _text(x, self.bottom + 17, label(value), "middle")

    def x_tick(self, value: float, text: str) -> Markup:
        return _text(self.x(value), self.bottom + 17, text, "middle")

    def axis_names(self, x_label: str, y_label: str) -> Markup:
        middle = (self.left + self.right) / 2
        return _text(middle, self.height - 5, x_label, "middle", "axis") + _text(2, 12, y_label, "start", "axis")


def _svg(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>').format(
        WIDTH, round(height), title, title, Markup("").join(parts)
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
        kind, _n(x), _n(y), anchor, escape(text)
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(_n(x1), _n(y1), _n(x2), _n(y2))


def _bar(frame: _Frame, start: float, value: float, y: float, thick: float, index: int) -> Markup:
    x1, x2 = sorted((frame.x(start), frame.x(value)))
    return Markup('<rect class="fill s{}" x="{}" y="{}" width="{}" height="{}"/>').format(
        index % COLOURS, _n(x1), _n(y), _n(max(0.8, x2 - x1)), _n(thick)
    )


def _whisker(frame: _Frame, pair: tuple[float, float], y: float) -> Markup:
    low, high = _n(frame.x(max(pair[0], frame.x_low))), _n(frame.x(min(pair[1], frame.x_high)))
    return Markup('<path class="whisker" d="M{} {}H{}M{} {}v5M{} {}v5"/>').format(
        low, _n(y), high, low, _n(y - 2.5), high, _n(y - 2.5)
    )


def _polyline(frame: _Frame, points: Sequence[Point], index: int) -> Markup:
    path = " ".join(f"{_n(frame.x(x))},{_n(frame.y(y))}" for x, y in points)
    return Markup('<polyline class="line s{}" points="{}"/>').format(index % COLOURS, path)


def _band(frame: _Frame, begin: float, end: float, name: str) -> Markup:
    x1, x2 = frame.x(begin), frame.x(end)
    return Markup('<rect class="band" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
        _n(x1), _n(frame.top), _n(max(1.5, x2 - x1)), _n(frame.bottom - frame.top), name
    ) + _text((x1 + x2) / 2, frame.top - 3, name, "middle")


def _mark(x: float, y: float, index: int, size: float) -> Markup:
    """The series' own shape: circle, square, triangle, diamond, then the same again in other colours."""
    shape = index % 4
    if shape == 0:
        return Markup('<circle class="mark s{}" cx="{}" cy="{}" r="{}"/>').format(
            index % COLOURS, _n(x), _n(y), _n(size)
        )
    outline = {
        1: [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        2: [(0, -1.15), (1.1, 0.85), (-1.1, 0.85)],
        3: [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
    }[shape]
    path = " ".join(f"{_n(x + dx * size)},{_n(y + dy * size)}" for dx, dy in outline)
    return Markup('<polygon class="mark s{}" points="{}"/>').format(index % COLOURS, path)


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
