"""Draws a day of a pool as SVG: replicas, demand and violated minutes. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from math import ceil

_WIDTH, _HEIGHT, _LEFT, _TOP = 960, 220, 48, 34
_GAP = 44  # between two panels, for the hours below each
_COLOURS = ("#7f8c8d", "#2980b9", "#27ae60", "#8e44ad")
_BAD = "#c0392b"
_TICKS_MAX = 12

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of a picture, with one value per minute.

    Attributes:
        title: Heading of the chart.
        lines: Values by the name of the line, with None where a value is unknown.
        violated: Whether each minute is violated.
    """

    title: str
    lines: dict[str, Values]
    violated: Sequence[bool]


def picture(panels: Sequence[Panel], begin: datetime) -> str:
    """Return an SVG document with one chart below the other.

    Args:
        panels: The charts.
        begin: Time of the first minute.
    """
    height = len(panels) * (_TOP + _HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        top = number * (_TOP + _HEIGHT + _GAP) + _TOP
        parts.append(f'<g transform="translate({_LEFT} {top})">{_panel(panel, begin)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, begin: datetime) -> str:
    width = _WIDTH - _LEFT - 12
    minutes = max(2, len(panel.violated), *(len(it) for it in panel.lines.values()))
    known = [value for values in panel.lines.values() for value in values if value is not None]
    top = max(1, ceil(1.05 * max(known, default=1.0)))

    def x(minute: float) -> str:
        return f"{minute / (minutes - 1) * width:.1f}"

    def y(value: float) -> str:
        return f"{(1 - value / top) * _HEIGHT:.1f}"

    parts = [f'<text y="-18" font-weight="bold">{escape(panel.title)}</text>']
    parts += _axes(top, minutes, begin, width)
    for at, (name, values) in enumerate(panel.lines.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        path = _path(values, x, y)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        parts.append(_legend(at, name, colour))
    parts += [
        f'<rect x="{x(at)}" y="{_HEIGHT + 2}" width="1.5" height="6" fill="{_BAD}"/>'
        for at, is_violated in enumerate(panel.violated)
        if is_violated
    ]
    count = sum(panel.violated)
    parts.append(_legend(len(panel.lines), f"violated ({count} minutes)", _BAD))
    return "".join(parts)


def _legend(at: int, name: str, colour: str) -> str:
    return f'<text x="{at * 110}" y="-4" fill="{colour}">{escape(name)}</text>'


def _axes(top: int, minutes: int, begin: datetime, width: int) -> list[str]:
    parts = [f'<path d="M0 0V{_HEIGHT}H{width}" fill="none" stroke="#333"/>']
    for value in (0, top / 2, top):
        at = (1 - value / top) * _HEIGHT + 4
        parts.append(f'<text x="-6" y="{at:.0f}" text-anchor="end">{value:g}</text>')
    step = 60 * max(1, ceil(minutes / 60 / _TICKS_MAX))
    for minute in range(0, minutes, step):
        at = minute / (minutes - 1) * width
        text = (begin + timedelta(minutes=minute)).strftime("%H:%M")
        parts.append(f'<text x="{at:.0f}" y="{_HEIGHT + 22}" text-anchor="middle">{text}</text>')
    return parts


def _path(values: Values, x: Callable[[float], str], y: Callable[[float], str]) -> str:
    """Return the path of a line, which is interrupted where values are unknown."""
    found: list[str] = []
    pen = "M"
    after = [*values[1:], None]
    for minute, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        # Points within a horizontal line are left out, which halves the file.
        if pen == "L" and values[minute - 1] == value == after[minute]:
            continue
        found.append(f"{pen}{x(minute)} {y(value)}")
        pen = "L"
    return "".join(found)
