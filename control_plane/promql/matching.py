"""Operators between numbers and vectors, with Prometheus' matching rules. Pure.

A vector has one value per set of labels. The set does not include the name of the metric.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.promql.series import Labels

Vector = dict[Labels, float]
Value = float | Vector


class EvaluationError(RuntimeError):
    """An expression has no result at present. The message names the reason."""


def _divided(left: float, right: float) -> float:
    if right:
        return left / right
    return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left)


def _remainder(left: float, right: float) -> float:
    return math.fmod(left, right) if right and math.isfinite(left) else math.nan


def _power(left: float, right: float) -> float:
    try:
        return math.pow(left, right)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
    "%": _remainder,
    "^": _power,
}
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
SETS = frozenset({"and", "or", "unless"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The rule by which elements of two vectors are matched.

    Attributes:
        names: Labels of `on` or `ignoring`.
        is_on: Whether only `names` are compared. If false, all labels except `names` are compared.
        many: Side that may have several elements per group: "", "left" or "right".
        included: Labels that are copied from the other side into the result.
    """

    names: frozenset[str] = frozenset()
    is_on: bool = False
    many: str = ""
    included: frozenset[str] = frozenset()

    def group(self, labels: Labels) -> Labels:
        """Return the labels that must be equal."""
        return frozenset(it for it in labels if (it[0] in self.names) == self.is_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryOperation:
    """A binary operator with its modifiers.

    Attributes:
        sign: The operator.
        is_bool: Whether a comparison returns 0 or 1 instead of filtering.
        matching: Rule of matching between two vectors.
    """

    sign: str
    is_bool: bool = False
    matching: Matching = Matching()

    def __call__(self, left: Value, right: Value) -> Value:
        """Return the result. Raises EvaluationError if elements do not match one to one."""
        if isinstance(left, dict):
            if not isinstance(right, dict):
                return self._each(left, lambda value: self._one(value, right, value))
            if self.sign in SETS:
                return self._sets(left, right)
            return self._vectors(left, right)
        if isinstance(right, dict):
            return self._each(right, lambda value: self._one(left, value, value))
        return self._one(left, right, left) or 0.0

    def _one(self, left: float, right: float, kept: float) -> float | None:
        """Return the result for two numbers, or None for a filtering comparison that is false."""
        if self.sign in ARITHMETIC:
            return ARITHMETIC[self.sign](left, right)
        holds = COMPARISONS[self.sign](left, right)
        if self.is_bool:
            return float(holds)
        return kept if holds else None

    def _each(self, vector: Vector, of: Callable[[float], float | None]) -> Vector:
        results = ((labels, of(value)) for labels, value in vector.items())
        return {labels: result for labels, result in results if result is not None}

    def _sets(self, left: Vector, right: Vector) -> Vector:
        group = self.matching.group
        if self.sign == "or":
            known = {group(labels) for labels in left}
            return left | {it: value for it, value in right.items() if group(it) not in known}
        others = {group(labels) for labels in right}
        is_and = self.sign == "and"
        return {it: value for it, value in left.items() if (group(it) in others) == is_and}

    def _vectors(self, left: Vector, right: Vector) -> Vector:
        is_swapped = self.matching.many == "right"
        many, one = (right, left) if is_swapped else (left, right)
        others = self._unique(one)
        results: Vector = {}
        for labels, value in many.items():
            other = others.get(self.matching.group(labels))
            if other is None:
                continue
            pair = (other[1], value) if is_swapped else (value, other[1])
            result = self._one(*pair, pair[0])
            key = self._labels(labels, other[0])
            if key in results:
                raise EvaluationError(f"several elements match by {sorted(key)}: group_left?")
            if result is not None:
                results[key] = result
        return results

    def _unique(self, vector: Vector) -> dict[Labels, tuple[Labels, float]]:
        found: dict[Labels, tuple[Labels, float]] = {}
        for labels, value in vector.items():
            key = self.matching.group(labels)
            if key in found:
                raise EvaluationError(
                    f"the side of one has several elements that match by {sorted(key)}"
                )
            found[key] = labels, value
        return found

    def _labels(self, labels: Labels, other: Labels) -> Labels:
        if not self.matching.many:
            return self.matching.group(labels)
        included = self.matching.included
        kept = {it for it in labels if it[0] not in included}
        return frozenset(kept | {it for it in other if it[0] in included})
