"""Work out the pictures of a live page: numbers become places, and the template draws them as SVG.

They are drawn anew with every round, beside the training, so that they cost milliseconds. A
report's own pictures, by matplotlib, take a hundred times as long.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 400.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 390.0, 14.0, 190.0
MOST_POINTS = 300  # of a line: more than there is room for
MOST_DOTS = 40  # of a line whose points are marked
MOST_BARS = 60

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """Hold the curve of a line: its places, and its points with what they say."""

    number: int  # of its colour
    name: str
    path: str
    dots: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Bar:
    """Hold one part of a bar."""

    number: int
    x: float
    y: float
    width: float
    height: float
    told: str


@dataclass(frozen=True)
class Plot:
    """Hold a picture: what is drawn where, with its heading and a sentence on what it shows."""

    name: str
    title: str
    about: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Curve] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # names of colours, if there are several


def line_plot(
    name: str, title: str, about: str, x_label: str, series: Mapping[str, Points], *, whole: bool
) -> Plot | None:
    """Draw lines, of which each has points; None if none has."""
    kept = {label: _thinned(_finite(points)) for label, points in series.items()}
    points = [point for each in kept.values() for point in each]
    if not points:
        return None
    across = _Axis([x for x, _ in points], LEFT, RIGHT, whole=whole)
    up = _Axis([y for _, y in points], BOTTOM, TOP, to_ticks=True)
    lines = [
        _line(number, label, each, across, up)
        for number, (label, each) in enumerate(kept.items())
        if each
    ]
    parts = list(kept) if len(kept) > 1 else []
    return Plot(name, title, about, x_label, across.ticks, up.ticks, lines, parts=parts)


def _line(number: int, name: str, points: Points, across: "_Axis", up: "_Axis") -> Curve:
    places = [(across.place(x), up.place(y), f"{x:g}: {y:.4g}") for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    marked = places if len(places) <= MOST_DOTS else places[-1:]
    return Curve(number, name, path, marked)


def bar_plot(
    name: str,
    title: str,
    about: str,
    x_label: str,
    bars: Sequence[tuple[int, Sequence[float]]],
    parts: Sequence[str],
) -> Plot | None:
    """Draw a bar for each number, its parts on top of each other; None if there is none."""
    bars = [(at, [max(0.0, part) for part in each]) for at, each in bars[-MOST_BARS:]]
    bars = [(at, each) for at, each in bars if all(map(math.isfinite, each))]
    if not bars:
        return None
    first, last = bars[0][0], bars[-1][0]
    across = _Axis([first - 0.5, last + 0.5], LEFT, RIGHT, whole=True)
    up = _Axis([0.0, *(sum(each) for _, each in bars)], BOTTOM, TOP, to_ticks=True)
    width = max(1.0, 0.8 * (RIGHT - LEFT) / (last - first + 1))
    drawn = []
    for at, each in bars:
        below = 0.0
        for number, (part, value) in enumerate(zip(parts, each, strict=True)):
            top, bottom = up.place(below + value), up.place(below)
            left, told = across.place(at) - width / 2, f"{at}, {part}: {value:.3g}"
            drawn.append(Bar(number, left, top, width, bottom - top, told))
            below += value
    return Plot(name, title, about, x_label, across.ticks, up.ticks, bars=drawn, parts=list(parts))


class _Axis:
    """Give values their places on one axis, from `begin` to `end`, and round numbers ticks."""

    def __init__(
        self,
        values: Sequence[float],
        begin: float,
        end: float,
        *,
        whole: bool = False,
        to_ticks: bool = False,
    ) -> None:
        self._low, self._high = min(values), max(values)
        if self._high <= self._low:
            room = max(abs(self._low) * 0.1, 0.5)
            self._low, self._high = self._low - room, self._high + room
        self._begin, self._end = begin, end
        step = self._step(whole)
        if to_ticks:
            self._low = math.floor(self._low / step + 1e-9) * step
            self._high = math.ceil(self._high / step - 1e-9) * step
        self.ticks = [(self.place(at), _short(at)) for at in self._multiples_of(step)]

    def place(self, value: float) -> float:
        """Return where a value is drawn."""
        share = (value - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def _step(self, whole: bool) -> float:
        """Choose a round number that parts the axis into at most five."""
        span = self._high - self._low
        size = 10.0 ** math.floor(math.log10(span / 4))
        step = next((size * k for k in (1, 2, 5) if span / (size * k) <= 5), size * 10)
        return max(1.0, step) if whole else step

    def _multiples_of(self, step: float) -> list[float]:
        first, last = math.ceil(self._low / step - 1e-9), math.floor(self._high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _short(value: float) -> str:
    value = 0.0 if abs(value) < 1e-12 else value
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def _finite(points: Points) -> Points:
    limit = 1e300  # beyond it differences overflow
    return [(x, y) for x, y in points if abs(x) < limit and abs(y) < limit]


def _thinned(points: Points) -> Points:
    """Keep at most so many points, the last among them."""
    step = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::step][::-1]
