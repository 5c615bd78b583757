"""Holds the service that tenants have had, where the token path can add to it without a call."""


class TierTotals:
    """Sums over one tier, which its tenants keep.

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
        totals: Sums of the tier.
    """

    __slots__ = ("counter", "totals", "weight")

    def __init__(self, totals: TierTotals) -> None:
        self.weight = 1
        self.counter = 0.0
        self.totals = totals
