"""Replays a pool's past demand through `plan` with other settings. Pure.

The replay runs in the fluid simulation of `control_plane.scaling.fluid`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import exp
from statistics import fmean

from control_plane.scaling.demand import BUCKET_S, DemandHistory
from control_plane.scaling.fluid import ScalingOutcome, Sight, Terms, play
from control_plane.scaling.model import FleetBudget, PoolFacts, PoolState, ScalingSettings
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.sleeping import urgent
from control_plane.scaling.work import PoolSpeed

QUARTER_S = 900
REPLAY_HOURS_MAX = 48  # longest replay in hours
QUARTERS_MIN = 4  # least number of quarter-hours of demand for a meaningful replay
_POOL = "pool"
_BOOTS = 8  # number of measured boot times from which on the assumed boot times are not used


class PlanRule:
    """The scaling loop's `plan`, used as a policy of the fluid simulation."""

    every_s = int(BUCKET_S)

    def __init__(self, settings: ScalingSettings, terms: Terms) -> None:
        """Create the policy for a pool with measured boot times and an empty history."""
        self._state = PoolState(settings, PoolFacts(0, 0, 0.0))
        least_s, greatest_s = terms.boot_s
        for part in range(_BOOTS):
            self._state.booted(least_s + (greatest_s - least_s) * part / (_BOOTS - 1))
        self._terms = terms
        self.sleepers = 0

    def target(self, t: int, sight: Sight) -> float:
        """Return the number of replicas that `plan` decides."""
        state = self._state
        state.history.add(fmean(sight.demand[-self.every_s :]))
        state.facts = self._facts(sight)
        state.note_sleepers(sight.asleep, float(t))
        decided = plan({_POOL: state}, FleetBudget(), float(t))[_POOL]
        remember(state, decided, float(t))
        self.sleepers = decided.asleep
        return decided.wanted

    def woken(self, t: int, sight: Sight) -> int:
        """Return the number of sleeping replicas to wake now, between two rounds."""
        self._state.facts = self._facts(sight)
        return urgent(self._state, float(t))

    def _facts(self, sight: Sight) -> PoolFacts:
        terms = self._terms
        is_tiered = len(terms.tiers) > 1
        return PoolFacts(
            sight.ready,
            sight.booting,
            sight.backlog_work_s,
            terms.objective_s,
            asleep=sight.asleep,
            deferrable_share=terms.tiers[-1] if is_tiered else 0.0,
            deferrable_s=terms.batch_deadline_s,
            deferred_work_s=sight.deferred_work_s,
        )


@dataclass(frozen=True, slots=True)
class ReplayCurves:
    """The figures of a replay, one value per minute.

    Attributes:
        provisioned: Number of serving, booting and sleeping replicas.
        ready: Number of replicas that served.
        violated: Whether the 99th percentile of TTFT misses the objective.
    """

    provisioned: tuple[int, ...]
    ready: tuple[int, ...]
    violated: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay of a pool's own demand with other settings.

    Attributes:
        violation_minutes: Minutes whose 99th percentile of TTFT misses the objective.
        violated_work_share: Share of the work that arrives while TTFT misses the objective.
        replica_hours: Hours of all replicas, including booting and sleeping replicas.
        accelerator_hours: Hours of the accelerators of these replicas.
        price: Money that the replica hours cost.
        changes: Number of changes of the number of replicas.
        replicas_most: Greatest number of replicas at the same time.
        curves: Figures of each minute.
    """

    violation_minutes: int
    violated_work_share: float
    replica_hours: float
    accelerator_hours: float
    price: float
    changes: int
    replicas_most: int
    curves: ReplayCurves


def kept_curve(history: DemandHistory, hours: int) -> list[float]:
    """Return the demand of the last hours in work-seconds per second, one number per second.

    The history stores a mean per quarter-hour and the size of the noise. Noise of this size is
    added to each bucket, and is the same in every replay. Surges shorter than a quarter-hour are
    flattened.
    """
    noise = random.Random(0)  # noqa: S311 -- no secrets
    curve: list[float] = []
    for mean in list(history.days)[-hours * 3600 // QUARTER_S :]:
        for _ in range(QUARTER_S // int(BUCKET_S)):
            level = mean * exp(noise.gauss(0.0, history.noise))
            curve += repeat(level, int(BUCKET_S))
    return curve


def trace_curve(
    prompt_tokens: Sequence[int], output_tokens: Sequence[int], bucket_s: int, speed: PoolSpeed
) -> list[float]:
    """Return the demand of a trace in work-seconds per second, one number per second.

    Args:
        prompt_tokens: Prompt tokens of the requests of each bucket. All count as computed tokens,
            because a trace lacks the hits of a prefix cache.
        output_tokens: Output tokens of the same requests.
        bucket_s: Seconds per bucket.
        speed: Speed of the pool's replicas.
    """
    curve: list[float] = []
    for prompt, output in zip(prompt_tokens, output_tokens, strict=True):
        curve += repeat(speed.work_s(prompt, output) / bucket_s, bucket_s)
    return curve


def by_minute(curve: Sequence[float]) -> list[float]:
    """Return the means of whole minutes of a curve with one number per second."""
    return [round(fmean(curve[at : at + 60]), 3) for at in range(0, len(curve) - 59, 60)]


def replay(curve: Sequence[float], state: PoolState, settings: ScalingSettings) -> Replay:
    """Simulate past demand under other settings, in a pool that begins with an empty history.

    Args:
        curve: Work-seconds per second, one number per second.
        state: The pool, which provides the boot times and the objective.
        settings: Settings to try. A number set by hand and a pause are ignored.
    """
    terms = Terms(
        boot_s=(state.boot_s(0.0), state.boot_s(1.0)),
        replicas_min=settings.replicas_min,
        replicas_max=max(settings.replicas_min, settings.replicas_max),
        objective_s=state.facts.objective_s,
        sleepers_share=settings.sleepers_share,
    )
    return _result(play(curve, PlanRule(settings, terms), terms), settings)


def _result(outcome: ScalingOutcome, settings: ScalingSettings) -> Replay:
    hours = outcome.gpu_hours
    return Replay(
        outcome.violation_minutes,
        round(outcome.violated_work_share, 4),
        round(hours, 2),
        round(hours * settings.accelerators, 2),
        round(hours * settings.price, 2),
        outcome.changes,
        max(outcome.provisioned, default=0),
        ReplayCurves(outcome.provisioned, outcome.ready, outcome.violated),
    )
