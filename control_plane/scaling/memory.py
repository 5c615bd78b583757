"""Updates the scaling loop's record of a pool, which one round passes to the next. Pure.

Times are seconds of PostgreSQL's clock, so differences between the clocks of control planes do not
matter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.model import (
    BOOT_PRIOR_S,
    PREFILL,
    PoolFacts,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.work import CellWork, PoolSpeed, Seen, Sums, news

_ABSENT_LOOKS = 4.0  # intervals without a round, after which earlier decisions count as unknown
_OBSERVE_LOOKS = 2  # number of rounds after a start that do not change the numbers of replicas
# multiple of the longest boot time after which replicas of an actuator's pool count as late
EFFECT_FACTOR = 1.5


def _no_sums() -> dict[int, Sums]:
    return {}


@dataclass(slots=True)
class Memory:
    """The record of a pool between two rounds of the scaling loop.

    Attributes:
        history: Demand of the pool.
        seen: Reported sums that the history includes, or None before the first round.
        asks: Replicas that demand needed in earlier rounds, in the form of `PoolState.asks`.
        boots_s: Measured boot times of the pool's last replicas, in seconds.
        boots: Boots that may be under way, in the form of `PoolState.boots`.
        known_since: Time since which rounds have followed each other without a gap.
        demand_at: Time of the last round with demand.
        looked_at: Time of the last round, or 0 before the first round.
        observes_until: End of the time in which the number of replicas is not changed.
        missing_since: Time since which fewer replicas are ready than wanted, or 0 if none is
            missing.
        came: Demand that arrived between the last two rounds, by tier.
        came_s: Seconds between the last two rounds.
        slept: Planned number of sleeping replicas at the last round.
        woken_at: Time of the round that first saw the last wake, or 0 if there was none.
        role: Role whose work the history counts, or empty for the work of the whole pool.
    """

    history: DemandHistory = field(default_factory=DemandHistory)
    seen: Seen | None = None
    asks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    boots_s: list[float] = field(default_factory=list[float])
    boots: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    known_since: float = 0.0
    demand_at: float = 0.0
    looked_at: float = 0.0
    observes_until: float = 0.0
    missing_since: float = 0.0
    came: dict[int, Sums] = field(default_factory=_no_sums)
    came_s: float = 0.0
    slept: int = 0
    woken_at: float = 0.0
    role: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON, to be read by `from_json`."""
        seen = None
        if self.seen is not None:
            seen = {key: [epoch, _rows(sums)] for key, (epoch, sums) in self.seen.items()}
        return {
            "history": self.history.as_json(),
            "seen": seen,
            "came": _rows(self.came),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any], bucket_s: float, role: str = "") -> "Memory":
        """Return a stored record. An empty document is read as a new record.

        The history of another role has other work, so only its boot times are restored.
        """
        if role == PREFILL:
            kept = kept.get(PREFILL, {"role": "", "boots_s": kept.get("boots_s", ())})
        if kept.get("role", "") != role:
            return cls(
                DemandHistory(bucket_s=bucket_s), boots_s=list(kept.get("boots_s", ())), role=role
            )
        found = cls(DemandHistory.from_json(kept.get("history", {}), bucket_s))
        if (seen := kept.get("seen")) is not None:
            found.seen = {key: (epoch, _sums(rows)) for key, (epoch, rows) in seen.items()}
        found.came = _sums(kept.get("came", {}))
        for name in _PLAIN:
            if name in kept:
                setattr(found, name, kept[name])
        found.asks = [(at, ask) for at, ask in found.asks]
        found.boots = [(at, count) for at, count in found.boots]
        return found


_PLAIN = (
    *("asks", "boots_s", "boots", "known_since", "demand_at", "looked_at"),
    *("observes_until", "missing_since", "came_s", "slept", "woken_at", "role"),
)


def _rows(sums: Mapping[int, Sums]) -> dict[str, list[int]]:
    return {str(priority): list(row) for priority, row in sums.items()}


def _sums(rows: Mapping[str, Sequence[int]]) -> dict[int, Sums]:
    return {int(key): (row[0], row[1], row[2], row[3]) for key, row in rows.items()}


@dataclass(frozen=True, slots=True)
class PoolSight:
    """The observations of a pool in one round.

    Attributes:
        reports: Last reports on the pool's cells, including reports of earlier owners.
        fresh: Keys of the recent reports from present owners.
        unheard: Number of cells without an owner or without a recent report.
        ready: Number of serving replicas.
        booting: Number of starting replicas.
        booted_s: Boot times of the replicas that became ready since the last round.
        planned: Number of replicas in the last plan, or None before the first plan.
        unplaced: Number of replicas without a node.
        unplaced_s: Seconds for which there have been replicas without a node.
        objective_s: TTFT objectives in seconds, by priority of the tier.
        asleep: Number of replicas that sleep as planned, or are about to sleep.
        sleepers: Number of sleeping replicas in the last plan, or None before the first plan.
        deferrable_s: Permitted wait of work of a preemptible tier in seconds, by the tier's
            priority.
        placed: Number of replicas on a node, in any state, without those that leave.
        leaving: Number of replicas that drain.
        waking: Number of starting replicas that have slept.
    """

    reports: Sequence[CellWork]
    fresh: frozenset[str]
    unheard: int
    ready: int
    booting: int
    booted_s: Sequence[float] = ()
    planned: int | None = None
    unplaced: int = 0
    unplaced_s: float = 0.0
    objective_s: Mapping[int, float] = field(default_factory=dict[int, float])
    asleep: int = 0
    sleepers: int | None = None
    deferrable_s: Mapping[int, float] = field(default_factory=dict[int, float])
    placed: int = 0
    leaving: int = 0
    waking: int = 0


def look(
    memory: Memory,
    sight: PoolSight,
    settings: ScalingSettings,
    speed: PoolSpeed | None,
    now: float,
) -> PoolState:
    """Update the record by the observations of a round, and return the input of `plan`.

    Args:
        memory: Record of the pool or of one of its roles, which this function changes.
        sight: Observations of this round.
        settings: Settings of the pool.
        speed: Speed of the pool's replicas, or None before the first measurement.
        now: Time of the round.
    """
    speed = None if speed is None else speed.of_role(memory.role)
    interval_s = memory.history.bucket_s
    since_s = now - memory.looked_at
    if since_s > _ABSENT_LOOKS * interval_s:
        memory.known_since = now
        memory.observes_until = now + (_OBSERVE_LOOKS - 0.5) * interval_s
        memory.asks.clear()
        memory.boots.clear()
    if not memory.looked_at:
        memory.demand_at = now
    if not memory.looked_at or since_s <= 0:  # PostgreSQL's clock may have been set back
        since_s = interval_s
    came, memory.seen = news(sight.reports, memory.seen)
    memory.came, memory.came_s = came, since_s
    fresh = [report for report in sight.reports if report.key in sight.fresh]
    is_idle = not any(sums[0] for sums in came.values())
    if speed is not None or is_idle:  # without requests there is no work, whatever the speed
        _add_work(memory.history, came.values(), speed, since_s)
    if not is_idle or any(report.queued for report in fresh):
        memory.demand_at = now
    unknown = _unknown(memory, sight, settings, speed, now)
    facts = replace(_facts(memory, sight, fresh, speed), unknown=unknown)
    state = PoolState(
        settings,
        facts,
        memory.history,
        memory.asks,
        memory.boots_s,
        memory.known_since,
        memory.demand_at,
        boots=memory.boots,
        slept=memory.slept,
        woken_at=memory.woken_at,
        role=memory.role,
    )
    state.note_sleepers(sight.asleep if sight.sleepers is None else sight.sleepers, now)
    memory.slept, memory.woken_at = state.slept, state.woken_at
    for boot_s in sight.booted_s:
        state.booted(boot_s)
    if sight.booted_s and memory.missing_since:
        memory.missing_since = now  # replicas have become ready, so the actuator is not late yet
    memory.looked_at = now
    return state


def _add_work(
    history: DemandHistory, came: Iterable[Sums], speed: PoolSpeed | None, since_s: float
) -> None:
    """Append the work that arrived in the seconds since the last round."""
    work_s = 0.0
    if speed is not None:
        work_s = sum(speed.work_s(prompt, output) for _, prompt, output, _ in came)
    if since_s < 2 * history.bucket_s:
        history.add(work_s / max(since_s, 1e-3))
    else:
        history.fill(work_s / since_s, since_s)


def _facts(
    memory: Memory,
    sight: PoolSight,
    fresh: Sequence[CellWork],
    speed: PoolSpeed | None,
) -> PoolFacts:
    answer_tokens = _answer_tokens(memory)
    waiting: dict[int, float] = {}
    for report in fresh:
        for priority, (requests, tokens) in report.queued.items():
            # Without a measured speed a request is counted as one work-second.
            work_s = speed.work_s(tokens, requests * answer_tokens) if speed else float(requests)
            waiting[priority] = waiting.get(priority, 0.0) + work_s
    boot_s = max((*BOOT_PRIOR_S, *memory.boots_s))
    later = {it: wait_s for it, wait_s in sight.deferrable_s.items() if wait_s > boot_s}
    deferred = {it: work_s for it, work_s in waiting.items() if it in later}
    busy = [priority for priority, sums in memory.came.items() if sums[0]]
    # More replicas sleep than the last plan wants, until the fleet's loop has woken them.
    about_to_wake = 0 if sight.sleepers is None else max(0, sight.asleep - sight.sleepers)
    facts = PoolFacts(
        sight.ready,
        sight.booting,
        sum(waiting.values()) - sum(deferred.values()),
        single_s=max((report.first_token_s for report in fresh), default=0.0),
        unplaced=sight.unplaced,
        unplaced_s=sight.unplaced_s,
        planned=sight.planned,
        asleep=sight.asleep,
        sleepers=sight.sleepers,
        deferrable_share=_share(memory, later, speed),
        deferrable_s=min(later.values(), default=0.0),
        deferred_work_s=sum(deferred.values()),
        placed=sight.placed,
        leaving=sight.leaving,
        waking=sight.waking + about_to_wake,
    )
    objectives = [sight.objective_s[it] for it in busy if sight.objective_s.get(it)]
    return replace(facts, objective_s=min(objectives)) if objectives else facts


def _share(memory: Memory, tiers: Collection[int], speed: PoolSpeed | None) -> float:
    """Return the share of the given tiers in the work that arrived between the last two rounds."""
    if speed is None:
        return 0.0
    work = {it: speed.work_s(sums[1], sums[2]) for it, sums in memory.came.items()}
    total = sum(work.values())
    return sum(work[it] for it in work if it in tiers) / total if total > 0 else 0.0


def _answer_tokens(memory: Memory) -> float:
    """Return the mean output tokens of recent requests, at least one token."""
    requests = sum(sums[0] for sums in memory.came.values())
    tokens = sum(sums[2] for sums in memory.came.values())
    return max(1.0, tokens / requests) if requests else 1.0


def _unknown(
    memory: Memory,
    sight: PoolSight,
    settings: ScalingSettings,
    speed: PoolSpeed | None,
    now: float,
) -> str:
    """Return the reason why the demand is unknown, or empty.

    The demand of a pool without requests is known without a measured speed.
    """
    if sight.unheard:
        return f"the routers of {sight.unheard} cells have not reported of late"
    if speed is None and now - memory.demand_at < settings.idle_s:
        return "the speed of its replicas is not measured yet"
    if now < memory.observes_until:
        return "scaling has just started"
    return ""


def without_effect_s(memory: Memory, state: PoolState, wanted: int, now: float) -> float:
    """Return the seconds for which replicas are missing beyond 1.5 times the longest boot time.

    The result is 0 if no replica is missing for so long. Otherwise the pool's actuator is late.
    """
    if state.facts.ready >= wanted:
        memory.missing_since = 0.0
        return 0.0
    if not memory.missing_since:
        memory.missing_since = now
    return max(0.0, now - memory.missing_since - EFFECT_FACTOR * state.boot_s(1.0))
