"""The findings of `sluice doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class DoctorLevel(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # it works, and will not for long, or not well
    WRONG = "wrong"
    UNKNOWN = "unknown"  # it could not be looked at


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A finding of `sluice doctor`.

    Attributes:
        check: Name of the check.
        level: Result of the check.
        found: Finding in words.
        fix: Next step for the operator; empty when all is well.
    """

    check: str
    level: DoctorLevel
    found: str
    fix: str = ""


def ok(check: str, found: str) -> DoctorFinding:
    """Return a finding without a problem."""
    return DoctorFinding(check, DoctorLevel.OK, found)
