"""Computes the token volumes at which the own fleet is cheaper than an API. Pure.

The cost of a fleet grows by whole replicas, and the bill of an API grows by tokens. Let R be the
price of a replica for a month. Let C be the tokens that a replica serves in a month, and p the
API's price per token. Then q = R / p is the volume at which the API's bill equals the price of one
replica. So n replicas are cheaper for volumes from n * q to n * C. A break-even exists exactly if
q < C, and the first one is at q. Above n * C the fleet needs n + 1 replicas. They are cheaper if
n * C >= (n + 1) * q. So from n = ceil(q / (C - q)) on, the fleet is cheaper at every volume.
"""

import math
from dataclasses import dataclass

MONTH_HOURS = 730.0


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The token volumes at which the fleet and an API cost the same, for the measured token mix.

    Attributes:
        utilisation: Share of paid time in which replicas are busy.
        own_per_million: Cost of 1M tokens on the own fleet at that utilisation.
        api_per_million: The API's price of 1M tokens of the same mix.
        replica_tokens: Tokens that one replica serves in a month at that utilisation.
        first_tokens: Tokens per month above which one replica is cheaper, or None if it never is.
        always_tokens: Tokens per month above which the fleet is cheaper at every volume, or None if
            no such number exists.
    """

    utilisation: float
    own_per_million: float
    api_per_million: float
    replica_tokens: float
    first_tokens: float | None
    always_tokens: float | None


@dataclass(frozen=True, slots=True)
class AtVolume:
    """The fleet's replicas and bill, and the API's bill, for a number of tokens per month."""

    tokens: float
    replicas: int
    own: float
    api: float

    @property
    def is_own_cheaper(self) -> bool:
        """Whether the own fleet is cheaper than the API at this volume."""
        return self.own < self.api


def break_even(
    tokens_per_busy_hour: float, utilisation: float, replica_hour: float, api_per_million: float
) -> BreakEven:
    """Return the break-even, if a busy hour serves equally many tokens at any utilisation.

    Args:
        tokens_per_busy_hour: Tokens that one replica serves in a busy hour, above 0.
        utilisation: Busy share of paid time, above 0 and at most 1.
        replica_hour: Price of an hour of all accelerators of a replica.
        api_per_million: The API's price of 1M tokens of the same mix.
    """
    tokens = tokens_per_busy_hour * utilisation * MONTH_HOURS
    month = replica_hour * MONTH_HOURS
    own = month / tokens * 1e6
    first = month / api_per_million * 1e6 if api_per_million > 0 else math.inf
    if first >= tokens:
        return BreakEven(utilisation, own, api_per_million, tokens, None, None)
    always = max(1, math.ceil(first / (tokens - first))) * first
    return BreakEven(utilisation, own, api_per_million, tokens, first, always)


def at_volume(even: BreakEven, tokens: float) -> AtVolume:
    """Return the bills of fleet and API for a month of this many tokens."""
    replicas = max(1, math.ceil(tokens / even.replica_tokens))
    own = replicas * even.own_per_million * even.replica_tokens / 1e6
    return AtVolume(tokens, replicas, own, even.api_per_million * tokens / 1e6)
