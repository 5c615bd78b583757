"""The stored state of a rollout, its events, and its actions; pure data.

`STATE` and `EVENT` are their stored forms: JSON, without loss.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import log
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from control_plane.rollouts.evidence import Baseline, Metric, Thresholds, Window
from control_plane.rollouts.plan import GOLDEN_SAMPLE_MIN, Plan, Stage
from control_plane.rollouts.sequential import Count, SequentialTest, detectable_rate

NO_STAGE = -1  # before the first one has opened


class Phase(StrEnum):
    """The phase of a rollout."""

    PLANNED = "planned"
    SHADOW = "shadow"
    RUNNING = "running"
    PAUSED = "paused"
    HALTED = "halted"  # all traffic is sent back; not yet confirmed
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    DONE = "done"


ENDED = frozenset({Phase.ROLLED_BACK, Phase.ABORTED, Phase.DONE})
UNREADABLE = "unreadable"  # no phase: of a rollout that this version cannot step


class Reason(StrEnum):
    """The reason why a rollout is paused, was rolled back, or was aborted by the platform.

    A pause ends by itself when there is evidence again, or the fleet is ready. The last four abort
    the rollout: its model or release is gone, or no engine can load it.
    """

    WORSE = "worse"
    BY_HAND = "by_hand"
    NO_EVIDENCE = "no_evidence"
    NOT_READY = "not_ready"
    PAUSED_TOO_LONG = "paused_too_long"
    TOO_LITTLE_TRAFFIC = "too_little_traffic"
    UNASKED = "unasked"
    RELEASE_GONE = "release_gone"
    MODEL_CHANGED = "model_changed"
    OWNER_DISABLED = "owner_disabled"
    NOT_LOADED = "not_loaded"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding that canary is worse, with its evidence.

    Attributes:
        metric: Metric of the breached gate.
        stage: Number of the stage.
        suspect: Counts of the stage on the worse side: canary's, except for
            `FEWER_REFUSALS`.
        reference: Counts on the other side.
        tolerated: Difference that the gate tolerates.
        log_e: Natural logarithm of the e-value.
        log_needed: Threshold of `log_e`.
        window_end_ms: End of the deciding window, in Unix time.
        at_ms: Unix time of the verdict.
    """

    metric: Metric
    stage: int
    suspect: Count
    reference: Count
    tolerated: float
    log_e: float
    log_needed: float
    window_end_ms: int
    at_ms: int


def explain(verdict: Verdict) -> str:
    """Return a verdict in one line, for operators."""
    sides = ("canary", "control")
    if verdict.metric is Metric.FEWER_REFUSALS:
        sides = ("control", "canary")
    counts = (verdict.suspect, verdict.reference)
    suspect, reference = (
        f"{count.bad:,} of {count.total:,} in {side} ({count.ratio:.2%})"
        for side, count in zip(sides, counts, strict=True)
    )
    return (
        f"{verdict.metric.value} in stage {verdict.stage}: {suspect} against {reference}; tolerated"
        f" {verdict.tolerated:.2%} more; e-value 10^{verdict.log_e / log(10):.1f},"
        f" needed 10^{verdict.log_needed / log(10):.1f}"
    )


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """Counts and e-value of one gate in a stage.

    Attributes:
        metric: Metric of the gate.
        canary: Requests of canary, and how many of them were bad.
        control: Requests of control, and how many of them were bad.
        log_e: Natural logarithm of the e-value.
        detectable_rate: Share of bad requests that the gate would have detected; None: none.
    """

    metric: Metric
    canary: Count
    control: Count
    log_e: float
    detectable_rate: float | None


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """The evidence of one stage; counts as in `Rollout`."""

    stage: int
    share: int
    mirrored: int
    watched_ms: int
    sample: int
    control_sample: int
    gates: tuple[GateEvidence, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """The state of a rollout; times are Unix time in milliseconds.

    Attributes:
        plan: Plan, which never changes.
        phase: Phase of the rollout.
        stage: Number of the stage whose share is in effect; `NO_STAGE` before the first.
        wanted: Stage that the fleet is prepared for; equal to `stage` when there is none.
        share: Basis points of the clients' traffic for canary.
        mirrored: Basis points of the traffic whose copies go to canary.
        is_ready: Whether the fleet can serve `share` from canary.
        open_ms: Unix milliseconds of the begin of `stage`; windows from before it are no evidence.
        watching_ms: Unix milliseconds since which the evidence is complete; earlier time does not
            count for the stage.
        heard_ms: Unix milliseconds of the last evidence, or of the begin of watching.
        asked_ms: Unix milliseconds since which the rollout waits for the fleet.
        paused_ms: Unix milliseconds of the begin of the pause.
        stepped_ms: Time of the last step; time never runs backwards.
        window_end_ms: End of the last window that was taken.
        watched_ms: Milliseconds for which the stage was watched.
        short_ms: Watched milliseconds at an operator's resume; the longest duration begins anew
            there.
        sample: Requests of the stage that canary had to answer, see `Arm.faults`; only of windows
            in which it was compared, where there is a comparison.
        control_sample: Requests of the stage that control had to answer.
        tests: Tests of this stage, one for each gate.
        thresholds: Thresholds of this stage.
        baseline: Control's recent past.
        reason: Reason of a pause or a rollback.
        verdict: The finding when the reason is `WORSE`.
        past: Evidence of the ended stages.
        has_prompts: Whether the model has golden prompts with an expected answer.
    """

    plan: Plan
    phase: Phase = Phase.PLANNED
    stage: int = NO_STAGE
    wanted: int = NO_STAGE
    share: int = 0
    mirrored: int = 0
    is_ready: bool = False
    open_ms: int = 0
    watching_ms: int = 0
    heard_ms: int = 0
    asked_ms: int = 0
    paused_ms: int = 0
    stepped_ms: int = 0
    window_end_ms: int = 0
    watched_ms: int = 0
    short_ms: int = 0
    sample: int = 0
    control_sample: int = 0
    tests: dict[Metric, SequentialTest] = field(default_factory=dict[Metric, SequentialTest])
    thresholds: Thresholds = field(default_factory=Thresholds)
    baseline: Baseline = field(default_factory=Baseline)
    reason: Reason | None = None
    verdict: Verdict | None = None
    past: tuple[StageEvidence, ...] = ()
    has_prompts: bool = False

    @property
    def evidence(self) -> StageEvidence:
        """The evidence of the present stage."""
        return StageEvidence(
            stage=self.stage,
            share=self.share,
            mirrored=self.mirrored,
            watched_ms=self.watched_ms,
            sample=self.sample,
            control_sample=self.control_sample,
            gates=tuple(
                GateEvidence(
                    metric,
                    test.canary,
                    test.control,
                    test.log_e,
                    detectable_rate(test, self.plan.alpha_of_test),
                )
                for metric, test in self.tests.items()
            ),
        )

    @property
    def golden_sample(self) -> tuple[int, int]:
        """Compared answers to golden prompts of each release, and those that the stage lacks.

        A stage waits for them if the model has such prompts, and the plan their gate.
        """
        test = self.tests.get(Metric.GOLDEN)
        if test is None or not self.has_prompts:
            return 0, 0
        gates = [gate.sample_min for gate in self.plan.gates if gate.metric is Metric.GOLDEN]
        wanted = max(GOLDEN_SAMPLE_MIN, *(gates if self.current.is_compared else ()), 0)
        compared = min(test.canary.total, test.control.total)
        return compared, max(0, wanted - compared)

    @property
    def is_waiting(self) -> bool:
        """Whether the next stage waits for the fleet."""
        return self.wanted != self.stage

    @property
    def is_last(self) -> bool:
        """Whether the model points at the release when this stage has ended."""
        return self.stage + 1 == len(self.plan.stages)

    @property
    def is_short_of_fleet(self) -> bool:
        """Whether the fleet is not ready yet, for the next stage or again for this one."""
        return self.is_waiting or not self.is_ready

    @property
    def is_held(self) -> bool:
        """Whether the rollout waits for the fleet or for gateways."""
        if self.phase is Phase.PAUSED:
            return self.reason is Reason.NOT_READY
        return self.phase in {Phase.SHADOW, Phase.RUNNING} and self.is_short_of_fleet

    @property
    def is_open(self) -> bool:
        """Whether canary gets requests, from clients or as copies."""
        return self.stage != NO_STAGE and self.phase in _OPEN

    @property
    def current(self) -> Stage:
        """The stage whose share is in effect; there must be one."""
        assert self.stage != NO_STAGE
        return self.plan.stages[self.stage]


_OPEN = frozenset({Phase.SHADOW, Phase.RUNNING, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Start:
    """An operator starts the rollout."""

    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class Ready:
    """The fleet can serve a stage: its replicas are ready and have the adapter."""

    stage: int
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class NotReady:
    """The fleet cannot serve the stage any more, e.g. after the loss of replicas."""

    stage: int
    kind: Literal["not_ready"] = "not_ready"


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator pauses the rollout: the share stays, and a worse release is still rolled back."""

    kind: Literal["pause"] = "pause"


@dataclass(frozen=True, slots=True)
class Resume:
    """An operator resumes a paused rollout."""

    kind: Literal["resume"] = "resume"


@dataclass(frozen=True, slots=True)
class Abort:
    """An operator ends the rollout; all requests go back to control."""

    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Promote:
    """An operator ends a stage early; `stage` is the one that the operator saw."""

    stage: int
    kind: Literal["promote"] = "promote"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Windows of evidence, in order; repeated ones are ignored."""

    windows: tuple[Window, ...]
    kind: Literal["evidence"] = "evidence"


@dataclass(frozen=True, slots=True)
class Expectations:
    """The model has golden prompts with an expected answer, or has none any more."""

    exist: bool
    kind: Literal["expectations"] = "expectations"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; every few seconds."""

    kind: Literal["tick"] = "tick"


@dataclass(frozen=True, slots=True)
class Restarted:
    """A process steps the rollout for the first time: after a restart, or as a new leader."""

    kind: Literal["restarted"] = "restarted"


@dataclass(frozen=True, slots=True)
class SentBack:
    """Every gateway has confirmed that canary gets no requests."""

    kind: Literal["sent_back"] = "sent_back"


@dataclass(frozen=True, slots=True)
class Gone:
    """The rollout's model, release or pool no longer exists."""

    reason: Reason
    kind: Literal["gone"] = "gone"


Event = (
    Start
    | Ready
    | NotReady
    | Pause
    | Resume
    | Abort
    | Promote
    | Evidence
    | Expectations
    | Tick
    | Restarted
    | SentBack
    | Gone
)


@dataclass(frozen=True, slots=True)
class SetShare:
    """Gateways shall send canary a share of the traffic, and copies of a share, in basis points."""

    share: int
    mirrored: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """The fleet shall get ready for a stage; its answer is `Ready`."""

    stage: int
    share: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """Gateways shall confirm that canary gets no requests; their answer is `SentBack`."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class FinishRollout:
    """The model points at the new release from now on."""


Action = SetShare | Prepare | RollBack | FinishRollout

STATE: TypeAdapter[Rollout] = TypeAdapter(Rollout)
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
