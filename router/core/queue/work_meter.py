"""Counts the demand of a cell, for the scaling of its pool."""

from router.core.types.request import Request
from router.core.types.work import TierWork
from sluice.priority import CLASSES

_SMOOTHING = 0.05
_TIERS_MAX = 64  # told apart; further ones count as the last


class WorkMeter:
    """Sums of a cell's demand since its book was made; pure.

    Requests refused for want of room are demand, too: they count like accepted ones.

    Attributes:
        tiers: Sums by priority of the tier.
        prompt_mean: Mean prompt tokens of recent requests, cached or not.
        reports: Number of the last report.
    """

    __slots__ = ("_seen", "prompt_mean", "reports", "tiers")

    def __init__(self) -> None:
        self.tiers: dict[int, TierWork] = {}
        self.prompt_mean = 0.0
        self.reports = 0
        self._seen = 0

    def came(self, request: Request, *, is_refused: bool) -> None:
        """Count a priced request.

        Args:
            request: Request; its priority is that of the queue, where each tier has several
                classes.
            is_refused: Whether the request was refused for want of room.
        """
        tier = self._tier(request.priority // CLASSES)
        tier.requests += 1
        tier.prompt_tokens += request.uncached_tokens
        tier.output_tokens += request.output_expected
        tier.refused += is_refused
        self._seen += 1
        weight = max(_SMOOTHING, 1 / self._seen)
        self.prompt_mean += weight * (request.prompt_tokens - self.prompt_mean)

    def turned_away(
        self, priority: int, requests: int, prompt_tokens: float, output_tokens: float
    ) -> None:
        """Count requests that gateways refused. Their tokens are unknown, so usual ones count.

        Args:
            priority: Priority of the queue, see `came`.
            requests: Number of requests.
            prompt_tokens: Uncached prompt tokens of a usual request.
            output_tokens: Output tokens of a usual request.
        """
        tier = self._tier(priority // CLASSES)
        tier.requests += requests
        tier.prompt_tokens += round(requests * prompt_tokens)
        tier.output_tokens += round(requests * output_tokens)
        tier.refused += requests

    def _tier(self, priority: int) -> TierWork:
        tier = self.tiers.get(priority)
        if tier is None:
            if len(self.tiers) >= _TIERS_MAX:
                return next(reversed(self.tiers.values()))
            tier = self.tiers[priority] = TierWork()
        return tier
