"""Decides on alerts: names, silences, and the notices for each receiver; pure.

An alert is one set of labels that a rule fires for. Alerts of one rule and severity are a group. A
receiver gets one notice for all alerts of a group that fire, another one when further alerts join,
and a last one when all are over.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

NAME, SEVERITY = "alertname", "severity"
LABELS_MAX = 40
# Waits of a group for further alerts: before the first notice, and between two notices.
WAIT_MS, JOIN_MS, REPEAT_MS = 10_000, 60_000, 4 * 3_600_000
_RANKS = {
    **dict.fromkeys(("p1", "critical", "page"), 1),
    **dict.fromkeys(("p2", "error", "high", "warning"), 2),
}
_LOWEST = 3
# Alerts that open an incident without waking a person.
_INCIDENTS = frozenset({"RolloutRolledBack"})

Labels = Mapping[str, str]


class GroupStatus(StrEnum):
    """The status of a group in notices."""

    FIRING = "firing"
    RESOLVED = "resolved"


def fingerprint(labels: Labels) -> str:
    """Return the name of an alert: equal labels give the same 32 hex digits."""
    text = json.dumps(sorted(labels.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def rank(labels: Labels) -> int:
    """Return the rank of a severity: 1 is a page, 3 waits for a working day."""
    return _RANKS.get(labels.get(SEVERITY, "").lower(), _LOWEST)


def group_of(labels: Labels) -> str:
    """Return the key of an alert's group."""
    return f"{labels.get(NAME, '')}/P{rank(labels)}"


def opens_incident(labels: Labels) -> bool:
    """Return whether an alert opens an incident: a page, or a rollout sent back."""
    return rank(labels) == 1 or labels.get(NAME) in _INCIDENTS


@dataclass(frozen=True, slots=True)
class AlertMatcher:
    """A condition of a silence, as in Alertmanager.

    Attributes:
        name: Name of a label; an alert without the label has the value "".
        operator: `=`, `!=`, `=~` or `!~`; patterns match whole values.
        value: Text that the label's value is compared with.
    """

    name: str
    operator: str
    value: str

    def matches(self, labels: Labels) -> bool:
        """Return whether an alert fulfils the condition."""
        found = labels.get(self.name, "")
        if self.operator.endswith("~"):
            holds = re.fullmatch(self.value, found) is not None
        else:
            holds = found == self.value
        return holds != self.operator.startswith("!")


def is_silenced(labels: Labels, silences: Iterable[Sequence[AlertMatcher]]) -> bool:
    """Return whether a silence matches; one without conditions matches nothing."""
    return any(all(it.matches(labels) for it in one) for one in silences if one)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAlert:
    """An alert of a group, with the fields that notices depend on.

    Attributes:
        fingerprint: Name of the alert.
        since_ms: Unix time at which it began to fire.
        is_acknowledged: Whether an operator works on it.
    """

    fingerprint: str
    since_ms: int
    is_acknowledged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldGroup:
    """Last notice of a group to a receiver.

    Attributes:
        fingerprints: Alerts that fired at that time; empty: all were over.
        told_ms: Time of the notice.
    """

    fingerprints: frozenset[str]
    told_ms: int


def telling(
    firing: Sequence[GroupAlert], told: ToldGroup | None, now_ms: int
) -> GroupStatus | None:
    """Return the notice that a receiver is due on a group now; None: none.

    Args:
        firing: Alerts of the group that fire and are not silenced.
        told: Last notice to the receiver; None: there was none.
        now_ms: Unix time.
    """
    before = told.fingerprints if told is not None else frozenset[str]()
    if not firing:
        return GroupStatus.RESOLVED if before else None
    if told is None or not before:
        waited = now_ms - min(alert.since_ms for alert in firing) >= WAIT_MS
        return GroupStatus.FIRING if waited else None
    quiet_ms = now_ms - told.told_ms
    if any(alert.fingerprint not in before for alert in firing):
        return GroupStatus.FIRING if quiet_ms >= JOIN_MS else None
    is_forgotten = not all(alert.is_acknowledged for alert in firing)
    return GroupStatus.FIRING if is_forgotten and quiet_ms >= REPEAT_MS else None


# A receiver that is away for less than half an hour hears of everything.
ATTEMPTS_MAX = 10
_FIRST_MS, _LONGEST_MS = 1_000, 300_000


def retry_after_ms(attempts: int, asked_ms: int = 0) -> int | None:
    """Return the wait after this many failures; None: the notice is given up.

    Args:
        attempts: Failed attempts so far.
        asked_ms: `Retry-After` of the receiver; values above five minutes are cut.
    """
    if attempts >= ATTEMPTS_MAX:
        return None
    return min(_LONGEST_MS, max(asked_ms, _FIRST_MS << attempts))
