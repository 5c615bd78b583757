"""Keeps the plans of all pools together within the budget. Pure.

The budget bounds accelerators and money. Replicas that exist whatever the plan is use the budget
first. These are the replicas of pools that are sized by hand, and the replicas that rollouts need.
A replica that leaves uses the budget until it has ended. So a pool grows only as far as the present
replicas of other pools permit.
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


class BudgetUse:
    """The use of the budget by planned numbers of replicas, and by the replicas that exist.

    The planned numbers and the existing replicas are each kept within the budget. A replica of a
    pool that has more replicas than planned costs nothing, because it exists already.
    """

    def __init__(
        self, budget: FleetBudget, pools: Mapping[str, PoolState], counts: Mapping[str, int]
    ) -> None:
        """Count the given numbers of replicas, and the replicas that exist."""
        self._budget = budget
        self._pools = pools
        self._planned = cost_of(pools, counts)
        self._unused: dict[str, int] = {}  # replicas beyond the given numbers, by pool
        there: dict[str, int] = {}
        for key, state in pools.items():
            facts, pool = state.facts, _pool_of(key, state)
            placed = max(facts.placed, facts.ready + facts.asleep)
            self._unused[pool] = self._unused.get(pool, 0) + placed - counts[key]
            there[key] = facts.leaving + counts[key]
        accelerators, price = cost_of(pools, there)
        for pool, unused in self._unused.items():
            settings = pools[pool].settings
            accelerators += max(0, unused) * settings.accelerators
            price += max(0, unused) * settings.price
        self._there = accelerators, price

    @property
    def is_kept(self) -> bool:
        """Whether the counted replicas are within the budget."""
        return self._fits(self._planned) and self._fits(self._there)

    @property
    def is_planned(self) -> bool:
        """Whether the planned numbers alone are within the budget."""
        return self._fits(self._planned)

    def has_room(self, key: str, *, is_new: bool = False) -> bool:
        """Return whether one more replica of a pool or role fits.

        Args:
            key: Key of the pool or role.
            is_new: Whether the replica is a new one in any case.
        """
        exists = not is_new and self._unused[_pool_of(key, self._pools[key])] > 0
        after = self._after(key, self._there)
        return self._fits(self._after(key, self._planned)) and (exists or self._fits(after))

    def add(self, key: str) -> None:
        """Count one more replica of a pool or role."""
        self._planned = self._after(key, self._planned)
        pool = _pool_of(key, self._pools[key])
        if self._unused[pool] <= 0:
            self._there = self._after(key, self._there)
        self._unused[pool] -= 1

    def _after(self, key: str, used: tuple[float, float]) -> tuple[float, float]:
        settings = self._pools[key].settings
        return used[0] + settings.accelerators, used[1] + settings.price

    def _fits(self, used: tuple[float, float]) -> bool:
        return used[0] <= self._budget.accelerators and used[1] <= self._budget.price


def _pool_of(key: str, state: PoolState) -> str:
    """Return the key of a pool, which the role DECODE has. A replica may change its role."""
    return state.partner if state.role == PREFILL else key


def within(
    budget: FleetBudget, pools: Mapping[str, PoolState], plans: dict[str, PoolPlan]
) -> dict[str, PoolPlan]:
    """Reduce the plans so that all pools together stay within the budget.

    Replicas of rollouts, and wanted replicas that already serve, are granted first. Then pools
    receive further replicas one by one, the least served pool first. If the budget is scarce, a
    pool leaves the share of replicas that have been without a node for ten minutes to other pools.
    """
    fixed = {key: _fixed(key, pools, plans) for key in pools}
    wanted = {key: max(fixed[key], it.wanted) for key, it in plans.items()}
    whole = BudgetUse(budget, pools, wanted)
    if whole.is_kept:
        return plans
    least = {key: least_of(state, pools, plans) for key, state in pools.items()}
    asked = {key: max(fixed[key], placeable(pools[key], it)) for key, it in plans.items()}
    granted = {
        key: max(fixed[key], min(pools[key].facts.ready, want)) for key, want in asked.items()
    }
    use = BudgetUse(budget, pools, granted)
    queue = [_turn(key, granted[key], least[key], asked[key]) for key in asked]
    heapify(queue)
    while queue:
        _, key = heappop(queue)
        if granted[key] >= asked[key] or not use.has_room(key):
            continue
        use.add(key)
        granted[key] += 1
        heappush(queue, _turn(key, granted[key], least[key], asked[key]))
    granted = both_served(pools, granted)
    return {
        key: _cut(decided, wanted[key], asked[key], granted[key], is_planned=whole.is_planned)
        for key, decided in plans.items()
    }


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
        placed = max(facts.placed, facts.ready + max(0, facts.booting - facts.unplaced))
        return min(decided.wanted, placed + 1)
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


def _cut(decided: PoolPlan, wanted: int, asked: int, granted: int, *, is_planned: bool) -> PoolPlan:
    """Return a plan with the number of replicas that the budget leaves, and the reason.

    Args:
        decided: Plan without regard to the budget.
        wanted: Number of replicas of this plan, or of a rollout.
        asked: This number, without replicas that have found no node for ten minutes.
        granted: Number of replicas within the budget.
        is_planned: Whether the plans of all pools are within the budget, so that only replicas that
            leave use too much of it.
    """
    if granted == wanted:
        return decided
    warnings = decided.warnings
    if granted > wanted:  # the only replica of a role, instead of one of the other role
        text = f"the budget leaves {granted} of each role"
    elif granted == asked:
        text = f"other pools may use the budget of {wanted - granted} replicas without a place"
    elif is_planned:
        text = f"the budget leaves {granted} of {wanted} until replicas that leave have ended"
    else:
        text = f"the budget leaves {granted} of {wanted}"
        warnings = (*warnings, f"{text} replicas: raise it, or lower other pools")
    reason = ScalingReason(Cause.BUDGET, granted, text)
    reasons = (*decided.reasons, reason)
    return replace(decided, wanted=granted, reasons=reasons, warnings=warnings)
