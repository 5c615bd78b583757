"""Finds the numbers of a schema that llguidance would change, and their replacements. Pure.

llguidance reads each number as a float, and converts whole numbers to 64-bit integers. A number
below their range becomes the least 64-bit integer, and then llguidance overflows its stack. Numbers
that are not whole are compared as text, in the shortest form of their digits.
"""

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

_EXACT_MAX = 1 << 53  # above this number, some whole numbers are not floats
_KEPT_MAX = (1 << 63) - (1 << 10)  # the greatest float that is a 64-bit integer
# Distance by which exclusive bounds of fractional numbers are moved away from 0, if they are whole.
# Otherwise, with the other bound less than 1 away, the compiler would permit the bound itself. From
# about 10,000 on, the distance between adjacent floats is greater than this.
_STEP = 1e-12
# Keyword of a bound -> the permitted side (1 for greater numbers, -1 for lesser numbers), and the
# keyword that also excludes the bound itself.
_BOUNDS = {
    "minimum": (1, "exclusiveMinimum"),
    "exclusiveMinimum": (1, None),
    "maximum": (-1, "exclusiveMaximum"),
    "exclusiveMaximum": (-1, None),
}


def read_float(text: str) -> float:
    """Return a number, exactly if it is whole. The compiler would read its exponent inexactly."""
    value = float(text)
    return int(value) if value.is_integer() and is_kept(value) else value


def is_kept(constant: float) -> bool:
    """Return whether the compiler uses a number unchanged."""
    return abs(constant) <= _KEPT_MAX and float(constant) == constant


def overflows(constant: float) -> bool:
    """Return whether the compiler would overflow its stack if it read a number as whole."""
    return constant < -_KEPT_MAX


def numeric_bounds(schema: dict[str, Any]) -> dict[str, float]:
    """Return the bounds of a schema whose values are numbers."""
    return {key: schema[key] for key in _BOUNDS if type(schema.get(key)) in (int, float)}


def changed_bounds(schema: dict[str, Any]) -> Iterable[tuple[str, float | None]]:
    """Yield (keyword, replacement) of bounds that the compiler changes, or None without one."""
    types = schema.get("type", "number")
    types = types if isinstance(types, list) else [types]
    is_whole = "number" not in types
    if is_whole and "integer" not in types:
        return
    for key, value in numeric_bounds(schema).items():
        side, flag = _BOUNDS[key]
        # before draft 6, this keyword was a boolean flag
        is_open = flag is None or schema.get(flag) is True
        kept: float | None = value
        if abs(value) >= _EXACT_MAX:
            kept = nearest_bound(value, side, is_open=is_open, is_whole=is_whole)
        elif is_open and not is_whole and isinstance(value, int) and value * side >= 0:
            kept = side * max(side * value + _STEP, math.nextafter(side * value, math.inf))
        if kept != value:
            yield key, kept


def nearest_bound(value: float, side: int, *, is_open: bool, is_whole: bool) -> int | None:
    """Return the nearest bound that permits no additional number, or None if none exists.

    Args:
        value: Number whose absolute value is 2^53 or more.
        side: Permitted side, 1 for greater numbers and -1 for lesser numbers.
        is_open: Whether the bound itself is excluded.
        is_whole: Whether the schema permits whole numbers only, so that fractions do not count.
    """
    if value * side > _KEPT_MAX:
        return None
    kept = float(max(-_KEPT_MAX, min(value, _KEPT_MAX)))
    # An exclusive bound moves to a float that differs from the bound itself.
    while not _lets_through_less(kept, value, side, is_whole) or (is_open and kept == value):
        kept = math.nextafter(kept, math.inf * side)
    return int(kept) if abs(kept) <= _KEPT_MAX else None


def _lets_through_less(kept: float, value: float, side: int, is_whole: bool) -> bool:
    digits = Decimal(kept) if is_whole else Decimal(repr(kept))
    return min(kept * side, digits * side) >= value * side
