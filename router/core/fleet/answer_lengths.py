"""Estimates the mean answer length of a cell and of its tenants, to reserve KV blocks."""

from collections import OrderedDict

_SMOOTHING = 0.05
_TENANTS_KEPT = 4096


class AnswerLengths:
    """Mean output tokens per answer.

    Attributes:
        mean: Mean output tokens of the whole cell.
    """

    __slots__ = ("_by_tenant", "mean")

    def __init__(self, prior_tokens: float) -> None:
        self.mean = prior_tokens
        self._by_tenant: OrderedDict[str, float] = OrderedDict()

    def expected(self, tenant_id: str, output_max: int) -> int:
        """Return the output tokens to reserve for a request, until its answer turns out longer."""
        mean = int(self._by_tenant.get(tenant_id, self.mean))
        return mean if 1 <= mean <= output_max else min(output_max, max(1, mean))

    def observe(self, tenant_id: str, tokens: int) -> None:
        """Update the means with the length of an answer."""
        self.mean += _SMOOTHING * (tokens - self.mean)
        means = self._by_tenant
        mean = means.pop(tenant_id, self.mean)
        means[tenant_id] = mean + _SMOOTHING * (tokens - mean)
        if len(means) > _TENANTS_KEPT:
            means.popitem(last=False)
