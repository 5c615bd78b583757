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
    """One line.

    Attributes:
        check: What was looked at.
        level: How it stands.
        found: What was seen, in words.
        fix: What to do; empty when all is well.
    """

    check: str
    level: DoctorLevel
    found: str
    fix: str = ""


def ok(check: str, found: str) -> DoctorFinding:
    """Return that it is well."""
    return DoctorFinding(check, DoctorLevel.OK, found)
