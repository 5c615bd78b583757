"""Moves the demand of a full pool to other pools that serve the same model. Pure.

Each pool counts only the requests that gateways sent to it, so work that several pools could do is
counted once. Gateways prefer a pool with a shorter wait, and so never choose a pool without
replicas. The transfer of demand in this module starts the first replicas of an empty pool.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from control_plane.scaling.model import Cause, PoolPlan, PoolState, ScalingReason

_FIXED = frozenset(
    {Cause.PIN, Cause.PAUSE, Cause.OBSERVING}
)  # a pool with such a cause receives no demand of other pools


def shared(
    pools: Mapping[str, PoolState],
    plans: Mapping[str, PoolPlan],
    capacity: Callable[[PoolState, PoolPlan], int],
) -> dict[str, PoolPlan]:
    """Return the plans, with the excess demand of full pools moved to other pools.

    Args:
        pools: All pools that are scaled, by their ids.
        plans: Plan of each pool without regard to other pools.
        capacity: Returns how many of a plan's replicas the pool can have.
    """
    found = dict(plans)
    for key in sorted(plans):
        left = _excess(pools[key], plans[key], capacity)
        for other, ratio in pools[key].others:
            if left <= 0:
                break
            if other in found and not any(_is_fixed(found[other], cause) for cause in _FIXED):
                found[other], taken = _taken(pools[other], found[other], key, left * ratio)
                left -= taken / ratio
    return found


def others_of(
    lists: Iterable[Sequence[tuple[str, float]]], ratio: Callable[[str, str], float | None]
) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return the `others` of each pool that shares a model with another pool.

    Args:
        lists: The pools of each model, with their prices.
        ratio: Returns the work-seconds of the second pool for one work-second of the first pool, or
            None if unknown.
    """
    prices: dict[str, dict[str, float]] = {}
    for pools in lists:
        for key, _ in pools:
            mine = prices.setdefault(key, {})
            for other, price in pools:
                if other != key:
                    mine[other] = min(price, mine.get(other, price))
    return {
        key: tuple(
            (other, known)
            for other, _ in sorted(mine.items(), key=lambda it: (it[1], it[0]))
            if (known := ratio(key, other)) is not None
        )
        for key, mine in prices.items()
    }


def _excess(
    state: PoolState, decided: PoolPlan, capacity: Callable[[PoolState, PoolPlan], int]
) -> float:
    """Return the number of replicas that a pool's demand needs beyond its capacity."""
    demand = decided.reasons[0]
    assert demand.cause in {Cause.DEMAND, Cause.SURGE}, demand
    if _is_fixed(decided, Cause.OBSERVING):
        return 0.0
    return max(0.0, float(demand.replicas - capacity(state, decided)))


def _taken(state: PoolState, decided: PoolPlan, of: str, work: float) -> tuple[PoolPlan, float]:
    """Return a plan with the part of another pool's work that fits, and the size of the part."""
    _, high = state.bounds
    own = decided.reasons[0].replicas
    ask = max(decided.ask, own + work)
    wanted = min(high, max(decided.wanted, ceil(own + work)))
    taken = min(work, max(0.0, high - own))
    if wanted == decided.wanted:
        return decided, taken
    text = f"work of {work:.1f} replicas of pool {of}, which cannot grow"
    reason = ScalingReason(Cause.SHARED, wanted, text)
    return replace(decided, wanted=wanted, ask=ask, reasons=(*decided.reasons, reason)), taken


def _is_fixed(decided: PoolPlan, cause: Cause) -> bool:
    return any(reason.cause is cause for reason in decided.reasons)
