"""The stored state of a rollout, its events, and its actions. Pure data.

`STATE` and `EVENT` convert the state and the events to JSON and back without loss.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import log
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from control_plane.rollouts.evidence import Baseline, Metric, Thresholds, Window
from control_plane.rollouts.plan import GOLDEN_SAMPLE_MIN, Plan, Stage
from control_plane.rollouts.sequential import Count, SequentialTest, detectable_rate

NO_STAGE = -1  # value of `stage` before the first stage has opened


class Phase(StrEnum):
    """The phase of a rollout."""

    PLANNED = "planned"
    SHADOW = "shadow"
    RUNNING = "running"
    PAUSED = "paused"
    # all traffic is sent back to control, and some gateway has not confirmed this change yet
    HALTED = "halted"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    DONE = "done"


ENDED = frozenset({Phase.ROLLED_BACK, Phase.ABORTED, Phase.DONE})
UNREADABLE = "unreadable"  # Not a phase. It marks a rollout that this version cannot step.


class Reason(StrEnum):
    """The reason why the platform paused, rolled back or aborted a rollout.

    A pause for `NO_EVIDENCE` ends when evidence arrives, and a pause for `NOT_READY` when the fleet
    is ready. The last four reasons abort the rollout.
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
    """The statistical verdict that canary is worse, with the evidence.

    Attributes:
        metric: Metric of the breached gate.
        stage: Number of the stage.
        suspect: Counts of the arm with the higher rate in the stage. This arm is canary, except for
            `FEWER_REFUSALS`.
        reference: Counts of the other arm in the stage.
        tolerated: Difference of the rates that the gate tolerates.
        log_e: Natural logarithm of the e-value.
        log_needed: Threshold of `log_e` for a verdict.
        window_end_ms: End of the deciding window, in Unix milliseconds.
        at_ms: Time of the verdict, in Unix milliseconds.
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
    """Return a verdict in one line of text for operators."""
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
        detectable_rate: Lowest share of bad requests that the gate would have detected. None means
            that the requests were too few for any share.
    """

    metric: Metric
    canary: Count
    control: Count
    log_e: float
    detectable_rate: float | None


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """The evidence of one stage, with the fields of `Rollout`."""

    stage: int
    share: int
    mirrored: int
    watched_ms: int
    sample: int
    control_sample: int
    gates: tuple[GateEvidence, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """The state of a rollout. All times are Unix times in milliseconds.

    Attributes:
        plan: Plan of the rollout, which never changes.
        phase: Phase of the rollout.
        stage: Number of the stage whose share is in effect, or `NO_STAGE` before the first.
        wanted: Number of the stage that the fleet is prepared for, equal to `stage` if no next
            stage is prepared.
        share: Share of the clients' traffic that goes to canary, in basis points.
        mirrored: Share of the traffic that is copied to canary, in basis points.
        is_ready: Whether the fleet can serve `share` from canary.
        open_ms: Time at which `stage` began. Earlier windows are no evidence for the stage.
        watching_ms: Time since which the evidence is complete. Earlier time does not count for the
            stage.
        heard_ms: Time of the last evidence, or of the start of watching.
        asked_ms: Time since which the rollout waits for the fleet.
        paused_ms: Time at which the pause began.
        stepped_ms: Time of the last step, which never decreases.
        window_end_ms: End of the last window that was applied.
        watched_ms: Milliseconds for which the stage was watched.
        short_ms: Value of `watched_ms` when an operator last resumed the rollout. The longest
            duration counts from this value.
        sample: Number of canary's requests in the stage, by the definition of `Arm.faults`. In
            stages with a comparison, only compared windows count.
        control_sample: Number of control's requests in the stage, by the same definition.
        tests: Sequential tests of this stage, one per gate.
        thresholds: Thresholds of this stage.
        baseline: Control's recent past.
        reason: Reason of a pause or a rollback.
        verdict: The verdict if the reason is `WORSE`.
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
        """The number of compared golden prompts per release, and the number that the stage lacks.

        A stage requires golden prompts if the model has any and the plan has the gate `GOLDEN`.
        """
        test = self.tests.get(Metric.GOLDEN)
        if test is None or not self.has_prompts:
            return 0, 0
        gates = [gate.sample_min for gate in self.plan.gates if gate.metric is Metric.GOLDEN]
        wanted = max([GOLDEN_SAMPLE_MIN, *(gates if self.current.is_compared else ())])
        compared = min(test.canary.total, test.control.total)
        return compared, max(0, wanted - compared)

    @property
    def is_waiting(self) -> bool:
        """Whether the next stage waits until the fleet is ready."""
        return self.wanted != self.stage

    @property
    def is_last(self) -> bool:
        """Whether this stage is the plan's last, after which the model points at the release."""
        return self.stage + 1 == len(self.plan.stages)

    @property
    def is_short_of_fleet(self) -> bool:
        """Whether the fleet is not ready for the next stage, or no longer ready for this stage."""
        return self.is_waiting or not self.is_ready

    @property
    def is_held(self) -> bool:
        """Whether the rollout waits for the fleet or for gateways."""
        if self.phase is Phase.PAUSED:
            return self.reason is Reason.NOT_READY
        return self.phase in {Phase.SHADOW, Phase.RUNNING} and self.is_short_of_fleet

    @property
    def is_open(self) -> bool:
        """Whether canary receives requests, either from clients or as copies."""
        return self.stage != NO_STAGE and self.phase in _OPEN

    @property
    def current(self) -> Stage:
        """The stage whose share is in effect. Must not be used before the first stage."""
        assert self.stage != NO_STAGE
        return self.plan.stages[self.stage]


_OPEN = frozenset({Phase.SHADOW, Phase.RUNNING, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Start:
    """Event: an operator starts the rollout."""

    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: the fleet can serve a stage, because its replicas are ready and have the adapter."""

    stage: int
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class NotReady:
    """Event: the fleet can no longer serve the stage, for example after a loss of replicas."""

    stage: int
    kind: Literal["not_ready"] = "not_ready"


@dataclass(frozen=True, slots=True)
class Pause:
    """Event: an operator pauses the rollout.

    The share does not change, and a worse release is still rolled back.
    """

    kind: Literal["pause"] = "pause"


@dataclass(frozen=True, slots=True)
class Resume:
    """Event: an operator resumes a paused rollout."""

    kind: Literal["resume"] = "resume"


@dataclass(frozen=True, slots=True)
class Abort:
    """Event: an operator aborts the rollout, and all requests go back to control."""

    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Promote:
    """Event: an operator ends a stage early.

    Attributes:
        stage: Number of the stage that the operator read. If the rollout is in another stage, no
            stage ends.
        kind: Discriminator of the union `Event`.
    """

    stage: int
    kind: Literal["promote"] = "promote"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Event: windows of evidence, in order. Windows that were applied before are ignored."""

    windows: tuple[Window, ...]
    kind: Literal["evidence"] = "evidence"


@dataclass(frozen=True, slots=True)
class Expectations:
    """Event: the model has golden prompts with an expected answer, or no longer has any."""

    exist: bool
    kind: Literal["expectations"] = "expectations"


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a check of the time limits is due. The loop sends this event every few seconds."""

    kind: Literal["tick"] = "tick"


@dataclass(frozen=True, slots=True)
class Restarted:
    """Event: a process takes its first step of the rollout, after a restart or a takeover."""

    kind: Literal["restarted"] = "restarted"


@dataclass(frozen=True, slots=True)
class SentBack:
    """Event: every gateway has confirmed that canary receives no requests."""

    kind: Literal["sent_back"] = "sent_back"


@dataclass(frozen=True, slots=True)
class Gone:
    """Event: the rollout's model, release or pool no longer exists."""

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
    """The action that sets the shares of traffic and copies that gateways send to canary.

    Both shares are in basis points.
    """

    share: int
    mirrored: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """The action by which the fleet prepares for a stage.

    The event `Ready` reports that the stage can begin.
    """

    stage: int
    share: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """The action by which gateways stop sending requests to canary.

    The event `SentBack` reports that all gateways confirmed the stop.
    """

    reason: Reason


@dataclass(frozen=True, slots=True)
class FinishRollout:
    """The action by which the model points at the new release from now on."""


Action = SetShare | Prepare | RollBack | FinishRollout

STATE: TypeAdapter[Rollout] = TypeAdapter(Rollout)
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
