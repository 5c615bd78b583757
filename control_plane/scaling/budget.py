"""Keeps the plans of all pools together within the budget. Pure.

The budget bounds accelerators and money. Replicas that exist whatever the plan is use the budget
first. These are the replicas of pools that are sized by hand, and the replicas that rollouts need.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from control_plane.scaling.model import (
    PREFILL,
    Cause,
    FleetBudget,
    PoolPlan,
    PoolState,
    ScalingReason,
)
from control_plane.scaling.roles import both_served, least_of

UNPLACED_S = 600.0  # seconds after which replicas without a node stop using budget


@dataclass(frozen=True, slots=True)
class FixedPool:
    """A pool whose number of replicas is set by hand.

    Attributes:
        accelerators: Accelerators of one replica.
        price: Money per replica and hour, or 0 if the pool has no price of its own.
    """

    id: str
    replicas: int
    accelerators: int
    price: float = 0.0


def price_of(price: float, accelerators: int, accelerator_price: float) -> float:
    """Return the money per replica and hour, which the budget sets if the pool has no price."""
    return price or accelerators * accelerator_price


def left_of(
    budget: FleetBudget, fixed: Iterable[FixedPool], accelerator_price: float
) -> FleetBudget:
    """Return the budget that pools sized by hand leave for the scaled pools.

    Args:
        budget: Bounds over all pools.
        fixed: Pools that are sized by hand.
        accelerator_price: Money per accelerator and hour in pools without a price.
    """
    accelerators, price = budget.accelerators, budget.price
    unpriced: list[str] = []
    for pool in fixed:
        each = price_of(pool.price, pool.accelerators, accelerator_price)
        accelerators -= pool.replicas * pool.accelerators
        price -= pool.replicas * each
        if pool.replicas and not each and budget.price < float("inf"):
            unpriced.append(pool.id)
    return FleetBudget(max(0.0, accelerators), max(0.0, price), tuple(unpriced))


def within(
    budget: FleetBudget, pools: Mapping[str, PoolState], plans: dict[str, PoolPlan]
) -> dict[str, PoolPlan]:
    """Reduce the plans so that all pools together stay within the budget.

    Replicas of rollouts, and wanted replicas that already serve, are granted first. Then pools
    receive further replicas one by one, the least served pool first. Replicas that have been
    without a node for ten minutes use no budget.
    """
    fixed = {key: _fixed(key, pools, plans) for key in pools}
    least = {key: least_of(state, pools, plans) for key, state in pools.items()}
    asked = {key: max(fixed[key], placeable(pools[key], it)) for key, it in plans.items()}
    accelerators, price = cost_of(pools, asked)
    if accelerators <= budget.accelerators and price <= budget.price:
        return plans
    granted = {
        key: max(fixed[key], min(pools[key].facts.ready, want)) for key, want in asked.items()
    }
    accelerators, price = cost_of(pools, granted)
    queue = [_turn(key, granted[key], least[key], asked[key]) for key in asked]
    heapify(queue)
    while queue:
        _, key = heappop(queue)
        settings = pools[key].settings
        if granted[key] >= asked[key]:
            continue
        after = (accelerators + settings.accelerators, price + settings.price)
        if after[0] > budget.accelerators or after[1] > budget.price:
            continue
        accelerators, price = after
        granted[key] += 1
        heappush(queue, _turn(key, granted[key], least[key], asked[key]))
    granted = both_served(pools, granted)
    return {key: _cut(decided, asked[key], granted[key]) for key, decided in plans.items()}


def cost_of(pools: Mapping[str, PoolState], counts: Mapping[str, int]) -> tuple[float, float]:
    """Return the accelerators, and the money per hour, of a number of replicas of each pool."""
    return (
        sum(pools[key].settings.accelerators * count for key, count in counts.items()),
        sum(pools[key].settings.price * count for key, count in counts.items()),
    )


def placeable(state: PoolState, decided: PoolPlan) -> int:
    """Return the planned replicas, without those that have found no node for ten minutes."""
    facts = state.facts
    if facts.unplaced and facts.unplaced_s > UNPLACED_S:
        return min(decided.wanted, facts.ready + max(0, facts.booting - facts.unplaced) + 1)
    return decided.wanted


def _fixed(key: str, pools: Mapping[str, PoolState], plans: Mapping[str, PoolPlan]) -> int:
    """Return the replicas of rollouts, of which a role of a pool has its planned part."""
    state = pools[key]
    needed = state.settings.rollout_replicas
    if state.role == PREFILL:
        return min(needed, plans[key].wanted)
    return max(0, needed - plans[state.partner].wanted) if state.role else needed


def _turn(key: str, granted: int, least: int, asked: int) -> tuple[tuple[bool, float], str]:
    """Return a pool's sort key for replicas of the budget. Pools below their minimum are first."""
    return (granted >= least, granted / max(asked, 1)), key


def _cut(decided: PoolPlan, asked: int, granted: int) -> PoolPlan:
    if granted == asked:
        return decided
    if granted > asked:  # the only replica of a role, instead of one of the other role
        reason = ScalingReason(Cause.BUDGET, granted, f"the budget leaves {granted} of each role")
        return replace(decided, wanted=granted, reasons=(*decided.reasons, reason))
    reason = ScalingReason(Cause.BUDGET, granted, f"the budget leaves {granted} of {asked}")
    warning = f"the budget leaves {granted} of {asked} replicas: raise it, or lower other pools"
    return replace(
        decided,
        wanted=granted,
        reasons=(*decided.reasons, reason),
        warnings=(*decided.warnings, warning),
    )
