"""Draws costs as bars, in the terminal and as a small SVG."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from xml.sax.saxutils import escape

ROWS_MAX = 400
_COLOURS = {"use": "#2563eb", "copies": "#a78bfa", "idle": "#d4d4d8"}
_WORDS = {"use": "requests", "copies": "shadow copies", "idle": "idle"}
_LEFT, _BAR, _ROW, _TOP = 200, 560, 22, 48


def label(row: Mapping[str, Any]) -> str:
    """Return the label of a row."""
    if row["kind"] == "use":
        return row["name"] or "-"
    word = f"({_WORDS[row['kind']]})"
    return f"{row['name']} {word}" if row["name"] else word


def amounts(micros: Sequence[int]) -> list[str]:
    """Return rounded amounts that add up exactly to their rounded total.

    The unit is a cent, or a millionth if the total is less than 100. The running sums are rounded,
    so each amount is less than one unit from its true value.
    """
    places = 2 if sum(micros) >= 100_000_000 else 6
    unit = 10 ** (6 - places)
    ends = [(reached + unit // 2) // unit for reached in accumulate(micros)]
    parts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [f"{part / 10**places:,.{places}f}" for part in [*parts, sum(parts)]]


def text_bar(micros: int, most: int, width: int = 24) -> str:
    """Return a bar for a line of text, with a resolution of an eighth of a character."""
    eighths = round(micros / most * width * 8) if most > 0 else 0
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return a chart with one horizontal bar per name, which stacks the kinds of cost."""
    by_name: dict[str, dict[str, int]] = {}
    for row in rows:
        name = label(row) if not row["name"] else row["name"]
        by_name.setdefault(name, {})[row["kind"]] = row["cost_micros"]
    sums = {name: sum(kinds.values()) for name, kinds in by_name.items()}
    most = max(1, *sums.values()) if sums else 1
    height = _TOP + _ROW * len(by_name) + 12
    texts = amounts(list(sums.values()))
    width = _LEFT + _BAR + 140
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-weight="600" fill="#18181b">{escape(title)}</text>',
        *_legend({row["kind"] for row in rows}),
    ]
    for index, (name, kinds) in enumerate(by_name.items()):
        y, x = _TOP + _ROW * index, float(_LEFT)
        parts.append(_text(_LEFT - 8, y + 14, name[:32], "end"))
        for kind, micros in kinds.items():
            length = micros / most * _BAR
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="{_ROW - 6}"'
                f' fill="{_COLOURS[kind]}"/>'
            )
            x += length
        parts.append(_text(x + 6, y + 14, texts[index], "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(kinds: Iterable[str]) -> list[str]:
    found = [kind for kind in _COLOURS if kind in kinds]
    return [
        part
        for place, kind in enumerate(found)
        for part in (
            f'<rect x="{_LEFT + 120 * place}" y="30" width="10" height="10"'
            f' fill="{_COLOURS[kind]}"/>',
            _text(_LEFT + 120 * place + 16, 39, _WORDS[kind], "start"),
        )
    ]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="#3f3f46">{escape(words)}</text>'
