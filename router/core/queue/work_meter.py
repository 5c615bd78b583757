"""Measures the demand of a cell, for the autoscaling of its pool."""

from router.core.types.request import Request
from router.core.types.work import TierWork
from sluice.priority import CLASSES

_SMOOTHING = 0.05
_TIERS_MAX = 64  # tiers with separate sums, where further tiers are added to the last sum


class WorkMeter:
    """Sums of a cell's demand since the router began its record of the cell. Pure.

    The sums include requests that were refused for lack of capacity, because these are demand, too.
    They exclude later attempts, for example of a request that moves here from another pool, because
    its first attempt is demand already.

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
        """Add a new request, with its predicted tokens, to the sums of its tier.

        Args:
            request: The request, whose `priority` is the tier's priority times `CLASSES` plus the
                class within the tier.
            is_refused: Whether the request was refused for lack of capacity.
        """
        self._seen += 1
        weight = max(_SMOOTHING, 1 / self._seen)
        self.prompt_mean += weight * (request.prompt_tokens - self.prompt_mean)
        if request.is_again:
            return
        tier = self._tier(request.priority // CLASSES)
        tier.requests += 1
        tier.prompt_tokens += request.uncached_tokens
        tier.output_tokens += request.output_expected
        tier.refused += is_refused

    def turned_away(
        self, priority: int, requests: int, prompt_tokens: float, output_tokens: float
    ) -> None:
        """Add requests that gateways refused, with the mean tokens of other requests.

        Args:
            priority: Priority of the requests, as in `came`.
            requests: Number of requests.
            prompt_tokens: Mean uncached prompt tokens of recent requests.
            output_tokens: Mean output tokens of recent requests.
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
