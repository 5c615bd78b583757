"""Measures the pace of a tier's virtual time: the counter of the tenant whose turn it is."""

import math

_MEAN_S = 1.0  # time constant of the mean pace
_SAMPLE_S = 0.1  # between two samples, at least


class VirtualTime:
    """The counter of the served tenants, and its mean pace.

    Attributes:
        now: Greatest counter of a tenant when it was served.
        pace: Growth of `now` per second.
    """

    __slots__ = ("_sampled", "_sampled_at", "_served", "now", "pace")

    def __init__(self) -> None:
        self.now = self.pace = 0.0
        self._sampled = self._served = 0.0
        self._sampled_at: float | None = None

    def reach(self, counter: float) -> None:
        """Note the counter of a tenant that is being served."""
        self.now = max(self.now, counter)

    def sample(self, served: float, now: float) -> None:
        """Measure the pace; `served` is all service of the tier so far.

        Weights are at least 1, so virtual time runs no faster than service: a greater growth comes
        from a tenant that is far ahead and had its turn because no other waited.
        """
        since = self._sampled_at
        if since is None:
            self._sampled_at, self._sampled, self._served = now, self.now, served
        elif now - since >= _SAMPLE_S:
            grown = max(0.0, min(self.now - self._sampled, served - self._served))
            weight = 1.0 - math.exp((since - now) / _MEAN_S)
            self.pace += weight * (grown / (now - since) - self.pace)
            self._sampled_at, self._sampled, self._served = now, self.now, served
