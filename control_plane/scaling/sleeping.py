"""Decides how many replicas of a pool sleep, and which sleeping replicas wake at once. Pure.

A sleeping replica has no role. In a pool with roles, it wakes into the role that needs it.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil

from control_plane.scaling.budget import BudgetUse
from control_plane.scaling.model import DRAIN_S, UTILISATION, FleetBudget, PoolPlan, PoolState
from control_plane.scaling.roles import by_pool, queued_once, sleepers_split

_DAY_SLOTS = 96  # Quarter-hours of one day. The busiest decides the number of sleeping replicas.


def urgent(state: PoolState, now: float) -> int:
    """Return the number of a pool's sleeping replicas to wake at once, between two rounds.

    Args:
        state: A pool without roles at present, with a history that may end with the last round.
        now: Time on the clock of `plan`.
    """
    return wakes({"": state}, ("",), now).get("", 0)


def wakes(pools: Mapping[str, PoolState], waiting: Collection[str], now: float) -> dict[str, int]:
    """Return the numbers of sleeping replicas to wake at once, by pool or role.

    A pool whose work waits wakes its own sleepers first, and then those of the other pools that
    serve its models, the cheapest pool first.

    Args:
        pools: Pools with waiting work, and the other pools of their models, by key. A pool with
            roles has both.
        waiting: Keys of the pools with waiting work.
        now: Time on the clock of `plan`.
    """
    waking = _Waking(queued_once(pools), now)
    needs: dict[str, float] = {}
    for key in sorted(waiting):
        if key in pools and waking.pools[key].facts.has_queue:
            needed = ceil(waking.pools[key].facts.backlog_work_s / DRAIN_S) + 1
            needs[key] = needed - waking.wake(key, needed)
    for key, left in needs.items():
        for other, ratio in pools[key].others:
            if left <= 0 or other not in pools:
                continue
            left -= waking.wake(other, ceil(left * ratio)) / ratio  # noqa: PLW2901
    return dict(waking.counts)


class _Waking:
    """Counts the sleeping replicas that wake, within the bounds of pools and roles.

    Attributes:
        pools: Pools and roles by key.
        counts: Numbers of woken replicas, by key.
    """

    def __init__(self, pools: Mapping[str, PoolState], now: float) -> None:
        self.pools = pools
        self.counts: Counter[str] = Counter()
        self._now = now

    def wake(self, key: str, most: int) -> int:
        """Wake at most the given number of replicas of a pool or role, and return the number."""
        count = min(most, self._wakeable(key))
        if count > 0:
            self.counts[key] += count
        return max(0, count)

    def _wakeable(self, key: str) -> int:
        state = self.pools[key]
        settings, facts = state.settings, state.facts
        if settings.is_paused or state.is_pinned(self._now):
            return 0
        woken, have = self.counts[key], facts.have
        room = state.bounds[1] - have - woken
        if state.role:
            woken += self.counts[state.partner]
            have += self.pools[state.partner].facts.have
            high = max(settings.replicas_min, settings.replicas_max)
            room = min(room, high - have - woken)
        return min(facts.asleep - woken, room)


def sleepers_of(states: Sequence[PoolState]) -> int:
    """Return the number of sleeping replicas for a pool whose demand needs none of them.

    Args:
        states: The pool, or both of its roles.
    """
    settings = states[0].settings
    days = zip(*(list(it.history.days)[-_DAY_SLOTS:][::-1] for it in states), strict=False)
    busiest = max((sum(it.history.base for it in states), *map(sum, days)))
    share = settings.sleepers_share * busiest / UTILISATION
    return max(settings.sleepers_min, round(share))


def with_sleepers(
    budget: FleetBudget, pools: Mapping[str, PoolState], plans: dict[str, PoolPlan], now: float
) -> dict[str, PoolPlan]:
    """Add sleeping replicas within the rest of the budget.

    Replicas that are no longer needed may always be put to sleep. A pool that grows wakes its
    sleeping replicas before another replica boots.
    """
    counts = {
        key: max(it.wanted, pools[key].settings.rollout_replicas) for key, it in plans.items()
    }
    use = BudgetUse(budget, sleepers_split(pools), counts)
    found = dict(plans)
    for keys in by_pool(pools):
        own = keys[-1]
        asleep = _sleepers([pools[key] for key in keys], [plans[key] for key in keys], now)
        granted = 0
        while granted < asleep and use.has_room(own):
            use.add(own)
            granted += 1
        if granted:
            found[own] = replace(plans[own], asleep=granted)
    return {
        key: it if use.has_room(key, is_new=True) else replace(it, has_room=False)
        for key, it in found.items()
    }


def _sleepers(states: Sequence[PoolState], plans: Sequence[PoolPlan], now: float) -> int:
    """Return the number of sleeping replicas of a pool, or of both of its roles."""
    facts = states[-1].facts
    asleep = sleepers_of(states)
    slept = facts.asleep if facts.sleepers is None else facts.sleepers
    wanted = sum(it.wanted for it in plans)
    spare = max(0, sum(it.facts.have for it in states) + slept - wanted)
    if states[-1].settings.is_paused or any(it.facts.unknown for it in states):
        return min(slept, spare)
    is_growing = slept and wanted > sum(it.facts.ready for it in states)
    if is_growing or not _may_boot_to_sleep(states, plans, now):
        return min(asleep, spare)
    return asleep


def _may_boot_to_sleep(states: Sequence[PoolState], plans: Sequence[PoolPlan], now: float) -> bool:
    """Return whether replicas of a pool may boot only to sleep.

    No replica boots to sleep in a pool that needs capacity, or whose only replica has no demand. A
    woken replica is expected to sleep again within twice the hold. In a pool that may sleep as a
    whole, it is expected to sleep again until demand has lasted for `idle_s`.

    Args:
        states: The pool, or both of its roles.
        plans: The plans of these states.
        now: Time on the clock of `plan`.
    """
    settings = states[-1].settings
    is_in_need = any(
        it.history.forecast(0.0).is_surge or it.facts.booting > 0 or it.facts.has_queue
        for it in states
    )
    may_sleep = not settings.replicas_min and sum(it.wanted for it in plans) == len(states)
    is_idle = may_sleep and all(it.ask <= 0 for it in plans)
    woken_at = max(it.woken_at for it in states)
    served_s = (max(it.demand_at for it in states) if may_sleep else now) - woken_at
    kept_s = settings.idle_s if may_sleep else 2 * max(it.kept_s for it in states)
    return not (is_in_need or is_idle or served_s <= kept_s)
