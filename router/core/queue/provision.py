"""Estimates the service of a tenant in other cells that their reports do not hold yet.

Reports are old. While they are under way, all cells see a tenant behind at the same moment, serve
it all at once, and then none for long. So service in this cell is charged together with the
estimated service elsewhere, by the recent ratio. Reports use this provision up before they count;
the rest of it lapses. At all times the tenant is charged for the reported service and for the
provision, so the estimate causes no lasting error.
"""

import math

MEMORY_MIN_S = 3.0  # of the ratio and of a provision
_MEMORY_MAX_S = 10.0
_MEMORY_INTERVALS = 7.0  # of reports: a provision outlives the reports under way


def memory_s(interval_s: float) -> float:
    """Return the memory of provisions for a mean interval between reports.

    A short memory drops a provision before a late report claims it; a long one charges a tenant for
    cells that it has left.
    """
    return min(max(MEMORY_MIN_S, _MEMORY_INTERVALS * interval_s), _MEMORY_MAX_S)


class Provision:
    """The provision for one tenant in one tier.

    Attributes:
        amount: Virtual service that is charged and not reported yet.
    """

    __slots__ = ("_at", "_here", "_service", "_there", "amount")

    def __init__(self, service: float, now: float) -> None:
        self.amount = self._here = self._there = 0.0
        self._service = service
        self._at = now

    def follow(self, service: float, ratio_max: int, memory_s: float, now: float) -> float:
        """Take the tenant's virtual service in this cell; return the change of the amount."""
        kept = math.exp((self._at - now) / memory_s)
        self._at = now
        self._there *= kept
        served, self._service = service - self._service, service
        self._here = max(0.0, self._here * kept + served)
        ratio = min(float(ratio_max), self._there / self._here) if self._here else 0.0
        before = self.amount
        self.amount = max(0.0, before * kept + served * ratio)
        return self.amount - before

    def settle(self, reported: float) -> float:
        """Take reported virtual service; return the part that the provision does not cover."""
        self._there = max(0.0, self._there + reported)
        covered = min(self.amount, max(0.0, reported))
        self.amount -= covered
        return reported - covered

    @property
    def is_over(self) -> bool:
        """Whether the provision is empty, and hardly any recent service elsewhere was reported."""
        return self.amount < 1.0 and self._there < 1.0
