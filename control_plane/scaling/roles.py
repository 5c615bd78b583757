"""Plans the two roles of a pool together: replicas that prefill, and replicas that decode. Pure.

Each role has its own demand. Prompt tokens to compute are the work of the role PREFILL, and output
tokens are the work of the role DECODE. The bounds of the pool apply to the sum of both numbers. A
replica changes its role without a boot, so a growing role takes what the other one only holds.
"""

from collections.abc import Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush

from control_plane.scaling.model import PREFILL, Cause, PoolPlan, PoolState, ScalingReason

Counts = dict[str, int]
# Least ratio of the utilisations of two roles that wait for the same queue.
_SAME = 0.9


def key_of(pool_id: str, role: str) -> str:
    """Return the key of a role in `plan`. The role DECODE has the key of its pool."""
    return f"{pool_id}/{role}" if role == PREFILL else pool_id


def queued_once(pools: Mapping[str, PoolState]) -> dict[str, PoolState]:
    """Return the states, in which a queue counts only for the role that causes it.

    Waiting requests wait for the role with the higher utilisation. If both roles are nearly equally
    utilised, the queue counts for both.
    """
    found = dict(pools)
    for key, state in pools.items():
        if state.role and _utilisation(state) < _SAME * _utilisation(pools[state.partner]):
            facts = replace(state.facts, backlog_work_s=0.0, deferred_work_s=0.0)
            found[key] = replace(state, facts=facts)
    return found


def sleepers_split(pools: Mapping[str, PoolState]) -> dict[str, PoolState]:
    """Return the states, in which each sleeping replica counts for one role of its pool.

    A sleeping replica may wake into either role. The roles share them in the ratio of their work,
    because a surge of requests is work of both.
    """
    found = dict(pools)
    for key, state in pools.items():
        if state.role == PREFILL and state.facts.asleep:
            decode = pools[state.partner]
            work, other = state.history.base, decode.history.base
            part = round(state.facts.asleep * work / max(1e-9, work + other))
            found[key] = replace(state, facts=replace(state.facts, asleep=part))
            rest = replace(decode.facts, asleep=decode.facts.asleep - part)
            found[state.partner] = replace(decode, facts=rest)
    return found


def by_pool(pools: Mapping[str, PoolState]) -> list[tuple[str, ...]]:
    """Return the keys of each pool. A pool with roles has two, of which the last is DECODE."""
    return [
        (state.partner, key) if state.role else (key,)
        for key, state in pools.items()
        if state.role != PREFILL
    ]


def _utilisation(state: PoolState) -> float:
    return state.history.now / max(state.facts.ready, 0.5)


def joined(
    pools: Mapping[str, PoolState], plans: Mapping[str, PoolPlan], now: float
) -> dict[str, PoolPlan]:
    """Return the plans, with the two roles of each pool within the bounds of the pool."""
    found = dict(plans)
    for key, state in pools.items():
        if state.role == PREFILL:
            pair = {key: state, state.partner: pools[state.partner]}
            found |= _paired(pair, {it: plans[it] for it in pair}, now)
    return found


def both_served(pools: Mapping[str, PoolState], counts: Mapping[str, int]) -> Counts:
    """Return the numbers of replicas, in which no role has none while the other has several.

    The sum of the two roles stays. A single replica has the role DECODE, which computes prompts,
    too.
    """
    found = dict(counts)
    for key, state in pools.items():
        if state.role == PREFILL:
            total = counts[key] + counts[state.partner]
            found[key] = min(max(counts[key], 1), max(0, total - 1))
            found[state.partner] = total - found[key]
    return found


def least_of(
    state: PoolState, pools: Mapping[str, PoolState], plans: Mapping[str, PoolPlan]
) -> int:
    """Return the part of its pool's minimum that a role has, in the ratio of the plans."""
    least = state.settings.replicas_min
    if not state.role:
        return least
    own, other = plans[pools[state.partner].partner].wanted, plans[state.partner].wanted
    prefill = own if state.role == PREFILL else other
    part = least * prefill // max(1, own + other)
    return part if state.role == PREFILL else least - part


def _paired(
    pair: Mapping[str, PoolState], plans: Mapping[str, PoolPlan], now: float
) -> dict[str, PoolPlan]:
    settings = next(iter(pair.values())).settings
    is_pinned = any(state.is_pinned(now) for state in pair.values())
    if settings.is_paused and not is_pinned:
        return dict(plans)
    plans = _without_held(pair, plans)
    counts = {key: decided.wanted for key, decided in plans.items()}
    planned = sum(counts.values())
    low, high = settings.replicas_min, max(settings.replicas_min, settings.replicas_max)
    cause, text = Cause.MAXIMUM, f"at most {high} of both roles"
    if is_pinned:
        assert settings.pin is not None
        low = high = settings.pin
        cause, text = Cause.PIN, f"an operator set {settings.pin} of both roles"
    elif planned and min(counts.values()) == 0 and planned < high:
        counts = {key: max(1, count) for key, count in counts.items()}
        cause, text = Cause.MINIMUM, "at least one of each role"
    planned = sum(counts.values())
    if planned < low:
        counts = _raised(pair, plans, counts, low)
        if not is_pinned:
            cause, text = Cause.MINIMUM, f"at least {low} of both roles"
    elif planned > high:
        counts = _lowered(pair, plans, counts, high)
    if is_pinned and settings.pin_prefill is not None:
        counts = _split(pair, high, settings.pin_prefill)
        text = f"an operator set {high}, of which {settings.pin_prefill} prefill"
    counts = both_served(pair, counts)
    return {
        key: _with(decided, counts[key], cause, text, is_said=is_pinned)
        for key, decided in plans.items()
    }


def _with(decided: PoolPlan, wanted: int, cause: Cause, text: str, *, is_said: bool) -> PoolPlan:
    if wanted == decided.wanted and not is_said:
        return decided
    reason = ScalingReason(cause, wanted, text)
    return replace(decided, wanted=wanted, reasons=(*decided.reasons, reason))


def _without_held(
    pair: Mapping[str, PoolState], plans: Mapping[str, PoolPlan]
) -> Mapping[str, PoolPlan]:
    """Return the plans, in which a growing role takes replicas that the other one only holds."""
    found = dict(plans)
    for key, state in pair.items():
        other = plans[state.partner]
        more = plans[key].wanted - state.facts.have
        needed = [it.replicas for it in other.reasons if it.cause is not Cause.HOLD]
        if more <= 0 or not needed or other.reasons[-1].cause is not Cause.HOLD:
            continue
        given = min(more, other.wanted - max(1, *needed))
        if given > 0:
            text = f"{given} of the held replicas take the role {state.role}"
            reason = ScalingReason(Cause.HOLD, other.wanted - given, text)
            found[state.partner] = replace(
                other, wanted=other.wanted - given, reasons=(*other.reasons, reason)
            )
    return found


def _raised(
    pair: Mapping[str, PoolState], plans: Mapping[str, PoolPlan], counts: Counts, low: int
) -> Counts:
    """Return the numbers with the sum `low`. The role with the least spare capacity is first."""

    def turn(key: str, count: int) -> tuple[bool, float, str]:
        is_full = count >= pair[key].bounds[1]
        return is_full, count / max(plans[key].ask, 1e-3), key

    found = dict(counts)
    queue = [turn(key, count) for key, count in found.items()]
    heapify(queue)
    for _ in range(low - sum(found.values())):
        *_, key = heappop(queue)
        found[key] += 1
        heappush(queue, turn(key, found[key]))
    return found


def _lowered(
    pair: Mapping[str, PoolState], plans: Mapping[str, PoolPlan], counts: Counts, high: int
) -> Counts:
    """Return the numbers with the sum `high`, in the ratio of the needs as far as bounds allow."""
    (prefill,) = (key for key, state in pair.items() if state.role == PREFILL)
    decode = pair[prefill].partner
    # A number in `counts` may be cut by a bound already, the largest reason is not.
    needs = {key: max(it.replicas for it in plans[key].reasons) for key in pair}
    least = {key: min(state.bounds[0], counts[key]) for key, state in pair.items()}
    part = round(high * needs[prefill] / max(1, needs[prefill] + needs[decode]))
    part = max(part, high - counts[decode])
    part = max(min(part, counts[prefill], high - least[decode]), min(least[prefill], high))
    return {prefill: part, decode: high - part}


def _split(pair: Mapping[str, PoolState], total: int, prefill: int) -> Counts:
    part = min(prefill, total)
    return {key: part if state.role == PREFILL else total - part for key, state in pair.items()}
