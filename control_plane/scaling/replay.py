"""Replays a pool's past demand through `plan` with other settings. Pure.

The replay runs in the fluid simulation of `control_plane.scaling.fluid`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import exp
from statistics import fmean

from control_plane.scaling.demand import BUCKET_S, DemandHistory
from control_plane.scaling.fluid import ScalingOutcome, Sight, Terms, play
from control_plane.scaling.fluid_roles import RoleSights, play_roles
from control_plane.scaling.model import FleetBudget, PoolFacts, PoolState, ScalingSettings
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.roles import key_of
from control_plane.scaling.sleeping import urgent, wakes
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


class RolesRule:
    """The scaling loop's `plan` for both roles of a pool, as a policy of the fluid simulation."""

    every_s = int(BUCKET_S)

    def __init__(self, settings: Mapping[str, ScalingSettings], terms: Terms) -> None:
        """Create the policy for a pool with measured boot times and empty histories.

        Args:
            settings: Settings of the pool for each role.
            terms: Parameters of the run.
        """
        self._keys = {role: key_of(_POOL, role) for role in settings}
        self._states: dict[str, PoolState] = {}
        self._terms = terms
        self.sleepers = terms.sleepers_min
        least_s, greatest_s = terms.boot_s
        for role, own in settings.items():
            state = PoolState(own, PoolFacts(0, 0, 0.0), role=role)
            state.partner = next(key for it, key in self._keys.items() if it != role)
            for part in range(_BOOTS):
                state.booted(least_s + (greatest_s - least_s) * part / (_BOOTS - 1))
            self._states[self._keys[role]] = state

    def targets(self, t: int, sights: RoleSights) -> dict[str, int]:
        """Return the numbers of replicas that `plan` decides."""
        self._see(sights)
        for role, sight in sights.items():
            state = self._states[self._keys[role]]
            state.history.add(fmean(sight.demand[-self.every_s :]))
            state.note_sleepers(sight.asleep, float(t))
        plans = plan(self._states, FleetBudget(), float(t))
        for key, decided in plans.items():
            remember(self._states[key], decided, float(t))
        self.sleepers = sum(it.asleep for it in plans.values())
        return {role: plans[key].wanted for role, key in self._keys.items()}

    def woken(self, t: int, sights: RoleSights) -> dict[str, int]:
        """Return the numbers of sleeping replicas to wake now, between two rounds."""
        self._see(sights)
        counts = wakes(self._states, self._states, float(t))
        return {role: counts.get(key, 0) for role, key in self._keys.items()}

    def _see(self, sights: RoleSights) -> None:
        for role, sight in sights.items():
            self._states[self._keys[role]].facts = PoolFacts(
                sight.ready,
                sight.booting,
                sight.backlog_work_s,
                self._terms.objective_s,
                asleep=sight.asleep,
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


def replay(
    curves: Mapping[str, Sequence[float]], state: PoolState, settings: Mapping[str, ScalingSettings]
) -> Replay:
    """Simulate past demand under other settings, in a pool that begins with an empty history.

    Args:
        curves: Work-seconds per second by role, one number per second. A pool without roles has the
            role "".
        state: The pool or a role, which provides the boot times and the objective.
        settings: Settings to try, by role. A number set by hand and a pause are ignored.
    """
    own = next(iter(settings.values()))
    terms = _terms(state, own)
    if len(curves) == 1:
        (curve,) = curves.values()
        return _result(play(curve, PlanRule(own, terms), terms), own)
    return _result(play_roles(curves, RolesRule(settings, terms), terms), own)


def _terms(state: PoolState, settings: ScalingSettings) -> Terms:
    return Terms(
        boot_s=(state.boot_s(0.0), state.boot_s(1.0)),
        replicas_min=settings.replicas_min,
        replicas_max=max(settings.replicas_min, settings.replicas_max),
        objective_s=state.facts.objective_s,
        sleepers_share=settings.sleepers_share,
        sleepers_min=settings.sleepers_min,
    )


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
