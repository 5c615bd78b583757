"""Chooses the pool for a request, where several pools serve its model; pure.

A session has a home among the pools and stays there, where its conversation is cached, unless
another pool would begin its answer much sooner. Other requests are spread by weight; a pool that
waits longer, or costs more, gets fewer of them. Both are placed by weighted rendezvous hashing, so
all gateways agree, and a pool that comes or goes moves its own sessions only.
"""

import hashlib
import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

# An unnoticeable wait: below it, price and weight decide rather than the wait.
USUAL_MS = 250.0
# A pool whose cost is this many times the least one gets nothing that is free to choose.
COST_FACTOR = 2.0
# A session leaves its home when that makes it wait more than so many times as long as the best
# pool, plus the time to compute a conversation of some thousand tokens anew.
HOME_FACTOR = 2.0
HOME_SLACK_MS = 1000.0
_MASK = (1 << 64) - 1


class ServingPool(NamedTuple):
    """One of the pools that serve a model.

    Attributes:
        pool_id: Id of the pool.
        weight: Share of the requests, relative to the other pools, while none of them waits.
        price: Price of a request, relative to the other pools; a pool of twice the price is chosen
            like one that makes a request wait twice as long.
    """

    pool_id: str
    weight: float
    price: float


class PoolReason(StrEnum):
    """Reasons for a pool."""

    HOME = "home"  # of the session
    AWAY = "away"  # another pool than the session's home
    WAIT = "wait"  # no session; by wait, price and weight
    NONE = "none"  # no pool serves now


def choose_pool(
    pools: Sequence[ServingPool], waits_ms: Sequence[float | None], session: int, salt: int
) -> tuple[int, PoolReason]:
    """Return the index of the pool for a request, and the reason.

    Args:
        pools: Pools that serve the model, at least one; the first one is the model's own.
        waits_ms: Predicted milliseconds to the first token in each; None: it does not serve now.
        session: Hash of the session; 0 without one.
        salt: Number of the request; spreads those without a session.
    """
    serving = [number for number, wait_ms in enumerate(waits_ms) if wait_ms is not None]
    if not serving:
        return 0, PoolReason.NONE
    waits = [wait_ms or 0.0 for wait_ms in waits_ms]
    if session:
        return _session_pool(pools, serving, waits, session)
    costs = [(USUAL_MS + waits[it]) * pools[it].price for it in serving]
    least = min(costs)
    shares = {
        it: pools[it].weight * (least / cost) ** 2
        for it, cost in zip(serving, costs, strict=True)
        if cost <= COST_FACTOR * least
    }
    return _heaviest(pools, shares, salt), PoolReason.WAIT


def _session_pool(
    pools: Sequence[ServingPool], serving: Sequence[int], waits: Sequence[float], session: int
) -> tuple[int, PoolReason]:
    """Return the session's home, or the next pool in its order that does not wait too long."""
    shares = {it: pool.weight / pool.price**2 for it, pool in enumerate(pools)}
    home = _heaviest(pools, shares, session)
    limit_ms = min([waits[it] for it in serving]) * HOME_FACTOR + HOME_SLACK_MS
    near = {it: shares[it] for it in serving if waits[it] <= limit_ms}
    if home in near:
        return home, PoolReason.HOME
    return _heaviest(pools, near, session), PoolReason.AWAY


def _heaviest(pools: Sequence[ServingPool], shares: dict[int, float], key: int) -> int:
    """Return the pool that a key falls to, each with a probability in proportion to its share."""
    return max(shares, key=lambda it: shares[it] / -math.log(_lot(pools[it].pool_id, key)))


def _lot(pool_id: str, key: int) -> float:
    """Return a number in (0, 1) that is the same for a pool and a key everywhere."""
    mixed = (_seed(pool_id) ^ key) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & _MASK
    return ((mixed ^ mixed >> 29) >> 12 | 1) / (1 << 52)


@lru_cache(maxsize=4096)
def _seed(pool_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(pool_id.encode(), digest_size=8).digest(), "little")
