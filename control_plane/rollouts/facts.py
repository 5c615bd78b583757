"""Turns the loop's observations into events for the state machine; pure."""

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

# A gateway that has not confirmed anything for this long is not there any more.
GATEWAY_LIVE_S = 15.0
# Evidence does not wait for the end of requests older than this: they count as they are.
OPEN_MAX_MS = 60_000
# A confirmation tells of the moment before it was sent, by another clock.
_CLOCK_MARGIN_MS = 1_000
# How much is read at once when there is a lot to catch up with.
_CATCH_UP_MS = 300_000
# A rollout that changed only in the time of its last step is written down this often.
_STORE_INTERVAL_MS = 5_000


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """The last confirmation of a gateway's worker process; times are Unix milliseconds.

    Attributes:
        version: Version of the state whose splits it follows.
        oldest_open_ms: Arrival of the oldest open request that a split has assigned, in Unix
            milliseconds; 0: none.
        seen_ms: Unix milliseconds of its report.
        missing_bases: Digests of bases being rolled out that it cannot serve yet.
    """

    version: int
    oldest_open_ms: int
    seen_ms: int
    missing_bases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A confirmation of a gateway's worker process; see `GatewayFacts`."""

    gateway_id: str
    version: int
    oldest_open_ms: int
    missing_bases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Facts:
    """Observations of the loop about a rollout at one step.

    Attributes:
        is_taken_over: Whether another process stepped it before.
        not_ready: Stages that the fleet cannot serve.
        ready: Stages that it can serve.
        windows: Evidence since the last taken window.
        is_confirmed: Whether all gateways follow the split as it was before this step.
        gone: Reason why the rollout cannot go on, if there is one.
        has_prompts: Whether the model has golden prompts with an expected answer; None: unknown.
    """

    is_taken_over: bool = False
    not_ready: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    windows: tuple[Window, ...] = ()
    is_confirmed: bool = False
    gone: Reason | None = None
    has_prompts: bool | None = None


def live(gateways: Sequence[GatewayFacts], now_ms: int) -> list[GatewayFacts]:
    """Return the gateways that are still alive."""
    return [one for one in gateways if now_ms - one.seen_ms <= GATEWAY_LIVE_S * 1000]


def is_confirmed(
    gateways: Sequence[GatewayFacts], version: int, changed_ms: int, now_ms: int
) -> bool:
    """Return whether no request follows an older split any more.

    Args:
        gateways: All gateways with a confirmation.
        version: Version of the state with the present split.
        changed_ms: Unix milliseconds of the last change of the split.
        now_ms: Unix milliseconds by the same clock.
    """
    here = live(gateways, now_ms)
    if here:
        return all(one.version >= version for one in here)
    return now_ms - changed_ms > GATEWAY_LIVE_S * 1000


def held_stages(
    rollout: Rollout, gateways: Sequence[GatewayFacts], base_digest: str, now_ms: int
) -> frozenset[int]:
    """Return the stages that must not begin, or end the rollout, before all gateways have the base.

    A gateway without the base sends canary's requests to control. That does no harm while the share
    stays, so the present stage is not held: only the next one is, and the end, after which control
    would be gone.
    """
    if all(base_digest not in one.missing_bases for one in live(gateways, now_ms)):
        return frozenset()
    last = len(rollout.plan.stages) - 1
    return (frozenset({rollout.wanted}) - {rollout.stage}) | {last}


def is_on_trial(rollout: Rollout, adapter_digest: str, codes: frozenset[str]) -> bool:
    """Return whether no stage may open, because no node has loaded canary's adapter yet.

    Args:
        rollout: Present state of the rollout.
        adapter_digest: Adapter of canary; empty: the base alone, which ready replicas have loaded.
        codes: Codes of nodes' results, see `control_plane.rollouts.trials`.
    """
    return rollout.stage == NO_STAGE and bool(adapter_digest) and not codes


def fault(rollout: Rollout, codes: frozenset[str]) -> Reason | None:
    """Return why a rollout ends before its begin: a node could not load canary's adapter.

    Later its gates decide, and a broken node ends nothing.
    """
    is_faulty = rollout.stage == NO_STAGE and any(codes)
    return Reason.NOT_LOADED if is_faulty else None


def evidence_until(gateways: Sequence[GatewayFacts], now_ms: int) -> int:
    """Return the time (Unix ms) before which all received requests have ended, or are too old."""
    ends = [one.oldest_open_ms or one.seen_ms for one in live(gateways, now_ms)]
    oldest = now_ms - OPEN_MAX_MS
    return max(oldest, min(ends) - _CLOCK_MARGIN_MS) if ends else oldest


def evidence_span(rollout: Rollout, created_ms: int, until_ms: int) -> tuple[int, int] | None:
    """Return the span (Unix ms) in which there may be new evidence; None: none is needed."""
    after_ms = max(rollout.window_end_ms, created_ms)
    if rollout.phase in ENDED or rollout.phase is Phase.HALTED or until_ms <= after_ms:
        return None
    return after_ms, min(until_ms, after_ms + _CATCH_UP_MS)


def stages_in_question(rollout: Rollout) -> frozenset[int]:
    """Return the stages whose readiness the fleet has to report."""
    if rollout.phase in ENDED or rollout.phase in {Phase.PLANNED, Phase.HALTED}:
        return frozenset()
    return frozenset({rollout.stage, rollout.wanted}) - {NO_STAGE}


def events(rollout: Rollout, facts: Facts) -> tuple[Event, ...]:
    """Return the events for the machine, in this order.

    Evidence comes before events that let the share grow: it is about the present stage.
    Expectations come before evidence, which may end a stage.
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
    # Gateways have confirmed the split before this step, not its changes.
    if rollout.phase is Phase.HALTED and facts.is_confirmed:
        told.append(SentBack())
    return tuple(told) or (Tick(),)


def _is_new(rollout: Rollout, stage: int) -> bool:
    return stage != rollout.stage or not rollout.is_ready


def must_store(before: Rollout, after: Rollout) -> bool:
    """Return whether a step without news has to be stored."""
    is_old = after.stepped_ms - before.stepped_ms >= _STORE_INTERVAL_MS
    return is_old or after.window_end_ms != before.window_end_ms


def wanted_split(rollout: Rollout, *, is_live: bool) -> tuple[int, int] | None:
    """Return share and mirrored share of the wanted split; None: no split.

    An aborted rollout keeps its split, with an empty canary, until the gateways have confirmed
    that. A planned one has it too, to measure control before the start.
    """
    if not is_live or rollout.phase in {Phase.ROLLED_BACK, Phase.DONE}:
        return None
    return rollout.share, rollout.mirrored


def may_settle(rollout: Rollout, *, is_confirmed: bool) -> bool:
    """Return whether the rollout's preparations can be ended.

    For a rolled back one, its phase is itself the confirmation.
    """
    return rollout.phase is Phase.ROLLED_BACK or (rollout.phase in ENDED and is_confirmed)
