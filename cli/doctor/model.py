"""The findings of `sluice doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class DoctorLevel(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the part works now, but badly or not for long
    WRONG = "wrong"
    UNKNOWN = "unknown"  # the check was impossible


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A finding of `sluice doctor`.

    Attributes:
        check: Name of the check.
        level: Severity of the finding.
        found: Description of the finding.
        fix: Next step for the operator, or empty if there is no problem.
    """

    check: str
    level: DoctorLevel
    found: str
    fix: str = ""


def ok(check: str, found: str) -> DoctorFinding:
    """Return a finding without a problem."""
    return DoctorFinding(check, DoctorLevel.OK, found)
