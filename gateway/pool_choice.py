"""Chooses the pool for a request whose model is served by several pools. Pure.

A session has a home pool and stays there, because its conversation is cached in that pool. The
session leaves its home only if another pool would begin the answer much sooner. Requests without a
session are distributed by weight, and a pool with a longer wait or a higher price receives fewer of
them. Pools are chosen by weighted rendezvous hashing. So all gateways choose the same home, and if
a pool is added or removed, only the sessions of that pool move.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

# Milliseconds added to each pool's wait. Users do not notice shorter waits, so a difference below
# this time matters less than price and weight.
USUAL_MS = 250.0
# A pool receives no request without a session if its cost (wait times price) exceeds this multiple
# of the lowest cost.
COST_FACTOR = 2.0
# A session leaves its home if the wait there exceeds the shortest wait times this factor, plus this
# slack. The slack is the time to compute a conversation of some thousand tokens anew.
HOME_FACTOR = 2.0
HOME_SLACK_MS = 1000.0
_MASK = (1 << 64) - 1


class ServingPool(NamedTuple):
    """One of the pools that serve a model.

    Attributes:
        pool_id: Id of the pool.
        weight: Share of the requests relative to the other pools, as long as no pool has a queue.
        price: Price of a request relative to the other pools. Twice the price reduces a pool's
            requests as much as twice the wait.
    """

    pool_id: str
    weight: float
    price: float


class PoolReason(StrEnum):
    """Reason why a pool was chosen."""

    HOME = "home"  # the pool is the session's home
    AWAY = "away"  # the session's home is too slow or serves nothing, so another pool was chosen
    WAIT = "wait"  # the request has no session, so wait, price and weight decided
    MOVE = "move"  # the request waited in another pool, and this pool can start it at once
    WAKE = "wake"  # no pool serves now, and the request wakes a replica of this pool
    NONE = "none"  # no pool serves now, and none has a replica that sleeps


def choose_pool(
    pools: Sequence[ServingPool],
    waits_ms: Sequence[float | None],
    session: int,
    salt: int,
    can_wake: Callable[[int], bool] = lambda _: False,
) -> tuple[int, PoolReason]:
    """Return the index of the pool for a request, and the reason.

    Args:
        pools: Pools that serve the model, at least one. The first pool is the model's own.
        waits_ms: Predicted milliseconds to the first token in each pool, or None for a pool that
            does not serve now.
        session: Hash of the session, or 0 without a session.
        salt: Number derived from the request, which chooses the pool of a request without session.
        can_wake: Returns whether the pool with a given index has replicas that sleep or have just
            been woken. If no pool serves, the cheapest of these pools is chosen.
    """
    serving = [number for number, wait_ms in enumerate(waits_ms) if wait_ms is not None]
    if not serving:
        waking = [number for number in range(len(pools)) if can_wake(number)]
        if not waking:
            return 0, PoolReason.NONE
        return min(waking, key=lambda it: (pools[it].price, -pools[it].weight)), PoolReason.WAKE
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


def better_pool(
    pools: Sequence[ServingPool],
    waits_ms: Mapping[int, float | None],
    own: int,
    here_ms: float | None,
    session: int,
) -> int | None:
    """Return the index of the pool to which a waiting request moves, or None if it stays.

    A request moves if a new one like it would never be sent to its pool. So a session moves only
    if another pool begins the answer much sooner, although its conversation is not cached there.

    Args:
        pools: Pools that serve the model.
        waits_ms: Predicted milliseconds to the first token in each pool that can start requests
            at once, by index.
        own: Index of the pool in which the request waits.
        here_ms: Predicted milliseconds to the first token of a new request in the same cell, or
            None if no replica serves there.
        session: Hash of the session, or 0 without a session.
    """
    costs = {
        it: (USUAL_MS + wait_ms) * pools[it].price
        for it, wait_ms in waits_ms.items()
        if wait_ms is not None and (here_ms is None or _is_sooner(wait_ms, here_ms, session))
    }
    if here_ms is not None and not session:
        limit = (USUAL_MS + here_ms) * pools[own].price
        costs = {it: cost for it, cost in costs.items() if COST_FACTOR * cost < limit}
    return min(costs, key=lambda it: (costs[it], it), default=None)


def _is_sooner(wait_ms: float, here_ms: float, session: int) -> bool:
    """Return whether another pool begins an answer so much sooner that a request may leave."""
    return here_ms > (wait_ms * HOME_FACTOR + HOME_SLACK_MS if session else wait_ms)


def _session_pool(
    pools: Sequence[ServingPool], serving: Sequence[int], waits: Sequence[float], session: int
) -> tuple[int, PoolReason]:
    """Return the session's home, or its next best pool if the wait at the home is too long."""
    shares = {it: pool.weight / pool.price**2 for it, pool in enumerate(pools)}
    home = _heaviest(pools, shares, session)
    limit_ms = min([waits[it] for it in serving]) * HOME_FACTOR + HOME_SLACK_MS
    near = {it: shares[it] for it in serving if waits[it] <= limit_ms}
    if home in near:
        return home, PoolReason.HOME
    return _heaviest(pools, near, session), PoolReason.AWAY


def _heaviest(pools: Sequence[ServingPool], shares: dict[int, float], key: int) -> int:
    """Return the index of a key's pool. Over all keys, a pool's frequency follows its share."""
    return max(shares, key=lambda it: shares[it] / -math.log(_lot(pools[it].pool_id, key)))


def _lot(pool_id: str, key: int) -> float:
    """Return a pseudo-random number in (0, 1) for a pool and a key, equal in all gateways."""
    mixed = (_seed(pool_id) ^ key) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & _MASK
    return ((mixed ^ mixed >> 29) >> 12 | 1) / (1 << 52)


@lru_cache(maxsize=4096)
def _seed(pool_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(pool_id.encode(), digest_size=8).digest(), "little")
