"""Decides the number of replicas of each pool, with its reasons. Pure.

Capacity covers the demand expected within the boot time of a replica. Spare replicas are added as
long as the avoided violated minutes are worth more than the replicas. A backlog adds further
replicas, which are removed as soon as the backlog is gone. A replica is removed only when no round
of the last minutes needed it, so that short drops of demand change nothing.

Deferrable work is work whose permitted wait is longer than a boot. Deferrable work needs no spare
capacity, since it can wait until noise and surges have passed. Sleeping replicas count as spare
capacity against surges, because they serve within seconds.
"""

from collections.abc import Mapping
from math import ceil, inf

from control_plane.scaling.backlog import owed_work_s, under_way
from control_plane.scaling.budget import UNPLACED_S, placeable, within
from control_plane.scaling.demand import WorkForecast
from control_plane.scaling.model import (
    DRAIN_S,
    UTILISATION,
    Cause,
    FleetBudget,
    PoolFacts,
    PoolPlan,
    PoolState,
    ScalingReason,
)
from control_plane.scaling.roles import joined, queued_once, sleepers_split
from control_plane.scaling.sharing import shared
from control_plane.scaling.sleeping import with_sleepers

_NOISE_SIGMAS = 2.0  # standard deviations of a bucket's demand that are served without a queue
# Standard deviations in a surge, while its demand is a projection, and while it does not rise. They
# are fewer, because a projection is already high, and because the rise itself counts as noise.
_RISE_SIGMAS, _SURGE_SIGMAS = 1.3, 1.8
_PROJECTED = 1.05  # factor over the present demand from which a surge's demand is a projection
# minutes that a surge violates without spare capacity, until a boot has ended and the backlog is
# gone
_SURGE_MINUTES = 5.0
_DEFERRED_PART = 0.5  # share of the permitted wait within which deferred work should be finished


def plan(pools: Mapping[str, PoolState], budget: FleetBudget, now: float) -> dict[str, PoolPlan]:
    """Return the number of replicas of each pool and role, with its reasons.

    Args:
        pools: All scaled pools, and both roles of each pool with roles, by key.
        budget: Bounds over all scaled pools together.
        now: Seconds of a monotonic clock.
    """
    roles = sleepers_split(queued_once(pools))
    alone = {key: _plan_pool(state, now) for key, state in roles.items()}
    plans = shared(roles, alone, placeable)
    bounded = within(budget, roles, joined(roles, plans, now))
    return with_sleepers(budget, pools, bounded, now)


def remember(state: PoolState, decided: PoolPlan, now: float) -> None:
    """Record the demand of a plan, so that later plans keep its replicas for `hold_s`."""
    # The base follows a fall late. Its replicas are not needed any more, so the hold has begun.
    if not state.history.is_falling:
        state.asks.append((now, decided.ask))
    while state.asks and state.asks[0][0] <= now - state.settings.hold_s:
        del state.asks[0]
    _record_boots(state, decided.wanted - state.facts.have, now)
    if state.history.now > 0 or state.facts.backlog_work_s > 0:
        state.demand_at = now


def _record_boots(state: PoolState, more: int, now: float) -> None:
    """Record the boots that a plan requests, or remove the ones that it cancels, the newest first.

    Sleeping replicas that wake are counted as boots for one round.
    """
    state.boots[:] = under_way(state, now)
    if more > 0:
        state.boots.append((now, more))
    while more < 0 and state.boots:
        at, count = state.boots.pop()
        if count + more > 0:
            state.boots.append((at, count + more))
        more += count


def _plan_pool(state: PoolState, now: float) -> PoolPlan:
    settings, facts = state.settings, state.facts
    have = facts.have
    reasons, ask = _demand_reasons(state, now)
    warnings = _warnings(state)
    if settings.pin is not None and state.is_pinned(now) and not state.role:
        left_s = settings.pin_until - now
        until = "it is lifted" if left_s == inf else f"{ceil(left_s / 60)} min have passed"
        text = f"an operator set {settings.pin}, until {until}"
        return PoolPlan(
            settings.pin, ask, (*reasons, ScalingReason(Cause.PIN, settings.pin, text)), warnings
        )
    if settings.is_paused:
        reasons.append(ScalingReason(Cause.PAUSE, have, f"scaling is paused: {have} stay"))
        return PoolPlan(have, ask, tuple(reasons), warnings)
    if facts.unknown:
        reasons.append(ScalingReason(Cause.OBSERVING, have, f"{facts.unknown}: {have} stay"))
        return PoolPlan(_bounded(state, now, have, reasons), ask, tuple(reasons), warnings)
    wanted = max(reason.replicas for reason in reasons)
    if wanted < have:
        wanted = _held(state, now, wanted, reasons)
    wanted = _bounded(state, now, wanted, reasons)
    return PoolPlan(wanted, ask, tuple(reasons), warnings)


def _demand_reasons(state: PoolState, now: float) -> tuple[list[ScalingReason], float]:
    """Return the reasons of demand, spare replicas and backlog, and the demand to remember."""
    facts = state.facts
    forecast = state.history.forecast(state.boot_s(1.0) + state.history.bucket_s)
    need = _need(forecast, facts)
    if forecast.is_surge:
        text = (
            f"a surge: {forecast.now:.1f} work-seconds per second after {forecast.base:.1f},"
            f" {forecast.expected:.1f} expected"
        )
        reasons = [ScalingReason(Cause.SURGE, ceil(need), text)]
    else:
        text = (
            f"demand of {forecast.expected:.1f} work-seconds per second"
            f" with {forecast.noise:.0%} noise"
        )
        reasons = [ScalingReason(Cause.DEMAND, ceil(need), text)]
    ask = need
    spare = _spare(forecast, need, state)
    if spare > need:
        text = f"spare for a surge to {spare * UTILISATION:.1f}: cheaper than the minutes it saves"
        reasons.append(ScalingReason(Cause.SPARE, ceil(spare), text))
        ask = spare
    if facts.has_queue:
        # A surge that still rises adds to the queue what is expected of it, not what it is now.
        coming = max(forecast.now, forecast.expected) * (1 - facts.deferrable_share)
        owed = owed_work_s(state, coming, _wait_s(state), now)
        drain = coming + owed / DRAIN_S
        text = f"a backlog of {owed:.0f} work-seconds when replicas come"
        reasons.append(ScalingReason(Cause.BACKLOG, ceil(drain), text))
    return reasons, ask


def _need(forecast: WorkForecast, facts: PoolFacts) -> float:
    """Return the capacity that serves urgent work at once, and deferrable work on average."""
    sigmas = _sigmas(forecast)
    at_once = forecast.expected * (1 - facts.deferrable_share)
    need = at_once * (1 + sigmas * forecast.noise)
    if not facts.deferrable_share:
        return need / UTILISATION
    owed = facts.deferred_work_s / (_DEFERRED_PART * facts.deferrable_s)
    deferrable = forecast.base * facts.deferrable_share + owed
    return max(need, at_once + deferrable) / UTILISATION


def _sigmas(forecast: WorkForecast) -> float:
    """Return the standard deviations of a bucket's demand that are served without a queue."""
    if not forecast.is_surge:
        return _NOISE_SIGMAS
    is_projected = forecast.expected > _PROJECTED * forecast.now
    return _RISE_SIGMAS if is_projected else _SURGE_SIGMAS


def _wait_s(state: PoolState) -> float:
    """Return the seconds until the first of several new replicas is ready."""
    return state.boot_s(0.0) * 1.1


def _spare(forecast: WorkForecast, need: float, state: PoolState) -> float:
    """Return the capacity with the least sum of replica cost and expected violated minutes.

    The first candidate covers the demand only. Each other candidate, together with the sleeping
    replicas, also covers one peak of past surges.
    """
    settings, facts = state.settings, state.facts
    base = forecast.base * (1 - facts.deferrable_share)
    worth = settings.minute_worth / 60 * settings.replicas_max
    saved = worth * forecast.surges_per_hour * _SURGE_MINUTES
    tops = [base * peak / UTILISATION - facts.asleep for peak in forecast.peaks]

    def cost(capacity: float) -> float:
        missed = sum(top > capacity + 1e-9 for top in tops)
        return capacity + saved * missed / len(tops)

    return min((need, *(top for top in tops if top > need)), key=cost)


def _held(state: PoolState, now: float, wanted: int, reasons: list[ScalingReason]) -> int:
    """Return the number of replicas to keep although the present demand needs fewer."""
    facts, hold_s = state.facts, state.kept_s
    have = facts.have
    if now - state.known_since < hold_s:
        known_s = now - state.known_since
        text = f"demand is known for {known_s:.0f} s, and none goes within the first {hold_s:.0f} s"
        reasons.append(ScalingReason(Cause.LEARNING, have, text))
        return have
    held = max((ask for at, ask in state.asks if at > now - hold_s), default=0.0)
    if facts.has_queue:
        # Replicas that serve a queue, or wake for it, are kept until the queue is empty.
        held = max(held, facts.ready + facts.waking)
    if state.others and now - state.woken_at < hold_s and wanted < have:
        # Gateways send requests of other pools to woken replicas only after these replicas are
        # ready, so the demand of this pool does not need them yet.
        reasons.append(ScalingReason(Cause.HOLD, have, f"woken in the last {hold_s:.0f} s"))
        return have
    if (kept := min(have, ceil(held))) > wanted:
        text = f"demand needed {kept} within the last {hold_s:.0f} s"
        reasons.append(ScalingReason(Cause.HOLD, kept, text))
        return kept
    return wanted


def _bounded(state: PoolState, now: float, wanted: int, reasons: list[ScalingReason]) -> int:
    """Return the number of replicas within the bounds of the pool's own settings."""
    settings, facts = state.settings, state.facts
    low, high = state.bounds
    if wanted > high:
        reasons.append(ScalingReason(Cause.MAXIMUM, high, f"at most {high}"))
        return high
    is_idle = facts.backlog_work_s <= 0 and now - state.demand_at >= settings.idle_s
    may_be_idle = not settings.replicas_min
    least = 0 if may_be_idle and is_idle else max(low, int(may_be_idle))
    if wanted < least:
        text = f"idle for less than {settings.idle_s:.0f} s" if may_be_idle else f"at least {low}"
        reasons.append(ScalingReason(Cause.IDLE if may_be_idle else Cause.MINIMUM, least, text))
        return least
    return wanted


def _warnings(state: PoolState) -> tuple[str, ...]:
    settings, facts = state.settings, state.facts
    found: list[str] = []
    if facts.single_s > facts.objective_s:
        found.append(
            f"a single request takes {facts.single_s:.2f} s to its first token, the objective is"
            f" {facts.objective_s:.2f} s: more replicas do not help"
        )
    if settings.replicas_min > settings.replicas_max:
        found.append(
            f"replicas_min {settings.replicas_min} is above replicas_max {settings.replicas_max}"
        )
    if facts.unplaced and facts.unplaced_s > UNPLACED_S:
        found.append(
            f"{facts.unplaced} replicas have found no place for {facts.unplaced_s / 60:.0f} min:"
            " add nodes, or lower replicas_max"
        )
    return tuple(found)
