"""A finding of `sluice doctor` about one thing that it looked at."""

from dataclasses import dataclass
from enum import StrEnum


class DoctorLevel(StrEnum):
    """How it stands."""

    OK = "ok"
    WARNING = "warning"  # it works, and will not for long, or not well
    WRONG = "wrong"
    UNKNOWN = "unknown"  # it could not be looked at


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One finding of `sluice doctor`.

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
    """Return that it is well."""
    return DoctorFinding(check, DoctorLevel.OK, found)
