"""Small line charts as SVG, drawn for inline use: colors and fonts come from the page's style sheet.

Called by the report. Pure text: it knows axes, lines and dots, and nothing of what they mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

LABEL_ROOM = 24  # half of a wide label
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
NUM_TICKS = 5

Point = tuple[float, float]


def plain(value: float) -> str:
    """A number as a label."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a chart: its range, and how its labels are written."""

    low: float
    high: float
    label: str = ""
    is_log: bool = False
    write: Callable[[float], str] = plain

    def share(self, value: float) -> float:
        """Where a value is, 0 to 1."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def linear_axis(values: Sequence[float], label: str, write: Callable[[float], str] = plain) -> Axis:
    """From 0 to a little more than the largest value."""
    return Axis(0.0, 1.05 * max(values, default=0.0) or 1.0, label, write=write)


def log_axis(values: Sequence[float], label: str, write: Callable[[float], str] = plain) -> Axis:
    """All values that are above 0, with a little room."""
    above = [value for value in values if value > 0] or [1.0]
    return Axis(min(above) / 1.1, max(above) * 1.1, label, True, write)


def ticks(low: float, high: float) -> list[float]:
    """About NUM_TICKS multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and 2 and 5 times them where there is room; round values where there is no power."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    found = [float(f"{f}e{power}") for power in range(first, last + 1) for f in factors]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 2 else ticks(low, high)


@dataclass(slots=True)
class Chart:
    """Axes and what is drawn between them, in the order of the calls."""

    x: Axis
    y: Axis
    _drawn: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], style: str, title: str = "") -> None:
        """A line through points; `style` is a class of the style sheet."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._place, points))
        self._drawn.append(
            f'<polyline class="line {style}" points="{path}">{_title(title)}</polyline>'
        )

    def dots(self, points: Sequence[Point], style: str) -> None:
        """A small dot at each point, as one path."""
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in map(self._place, points))
        self._drawn.append(f'<path class="dots {style}" d="{path}"/>')

    def marks(self, points: Sequence[Point], style: str, titles: Sequence[str]) -> None:
        """A large dot at each point that tells its title when it is pointed at."""
        for point, title in zip(points, titles, strict=True):
            x, y = self._place(point)
            self._drawn.append(
                f'<circle class="mark {style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{_title(title)}</circle>'
            )

    def bar(
        self, start: float, end: float, low: float, high: float, style: str, title: str
    ) -> None:
        """A filled rectangle."""
        left, top = self._place((start, high))
        right, bottom = self._place((end, low))
        self._drawn.append(
            f'<rect class="bar {style}" x="{left:.1f}" y="{top:.1f}" width="{max(1.0, right - left - 1):.1f}" '
            f'height="{bottom - top:.1f}">{_title(title)}</rect>'
        )

    def to_svg(self, name: str) -> str:
        """The image; `name` is read to those who do not see it."""
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">']
        parts += [self._grid(), *self._drawn, "</svg>"]
        return "".join(parts)

    def _place(self, point: Point) -> Point:
        x, y = self.x.share(point[0]), self.y.share(point[1])
        return (
            LEFT + x * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - min(y, 1.0) * (HEIGHT - TOP - BOTTOM),
        )

    def _grid(self) -> str:
        floor = HEIGHT - BOTTOM
        parts = []
        for value in self.y.ticks():
            _, y = self._place((self.x.low, value))
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LEFT - 6, y + 4, "end", self.y.write(value)))
        last = -math.inf
        for value in self.x.ticks():
            x, _ = self._place((value, self.y.low))
            if x - last >= 38:  # labels need room
                last = x
                parts.append(f'<path class="grid" d="M{x:.1f} {floor}v4"/>')
                anchor = "middle" if x < WIDTH - LABEL_ROOM else "end"
                at = x if anchor == "middle" else WIDTH - 1
                parts.append(_text(at, floor + 16, anchor, self.x.write(value)))
        parts.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "middle", self.x.label))
        return "".join(parts)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
