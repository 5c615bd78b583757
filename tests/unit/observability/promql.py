"""Reads names out of PromQL: no evaluation, only which metrics and labels an expression uses."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<range>\[[^\]]*\])
    |(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?:ms|[smhdwy])?(?![\w:]))
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<symbol>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@])""",
    re.VERBOSE,
)
_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "atan2", "inf", "nan"}
FUNCTIONS = {
    *("sum", "min", "max", "avg", "count", "topk", "bottomk", "stddev", "quantile"),
    *("rate", "irate", "increase", "delta", "deriv", "histogram_quantile", "time", "vector"),
    *("clamp_min", "clamp_max", "abs", "absent", "label_replace", "scalar", "round"),
    *("max_over_time", "min_over_time", "avg_over_time", "last_over_time"),
    *("sum_over_time", "count_over_time"),
}


@dataclass(frozen=True)
class Selector:
    """A metric with the labels that its braces name, and what they are compared with."""

    metric: str
    labels: tuple[tuple[str, str, str], ...]  # (label, operator, value)


@dataclass
class Names:
    """What an expression names.

    Attributes:
        selectors: In order.
        grouping: Labels of `by`, `without`, `on` and the like.
    """

    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise ValueError(f"not understood: {expression[at : at + 20]!r}")
        at = found.end()
        assert found.lastgroup
        if found.lastgroup != "space":
            yield found.lastgroup, found[0]
    yield "end", ""


def names_in(expression: str) -> Names:
    """Return what an expression names; ValueError: it is not understood."""
    tokens, names, at = list(_tokens(expression)), Names(), 0
    if expression.count("(") != expression.count(")"):
        raise ValueError("parentheses do not match")
    while tokens[at][0] != "end":
        kind, text = tokens[at]
        at += 1
        if kind != "name" or text.lower() in _WORDS:
            if text == "{":
                raise ValueError("a selector without a metric")
            continue
        if text in _LISTS:
            listed, at = _list(tokens, at, may_lack=text.startswith("group_"))
            names.grouping |= listed
        elif tokens[at][1] == "(":
            if text not in FUNCTIONS:
                raise ValueError(f"unknown function {text}")
        elif text not in FUNCTIONS:  # `sum by (...) (...)` has its list first
            labels, at = _matchers(tokens, at)
            names.selectors.append(Selector(text, labels))
    return names


def _list(tokens: list[tuple[str, str]], at: int, *, may_lack: bool) -> tuple[set[str], int]:
    if tokens[at][1] != "(":
        if may_lack:
            return set(), at
        raise ValueError("a list of labels is missing")
    end = next(i for i in range(at, len(tokens)) if tokens[i][1] in {")", ""})
    inside = tokens[at + 1 : end]
    if any(kind != "name" and text != "," for kind, text in inside):
        raise ValueError("no list of labels")
    return {text for kind, text in inside if kind == "name"}, end + 1


def _matchers(
    tokens: list[tuple[str, str]], at: int
) -> tuple[tuple[tuple[str, str, str], ...], int]:
    if tokens[at][1] != "{":
        return (), at
    found: list[tuple[str, str, str]] = []
    at += 1
    while tokens[at][1] != "}":
        (kind, label), (_, operator), (value_kind, value) = tokens[at : at + 3]
        if kind != "name" or operator not in {"=", "!=", "=~", "!~"} or value_kind != "string":
            raise ValueError(f"no matcher: {label}{operator}{value}")
        found.append((label, operator, value[1:-1]))
        at += 3
        if tokens[at][1] == ",":
            at += 1
    return tuple(found), at + 1
