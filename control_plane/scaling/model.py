"""The data of scaling, which are a pool's settings, its observed facts, and the plan for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from control_plane.scaling.demand import DemandHistory

# Assumed boot times in seconds, until a pool has measured its own. Published times are 85 to 300.
BOOT_PRIOR_S = (180.0, 300.0)
UTILISATION = 0.97  # share of a replica's time that can be used before a queue forms
# Seconds in which new replicas should clear a backlog. They are as long as the window in which
# demand is measured, because more replicas for a shorter time would cost more than the time.
DRAIN_S = 30.0
_BACKLOG_S = 0.5  # work-seconds per ready replica that do not count as a queue yet
_HOLD_LEAST_S = 60.0  # seconds for which a replica is kept, however short its boot is
_BOOTS_KEPT = 32
_BOOTS_ENOUGH = 8  # number of measured boots from which on the assumed ones are not used


class Cause(StrEnum):
    """The cause of a pool's number of replicas."""

    DEMAND = "demand"
    SURGE = "surge"
    BACKLOG = "backlog"
    SPARE = "spare"
    HOLD = "hold"
    LEARNING = "learning"
    OBSERVING = "observing"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    PIN = "pin"
    PAUSE = "pause"
    BUDGET = "budget"
    IDLE = "idle"
    WAKE = "wake"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class ScalingReason:
    """One step of the decision on a number of replicas.

    Attributes:
        cause: The cause of the step.
        replicas: Number of replicas that this cause requires or permits.
        text: The step in words and numbers.
    """

    cause: Cause
    replicas: int
    text: str


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """The operators' settings for one pool.

    Attributes:
        replicas_min: Least number of replicas. With 0, an idle pool is scaled to zero.
        replicas_max: Greatest number of replicas.
        minute_worth: Cost that is worth one avoided violated minute, in minutes of `replicas_max`
            replicas.
        idle_s: Seconds without demand after which a pool whose minimum is 0 is scaled to zero.
        accelerators: Accelerators of one replica.
        price: Money per replica and hour.
        pin: Number of replicas that an operator set by hand, or None if no operator has set one.
        hold_s: Most seconds for which a replica is kept after demand last needed it. A pool whose
            boots are shorter keeps it for the longest boot, and at least for a minute.
        pin_until: End of the pin on the clock of `plan`. The end is infinite if only an operator
            removes the pin.
        is_paused: Whether the number of replicas is left unchanged.
        sleepers_share: Number of sleeping replicas per replica of the day's busiest quarter-hour.
        sleepers_min: Least number of sleeping replicas while demand does not need them.
        rollout_replicas: Replicas that rollouts need. The pool has at least this number, whatever
            the plan is.
        pin_prefill: Number of the pinned replicas that only prefill, or None if demand decides.
        role_min: Least number of replicas of one role, in a pool with roles that serves.
        role_max: Greatest number of replicas of one role, or None if only the pool is bounded.
    """

    replicas_min: int = 1
    replicas_max: int = 1
    minute_worth: float = 3.0
    idle_s: float = 900.0
    accelerators: int = 0
    price: float = 0.0
    pin: int | None = None
    pin_until: float = float("inf")
    is_paused: bool = False
    hold_s: float = 300.0
    sleepers_share: float = 0.0
    sleepers_min: int = 0
    rollout_replicas: int = 0
    pin_prefill: int | None = None
    role_min: int = 1
    role_max: int | None = None


@dataclass(frozen=True, slots=True)
class FleetBudget:
    """Upper bounds over all pools together.

    Attributes:
        accelerators: Number of accelerators that all replicas may use.
        price: Money per hour that all replicas may cost.
        unpriced: Ids of pools that are sized by hand and have no price, so that `price` does not
            include them.
    """

    accelerators: float = float("inf")
    price: float = float("inf")
    unpriced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The observed facts of a pool at present.

    Attributes:
        ready: Replicas that serve.
        booting: Replicas that have been requested and do not serve yet.
        backlog_work_s: Work-seconds that wait, without deferrable work.
        objective_s: TTFT objective of the strictest tier with demand.
        single_s: TTFT of a median request on an idle replica, in seconds. Zero means unknown.
        unplaced: Wanted replicas for which no node has room.
        unplaced_s: Seconds for which there have been wanted replicas without a node.
        planned: Number of replicas in the last plan, or None before the first plan.
        unknown: Reason why the present demand is unknown, in words. It is empty if the demand is
            known.
        asleep: Number of sleeping replicas, which serve a few seconds after they are woken. They
            have no role, so both roles of a pool have the pool's number.
        sleepers: Number of sleeping replicas in the last plan, or None before the first plan. Both
            roles of a pool have the pool's number.
        deferrable_share: Share of the demand that may wait longer than the boot time of a replica.
        deferrable_s: Seconds that the deferrable work may wait.
        deferred_work_s: Work-seconds of deferrable work that wait.
        placed: Replicas on a node, in any state, without those that leave.
        leaving: Replicas that drain. They use the budget until they have ended.
        waking: Replicas that have been woken and do not serve yet.
    """

    ready: int
    booting: int
    backlog_work_s: float
    objective_s: float = 1.5
    single_s: float = 0.0
    unplaced: int = 0
    unplaced_s: float = 0.0
    planned: int | None = None
    unknown: str = ""
    asleep: int = 0
    sleepers: int | None = None
    deferrable_share: float = 0.0
    deferrable_s: float = 0.0
    deferred_work_s: float = 0.0
    placed: int = 0
    leaving: int = 0
    waking: int = 0

    @property
    def have(self) -> int:
        """Number of replicas that serve or are planned to serve, without sleeping replicas."""
        there = self.ready + self.booting
        return there if self.planned is None else self.planned

    @property
    def has_queue(self) -> bool:
        """Whether more work waits than the ready replicas begin at once."""
        return self.backlog_work_s > self.ready * _BACKLOG_S


PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True)
class PoolState:
    """The input of `plan` for one pool, or for one role of a pool with roles.

    Attributes:
        settings: Operators' settings. Both roles of a pool have the pool's settings, which bound
            the sum of the two numbers.
        facts: Observed facts.
        history: The pool's recorded demand.
        asks: Pairs (time, replicas that demand needed) of earlier plans, the oldest first.
        boots_s: Measured boot times of the pool's last replicas, in seconds.
        boots: Pairs (time of the request, replicas) of boots that may be under way, the oldest
            first.
        known_since: Start of the history, on the clock of `plan`.
        demand_at: Time of the last round with demand or backlog.
        slept: Number of sleeping replicas at the last call of `note_sleepers`.
        woken_at: Time of the round that first saw the last wake of a sleeping replica.
        others: Other pools that serve a model of this pool, the cheapest first. Each id is paired
            with the pool's work-seconds for one work-second of this pool.
        role: Role of the replicas, or empty if the pool has no roles. Replicas with the role DECODE
            may compute prompts, too.
        partner: Key of the pool's other role, or empty without roles.
    """

    settings: ScalingSettings
    facts: PoolFacts
    history: DemandHistory = field(default_factory=DemandHistory)
    asks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    boots_s: list[float] = field(default_factory=list[float])
    known_since: float = 0.0
    demand_at: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    boots: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    slept: int = 0
    woken_at: float = float("-inf")
    role: str = ""
    partner: str = ""

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest number of replicas of this pool or role, if it is not idle."""
        settings = self.settings
        low, high = settings.replicas_min, max(settings.replicas_min, settings.replicas_max)
        if not self.role:
            return low, high
        most = high - 1 if settings.role_max is None else min(settings.role_max, high - 1)
        most = max(1, most)
        return min(settings.role_min, most), most

    @property
    def kept_s(self) -> float:
        """Seconds for which a replica is kept after demand last needed it.

        A replica that is needed again costs one boot. So it is kept for no longer than one boot.
        """
        return min(self.settings.hold_s, max(_HOLD_LEAST_S, self.boot_s(1.0)))

    def is_pinned(self, now: float) -> bool:
        """Return whether an operator's number is in effect."""
        return self.settings.pin is not None and now < self.settings.pin_until

    def note_sleepers(self, asleep: int, now: float) -> None:
        """Record the planned number of sleeping replicas. A decrease counts as a wake."""
        if asleep < self.slept:
            self.woken_at = now
        self.slept = asleep

    def booted(self, seconds: float) -> None:
        """Record the boot time of one replica."""
        self.boots_s.append(seconds)
        del self.boots_s[:-_BOOTS_KEPT]

    def known_boots_s(self) -> Sequence[float]:
        """Return the measured boot times, with the assumed ones while few are measured."""
        if len(self.boots_s) >= _BOOTS_ENOUGH:
            return self.boots_s
        return (*BOOT_PRIOR_S, *self.boots_s)

    def boot_s(self, share: float) -> float:
        """Return the boot time in seconds that the given share of replicas does not exceed."""
        known = sorted(self.known_boots_s())
        return known[min(len(known) - 1, int(share * len(known)))]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool's number of replicas, with the steps of the decision.

    Attributes:
        wanted: Number of replicas to have.
        ask: Replicas that demand needs, before rounding, hysteresis, bounds and budget.
        reasons: The steps to `wanted` in order, of which the last step decided.
        warnings: Warnings for operators, in words.
        asleep: Number of sleeping replicas to have in addition. In a pool with roles, the role
            DECODE has the number of the pool, because sleeping replicas have no role.
        has_room: Whether the budget has room for one replica more, as a move needs it.
    """

    wanted: int
    ask: float
    reasons: tuple[ScalingReason, ...]
    warnings: tuple[str, ...] = ()
    asleep: int = 0
    has_room: bool = True

    @property
    def decisive(self) -> ScalingReason:
        """The last reason whose number of replicas is the wanted number."""
        found = (it for it in reversed(self.reasons) if it.replicas == self.wanted)
        return next(found, self.reasons[-1])


@dataclass(frozen=True, slots=True)
class Shown:
    """The figures of a pool for metrics.

    Attributes:
        wanted: Number of replicas that the pool should have.
        demand: Demand in work-seconds per second.
        late_s: Seconds by which the pool's actuator is late (`without_effect_s`), or 0.
    """

    wanted: int
    demand: float
    late_s: float
