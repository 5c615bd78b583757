"""The state machine of a rollout, a pure function (state, event, now) -> (state, actions).

The share grows only when the previous stage has ended and the fleet is ready for the next stage.
Every stage of the plan is run. A gate breach sends all requests back to control in the same step,
in every phase in which canary has traffic. A new process can continue at any time, because the
state is complete. Repeated evidence is ignored, and unwatched time does not count.
"""

from dataclasses import dataclass, replace
from math import log

from control_plane.rollouts.evidence import (
    Metric,
    Window,
    comparisons,
    known,
    reference_min,
    remember,
    scale,
)
from control_plane.rollouts.plan import Gate
from control_plane.rollouts.sequential import Count, SequentialTest, observe, rescaled
from control_plane.rollouts.state import (
    ENDED,
    NO_STAGE,
    Abort,
    Action,
    Event,
    Evidence,
    Expectations,
    FinishRollout,
    Gone,
    NotReady,
    Pause,
    Phase,
    Prepare,
    Promote,
    Ready,
    Reason,
    Restarted,
    Resume,
    RollBack,
    Rollout,
    SentBack,
    SetShare,
    Start,
    Tick,
    Verdict,
)
from sluice.errors import ErrorCode, PlatformError

# Milliseconds between two steps above which evidence was missed. Steps normally follow each other
# every few seconds.
STEP_GAP_MAX_MS = 30_000
_NOTHING = Count(0, 0)
# Prior for golden prompts, which assumes 50 expected answers of control. Without a prior, control
# would need 50 runs before canary's answers could be tested.
_EXPECTED = Count(0, 50)
_GOING = frozenset({Phase.SHADOW, Phase.RUNNING})
_WAITS_FOR_FLEET = (Phase.PAUSED, Reason.NOT_READY)
_WAITS_FOR_EVIDENCE = (Phase.PAUSED, Reason.NO_EVIDENCE)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step.

    Attributes:
        rollout: Rollout after the step, to be stored.
        actions: Complete list of actions in effect from now on, as `due` returns them. The list is
            empty if nothing changes. The actions are stored in the same transaction as the rollout.
    """

    rollout: Rollout
    actions: tuple[Action, ...]


def step(rollout: Rollout, event: Event, now_ms: int) -> Step:
    """Return the rollout after an event.

    Args:
        rollout: Stored rollout.
        event: Event, which is `Tick` if only time has passed.
        now_ms: Unix time in milliseconds. If the clock was set back, the time of the last step is
            used instead.

    Raises:
        PlatformError: `CONFLICT` if the operator's command is not possible in the rollout's phase.
    """
    now_ms = max(now_ms, rollout.stepped_ms)
    before = rollout
    if rollout.phase in ENDED:
        _refuse(rollout, event)
        return Step(rollout, due(rollout) if isinstance(event, Restarted) else ())
    if isinstance(event, Restarted) or now_ms - rollout.stepped_ms > STEP_GAP_MAX_MS:
        rollout = _watching_anew(rollout, now_ms)
    rollout = _after_event(replace(rollout, stepped_ms=now_ms), event, now_ms)
    rollout = _after_time(rollout, now_ms)
    is_news = _standing(rollout) != _standing(before) or isinstance(event, Restarted)
    return Step(rollout, due(rollout) if is_news else ())


def due(rollout: Rollout) -> tuple[Action, ...]:
    """Return the actions that the state requires. A repeated action has no effect."""
    shares = SetShare(rollout.share, rollout.mirrored)
    if rollout.phase is Phase.HALTED:
        assert rollout.reason is not None
        return shares, RollBack(rollout.reason)
    if rollout.phase is Phase.DONE:
        return shares, FinishRollout()
    if rollout.is_short_of_fleet and (
        rollout.phase in _GOING or (rollout.phase, rollout.reason) == _WAITS_FOR_FLEET
    ):
        return shares, Prepare(rollout.wanted, rollout.plan.stages[rollout.wanted].share)
    return (shares,)


def _standing(rollout: Rollout) -> tuple[Phase, Reason | None, int, int, bool]:
    """Return the fields that determine `due`. The shares follow from phase and stage."""
    return rollout.phase, rollout.reason, rollout.stage, rollout.wanted, rollout.is_ready


def _watching_anew(rollout: Rollout, now_ms: int) -> Rollout:
    """Return the rollout as watched from now on, because earlier evidence may be missing."""
    return replace(rollout, watching_ms=now_ms, heard_ms=now_ms, asked_ms=now_ms)


def _after_event(rollout: Rollout, event: Event, now_ms: int) -> Rollout:
    match event:
        case Evidence():
            for window in event.windows:
                rollout = _after_window(rollout, window, now_ms)
        case Ready():
            rollout = _after_ready(rollout, event.stage, now_ms)
        case NotReady():
            if event.stage == rollout.stage and rollout.is_ready:
                rollout = replace(rollout, is_ready=False, asked_ms=now_ms)
        case Expectations():
            rollout = replace(rollout, has_prompts=event.exist)
        case SentBack() | Gone():
            rollout = _after_end(rollout, event)
        case Tick() | Restarted():
            pass
        case Start() | Pause() | Resume() | Abort() | Promote():
            rollout = _commanded(rollout, event, now_ms)
    return rollout


def _after_end(rollout: Rollout, event: SentBack | Gone) -> Rollout:
    """Return the rollout after an event that ends it.

    An already rolled back rollout is unchanged.
    """
    if rollout.phase is Phase.HALTED:
        is_confirmed = isinstance(event, SentBack)
        return replace(rollout, phase=Phase.ROLLED_BACK) if is_confirmed else rollout
    if isinstance(event, Gone):
        return replace(_aborted(rollout), reason=event.reason)
    return rollout


# Operators' commands, with the phases in which each command is permitted.
_COMMANDS: dict[type, frozenset[Phase]] = {
    Start: frozenset({Phase.PLANNED}),
    # An operator may also pause a rollout that the platform has paused. Otherwise the rollout could
    # resume without an operator.
    Pause: frozenset({Phase.PAUSED}) | _GOING,
    Resume: frozenset({Phase.PAUSED}),
    Abort: frozenset({Phase.PLANNED, Phase.PAUSED}) | _GOING,
    Promote: frozenset({Phase.PAUSED}) | _GOING,
}


def _refuse(rollout: Rollout, event: Event) -> None:
    """Raise `CONFLICT` if an operator's command is not possible in the present phase."""
    phases = _COMMANDS.get(type(event))
    if phases is not None and rollout.phase not in phases:
        message = f"a rollout that is {rollout.phase.value} cannot do this: {event.kind}"
        raise PlatformError(ErrorCode.CONFLICT, message)


def _commanded(
    rollout: Rollout, event: Start | Pause | Resume | Abort | Promote, now_ms: int
) -> Rollout:
    _refuse(rollout, event)
    match event:
        case Start():
            return _wanting(_watching_anew(rollout, now_ms), 0, now_ms)
        case Pause():
            if rollout.phase is Phase.PAUSED:
                return replace(rollout, reason=Reason.BY_HAND)
            return _paused(rollout, Reason.BY_HAND, now_ms)
        case Resume():
            return replace(_resumed(rollout, now_ms), short_ms=rollout.watched_ms)
        case Abort():
            return _aborted(rollout)
        case Promote():
            if rollout.is_waiting or event.stage != rollout.stage:
                message = f"stage {event.stage} is not the present stage; read the rollout again"
                raise PlatformError(ErrorCode.CONFLICT, message)
            if rollout.is_last and not rollout.is_ready:
                message = (
                    f"stage {event.stage} cannot be ended: some gateways or replicas cannot serve"
                    " it yet; wait"
                )
                raise PlatformError(ErrorCode.CONFLICT, message)
            if rollout.phase is Phase.PAUSED:
                rollout = _resumed(rollout, now_ms)
            return _stage_ended(rollout, now_ms)


def _aborted(rollout: Rollout) -> Rollout:
    return replace(rollout, phase=Phase.ABORTED, share=0, mirrored=0)


def _paused(rollout: Rollout, reason: Reason, now_ms: int) -> Rollout:
    return replace(rollout, phase=Phase.PAUSED, reason=reason, paused_ms=now_ms)


def _resumed(rollout: Rollout, now_ms: int) -> Rollout:
    going = replace(rollout, phase=_phase_of(rollout), reason=None)
    return _watching_anew(going, now_ms)


def _phase_of(rollout: Rollout) -> Phase:
    stage = rollout.plan.stages[max(rollout.stage, 0)]
    return Phase.SHADOW if stage.is_shadow else Phase.RUNNING


def _sent_back(rollout: Rollout, reason: Reason, verdict: Verdict | None = None) -> Rollout:
    return replace(rollout, phase=Phase.HALTED, share=0, mirrored=0, reason=reason, verdict=verdict)


def _wanting(rollout: Rollout, stage: int, now_ms: int) -> Rollout:
    """Return the rollout as it waits until the fleet is ready for a stage.

    The present stage continues and is still watched.
    """
    rollout = replace(rollout, wanted=stage, asked_ms=now_ms)
    return replace(rollout, phase=_phase_of(rollout))


def _stage_ended(rollout: Rollout, now_ms: int) -> Rollout:
    if rollout.is_last:
        return replace(rollout, phase=Phase.DONE)
    return _wanting(rollout, rollout.stage + 1, now_ms)


def _after_ready(rollout: Rollout, stage: int, now_ms: int) -> Rollout:
    if stage not in (rollout.stage, rollout.wanted):
        return rollout
    if (rollout.phase, rollout.reason) == _WAITS_FOR_FLEET and stage == rollout.wanted:
        rollout = _resumed(rollout, now_ms)
    if rollout.phase in _GOING and rollout.is_waiting and stage == rollout.wanted:
        return _opened(rollout, now_ms)
    if stage == rollout.stage and not rollout.is_ready:
        return replace(rollout, is_ready=True, watching_ms=now_ms)
    return rollout


def _opened(rollout: Rollout, now_ms: int) -> Rollout:
    """Return the rollout in the stage that it waited for. Only this function raises a share."""
    stage = rollout.plan.stages[rollout.wanted]
    thresholds = scale(rollout.baseline)
    past = known(rollout.baseline, thresholds)
    past[Metric.GOLDEN] = past.get(Metric.GOLDEN, _NOTHING) + _EXPECTED
    tests = {
        gate.metric: rescaled(
            SequentialTest(gate.tolerated, reference_min(gate.metric)),
            past.get(gate.metric, _NOTHING),
        )
        for gate in rollout.plan.gates
    }
    opened = replace(
        rollout,
        stage=rollout.wanted,
        share=0 if stage.is_shadow else stage.share,
        mirrored=stage.share if stage.is_shadow else 0,
        is_ready=True,
        open_ms=now_ms,
        watched_ms=0,
        short_ms=0,
        sample=0,
        control_sample=0,
        tests=tests,
        thresholds=thresholds,
        past=rollout.past if rollout.stage == NO_STAGE else (*rollout.past, rollout.evidence),
    )
    return _watching_anew(replace(opened, phase=_phase_of(opened)), now_ms)


def _after_window(rollout: Rollout, window: Window, now_ms: int) -> Rollout:
    if rollout.phase in ENDED or window.start_ms < rollout.window_end_ms:
        return rollout
    rollout = replace(rollout, window_end_ms=window.end_ms, heard_ms=now_ms)
    is_news = window.start_ms >= rollout.paused_ms
    if is_news and (rollout.phase, rollout.reason) == _WAITS_FOR_EVIDENCE:
        rollout = _resumed(rollout, now_ms)
    if rollout.is_open and window.start_ms >= rollout.open_ms:
        rollout = _judged(rollout, window, now_ms)
    rollout = replace(rollout, baseline=remember(rollout.baseline, window.control))
    return _rescaled(rollout) if rollout.is_open else rollout


def _rescaled(rollout: Rollout) -> Rollout:
    """Return the rollout with thresholds from control's most recent past.

    Control may be slow when a stage opens, for example because engines on the same nodes load
    weights. With thresholds fixed at that time, a slow release would stay undetected for the whole
    stage.
    """
    thresholds = scale(rollout.baseline)
    if thresholds == rollout.thresholds:
        return rollout
    before, now = (known(rollout.baseline, it) for it in (rollout.thresholds, thresholds))
    tests = {
        metric: rescaled(test, now[metric])
        if metric in now and now[metric] != before.get(metric)
        else test
        for metric, test in rollout.tests.items()
    }
    return replace(rollout, thresholds=thresholds, tests=tests)


def _judged(rollout: Rollout, window: Window, now_ms: int) -> Rollout:
    """Return the rollout after the tests of its stage have processed a window."""
    seen = comparisons(window, rollout.thresholds)
    tests = {
        metric: observe(test, seen[metric].suspect, seen[metric].reference)
        if metric in seen
        else test
        for metric, test in rollout.tests.items()
    }
    is_watched = (
        rollout.phase in _GOING and rollout.is_ready and window.start_ms >= rollout.watching_ms
    )
    # While control's rate is unknown, the tests bet nothing, so their evidence does not change. A
    # window of this period must not count for the sample that permits a larger share.
    is_judged = not rollout.current.is_compared or any(
        test.bets > rollout.tests[metric].bets for metric, test in tests.items()
    )
    rollout = replace(
        rollout,
        tests=tests,
        sample=rollout.sample + is_judged * window.canary.faults.total,
        control_sample=rollout.control_sample + is_judged * window.control.faults.total,
        watched_ms=rollout.watched_ms + is_watched * (window.end_ms - window.start_ms),
    )
    alpha = rollout.plan.alpha_of_test
    breached = [gate for gate in rollout.plan.gates if tests[gate.metric].is_worse(alpha)]
    if not breached:
        return rollout
    worst = max(breached, key=lambda gate: tests[gate.metric].log_e)
    return _sent_back(rollout, Reason.WORSE, _verdict(rollout, worst, now_ms))


def _verdict(rollout: Rollout, gate: Gate, now_ms: int) -> Verdict:
    test = rollout.tests[gate.metric]
    return Verdict(
        metric=gate.metric,
        stage=rollout.stage,
        suspect=test.canary,
        reference=test.control,
        tolerated=gate.tolerated,
        log_e=test.log_e,
        log_needed=-log(rollout.plan.alpha_of_test),
        window_end_ms=rollout.window_end_ms,
        at_ms=now_ms,
    )


def _after_time(rollout: Rollout, now_ms: int) -> Rollout:
    """Return the rollout after a check of its time limits. The first exceeded limit decides."""
    plan = rollout.plan
    if rollout.phase is Phase.PAUSED and now_ms - rollout.paused_ms > plan.pause_max_s * 1000:
        return _sent_back(rollout, Reason.PAUSED_TOO_LONG)
    if rollout.phase not in _GOING:
        return rollout
    if rollout.is_short_of_fleet and now_ms - rollout.asked_ms > plan.ready_max_s * 1000:
        return _paused(rollout, Reason.NOT_READY, now_ms)
    if rollout.stage != NO_STAGE and now_ms - rollout.heard_ms > plan.quiet_max_s * 1000:
        return _paused(rollout, Reason.NO_EVIDENCE, now_ms)
    is_going = rollout.stage != NO_STAGE and not rollout.is_waiting
    return _after_stage(rollout, now_ms) if is_going else rollout


def _after_stage(rollout: Rollout, now_ms: int) -> Rollout:
    stage = rollout.current
    is_over = rollout.watched_ms >= stage.duration_min_s * 1000
    if not is_over or (rollout.is_last and not rollout.is_ready):
        return rollout
    is_late = rollout.watched_ms - rollout.short_ms >= stage.duration_max_s * 1000
    is_light = is_late and stage.sample_light is not None
    if _is_sampled(rollout, (stage.sample_light or 0) if is_light else stage.sample_min):
        return _stage_ended(rollout, now_ms)
    return _after_short_stage(rollout, now_ms) if is_late else rollout


def _after_short_stage(rollout: Rollout, now_ms: int) -> Rollout:
    """Return the rollout after a stage that reached its longest duration with too little evidence.

    If golden answers are missing, the release was never compared, so the stage does not pass under
    any plan. More traffic would not change that, so an operator has to decide.
    """
    _, unasked = rollout.golden_sample
    reason = Reason.UNASKED if unasked else Reason.TOO_LITTLE_TRAFFIC
    match rollout.plan.when_short:
        case "roll_back":
            return _sent_back(rollout, reason)
        case "go_on" if not unasked:
            return _stage_ended(rollout, now_ms)
        case _:
            return _paused(rollout, reason, now_ms)


def _is_sampled(rollout: Rollout, sample_min: int) -> bool:
    """Return whether the sample is large enough, for both releases if they are compared."""
    _, unasked = rollout.golden_sample
    if unasked:
        return False
    if not rollout.current.is_compared:
        return rollout.sample >= sample_min
    tests = [(gate, rollout.tests[gate.metric]) for gate in rollout.plan.gates]
    return min(rollout.sample, rollout.control_sample) >= sample_min and all(
        min(test.canary.total, test.control.total) >= gate.sample_min for gate, test in tests
    )
