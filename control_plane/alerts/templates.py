"""Fills the templates of annotations with the facts of an alert, as Prometheus does. Pure.

Only the part of Go's templates that rules use is supported. This part has values with functions
(`{{ $value | humanize }}`), labels (`{{ $labels.pool }}`), and one level of a condition (`{{ with
$externalLabels.runbooks }}{{ . }}{{ else }}...{{ end }}`).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_PIECE = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}", re.DOTALL)
_LABEL = re.compile(r"\$(labels|externalLabels)\.(\w+)")
_PRINTF = re.compile(r'printf "%\.(\d)f"')
_WITH = "with "
_LARGE, _SMALL = ("", *"kMGTPEZY"), ("", *"munpfazy")
_BINARY = ("", *(f"{prefix}i" for prefix in "kMGTPEZY"))


class AnnotationError(ValueError):
    """A template uses an unsupported construct, which the message names."""


@dataclass(frozen=True, slots=True)
class AlertFacts:
    """The facts that a template may use.

    Attributes:
        value: Value of the rule's expression.
        labels: Labels of the series.
        external: Labels of the installation.
    """

    value: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    external: Mapping[str, str] = field(default_factory=dict[str, str])


def filled(text: str, facts: AlertFacts) -> str:
    """Return a template with its expressions filled in. Raises AnnotationError if unsupported."""
    parts = _PIECE.split(text)
    found: list[str] = []
    is_shown, inner, has_value = True, "", False
    for words, piece in zip(parts[::2], (*parts[1::2], None), strict=True):
        if is_shown:
            found.append(words)
        if piece is None:
            break
        if piece.startswith(_WITH):
            inner = str(_valued(piece.removeprefix(_WITH), facts, ""))
            is_shown = has_value = bool(inner)
        elif piece in {"else", "end"}:
            is_shown = piece == "end" or not has_value
        elif is_shown:
            found.append(_shown(_valued(piece, facts, inner)))
    return "".join(found)


def _valued(pipe: str, facts: AlertFacts, inner: str) -> str | float:
    """Return the value of one expression, which is a variable and any functions on it."""
    source, *functions = (part.strip() for part in pipe.split("|"))
    value: str | float
    if source == "$value":
        value = facts.value
    elif source == ".":
        value = inner
    elif label := _LABEL.fullmatch(source):
        value = (facts.labels if label[1] == "labels" else facts.external).get(label[2], "")
    else:
        raise AnnotationError(f"not supported in a text: {source!r}")
    for name in functions:
        value = _function(name)(float(value))
    return value


def _function(name: str) -> Callable[[float], str]:
    if found := _PRINTF.fullmatch(name):
        return lambda value: f"{value:.{found[1]}f}"
    if name not in _HUMAN:
        raise AnnotationError(f"not supported in a text: {name!r}")
    return _HUMAN[name]


def _shown(value: str | float) -> str:
    """Return a number in the format of Go."""
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    is_plain = value == 0 or 1e-4 <= abs(value) < 1e21
    return f"{value:.0f}" if is_plain and value == int(value) else repr(value)


def _four(value: float) -> str:
    return _shown(value) if not math.isfinite(value) else f"{value:.4g}"


def humanize(value: float) -> str:
    """Return a number with a metric prefix such as k or M."""
    if value == 0 or not math.isfinite(value):
        return _four(value)
    return "".join(_scaled(value))


def _scaled(value: float) -> tuple[str, str]:
    prefixes, factor = (_LARGE, 1e-3) if abs(value) >= 1 else (_SMALL, 1e3)
    place = 0
    while (abs(value) >= 1000 if factor < 1 else abs(value) < 1) and place < len(prefixes) - 1:
        value, place = value * factor, place + 1
    return _four(value), prefixes[place]


def humanize_1024(value: float) -> str:
    """Return a number with a binary prefix such as Ki or Mi."""
    if abs(value) <= 1 or not math.isfinite(value):
        return _four(value)
    place = 0
    while abs(value) >= 1024 and place < len(_BINARY) - 1:
        value, place = value / 1024, place + 1
    return f"{_four(value)}{_BINARY[place]}"


def humanize_duration(value: float) -> str:
    """Return a number of seconds in a readable form."""
    if not math.isfinite(value):
        return _four(value)
    if abs(value) < 1:
        return f"{humanize(value)}s"
    sign, value = ("-" if value < 0 else ""), abs(value)
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{sign}{days}d {hours}h {minutes}m {seconds}s"
    if hours:
        return f"{sign}{hours}h {minutes}m {seconds}s"
    return f"{sign}{minutes}m {seconds}s" if minutes else f"{sign}{_four(value)}s"


_HUMAN: Mapping[str, Callable[[float], str]] = {
    "humanize": humanize,
    "humanize1024": humanize_1024,
    "humanizeDuration": humanize_duration,
    "humanizePercentage": lambda value: f"{_four(value * 100)}%",
}
