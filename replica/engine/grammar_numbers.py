"""Finds numbers of a schema that llguidance changes, and their replacements. Pure.

llguidance holds each number as a float. Whole numbers become 64 bits, whose least value, which also
replaces lower ones, overflows its stack. Other numbers are compared as text, by their shortest
digits.
"""

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

_EXACT_MAX = 1 << 53  # not every whole number above is a float
_KEPT_MAX = (1 << 63) - (1 << 10)  # the greatest float of 64 bits
# From an open whole bound of numbers away from 0: where the other bound is less than 1 away, the
# compiler lets the bound itself through. A float's own step is more from some 10,000 on.
_STEP = 1e-12
# The side that a bound lets through, and what says that the bound itself is not let through.
_BOUNDS = {
    "minimum": (1, "exclusiveMinimum"),
    "exclusiveMinimum": (1, None),
    "maximum": (-1, "exclusiveMaximum"),
    "exclusiveMaximum": (-1, None),
}


def read_float(text: str) -> float:
    """Return whole numbers exactly: the compiler reads points and exponents inexactly."""
    value = float(text)
    return int(value) if value.is_integer() and is_kept(value) else value


def is_kept(constant: float) -> bool:
    """Return whether the compiler keeps a number unchanged."""
    return abs(constant) <= _KEPT_MAX and float(constant) == constant


def overflows(constant: float) -> bool:
    """Return whether a number ends the process when it is read as a whole number."""
    return constant < -_KEPT_MAX


def numeric_bounds(schema: dict[str, Any]) -> dict[str, float]:
    """Return the bounds that are numbers."""
    return {key: schema[key] for key in _BOUNDS if type(schema.get(key)) in (int, float)}


def changed_bounds(schema: dict[str, Any]) -> Iterable[tuple[str, float | None]]:
    """Yield bounds that would not hold, and their replacements; for None see `nearest_bound`."""
    types = schema.get("type", "number")
    types = types if isinstance(types, list) else [types]
    is_whole = "number" not in types
    if is_whole and "integer" not in types:
        return
    for key, value in numeric_bounds(schema).items():
        side, flag = _BOUNDS[key]
        is_open = flag is None or schema.get(flag) is True  # as it was said before draft 6
        kept: float | None = value
        if abs(value) >= _EXACT_MAX:
            kept = nearest_bound(value, side, is_open=is_open, is_whole=is_whole)
        elif is_open and not is_whole and isinstance(value, int) and value * side >= 0:
            kept = side * max(side * value + _STEP, math.nextafter(side * value, math.inf))
        if kept != value:
            yield key, kept


def nearest_bound(value: float, side: int, *, is_open: bool, is_whole: bool) -> int | None:
    """Return the nearest bound that allows no further number; None if there is none.

    Args:
        value: Number from 2^53 on.
        side: Allowed side: 1, greater numbers; -1, lesser ones.
        is_open: Whether the bound itself is excluded.
        is_whole: Whether the numbers are whole: digits behind the point are then ignored.
    """
    if value * side > _KEPT_MAX:
        return None
    kept = float(max(-_KEPT_MAX, min(value, _KEPT_MAX)))
    # An open bound moves to the next whole number, which is not always another float.
    while not _lets_through_less(kept, value, side, is_whole) or (is_open and kept == value):
        kept = math.nextafter(kept, math.inf * side)
    return int(kept) if abs(kept) <= _KEPT_MAX else None


def _lets_through_less(kept: float, value: float, side: int, is_whole: bool) -> bool:
    digits = Decimal(kept) if is_whole else Decimal(repr(kept))
    return min(kept * side, digits * side) >= value * side
