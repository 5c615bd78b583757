"""Measures the pace of a tier's virtual time, that is, of the counter of the served tenant."""

import math

_MEAN_S = 1.0  # time constant of the mean pace, in seconds
_SAMPLE_S = 0.1  # least seconds between two samples


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
        """Advance virtual time to the counter of a tenant that is served."""
        self.now = max(self.now, counter)

    def sample(self, served: float, now: float) -> None:
        """Update the pace, where `served` is the total service of the tier.

        Because weights are at least 1, virtual time cannot run faster than service. But a tenant
        with a high counter may be served while no other tenant waits. Then virtual time jumps, so
        its growth is limited to the service.
        """
        since = self._sampled_at
        if since is None:
            self._sampled_at, self._sampled, self._served = now, self.now, served
        elif now - since >= _SAMPLE_S:
            grown = max(0.0, min(self.now - self._sampled, served - self._served))
            weight = 1.0 - math.exp((since - now) / _MEAN_S)
            self.pace += weight * (grown / (now - since) - self.pace)
            self._sampled_at, self._sampled, self._served = now, self.now, served
