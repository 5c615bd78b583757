"""The service that tenants have received, as attributes that the token path adds to directly."""


class TierTotals:
    """Sums over one tier, updated by the tier's tenant queues.

    Attributes:
        served: Service so far: computed prompt tokens and 2 x output tokens.
        uncached_tokens: Prompt tokens of the waiting requests that have to be computed.
    """

    __slots__ = ("served", "uncached_tokens")

    def __init__(self) -> None:
        self.served = 0.0
        self.uncached_tokens = 0


class ServiceAccount:
    """The service of one tenant in one tier.

    Attributes:
        weight: Share of the tenant within its tier.
        counter: Virtual service: computed prompt tokens and 2 x output tokens, over the weight. The
            token path adds the output; the queue adds everything else.
        elsewhere: Part of the counter that is not service in this cell: service in other cells of
            the pool, and lifts after idle periods.
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
