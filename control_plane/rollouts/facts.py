"""Turns the observations of the loop into events for the state machine of a rollout. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.rollouts.evidence import Window
from control_plane.rollouts.state import (
    ENDED,
    NO_STAGE,
    Event,
    Evidence,
    Expectations,
    Gone,
    NotReady,
    Phase,
    Ready,
    Reason,
    Restarted,
    Rollout,
    SentBack,
    Tick,
)

# Seconds without a confirmation after which a gateway counts as stopped.
GATEWAY_LIVE_S = 15.0
# Maximum age of open requests for which evidence waits, in milliseconds. Older open requests are
# not waited for.
OPEN_MAX_MS = 60_000
# A confirmation describes a moment before it was sent, measured by another clock. The margin, in
# milliseconds, covers both differences.
_CLOCK_MARGIN_MS = 1_000
# Longest time range of evidence that one step reads, in milliseconds, for example after an outage
# of the control plane.
_CATCH_UP_MS = 300_000
# Milliseconds between two writes of a rollout if only the time of its last step has changed.
_STORE_INTERVAL_MS = 5_000


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """The last confirmation of a gateway's worker process.

    Attributes:
        version: Version of the state whose splits the worker follows.
        oldest_open_ms: Arrival time of the oldest open request that was assigned by a split, in
            Unix milliseconds. Zero means that no such request is open.
        seen_ms: Time of the confirmation, in Unix milliseconds.
        missing_bases: Digests of bases in rollouts that the worker cannot serve yet.
    """

    version: int
    oldest_open_ms: int
    seen_ms: int
    missing_bases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A new confirmation of a gateway's worker process, with the fields of `GatewayFacts`."""

    gateway_id: str
    version: int
    oldest_open_ms: int
    missing_bases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Facts:
    """The observations of the loop about a rollout at one step.

    Attributes:
        is_taken_over: Whether another process performed the last step of the rollout.
        not_ready: Numbers of the stages that the fleet cannot serve yet.
        ready: Numbers of the stages that the fleet can serve.
        windows: Evidence since the last window that was applied.
        is_confirmed: Whether all gateways follow the split as it was before this step.
        gone: Reason why the rollout cannot continue, or None if it can.
        has_prompts: Whether the model has golden prompts with an expected answer. None means
            unknown.
    """

    is_taken_over: bool = False
    not_ready: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    windows: tuple[Window, ...] = ()
    is_confirmed: bool = False
    gone: Reason | None = None
    has_prompts: bool | None = None


def live(gateways: Sequence[GatewayFacts], now_ms: int) -> list[GatewayFacts]:
    """Return the gateways whose last confirmation is recent."""
    return [one for one in gateways if now_ms - one.seen_ms <= GATEWAY_LIVE_S * 1000]


def is_confirmed(
    gateways: Sequence[GatewayFacts], version: int, changed_ms: int, now_ms: int
) -> bool:
    """Return whether every live gateway assigns requests by the present split.

    Args:
        gateways: All gateways with a confirmation.
        version: Version of the state that has the present split.
        changed_ms: Unix milliseconds of the last change of the split.
        now_ms: Present time in Unix milliseconds, by the same clock as `changed_ms`.
    """
    here = live(gateways, now_ms)
    if here:
        return all(one.version >= version for one in here)
    return now_ms - changed_ms > GATEWAY_LIVE_S * 1000


def held_stages(
    rollout: Rollout, gateways: Sequence[GatewayFacts], base_digest: str, now_ms: int
) -> frozenset[int]:
    """Return the stages that have to wait until all gateways have loaded canary's base.

    A gateway without the base sends canary's requests to control. The detour does no harm while the
    share is unchanged, so the present stage continues. The next stage waits. The last stage cannot
    end either, because control would no longer exist after the rollout.
    """
    if all(base_digest not in one.missing_bases for one in live(gateways, now_ms)):
        return frozenset()
    last = len(rollout.plan.stages) - 1
    return (frozenset({rollout.wanted}) - {rollout.stage}) | {last}


def is_on_trial(rollout: Rollout, adapter_digest: str, codes: frozenset[str]) -> bool:
    """Return whether the first stage must wait until a node has loaded canary's adapter.

    Args:
        rollout: Present state of the rollout.
        adapter_digest: Adapter of canary. It is empty if canary is the base alone, which ready
            replicas have loaded.
        codes: Result codes of the nodes, as `control_plane.rollouts.trials` returns them.
    """
    return rollout.stage == NO_STAGE and bool(adapter_digest) and not codes


def fault(rollout: Rollout, codes: frozenset[str]) -> Reason | None:
    """Return the reason to end a rollout before its first stage.

    A rollout ends there if any node could not load the adapter. After the first stage has begun,
    the gates decide, so that a single broken node ends no rollout.
    """
    is_faulty = rollout.stage == NO_STAGE and any(codes)
    return Reason.NOT_LOADED if is_faulty else None


def evidence_until(gateways: Sequence[GatewayFacts], now_ms: int) -> int:
    """Return the Unix time (ms) before which all requests have ended or reached the age limit."""
    ends = [one.oldest_open_ms or one.seen_ms for one in live(gateways, now_ms)]
    oldest = now_ms - OPEN_MAX_MS
    return max(oldest, min(ends) - _CLOCK_MARGIN_MS) if ends else oldest


def evidence_span(rollout: Rollout, created_ms: int, until_ms: int) -> tuple[int, int] | None:
    """Return the time range (Unix ms) of possible new evidence, or None if none is needed."""
    after_ms = max(rollout.window_end_ms, created_ms)
    if rollout.phase in ENDED or rollout.phase is Phase.HALTED or until_ms <= after_ms:
        return None
    return after_ms, min(until_ms, after_ms + _CATCH_UP_MS)


def stages_in_question(rollout: Rollout) -> frozenset[int]:
    """Return the stages whose readiness the fleet must report."""
    if rollout.phase in ENDED or rollout.phase in {Phase.PLANNED, Phase.HALTED}:
        return frozenset()
    return frozenset({rollout.stage, rollout.wanted}) - {NO_STAGE}


def events(rollout: Rollout, facts: Facts) -> tuple[Event, ...]:
    """Return the events for the state machine, in the order of their application.

    `Evidence` precedes events that raise the share, because it belongs to the present stage.
    `Expectations` precede `Evidence`, because evidence may end a stage.
    """
    if facts.gone is not None and rollout.phase is not Phase.HALTED:
        return (Gone(facts.gone),)
    told: list[Event] = []
    if facts.is_taken_over:
        told.append(Restarted())
    if rollout.stage in facts.not_ready and rollout.is_ready:
        told.append(NotReady(rollout.stage))
    if facts.has_prompts not in {None, rollout.has_prompts}:
        told.append(Expectations(bool(facts.has_prompts)))
    if facts.windows:
        told.append(Evidence(facts.windows))
    told += [Ready(stage) for stage in sorted(facts.ready) if _is_new(rollout, stage)]
    # The confirmation refers to the split before this step. So it counts only if an earlier step
    # halted the rollout.
    if rollout.phase is Phase.HALTED and facts.is_confirmed:
        told.append(SentBack())
    return tuple(told) or (Tick(),)


def _is_new(rollout: Rollout, stage: int) -> bool:
    return stage != rollout.stage or not rollout.is_ready


def must_store(before: Rollout, after: Rollout) -> bool:
    """Return whether to store the rollout after a step that changed neither phase nor stage."""
    is_old = after.stepped_ms - before.stepped_ms >= _STORE_INTERVAL_MS
    return is_old or after.window_end_ms != before.window_end_ms


def wanted_split(rollout: Rollout, *, is_live: bool) -> tuple[int, int] | None:
    """Return the share and the mirrored share of the split, or None for no split.

    An aborted rollout keeps its split with a canary share of 0 until the gateways have confirmed
    it. A planned rollout also has a split, so that control is measured before the start.
    """
    if not is_live or rollout.phase in {Phase.ROLLED_BACK, Phase.DONE}:
        return None
    return rollout.share, rollout.mirrored


def may_settle(rollout: Rollout, *, is_confirmed: bool) -> bool:
    """Return whether the fleet can end its preparations for the rollout.

    A rollout is rolled back only after such a confirmation, so this phase needs no further one.
    """
    return rollout.phase is Phase.ROLLED_BACK or (rollout.phase in ENDED and is_confirmed)
