"""Rollouts as JSON, for lists and clients. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log10
from typing import Any, Self

from control_plane.rollouts import plan as plans
from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import MIRRORED, SHARE, TOLERATED, Plan
from control_plane.rollouts.state import (
    NO_STAGE,
    GateEvidence,
    Phase,
    Reason,
    Rollout,
    StageEvidence,
    Verdict,
    explain,
)

Json = dict[str, Any]
_DIGITS = 12  # number of displayed digits of a digest

SUMMARY = (
    *("id", "model_id", "control", "canary", "owner_tenant_id", "phase", "reason", "stage"),
    *("stages", SHARE.shown, MIRRORED.shown, "is_live", "explanation", "problem"),
    *("created_at", "started_at", "ended_at"),
)
DETAILS = (
    *("wanted_stage", "is_ready", "waiting_for", "stage_left_s", "watched_s", "watched_needed_s"),
    "sample",
    *("control_sample", "sample_needed", "gates", "past_stages", "verdict"),
    *("evidence_until_unix_ms", "plan", "trials", "version"),
)
EVENT = (
    *("id", "rollout_id", "at", "event", "actor_id", "phase", "reason", "stage", "wanted"),
    *(SHARE.shown, MIRRORED.shown, "detail", "verdict"),
)

_WHY = {
    Reason.WORSE: "canary is worse",
    Reason.BY_HAND: "an operator has paused it; resume or abort it",
    Reason.NO_EVIDENCE: "figures of its requests are missing; it goes on when they come again",
    Reason.NOT_READY: "the fleet is not ready for it; it goes on when it is",
    Reason.PAUSED_TOO_LONG: "it was paused for too long",
    Reason.RELEASE_GONE: "one of its releases was deleted",
    Reason.MODEL_CHANGED: "the model was given another release meanwhile",
    Reason.OWNER_DISABLED: "the tenant that the model belongs to is disabled",
    Reason.NOT_LOADED: "an engine cannot load it, or generates nothing with it: its trials say why",
    Reason.TOO_LITTLE_TRAFFIC: "there was too little traffic to compare; promote or abort it",
    Reason.UNASKED: "its golden prompts were not answered often enough: sluice golden results says"
    " why; then resume, promote or abort it",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of a rollout, with the fields of its state that lists show.

    Attributes:
        stages: Number of stages in its plan.
    """

    phase: Phase
    reason: Reason | None
    stage: int
    wanted: int
    stages: int
    share: int
    mirrored: int
    verdict: Verdict | None

    @classmethod
    def of(cls, state: Rollout) -> Self:
        """Return the progress of a rollout."""
        return cls(
            phase=state.phase,
            reason=state.reason,
            stage=state.stage,
            wanted=state.wanted,
            stages=len(state.plan.stages),
            share=state.share,
            mirrored=state.mirrored,
            verdict=state.verdict,
        )


def explanation(standing: Standing) -> str:
    """Return the reason of a rollout's phase in one line, which is empty for a normal phase."""
    if standing.verdict is not None:
        return explain(standing.verdict)
    if standing.reason is not None:
        return _WHY[standing.reason]
    if standing.wanted != standing.stage and standing.phase is not Phase.PLANNED:
        return f"waits until the fleet can serve stage {standing.wanted}"
    return ""


def progress(standing: Standing) -> Json:
    """Return the progress of a rollout as fields of a list entry."""
    return {
        "phase": standing.phase.value,
        "reason": standing.reason.value if standing.reason is not None else "",
        "stage": standing.stage,
        "stages": standing.stages,
        SHARE.shown: SHARE.show(standing.share),
        MIRRORED.shown: MIRRORED.show(standing.mirrored),
        "explanation": explanation(standing),
        "problem": "",
    }


def unknown_progress(phase: str, share: int, mirrored: int, problem: str) -> Json:
    """Return the list entry of a rollout whose state cannot be read.

    Args:
        phase: Phase at the last write, possibly an unknown phase.
        share: Share that gateways send to canary, in basis points.
        mirrored: Share that gateways copy to canary, in basis points.
        problem: Reason why the state cannot be read.
    """
    return {
        "phase": phase,
        "reason": "",
        "stage": NO_STAGE,
        "stages": 0,
        SHARE.shown: SHARE.show(share),
        MIRRORED.shown: MIRRORED.show(mirrored),
        "explanation": "",
        "problem": problem,
    }


def unknown_details() -> Json:
    """Return empty details for a rollout whose state cannot be read."""
    counts = ("watched_s", "watched_needed_s", "sample", "control_sample", "sample_needed")
    return {
        "wanted_stage": NO_STAGE,
        "is_ready": False,
        "waiting_for": "",
        "stage_left_s": None,
        **dict.fromkeys(counts, 0),
        "gates": [],
        "past_stages": [],
        "evidence_until_unix_ms": 0,
        "plan": {},
    }


def waiting_for(state: Rollout, base_digest: str | None, lacking: Sequence[str]) -> str:
    """Return the unmet conditions of the next stage in one line, or an empty text.

    Args:
        state: State of the rollout.
        base_digest: Base of canary, or None if canary's release no longer exists.
        lacking: Ids of the gateways that cannot serve the base yet.
    """
    if not state.is_held:
        return _evidence_wanted(state)
    if not lacking:
        tried = ", one of which has tried its adapter" if state.stage == NO_STAGE else ""
        stage = max(state.wanted, state.stage)
        return f"replicas that can serve stage {stage}{tried}: see their pool"
    others = len(lacking) - 1
    who = lacking[0] + (f" and {others} more" if others else "")
    verb = "have" if others else "has"
    return (
        f"{who} {verb} not loaded the files of base {(base_digest or '')[:_DIGITS]} yet: the log of"
        " the gateway says why (base_not_fetched, base_not_loaded); one that ends is not waited for"
    )


def stage_left_s(state: Rollout) -> float | None:
    """Return the seconds until a stage can end, if requests arrive at the rate of this stage.

    The result is None before and after the stage, and with too few requests for an estimate.
    """
    if not _is_watching(state):
        return None
    stage, watched_s = state.current, state.watched_ms / 1000
    left_s = max(0.0, stage.duration_min_s - watched_s)
    latest_s = max(0.0, stage.duration_max_s - (state.watched_ms - state.short_ms) / 1000)
    for counted, missing in (_sampled(state), state.golden_sample):
        if missing and not (counted and watched_s):
            return None
        if missing:
            left_s = max(left_s, min(missing * watched_s / counted, latest_s))
    return left_s


def _is_watching(state: Rollout) -> bool:
    is_going = state.phase in {Phase.SHADOW, Phase.RUNNING} and state.stage != NO_STAGE
    return is_going and not state.is_short_of_fleet


def _sampled(state: Rollout) -> tuple[int, int]:
    """Return the counted requests of the stage, and the number of missing requests."""
    is_compared = state.current.is_compared
    counted = min(state.sample, state.control_sample) if is_compared else state.sample
    return counted, max(0, state.current.sample_min - counted)


def _evidence_wanted(state: Rollout) -> str:
    """Return the missing evidence of the present stage in one line, or an empty text."""
    if not _is_watching(state):
        return ""
    left_s = state.current.duration_min_s - state.watched_ms / 1000
    _, missing = _sampled(state)
    wanted = [f"{left_s:.0f} s"] if left_s > 0 else []
    if missing:
        of = "each release" if state.current.is_compared else "canary"
        wanted.append(f"{missing:,} requests of {of}")
    answered, unasked = state.golden_sample
    if unasked:
        hint = "" if answered else " (none yet: sluice golden results says why)"
        wanted.append(f"{unasked:,} answers of each release to golden prompts{hint}")
    return " and ".join(wanted)


def details(state: Rollout, base_digest: str | None = None, lacking: Sequence[str] = ()) -> Json:
    """Return the details of the present stage, with the unmet conditions of its end."""
    stage = None if state.stage == NO_STAGE else state.current
    return {
        "wanted_stage": state.wanted,
        "is_ready": state.is_ready,
        "waiting_for": waiting_for(state, base_digest, lacking),
        "stage_left_s": stage_left_s(state),
        "watched_s": state.watched_ms / 1000,
        "watched_needed_s": 0.0 if stage is None else stage.duration_min_s,
        "sample": state.sample,
        "control_sample": state.control_sample,
        "sample_needed": 0 if stage is None else stage.sample_min,
        "gates": _gates(state.plan, state.evidence),
        "past_stages": [_past_stage(state.plan, past) for past in state.past],
        "evidence_until_unix_ms": state.window_end_ms,
        "plan": plans.shown(state.plan.model_dump(mode="json")),
    }


def _past_stage(plan: Plan, past: StageEvidence) -> Json:
    """Return the evidence of an ended stage."""
    return {
        "stage": past.stage,
        SHARE.shown: SHARE.show(past.share),
        MIRRORED.shown: MIRRORED.show(past.mirrored),
        "watched_s": past.watched_ms / 1000,
        "sample": past.sample,
        "control_sample": past.control_sample,
        "gates": _gates(plan, past),
    }


def _gates(plan: Plan, seen: StageEvidence) -> list[Json]:
    """Return the evidence of each gate in a stage, with its distance from a verdict."""
    tolerated = {gate.metric: gate.tolerated for gate in plan.gates}
    return [
        _gate(one, tolerated[one.metric], plan.alpha_of_test)
        for one in seen.gates
        if one.metric in tolerated
    ]


def _gate(one: GateEvidence, tolerated: float, alpha: float) -> Json:
    sides = [one.canary, one.control]
    if one.metric is Metric.FEWER_REFUSALS:  # here `canary` has control's counts
        sides.reverse()
    canary, control = ({"bad": side.bad, "total": side.total} for side in sides)
    rate = one.detectable_rate
    return {
        "metric": one.metric.value,
        TOLERATED.shown: TOLERATED.show(tolerated),
        "canary": canary,
        "control": control,
        "e_value_log10": round(one.log_e / log(10), 3),
        "e_value_needed_log10": round(-log10(alpha), 3),
        "detectable_percent": None if rate is None else round(100 * rate, 2),
    }
