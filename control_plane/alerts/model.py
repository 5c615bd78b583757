"""Decides which notices about alerts a receiver must receive, and which alerts are silenced. Pure.

An alert is one set of labels for which a rule fires. Alerts with the same rule and severity form a
group. A receiver receives one notice for all firing alerts of a group, and another notice when
further alerts fire. A last notice follows when all alerts have ended.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

NAME, SEVERITY = "alertname", "severity"
LABELS_MAX = 40
# Waits in milliseconds. `WAIT_MS` precedes the first notice of a group, `JOIN_MS` a notice about
# further alerts, and `REPEAT_MS` a repetition.
WAIT_MS, JOIN_MS, REPEAT_MS = 10_000, 60_000, 4 * 3_600_000
_RANKS = {
    **dict.fromkeys(("p1", "critical", "page"), 1),
    **dict.fromkeys(("p2", "error", "high", "warning"), 2),
}
_LOWEST = 3
# Alerts that open an incident although their severity is not a page.
_INCIDENTS = frozenset({"RolloutRolledBack"})

Labels = Mapping[str, str]


class GroupStatus(StrEnum):
    """The status of a group in notices."""

    FIRING = "firing"
    RESOLVED = "resolved"


def fingerprint(labels: Labels) -> str:
    """Return the fingerprint of an alert, which is 32 hex digits, equal for equal labels."""
    text = json.dumps(sorted(labels.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def rank(labels: Labels) -> int:
    """Return the rank of an alert's severity, from 1 (page) to 3 (waits for a working day)."""
    return _RANKS.get(labels.get(SEVERITY, "").lower(), _LOWEST)


def group_of(labels: Labels) -> str:
    """Return the key of the group that an alert belongs to."""
    return f"{labels.get(NAME, '')}/P{rank(labels)}"


def opens_incident(labels: Labels) -> bool:
    """Return whether an alert opens an incident, as pages and rollbacks do."""
    return rank(labels) == 1 or labels.get(NAME) in _INCIDENTS


@dataclass(frozen=True, slots=True)
class AlertMatcher:
    """A condition of a silence, as in Alertmanager.

    Attributes:
        name: Name of a label. A missing label counts as the empty string.
        operator: `=`, `!=`, `=~` or `!~`. A pattern must match the whole value.
        value: Text or pattern for the label's value.
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
    """Return whether any silence matches. A silence without conditions matches nothing."""
    return any(all(it.matches(labels) for it in one) for one in silences if one)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAlert:
    """The fields of an alert that determine notices.

    Attributes:
        fingerprint: Fingerprint of the alert.
        since_ms: Time at which the alert began to fire, in Unix milliseconds.
        is_acknowledged: Whether an operator has acknowledged the alert.
    """

    fingerprint: str
    since_ms: int
    is_acknowledged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldGroup:
    """The last notice about a group to a receiver.

    Attributes:
        fingerprints: Alerts that fired at the time of the notice, or an empty set if all alerts had
            ended.
        told_ms: Time of the notice, in Unix milliseconds.
    """

    fingerprints: frozenset[str]
    told_ms: int


def telling(
    firing: Sequence[GroupAlert], told: ToldGroup | None, now_ms: int
) -> GroupStatus | None:
    """Return the status of the notice that is due for a receiver now, or None.

    Args:
        firing: Alerts of the group that fire and are not silenced.
        told: Last notice to the receiver, or None before the first notice.
        now_ms: Unix time in milliseconds.
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


# Attempts per notice. A receiver that is down for less than half an hour receives all notices.
ATTEMPTS_MAX = 10
_FIRST_MS, _LONGEST_MS = 1_000, 300_000


def retry_after_ms(attempts: int, asked_ms: int = 0) -> int | None:
    """Return the milliseconds until the next attempt, or None after the last attempt.

    Args:
        attempts: Failed attempts so far.
        asked_ms: `Retry-After` of the receiver in milliseconds, which is limited to five minutes.
    """
    if attempts >= ATTEMPTS_MAX:
        return None
    return min(_LONGEST_MS, max(asked_ms, _FIRST_MS << attempts))
