"""The result of a scaling round for each pool, and its form as JSON in the API. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from control_plane.scaling.memory import Memory
from control_plane.scaling.model import PREFILL, PoolPlan, PoolState, Shown
from control_plane.scaling.scaled_pool import ScaledPool
from control_plane.scaling.work import PoolSpeed

_SUMS = ("wanted", "ready", "booting", "sleepers", "demand", "expected", "base")
_MOST = ("asleep", "noise", "boot_s", "late_s")  # both roles have the sleeping replicas of the pool
# A decision counts as old after so many intervals between two rounds, and after so many seconds.
_STALE_LOOKS, _STALE_S = 4.0, 30.0


@dataclass(frozen=True, slots=True)
class Looked:
    """A pool, or one role of a pool, with the result of a scaling round.

    Attributes:
        speed: Speed of the pool's replicas, or None before the first measurement.
        is_measured: Whether the speed was measured recently.
        late_s: Seconds by which the pool's actuator is late (`without_effect_s`), or 0.
    """

    pool: ScaledPool
    memory: Memory
    state: PoolState
    speed: PoolSpeed | None
    is_measured: bool
    decided: PoolPlan
    late_s: float


def by_pool(looked: Iterable[Looked]) -> list[tuple[Looked, ...]]:
    """Return the results by pool. A pool with roles has two."""
    return [tuple(group) for _, group in groupby(looked, key=lambda it: it.pool.id)]


def memory_of(group: Sequence[Looked]) -> dict[str, Any]:
    """Return the stored record of a pool, with the record of its role PREFILL, if any, in it."""
    records = {one.pool.role: one.memory.as_json() for one in group}
    prefill = records.pop(PREFILL, None)
    (record,) = records.values()
    return record if prefill is None else record | {PREFILL: prefill}


def decision_of(group: Sequence[Looked], next_nodes: Collection[str] = ()) -> dict[str, Any]:
    """Return the decision of a round on a pool as JSON, in the form of the API.

    Args:
        group: The results of the pool, or of both of its roles.
        next_nodes: Nodes that fetch the pool's base ahead.
    """
    return _whole(group) | {"next_nodes": sorted(next_nodes)}


def _whole(group: Sequence[Looked]) -> dict[str, Any]:
    """Return the decision of a pool, with those of its roles, if any, in it."""
    parts = {one.pool.role: _decision(one) for one in group}
    if len(parts) == 1:
        return next(iter(parts.values())) | {"role_decisions": {}}
    first = next((it for one, it in zip(group, parts.values(), strict=True) if _moves(one)), None)
    whole = first or parts[group[-1].pool.role]
    backlog_work_s = sum(it["backlog_work_s"] for it in parts.values())
    return (
        whole
        | {name: round(sum(it[name] for it in parts.values()), 3) for name in _SUMS}
        | {name: max(it[name] for it in parts.values()) for name in _MOST}
        | {"backlog_work_s": round(backlog_work_s, 3), "role_decisions": parts}
        | {
            "reasons": [
                reason | {"text": f"{role}: {reason['text']}"}
                for role, it in parts.items()
                for reason in it["reasons"]
            ],
            "warnings": list(
                dict.fromkeys(text for it in parts.values() for text in it["warnings"])
            ),
        }
    )


def _moves(one: Looked) -> bool:
    return one.decided.wanted != one.pool.sight.planned


def _decision(one: Looked) -> dict[str, Any]:
    facts, speed = one.state.facts, one.speed
    forecast = one.state.history.forecast(one.state.boot_s(1.0))
    return {
        "wanted": one.decided.wanted,
        "ready": facts.ready,
        "booting": facts.booting,
        "asleep": facts.asleep,
        "sleepers": one.decided.asleep,
        "cause": str(one.decided.decisive.cause),
        "reasons": [asdict(reason) for reason in one.decided.reasons],
        "warnings": [*one.decided.warnings, *_late_warnings(one)],
        "demand": round(forecast.now, 3),
        "expected": round(forecast.expected, 3),
        "base": round(forecast.base, 3),
        "noise": round(forecast.noise, 3),
        "backlog_work_s": round(facts.backlog_work_s, 3),
        "boot_s": round(one.state.boot_s(1.0), 1),
        "boots": len(one.state.boots_s),
        "speed": {} if speed is None else asdict(speed),
        "tiers": {str(it): list(sums) for it, sums in sorted(one.memory.came.items())},
        "tiers_s": round(one.memory.came_s, 3),
        "late_s": round(one.late_s, 1),
    }


def age_warnings(age_s: float, interval_s: float) -> list[str]:
    """Return a warning if a decision is so old that no control plane seems to plan."""
    if age_s <= max(_STALE_S, _STALE_LOOKS * interval_s):
        return []
    return [f"this plan is {age_s:.0f} s old: no control plane has planned since, see their logs"]


def _late_warnings(one: Looked) -> list[str]:
    told = [text for text in (one.pool.ask_warning, one.pool.condition) if text]
    if not one.late_s:
        return told
    missing = one.decided.wanted - one.state.facts.ready
    role = f"{one.pool.role} " if one.pool.role else ""
    return [
        *told,
        f"{missing} {role}replicas are wanted and not ready, {one.late_s / 60:.0f} min longer than"
        " the longest boot: see `sluice fleet pool show` and the logs of the agents",
    ]


def shown(group: Sequence[Looked]) -> Shown:
    """Return the figures of a pool for metrics."""
    return Shown(
        sum(one.decided.wanted for one in group),
        sum(one.state.history.now for one in group),
        max(one.late_s if one.pool.is_on else 0.0 for one in group),
    )
