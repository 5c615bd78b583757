"""Records of scaling: a pool's settings, its observed facts, and the plan for it."""

from dataclasses import dataclass, field
from enum import StrEnum

from control_plane.scaling.demand import DemandHistory

# Boot times in seconds of a pool that has measured none: the field publishes 85 to 300.
BOOT_PRIOR_S = (180.0, 300.0)
_BOOTS_KEPT = 32
SLEEPING_ENGINES = frozenset({"openvino", "sim"})  # their hosts can give KV memory back


class Cause(StrEnum):
    """Causes of a pool's number of replicas."""

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
    """One step of the way to a number of replicas.

    Attributes:
        cause: The cause of the step.
        replicas: Replicas that this cause asks for, or allows.
        text: The step in words and numbers.
    """

    cause: Cause
    replicas: int
    text: str


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Operators' settings for one pool.

    Attributes:
        replicas_min: Replicas that the pool keeps at least; 0 lets it go to none while it is idle.
        replicas_max: Replicas that it gets at most.
        minute_worth: Minutes that the pool at its maximum may run for one violated minute less.
        idle_s: Seconds without demand after which a pool whose minimum is 0 goes to none.
        accelerators: Accelerators of one replica.
        price: Money per replica and hour.
        pin: Replicas that an operator set by hand; None: none.
        hold_s: Seconds for which a replica stays that something has asked for.
        pin_until: End of the pin, on the clock of `plan`; infinite: until an operator ends it.
        is_paused: Whether the pool stays as it is.
        sleepers_share: Sleeping replicas per replica of the busiest quarter of an hour of the day.
        sleepers_min: Sleeping replicas that the pool keeps at least while it is not in need.
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


@dataclass(frozen=True, slots=True)
class FleetBudget:
    """Bounds over all pools together.

    Attributes:
        accelerators: Accelerators that replicas may hold.
        price: Money per hour that replicas may cost.
    """

    accelerators: float = float("inf")
    price: float = float("inf")


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Observed facts of a pool now.

    Attributes:
        ready: Replicas that serve.
        booting: Replicas that are on their way.
        backlog_work_s: Work-seconds that wait, but for deferrable ones.
        objective_s: First-token objective of the strictest tier with demand.
        single_s: First token of a median request on an idle replica, in seconds; 0: not known.
        unplaced: Replicas that were asked for and find no place.
        unplaced_s: Seconds for which that has been so.
        planned: Replicas that the last plan asked for; None: there was none.
        unknown: Reason why demand is not known now, in words; empty: it is.
        asleep: Replicas that sleep: they serve some seconds after they are woken.
        sleepers: Sleeping replicas that the last plan asked for; None: there was none.
        deferrable_share: Share of the demand that may wait longer than a replica takes to boot.
        deferrable_s: Seconds that this work may wait.
        deferred_work_s: Work-seconds of it that wait.
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

    @property
    def have(self) -> int:
        """Replicas that there are, or will be, and do not sleep."""
        there = self.ready + self.booting
        return there if self.planned is None else self.planned


@dataclass(slots=True)
class PoolState:
    """The input of `plan` for one pool.

    Attributes:
        settings: Operators' settings.
        facts: Observed facts.
        history: The pool's demand, as far back as it is known.
        asks: Times of earlier plans and the replicas that demand asked for, the oldest first.
        boots_s: Seconds that the last replicas took to boot.
        known_since: Begin of the history, on the clock of `plan`.
        demand_at: Time of the last demand or backlog.
        others: Pools that serve a model of this one, too, the cheapest first, each with its
            work-seconds for one work-second of this pool.
    """

    settings: ScalingSettings
    facts: PoolFacts
    history: DemandHistory = field(default_factory=DemandHistory)
    asks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    boots_s: list[float] = field(default_factory=list[float])
    known_since: float = 0.0
    demand_at: float = 0.0
    others: tuple[tuple[str, float], ...] = ()

    def booted(self, seconds: float) -> None:
        """Learn the boot time of one replica."""
        self.boots_s.append(seconds)
        del self.boots_s[:-_BOOTS_KEPT]

    def boot_s(self, share: float) -> float:
        """Return the boot time within which a share of the replicas is ready, in seconds."""
        known = sorted((*BOOT_PRIOR_S, *self.boots_s) if len(self.boots_s) < 8 else self.boots_s)
        return known[min(len(known) - 1, int(share * len(known)))]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool's number of replicas, with the way to it.

    Attributes:
        wanted: Replicas to have.
        ask: Replicas that demand asks for, before holding, bounds and budget; not rounded.
        reasons: The steps to `wanted`, in order; the last one decided.
        warnings: Warnings for operators, in words.
        asleep: Replicas to have asleep besides.
    """

    wanted: int
    ask: float
    reasons: tuple[ScalingReason, ...]
    warnings: tuple[str, ...] = ()
    asleep: int = 0


@dataclass(frozen=True, slots=True)
class Shown:
    """Figures of a pool for metrics.

    Attributes:
        wanted: Replicas that it shall have.
        demand: Work-seconds per second.
        late_s: Seconds for which its actuator has been late with replicas.
    """

    wanted: int
    demand: float
    late_s: float
