"""Reads promtool's files of rule tests, and runs a case on our own evaluator."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.alerts.rules import (
    ActiveAlert,
    AlertRule,
    RuleGroup,
    RuleState,
    duration_ms,
    history_ms,
    rule_groups,
)
from control_plane.promql.expression import compiled
from control_plane.promql.matching import Value
from control_plane.promql.series import Labels, SeriesStore
from tests.support.yaml_files import read_yaml

_ITEM = re.compile(
    r"(_|stale|[-+]?(?:[\d.]+(?:e[-+]?\d+)?|Inf|NaN))([-+][\d.]+(?:e\d+)?)?(?:x(\d+))?"
)
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_PART = re.compile(r"(\d+)(ms|[smhd])")


def milliseconds(text: str) -> int:
    """Return a duration of several units, e.g. `6h58m`."""
    return sum(duration_ms(number + unit) for number, unit in _PART.findall(str(text)))


def series_of(text: str) -> tuple[str, Labels]:
    """Return the name and the labels of a series as promtool writes it."""
    name, _, rest = text.partition("{")
    return name.strip(), frozenset((label, value) for label, value in _LABEL.findall(rest))


def values_of(text: str) -> list[float | None | str]:
    """Return the values of promtool's short form; None: no sample, "stale": the series ended."""
    found: list[float | None | str] = []
    for word in text.split():
        item = _ITEM.fullmatch(word)
        if item is None:
            raise ValueError(f"no value: {word!r}")
        first, step, times = item[1], float(item[2] or 0), item[3]
        if first in {"_", "stale"}:
            found += [None if first == "_" else first] * int(times or 1)
        else:
            found += [float(first) + step * number for number in range(int(times or 0) + 1)]
    return found


@dataclass(frozen=True)
class RuleCase:
    """A test of one of promtool's files.

    Attributes:
        name: File and name.
        interval_ms: Time between evaluations.
        given: The test as written.
        groups: Rules that it needs.
    """

    name: str
    interval_ms: int
    given: Mapping[str, Any]
    groups: Sequence[RuleGroup]

    def run(self) -> Iterator[tuple[Mapping[str, Any], Sequence[ActiveAlert] | Value]]:
        """Yield each expectation with what came of it: alerts that fire, or a value."""
        asked = [("alert", it) for it in self.given.get("alert_rule_test", ())]
        asked += [("expression", it) for it in self.given.get("promql_expr_test", ())]
        asked.sort(key=lambda it: milliseconds(it[1]["eval_time"]))
        read = history_ms(self.groups)
        for kind, one in asked:
            if kind == "expression":
                read = {**dict.fromkeys(compiled(one["expr"]).reads, 0), **read}
        store = SeriesStore(dict.fromkeys(read, 10**9), 10_000)
        self._fill(store)
        state, now_ms = RuleState(self.groups, store), 0
        active: Sequence[ActiveAlert] = ()
        for kind, one in asked:
            until_ms = milliseconds(one["eval_time"])
            while now_ms <= until_ms:
                outcome = state.step(now_ms)
                assert not outcome.failed, outcome.failed
                active, now_ms = outcome.active, now_ms + self.interval_ms
            if kind == "alert":
                fires = [it for it in active if it.is_firing]
                yield one, [it for it in fires if it.labels["alertname"] == one["alertname"]]
            else:
                yield one, compiled(one["expr"]).evaluate(store, until_ms)

    def _fill(self, store: SeriesStore) -> None:
        interval_ms = milliseconds(self.given["interval"])
        for number, one in enumerate(self.given["input_series"]):
            name, labels = series_of(one["series"])
            for place, value in enumerate(values_of(str(one["values"]))):
                if value is not None:
                    samples = [] if isinstance(value, str) else [(name, labels, value)]
                    store.write(f"input/{number}", place * interval_ms, samples)


def rule_cases(folder: Path) -> list[RuleCase]:
    """Return the cases of a folder beside the rules that they test, each with what it needs."""
    found: list[RuleCase] = []
    for file in sorted((folder / "tests").glob("*.yml")):
        document = read_yaml(file)
        paths = [(file.parent / path).resolve() for path in document["rule_files"]]
        groups = [group for path in paths for group in _groups(path)]
        interval_ms = milliseconds(document["evaluation_interval"])
        for test in document["tests"]:
            wanted = {it["alertname"] for it in test.get("alert_rule_test", ())}
            for it in test.get("promql_expr_test", ()):
                wanted |= set(compiled(it["expr"]).reads)
            needed = _needed(groups, wanted)
            found.append(RuleCase(f"{file.stem}: {test['name']}", interval_ms, test, needed))
    return found


_READ: dict[Path, list[RuleGroup]] = {}


def _groups(path: Path) -> list[RuleGroup]:
    if path not in _READ:
        _READ[path] = rule_groups(read_yaml(path))
    return _READ[path]


def _needed(groups: Sequence[RuleGroup], wanted: set[str]) -> list[RuleGroup]:
    """Return the rules of some names, and those that they read."""
    rules = [rule for group in groups for rule in group.rules]
    while True:
        reads = {name for it in rules if it.name in wanted for name in it.expression.reads}
        if reads <= wanted:
            break
        wanted = wanted | reads

    def kept(group: RuleGroup) -> list[AlertRule]:
        return [rule for rule in group.rules if rule.name in wanted]

    return [
        RuleGroup(name=group.name, interval_ms=group.interval_ms, rules=kept(group))
        for group in groups
        if kept(group)
    ]
