"""Charts as SVG text, which a browser shows by itself. Sizes are in pixels of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import fmean

POINTS = 100
"""Of a curve at most; a longer one is drawn as means of steps that lie together."""
DOTS = 25
"""A curve of no more points shows each of them."""
BARS = 120
"""Of a bar chart at most."""
WIDE, NARROW = 1040, 336

Points = Sequence[tuple[float, float]]
"""(x, y) by rising x; y may be NaN."""


@dataclass(frozen=True)
class Bar:
    """A part of a row of a timeline."""

    begin: float
    """In the unit of the x axis."""
    end: float
    colour: str
    title: str
    """Shown under the pointer."""


@dataclass(frozen=True)
class _Axes:
    """A plot's frame: turns numbers into pixels."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = 48
    right: float = 14
    top: float = 18
    bottom: float = 32

    def x(self, value: float) -> float:
        low, high = self.x_range
        inner = self.width - self.left - self.right
        return round(self.left + (value - low) / (high - low) * inner, 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        inner = self.height - self.top - self.bottom
        return round(self.height - self.bottom - (value - low) / (high - low) * inner, 1)

    def draw(
        self,
        body: str,
        x_label: str,
        x_ticks: Sequence[float],
        y_label: str,
        y_ticks: Sequence[float],
    ) -> str:
        """The whole chart: `body` over the lines of the grid, with numbers and labels."""
        right, floor = self.width - self.right, self.height - self.bottom
        parts = [f'<svg viewBox="0 0 {self.width} {self.height}" role="img">']
        for value in y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(_text(self.left - 6, y + 4, number(value, 6), "end"))
        for value in x_ticks:
            parts.append(_text(self.x(value), floor + 14, number(value, 6), "middle"))
        line = f'<line class="axis" x1="{self.left}" x2="{right}" y1="{floor}" y2="{floor}"/>'
        labels = _text(right, self.height - 3, x_label, "end") + _text(0, 11, y_label, "start")
        return "".join([*parts, body, line, labels, "</svg>"])


def line_chart(points: Points, steps: tuple[float, float], unit: str) -> str:
    """A curve over steps, of which the axis shows `steps`, the first and the last. Of more than
    POINTS values several lie in one point: the line is their mean, the band goes from the lowest
    to the highest. A gap is where no value is finite."""
    size = -(-len(points) // POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    drawn = [(group, [y for _, y in group if math.isfinite(y)]) for group in groups]
    finite = [y for _, values in drawn for y in values]
    low, high = _span(finite)
    axes = _Axes(NARROW, 170, _apart(*steps), (low, high))
    body = []
    for has_values, items in groupby(drawn, key=lambda item: bool(item[1])):
        if has_values:
            part = list(items)
            has_dots = len(part) == 1 or len(groups) <= DOTS
            body.append(_curve(axes, part, size > 1, has_dots))
    return axes.draw("".join(body), "step", _whole_ticks(axes.x_range), unit, ticks(low, high))


def _curve(
    axes: _Axes, groups: Sequence[tuple[Points, list[float]]], has_band: bool, has_dots: bool
) -> str:
    """One part of a line without gaps, its points under the pointer."""
    xs = [axes.x(fmean(x for x, _ in group)) for group, _ in groups]
    means = [fmean(values) for _, values in groups]
    parts = []
    if has_band:
        above = [(x, axes.y(max(values))) for x, (_, values) in zip(xs, groups, strict=True)]
        below = [(x, axes.y(min(values))) for x, (_, values) in zip(xs, groups, strict=True)]
        parts.append(f'<polygon class="band" points="{_path([*above, *below[::-1]])}"/>')
    ys = [axes.y(mean) for mean in means]
    parts.append(f'<polyline class="line" points="{_path(zip(xs, ys, strict=True))}"/>')
    for x, y, mean, (group, _) in zip(xs, ys, means, groups, strict=True):
        first, last = group[0][0], group[-1][0]
        if has_dots:
            parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="2.5"/>')
        hover = f"<title>{_steps(first, last)}: {number(mean)}</title>"
        parts.append(f'<circle class="hover" cx="{x}" cy="{y}" r="5">{hover}</circle>')
    return "".join(parts)


def stacked_bars(
    bars: Sequence[tuple[float, Sequence[float]]], kinds: Sequence[tuple[str, str]], unit: str
) -> str:
    """A bar per step: (step, the height of its part of each of `kinds`, which are (name, colour)
    from below). Of more than BARS steps several share one, which has their mean heights."""
    size = -(-len(bars) // BARS)
    groups = [bars[i : i + size] for i in range(0, len(bars), size)]
    means = [[fmean(heights) for heights in zip(*(h for _, h in g), strict=True)] for g in groups]
    gap = (bars[-1][0] - bars[0][0]) / max(len(bars) - 1, 1) or 1.0
    steps = (bars[0][0] - gap / 2, bars[-1][0] + gap / 2)
    axes = _Axes(WIDE, 220, steps, (0, max(map(sum, means)) or 1.0))
    body = []
    for group, heights in zip(groups, means, strict=True):
        first, last = group[0][0], group[-1][0]
        left, right = axes.x(first - gap / 2), axes.x(last + gap / 2)
        base = 0.0
        for (name, colour), height in zip(kinds, heights, strict=True):
            top, floor = axes.y(base + height), axes.y(base)
            base += height
            title = f"{_steps(first, last)}: {name} {number(height)} {unit}"
            body.append(_rect(left, top, max(right - left - 1, 1), floor - top, colour, title))
    y_ticks = ticks(*axes.y_range)
    return axes.draw("".join(body), "step", _whole_ticks(axes.x_range), unit, y_ticks)


def timeline(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    marks: Sequence[tuple[float, str]],
    length: float,
    unit: str,
) -> str:
    """Rows of bars from 0 to `length`; each of `marks` is a line across all of them."""
    height = 26
    axes = _Axes(WIDE, 50 + height * len(rows), (0, length), (0, 1), left=150)
    body = []
    for x, label in marks:
        place, floor = axes.x(x), axes.height - axes.bottom
        body.append(f'<line class="mark" x1="{place}" x2="{place}" y1="4" y2="{floor}"/>')
        body.append(_text(place + 4, 12, label, "start"))
    for row, (label, bars) in enumerate(rows):
        top = axes.top + row * height
        body.append(_text(axes.left - 8, top + 17, label, "end"))
        for bar in bars:
            left, right = axes.x(bar.begin), axes.x(bar.end)
            width = max(right - left - 0.5, 0.5)
            body.append(_rect(left, top + 3, width, height - 6, bar.colour, bar.title))
    return axes.draw("".join(body), unit, ticks(0, length, 10), "", ())


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in a range, about `most`, in steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def number(value: float, digits: int = 4) -> str:
    """Short, for people: 0.357, 28.3k, 1.5e-05."""
    if not math.isfinite(value):
        return "not finite"
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.{digits - 1}g}{letter}"
    return f"{value:.{digits}g}"


def _whole_ticks(span: tuple[float, float]) -> list[float]:
    return [tick for tick in ticks(*span) if tick == int(tick)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The y axis for some values: from 0 where that costs little room."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    return _apart(0.0 if 0 <= low < high / 2 else low, high)


def _apart(low: float, high: float) -> tuple[float, float]:
    """A range with some width."""
    around = abs(low) / 2 or 1.0
    return (low, high) if high > low else (low - around, high + around)


def _steps(first: float, last: float) -> str:
    return f"step {first:g}" if first == last else f"mean of steps {first:g} to {last:g}"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    hover = f"<title>{escape(title)}</title>"
    return f'<rect x="{x}" y="{y}" {size} fill="{colour}">{hover}</rect>'
