"""Remembers groups of answers that could not be judged and wait for another attempt. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from control_plane.quality.verdicts import Group

_FIRST_S = 5.0
_FAILURES_MAX = 6  # number of failures after which a group is parked
PARKED_S = 3600.0
# Largest number of remembered groups. The groups that failed longest ago are forgotten.
_GROUPS_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Deferral:
    failures: int
    until_s: float


class Deferrals:
    """The failed groups, with pauses between attempts that grow up to an hour."""

    def __init__(self) -> None:
        self._known: dict[Group, _Deferral] = {}

    def failed(self, group: Group, now_s: float) -> bool:
        """Record that a group could not be judged, and return whether it was parked now.

        A parked group is retried only after an hour.
        """
        before = self._known.pop(group, None)
        failures = (before.failures if before is not None else 0) + 1
        is_parked = failures >= _FAILURES_MAX
        pause_s = PARKED_S if is_parked else _FIRST_S * 2 ** (failures - 1)
        self._known[group] = _Deferral(failures, now_s + pause_s)
        if len(self._known) > _GROUPS_MAX:
            del self._known[next(iter(self._known))]
        return failures == _FAILURES_MAX

    def succeeded(self, groups: Iterable[Group]) -> None:
        """Forget the failures of groups that were judged."""
        for group in groups:
            self._known.pop(group, None)

    def waiting(self, now_s: float) -> list[Group]:
        """Return the groups that must be skipped now."""
        return sorted(group for group, one in self._known.items() if now_s < one.until_s)

    def forget(self, now_s: float) -> None:
        """Forget groups without a new failure in the hour after their next attempt was due."""
        self._known = {g: one for g, one in self._known.items() if now_s < one.until_s + PARKED_S}

    @property
    def parked(self) -> int:
        """Number of parked groups."""
        return sum(one.failures >= _FAILURES_MAX for one in self._known.values())
