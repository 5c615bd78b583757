"""Rules in the form of Prometheus' files, and their evaluation at an instant. Pure.

A recording rule writes new series. An alerting rule fires for each set of labels whose expression
has had a result for the time `for`. Both kinds of rules read the same store of series.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

from control_plane.alerts.model import NAME
from control_plane.alerts.templates import AlertFacts, AnnotationError, filled
from control_plane.promql.expression import Expression, PromqlError, compiled
from control_plane.promql.matching import EvaluationError, Value, Vector
from control_plane.promql.series import Labels, SeriesStore

_RULES_MAX = 1000
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class RulesError(ValueError):
    """A rule file cannot be used. The message names the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """A recording or alerting rule.

    Attributes:
        name: Metric that the rule records, or name of the alert.
        is_alert: Whether the rule is an alerting rule and not a recording rule.
        expression: Expression of the rule.
        lasts_ms: Milliseconds for which the expression must have a result before the alert fires.
        labels: Labels that the rule adds.
        annotations: Templates of the alert's texts.
    """

    name: str
    is_alert: bool
    expression: Expression
    lasts_ms: int = 0
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Rules that are evaluated one after another.

    Attributes:
        name: Name of the group.
        interval_ms: Milliseconds between evaluations, or 0 if the group is evaluated at each
            `step`.
        rules: Rules in the order of evaluation.
    """

    name: str
    interval_ms: int = 0
    rules: Sequence[AlertRule]


def duration_ms(text: str) -> int:
    """Return the milliseconds of a duration such as `5m`. Raises RulesError if it is invalid."""
    number = text.rstrip("msdh")
    unit = text[len(number) :]
    if not number.isdigit() or unit not in _UNITS_MS:
        raise RulesError(f"{text!r} is no duration such as 30s or 5m")
    return int(number) * _UNITS_MS[unit]


def rule_groups(document: Any) -> list[RuleGroup]:
    """Return the groups of a parsed rule file. Raises RulesError if the file cannot be used."""
    try:
        groups = [_group(group) for group in document["groups"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise RulesError(f"no rule file: {error!r}") from None
    if sum(len(group.rules) for group in groups) > _RULES_MAX:
        raise RulesError(f"more than {_RULES_MAX} rules")
    return groups


def _group(given: Mapping[str, Any]) -> RuleGroup:
    interval = given.get("interval")
    rules = [_rule(rule) for rule in given["rules"]]
    interval_ms = duration_ms(interval) if interval else 0
    return RuleGroup(name=str(given["name"]), interval_ms=interval_ms, rules=rules)


def _rule(given: Mapping[str, Any]) -> AlertRule:
    is_alert = "alert" in given
    name = str(given["alert"] if is_alert else given["record"])
    annotations = dict(given.get("annotations", {}))
    try:
        rule = AlertRule(
            name=name,
            is_alert=is_alert,
            expression=compiled(str(given["expr"])),
            lasts_ms=duration_ms(given["for"]) if "for" in given else 0,
            labels=dict(given.get("labels", {})),
            annotations=annotations,
        )
        for text in annotations.values():
            filled(text, AlertFacts(0.0))
    except (PromqlError, AnnotationError, RulesError) as error:
        raise RulesError(f"{name}: {error}") from None
    return rule


def history_ms(groups: Iterable[RuleGroup]) -> dict[str, int]:
    """Return the longest history that any rule reads of a metric, in milliseconds by metric."""
    found: dict[str, int] = {}
    for rule in chain.from_iterable(group.rules for group in groups):
        for name, back_ms in rule.expression.reads.items():
            found[name] = max(found.get(name, 0), back_ms)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAlert:
    """An alert whose expression has a result at present.

    Attributes:
        labels: Labels of the alert, including its name.
        annotations: Present texts of the alert.
        since_ms: Unix time in milliseconds since which the expression has had a result.
        fires_since_ms: Unix time in milliseconds since which the alert fires, or None if it does
            not fire yet.
    """

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since_ms: int
    fires_since_ms: int | None = None

    @property
    def is_firing(self) -> bool:
        """Whether the expression has had a result for long enough."""
        return self.fires_since_ms is not None


@dataclass(frozen=True, slots=True)
class RulesOutcome:
    """The result of an evaluation of rules.

    Attributes:
        active: Alerts whose expression has a result.
        ended: Alerts that have fired, and whose expression no longer has a result.
        failed: Reasons of failure, by rule.
    """

    active: Sequence[ActiveAlert]
    ended: Sequence[ActiveAlert]
    failed: Mapping[str, str]


class RuleState:
    """Evaluates groups of rules, and stores the start of each active alert."""

    def __init__(
        self,
        groups: Sequence[RuleGroup],
        store: SeriesStore,
        external: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._groups = groups
        self._external = external
        self._store = store
        self._active: dict[tuple[int, int], dict[Labels, ActiveAlert]] = {}
        self._due_ms: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all active alerts."""
        self._active.clear()
        self._due_ms.clear()

    def step(self, now_ms: int) -> RulesOutcome:
        """Evaluate the groups that are due at `now_ms`."""
        ended: list[ActiveAlert] = []
        failed: dict[str, str] = {}
        for number, group in enumerate(self._groups):
            if now_ms < self._due_ms.get(number, 0):
                continue
            self._due_ms[number] = now_ms + group.interval_ms
            for place, rule in enumerate(group.rules):
                try:
                    ended += self._apply((number, place), rule, now_ms)
                except EvaluationError as error:
                    failed[rule.name] = str(error)
        active = list(chain.from_iterable(it.values() for it in self._active.values()))
        return RulesOutcome(active, ended, failed)

    def _apply(self, key: tuple[int, int], rule: AlertRule, now_ms: int) -> list[ActiveAlert]:
        vector = _vector(rule.expression.evaluate(self._store, now_ms))
        if not rule.is_alert:
            samples = [(rule.name, _with(it, rule.labels), value) for it, value in vector.items()]
            self._store.write(f"rule/{key[0]}/{key[1]}", now_ms, samples)
            return []
        before = self._active.get(key, {})
        after = {
            labels: _active(
                rule,
                AlertFacts(value, dict(labels), self._external),
                before.get(labels),
                now_ms,
            )
            for labels, value in vector.items()
        }
        self._active[key] = after
        return [it for labels, it in before.items() if it.is_firing and labels not in after]


def _vector(value: Value) -> Vector:
    return value if isinstance(value, dict) else {frozenset(): value}


def _with(labels: Labels, added: Mapping[str, str]) -> Labels:
    return frozenset({**dict(labels), **added}.items())


def _active(
    rule: AlertRule, facts: AlertFacts, before: ActiveAlert | None, now_ms: int
) -> ActiveAlert:
    since_ms = before.since_ms if before is not None else now_ms
    fires_since_ms = before.fires_since_ms if before is not None else None
    if fires_since_ms is None and now_ms - since_ms >= rule.lasts_ms:
        fires_since_ms = now_ms
    return ActiveAlert(
        labels={**facts.labels, **rule.labels, NAME: rule.name},
        annotations={name: filled(text, facts) for name, text in rule.annotations.items()},
        since_ms=since_ms,
        fires_since_ms=fires_since_ms,
    )
