"""Parses PromQL expressions into functions of (series, instant). Pure.

The supported part of the language is the part that the platform's rules use. Any other expression
is refused when it is parsed.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import promql_parser as promql

from control_plane.promql.functions import (
    RANGE_FUNCTIONS,
    SampleRange,
    histogram_quantile,
    largest,
    mean,
    smallest,
    total,
)
from control_plane.promql.matching import (
    ARITHMETIC,
    COMPARISONS,
    SETS,
    BinaryOperation,
    EvaluationError,
    Matching,
    Value,
    Vector,
)
from control_plane.promql.series import Labels, SeriesStore

Evaluate = Callable[[SeriesStore, int], Value]
_Ranges = Callable[[SeriesStore, int], Iterable[tuple[Labels, SampleRange]]]
_AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": total,
    "min": smallest,
    "max": largest,
    "avg": mean,
    "count": len,
}


def _clamped_below(value: float, least: float) -> float:
    return math.nan if math.isnan(least) else max(value, least)


def _clamped_above(value: float, most: float) -> float:
    return math.nan if math.isnan(most) else min(value, most)


# Functions of each value of a vector. Some have further numbers as arguments.
_OF_EACH: Mapping[str, Callable[..., float]] = {
    "abs": math.fabs,
    "clamp_min": _clamped_below,
    "clamp_max": _clamped_above,
}
_NAME = "__name__"
_EDGE = "le"
_STEP_MS = 15_000  # default step of a subquery, in milliseconds


class PromqlError(ValueError):
    """An expression is not supported. The message names the place."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression.

    Attributes:
        text: Text of the expression.
        evaluate: Returns the value of the expression for a store at an instant. It raises
            EvaluationError.
        reads: History that the expression reads, in milliseconds by metric.
    """

    text: str
    evaluate: Evaluate
    reads: Mapping[str, int]


def compiled(text: str) -> Expression:
    """Return a parsed expression. Raises PromqlError if it is not supported."""
    try:
        tree = promql.parse(text)
    except ValueError as error:
        raise PromqlError(f"{text}: {error}") from None
    compiler = _Compiler()
    return Expression(text, compiler.value(tree, 0), compiler.reads)


def _ms(duration: timedelta | None) -> int:
    return round(duration.total_seconds() * 1000) if duration is not None else 0


class _Compiler:
    """Builds the functions of a syntax tree, and records which metrics they read."""

    def __init__(self) -> None:
        self.reads: dict[str, int] = {}

    def value(self, node: Any, back_ms: int) -> Evaluate:
        """Return a node's function, which is evaluated at instants up to `back_ms` in the past."""
        makers: dict[type, Callable[[Any, int], Evaluate]] = {
            promql.ParenExpr: lambda it, back_ms: self.value(it.expr, back_ms),
            promql.NumberLiteral: _literal,
            promql.VectorSelector: self._instant,
            promql.UnaryExpr: self._negated,
            promql.AggregateExpr: self._aggregate,
            promql.BinaryExpr: self._binary,
            promql.Call: self._call,
        }
        maker = makers.get(type(node))
        if maker is None:
            raise PromqlError(f"not supported here: {node}")
        return maker(node, back_ms)

    def _negated(self, node: Any, back_ms: int) -> Evaluate:
        negated, of = BinaryOperation(sign="*"), self.value(node.expr, back_ms)
        return lambda store, at: negated(of(store, at), -1.0)

    def _selector(self, node: Any, back_ms: int) -> tuple[str, Callable[[Labels], bool], int]:
        name, offset_ms = node.name, _ms(node.offset)
        if not name or node.at is not None or node.matchers.or_matchers:
            raise PromqlError(f"only NAME{{...}} with `offset` is supported: {node}")
        self.reads[name] = max(self.reads.get(name, 0), back_ms + offset_ms)
        return name, _fitting(node.matchers.matchers), offset_ms

    def _instant(self, node: Any, back_ms: int) -> Evaluate:
        name, fits, offset_ms = self._selector(node, back_ms)

        def evaluate(store: SeriesStore, at_ms: int) -> Vector:
            found = ((it.labels, it.at(at_ms - offset_ms)) for it in store.select(name, fits))
            return {labels: value for labels, value in found if value is not None}

        return evaluate

    def _ranges(self, node: Any, back_ms: int) -> _Ranges:
        match node:
            case promql.MatrixSelector():
                return self._matrix(node, back_ms)
            case promql.SubqueryExpr() if node.at is None:
                return self._subquery(node, back_ms)
            case _:
                raise PromqlError(f"want a range: {node}")

    def _matrix(self, node: Any, back_ms: int) -> _Ranges:
        span_ms = _ms(node.range)
        name, fits, offset_ms = self._selector(node.vector_selector, back_ms + span_ms)

        def ranges(store: SeriesStore, at_ms: int) -> Iterable[tuple[Labels, SampleRange]]:
            until_ms = at_ms - offset_ms
            after_ms = until_ms - span_ms
            for series in store.select(name, fits):
                samples = series.window(after_ms, until_ms)
                yield series.labels, SampleRange(*samples, after_ms, until_ms)

        return ranges

    def _subquery(self, node: Any, back_ms: int) -> _Ranges:
        span_ms, offset_ms = _ms(node.range), _ms(node.offset)
        step_ms = _ms(node.step) or _STEP_MS
        of = self.value(node.expr, back_ms + span_ms + offset_ms)

        def ranges(store: SeriesStore, at_ms: int) -> Iterable[tuple[Labels, SampleRange]]:
            until_ms = at_ms - offset_ms
            after_ms = until_ms - span_ms
            found: dict[Labels, tuple[list[int], list[float]]] = {}
            # steps are multiples of the step length, independent of the instant
            first_ms = (after_ms // step_ms + 1) * step_ms
            for moment_ms in range(first_ms, until_ms + 1, step_ms):
                for labels, value in _vector(of(store, moment_ms)).items():
                    times, values = found.setdefault(labels, ([], []))
                    times.append(moment_ms)
                    values.append(value)
            for labels, samples in found.items():
                yield labels, SampleRange(*samples, after_ms, until_ms)

        return ranges

    def _aggregate(self, node: Any, back_ms: int) -> Evaluate:
        function = _AGGREGATIONS.get(str(node.op))
        if function is None or node.param is not None:
            raise PromqlError(f"unknown aggregation {node.op}")
        group = _grouping(node.modifier)
        of = self.value(node.expr, back_ms)

        def evaluate(store: SeriesStore, at_ms: int) -> Vector:
            groups: dict[Labels, list[float]] = {}
            for labels, value in _vector(of(store, at_ms)).items():
                groups.setdefault(group(labels), []).append(value)
            return {labels: float(function(values)) for labels, values in groups.items()}

        return evaluate

    def _binary(self, node: Any, back_ms: int) -> Evaluate:
        sign = str(node.op)
        if sign not in ARITHMETIC and sign not in COMPARISONS and sign not in SETS:
            raise PromqlError(f"unknown operator {sign}")
        modifier = node.modifier
        operation = BinaryOperation(
            sign=sign,
            is_bool=bool(modifier and modifier.return_bool),
            matching=_matching(modifier) if modifier else Matching(),
        )
        left, right = self.value(node.lhs, back_ms), self.value(node.rhs, back_ms)
        return lambda store, at: operation(left(store, at), right(store, at))

    def _call(self, node: Any, back_ms: int) -> Evaluate:
        name, arguments = node.func.name, node.args
        if name in RANGE_FUNCTIONS:
            return _over_ranges(name, self._ranges(arguments[0], back_ms))
        if name == "absent":
            labels = _equal_labels(arguments[0])
            of = self.value(arguments[0], back_ms)
            return lambda store, at: {} if of(store, at) else {labels: 1.0}
        if name == "time":
            return lambda _store, at: at / 1000
        function = _OF_VALUES.get(name) or _for_each(name)
        given = [self.value(it, back_ms) for it in arguments]
        return lambda store, at: function(*(of(store, at) for of in given))


def _literal(node: Any, _back_ms: int) -> Evaluate:
    number = float(node.val)
    return lambda _store, _at: number


def _over_ranges(name: str, ranges: _Ranges) -> Evaluate:
    function = RANGE_FUNCTIONS[name]

    def evaluate(store: SeriesStore, at_ms: int) -> Vector:
        found = ((labels, function(samples)) for labels, samples in ranges(store, at_ms))
        return {labels: float(value) for labels, value in found if value is not None}

    return evaluate


def _for_each(name: str) -> Callable[..., Value]:
    function = _OF_EACH.get(name)
    if function is None:
        raise PromqlError(f"unknown function {name}")

    def evaluate(vector: Value, *rest: Value) -> Vector:
        numbers = [_number(it) for it in rest]
        return {labels: function(value, *numbers) for labels, value in _vector(vector).items()}

    return evaluate


def _fitting(matchers: Iterable[Any]) -> Callable[[Labels], bool]:
    """Return the condition that labels fulfil all matchers. A missing label counts as empty."""
    conditions: list[tuple[str, Callable[[str], bool]]] = []
    for one in matchers:
        if one.name == _NAME:
            raise PromqlError(f"the name of a metric stands before its braces: {one}")
        conditions.append((one.name, _condition(one)))
    if not conditions:
        return lambda _labels: True

    def fits(labels: Labels) -> bool:
        values = dict(labels)
        return all(holds(values.get(name, "")) for name, holds in conditions)

    return fits


def _condition(matcher: Any) -> Callable[[str], bool]:
    wanted: str = matcher.value
    if matcher.op == promql.MatchOp.Equal:
        return lambda value: value == wanted
    if matcher.op == promql.MatchOp.NotEqual:
        return lambda value: value != wanted
    try:
        pattern = re.compile(wanted)
    except re.error as error:
        raise PromqlError(f"{wanted!r} is no pattern: {error}") from None
    is_negated = matcher.op == promql.MatchOp.NotRe
    return lambda value: (pattern.fullmatch(value) is None) == is_negated


def _grouping(modifier: Any) -> Callable[[Labels], Labels]:
    names = frozenset(modifier.labels) if modifier is not None else frozenset[str]()
    is_by = modifier is None or modifier.type == promql.AggModifierType.By
    return Matching(names=names, is_on=is_by).group


def _matching(modifier: Any) -> Matching:
    many = {
        str(promql.VectorMatchCardinality.ManyToOne): "left",
        str(promql.VectorMatchCardinality.OneToMany): "right",
    }
    listed = modifier.matching
    return Matching(
        names=frozenset(listed.labels) if listed is not None else frozenset(),
        is_on=listed is not None and listed.type == promql.LabelModifierType.Include,
        many=many.get(str(modifier.card), ""),
        included=frozenset(modifier.group_labels or ()),
    )


def _equal_labels(node: Any) -> Labels:
    """Return the labels of the result of `absent`, from the selector's `=` matchers."""
    if not isinstance(node, promql.VectorSelector):
        return frozenset()
    matchers = node.matchers.matchers
    return frozenset((it.name, it.value) for it in matchers if it.op == promql.MatchOp.Equal)


def _quantiles(share: Value, buckets: Value) -> Vector:
    of = Matching(names=frozenset({_EDGE})).group
    histograms: dict[Labels, dict[float, float]] = {}
    for labels, count in _vector(buckets).items():
        edge = dict(labels).get(_EDGE, "")
        try:
            at = float(edge)
        except ValueError:
            continue
        found = histograms.setdefault(of(labels), {})
        found[at] = found.get(at, 0.0) + count  # for example, 1 and 1.0 denote the same edge
    number = _number(share)
    return {labels: histogram_quantile(number, found) for labels, found in histograms.items()}


def _vector(value: Value) -> Vector:
    if not isinstance(value, dict):
        raise EvaluationError(f"want a vector: {value}")
    return value


def _number(value: Value) -> float:
    if isinstance(value, dict):
        raise EvaluationError("want a number, not a vector")
    return value


def _as_vector(number: Value) -> Vector:
    return {frozenset(): _number(number)}


def _only(value: Value) -> float:
    vector = _vector(value)
    return next(iter(vector.values())) if len(vector) == 1 else math.nan


_OF_VALUES: Mapping[str, Callable[..., Value]] = {
    "vector": _as_vector,
    "scalar": _only,
    "histogram_quantile": _quantiles,
}
