"""Plots as inline SVG: no library, no script, nothing from elsewhere, colours by the page's CSS.

Series differ in colour, marker and dash, so that a print in grey still tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final

import msgspec

from specserve_loadgen.intervals import Interval

WIDTH: Final = 560
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 12, 44
NUM_COLOURS: Final = 8
SLANTED: Final = 46  # more height where names of places are too long to stand side by side
_DASHES: Final = ("", "6 3", "2 3", "8 3 2 3")


class Point(msgspec.Struct, frozen=True):
    x: float
    y: float
    low: float | None = None
    high: float | None = None


def estimated(x: float, interval: Interval) -> Point:
    return Point(x, interval.estimate, interval.low, interval.high)


def estimates(entries: Iterable[tuple[float, Interval | None]]) -> tuple[Point, ...]:
    """Of what is known."""
    return tuple(estimated(x, interval) for x, interval in entries if interval is not None)


class Series(msgspec.Struct, frozen=True):
    """style: colour, marker and dash; the same for one thing in all plots of a page"""

    name: str
    points: tuple[Point, ...]
    style: int


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """x_names: one place each, at 0, 1, ...; y_range: None: what the points need, from 0"""

    x_label: str
    y_label: str
    x_names: tuple[str, ...] = ()
    y_range: tuple[float, float] | None = None
    x_is_log: bool = False
    reference: float | None = None  # a dotted line at this y


class _Frame:
    """Data to pixels."""

    def __init__(self, series: Sequence[Series], axes: Axes) -> None:
        points = [p for one in series for p in one.points]
        xs = [p.x for p in points] or [0.0, 1.0]
        self.axes = axes
        if axes.x_names:
            self._x_low, self._x_high = -0.5, len(axes.x_names) - 0.5
        else:
            self._x_low, self._x_high = self._wide(min(xs), max(xs))
        highest = [value for p in points for value in (p.y, p.high, axes.reference) if value]
        top = max(highest, default=1.0)
        self.y_low, self.y_high = axes.y_range or (0.0, top * 1.06 or 1.0)

    @property
    def slants(self) -> bool:
        names = self.axes.x_names
        return len(names) * max(map(len, names), default=0) > 80

    @property
    def height(self) -> int:
        """Of the whole plot."""
        return HEIGHT + SLANTED * self.slants

    def _wide(self, low: float, high: float) -> tuple[float, float]:
        if self.axes.x_is_log:
            low, high = math.log10(low), math.log10(high)
        return (low - 0.5, high + 0.5) if low == high else (low, high)

    def x(self, value: float) -> float:
        if self.axes.x_is_log:
            value = math.log10(value)
        share = (value - self._x_low) / (self._x_high - self._x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - max(-0.02, min(1.02, share)) * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[tuple[float, str]]:
        if self.axes.x_names:
            return [(float(at), name) for at, name in enumerate(self.axes.x_names)]
        if self.axes.x_is_log:
            return _log_ticks(self._x_low, self._x_high)
        return [(value, _short(value)) for value in nice_ticks(self._x_low, self._x_high)]


def nice_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most`, within low..high."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def lines(series: Sequence[Series], axes: Axes, title: str) -> str:
    """Points joined by lines; where a point has an interval, a bar from low to high."""
    frame = _Frame(series, axes)
    spread = _spread(len(series)) if axes.x_names else lambda idx: 0.0
    parts = [_grid(frame)]
    for idx, one in enumerate(series):
        shift, style = spread(idx), one.style
        at = [(frame.x(p.x) + shift, frame.y(p.y), p) for p in one.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in at) if at else ""
        parts.append(f'<path class="line {_class(style)}"{_dash(style)} d="{path}"/>')
        parts += [_bar(frame, x, p, style) for x, _, p in at]
        parts += [_marker(x, y, style, _tip(one.name, p, axes)) for x, y, p in at]
    return _svg(frame, parts, title) + _legend([(one.name, one.style) for one in series])


def curves(series: Sequence[Series], axes: Axes, title: str) -> str:
    """Steps without markers: cumulative shares, and what holds until it changes."""
    frame = _Frame(series, axes)
    parts = [_grid(frame)]
    for one in series:
        path, last = "", 0.0
        for p in one.points:
            x, y = frame.x(p.x), frame.y(p.y)
            path += f"L{x:.1f} {last:.1f}L{x:.1f} {y:.1f}" if path else f"M{x:.1f} {y:.1f}"
            last = y
        name = f"<title>{escape(one.name)}</title>"
        style = f'class="line {_class(one.style)}"{_dash(one.style)}'
        parts.append(f'<path {style} d="{path}">{name}</path>')
    return _svg(frame, parts, title) + _legend([(one.name, one.style) for one in series])


def stacked(
    bars: Sequence[tuple[str, Sequence[float]]], parts_of: Sequence[str], axes: Axes, title: str
) -> str:
    """One bar per name, cut into as many parts as `parts_of` names."""
    tallest = max((sum(values) for _, values in bars), default=1.0)
    names = tuple(name for name, _ in bars)
    axes = msgspec.structs.replace(axes, x_names=names, y_range=(0.0, tallest * 1.06 or 1.0))
    frame = _Frame([], axes)
    width = 0.6 * (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    drawn = [_grid(frame)]
    for at, (name, values) in enumerate(bars):
        below = 0.0
        for idx, value in enumerate(values):
            y, bottom = frame.y(below + value), frame.y(below)
            tip = f"{name}, {parts_of[idx]}: {value:.3g} {axes.y_label}"
            drawn.append(_rect(frame.x(at) - width / 2, y, width, bottom - y, idx, tip))
            below += value
    return _svg(frame, drawn, title) + _legend(
        [(name, idx) for idx, name in enumerate(parts_of)], _box
    )


def grouped(series: Sequence[Series], axes: Axes, title: str) -> str:
    """Bars side by side over `axes.x_names`, each with its interval."""
    frame = _Frame(series, axes)
    place = (WIDTH - LEFT - RIGHT) / max(1, len(axes.x_names))
    width = 0.8 * place / max(1, len(series))
    parts = [_grid(frame)]
    for idx, one in enumerate(series):
        for p in one.points:
            x = frame.x(p.x) - 0.4 * place + idx * width
            y = frame.y(p.y)
            tip = _tip(one.name, p, axes)
            parts.append(_rect(x, y, max(1.0, width - 1), frame.y(0) - y, one.style, tip))
            parts.append(_bar(frame, x + width / 2, p, None))
    return _svg(frame, parts, title) + _legend([(one.name, one.style) for one in series], _box)


def ecdf(values: Sequence[float], most: int = 120) -> tuple[Point, ...]:
    """The cumulative share of values, thinned to `most` points."""
    ordered = sorted(values)
    count = len(ordered)
    ranks = (
        sorted({round(k * (count - 1) / max(1, most - 1)) for k in range(most)}) if count else ()
    )
    return tuple(Point(ordered[rank], (rank + 1) / count) for rank in ranks)


# ---- parts -------------------------------------------------------------------------------------


def _svg(frame: _Frame, parts: Sequence[str], title: str) -> str:
    inner = "".join(part for part in parts if part)
    name = escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {frame.height}" role="img" aria-label="{name}">'
        f"<title>{name}</title>{inner}</svg>"
    )


def _legend(names: Sequence[tuple[str, int]], sample: Callable[[int], str] | None = None) -> str:
    """sample: of a style, 34 by 12; None: its line"""
    drawn = _line if sample is None else sample
    items = [
        f'<li><svg viewBox="0 0 34 12" aria-hidden="true">{drawn(idx)}</svg>{escape(name)}</li>'
        for name, idx in names
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _line(idx: int) -> str:
    return f'<path class="line {_class(idx)}"{_dash(idx)} d="M0 6H34"/>{_marker(17, 6, idx, "")}'


def _box(idx: int) -> str:
    return f'<rect class="area {_class(idx)}" x="11" width="12" height="12"/>'


def _grid(frame: _Frame) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = []
    for value in nice_ticks(frame.y_low, frame.y_high, 6):
        y = frame.y(value)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        drawn.append(
            f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
        )
    ticks = frame.x_ticks()
    every = -(-len(ticks) // 16)
    for value, name in ticks[::every]:
        place = f'x="{frame.x(value):.1f}" y="{bottom + 15}" text-anchor="middle"'
        if frame.slants:
            place = f'transform="translate({frame.x(value) + 5:.1f} {bottom + 13}) rotate(-35)" '
            place += 'text-anchor="end"'
        shown = name if len(name) <= 17 else name[:16] + "…"
        drawn.append(f"<text {place}>{escape(shown)}</text>")
    if frame.axes.reference is not None:
        y = frame.y(frame.axes.reference)
        drawn.append(f'<path class="reference" d="M{LEFT} {y:.1f}H{right}"/>')
    middle = (TOP + bottom) / 2
    drawn += [
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
        f'<text class="label" x="{(LEFT + right) / 2:.0f}" y="{frame.height - 4}" '
        f'text-anchor="middle">{escape(frame.axes.x_label)}</text>',
        f'<text class="label" transform="translate(14 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(frame.axes.y_label)}</text>',
    ]
    return "".join(drawn)


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """1, 2 and 5 of each decade, or even steps where fewer than two of those lie inside

    low, high: logarithms
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    values = [m * 10.0**decade for decade in decades for m in (1, 2, 5)]
    inside = [v for v in values if low - 1e-9 <= math.log10(v) <= high + 1e-9]
    if len(inside) < 2:
        inside = nice_ticks(10.0**low, 10.0**high)
    return [(value, _short(value)) for value in inside]


def _spread(count: int) -> Callable[[int], float]:
    """Pixels by which series at named places stand apart, so that their intervals can be seen."""
    return lambda idx: (idx - (count - 1) / 2) * min(9.0, 40.0 / max(1, count))


def _class(idx: int) -> str:
    return f"s{idx % NUM_COLOURS}"


def _dash(idx: int) -> str:
    dash = _DASHES[idx // 2 % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _bar(frame: _Frame, x: float, point: Point, idx: int | None) -> str:
    if point.low is None or point.high is None:
        return ""
    low, high = frame.y(point.low), frame.y(point.high)
    colour = "ink" if idx is None else _class(idx)
    return (
        f'<path class="bar {colour}" d="M{x:.1f} {low:.1f}V{high:.1f}'
        f'M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"/>'
    )


def _marker(x: float, y: float, idx: int, tip: str) -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    kind = f'class="mark {_class(idx)}"'
    if idx % 3 == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'
    if idx % 3 == 1:
        place = f'x="{x - 3.2:.1f}" y="{y - 3.2:.1f}"'
        return f'<rect {kind} {place} width="6.4" height="6.4">{title}</rect>'
    return f'<path {kind} d="M{x:.1f} {y - 4.4:.1f}l4.4 7.6h-8.8z">{title}</path>'


def _rect(x: float, y: float, width: float, height: float, idx: int, tip: str) -> str:
    return (
        f'<rect class="area {_class(idx)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{max(0.0, height):.1f}"><title>{escape(tip)}</title></rect>'
    )


def _tip(name: str, point: Point, axes: Axes) -> str:
    where = axes.x_names[round(point.x)] if axes.x_names else _short(point.x)
    text = f"{name}, {axes.x_label} {where}: {point.y:.3g}"
    if point.low is not None and point.high is not None:
        text += f" (95 %: {point.low:.3g} to {point.high:.3g})"
    return text


def _short(value: float) -> str:
    return f"{value:.6g}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"
