"""Counts the tokens that tenants received, in attributes that the token path updates directly."""


class TierTotals:
    """Sums over one tier, updated by the tier's tenant queues.

    Attributes:
        served: Service so far, in computed prompt tokens plus 2 x output tokens.
        uncached_tokens: Prompt tokens of the waiting requests that have to be computed.
    """

    __slots__ = ("served", "uncached_tokens")

    def __init__(self) -> None:
        self.served = 0.0
        self.uncached_tokens = 0


class ServiceAccount:
    """The service of one tenant in one tier, which is counted in tokens.

    Attributes:
        weight: Share of the tenant within its tier.
        counter: Virtual service, that is, (computed prompt tokens + 2 x output tokens) / weight.
            The token path adds the output, and the queue adds everything else.
        elsewhere: Part of the counter that is not service in this cell. It consists of service in
            other cells of the pool and of increases after idle periods.
        totals: Sums of the tier.
    """

    __slots__ = ("counter", "elsewhere", "totals", "weight")

    def __init__(self, totals: TierTotals) -> None:
        self.weight = 1
        self.counter = self.elsewhere = 0.0
        self.totals = totals

    @property
    def service(self) -> float:
        """Virtual service in this cell since the account was opened."""
        return self.counter - self.elsewhere
