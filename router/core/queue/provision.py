"""Estimates the service of a tenant in other cells that the cells have not reported yet.

Reports arrive late. Without an estimate, all cells would notice at the same moment that a tenant is
behind the others, and all would serve that tenant. After their reports, no cell would serve the
tenant for a long time. So each charge for service in this cell also charges the expected service in
other cells. The estimate uses the recent ratio of service in other cells to service in this cell.

This advance charge is the provision. Reported service is first deducted from the provision, and
only the excess is charged. An unused provision expires. So a tenant is always charged for the
reported service plus the provision, and a wrong estimate has no lasting effect.
"""

import math

MEMORY_MIN_S = 3.0  # least time constant of the ratio and of a provision, in seconds
_MEMORY_MAX_S = 10.0
_MEMORY_INTERVALS = 7.0  # time constant in report intervals, longer than the delay of a report


def memory_s(interval_s: float) -> float:
    """Return the time constant of provisions for a mean interval between reports.

    With a short time constant, a provision expires before a late report is deducted from it. With a
    long time constant, a tenant is charged for cells that have stopped serving the tenant.
    """
    return min(max(MEMORY_MIN_S, _MEMORY_INTERVALS * interval_s), _MEMORY_MAX_S)


class Provision:
    """The provision for one tenant in one tier.

    Attributes:
        amount: Virtual service that has been charged but not reported yet.
    """

    __slots__ = ("_at", "_here", "_service", "_there", "amount")

    def __init__(self, service: float, now: float) -> None:
        self.amount = self._here = self._there = 0.0
        self._service = service
        self._at = now

    def follow(self, service: float, ratio_max: int, memory_s: float, now: float) -> float:
        """Update the provision by the tenant's service in this cell, and return its change.

        Args:
            service: Total virtual service of the tenant in this cell.
            ratio_max: Largest ratio of service elsewhere to service here.
            memory_s: Time constant of the provision, in seconds.
            now: Time, in seconds.
        """
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
        """Deduct reported service from the provision, and return the uncovered part."""
        self._there = max(0.0, self._there + reported)
        covered = min(self.amount, max(0.0, reported))
        self.amount -= covered
        return reported - covered

    @property
    def is_over(self) -> bool:
        """Whether the provision can be deleted, as it is used up and other cells are inactive."""
        return self.amount < 1.0 and self._there < 1.0
