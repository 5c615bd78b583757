"""Decides when the engine of a replica is started, probed, stopped and restarted.

The state machine is pure, since `decide` maps (state, event, now) to (state, actions) without I/O.
`replica.agent.runner` performs the actions and reports their results as events.

The agent relies on one invariant. `StartEngine` is decided only after `EngineGone` reports the end
of the previous engine and its descendants. So a replica never has two engines, whatever the order
of events. Each engine has a run number, and late events of earlier runs are ignored. If an earlier
agent left an engine running, that is the first event.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from replica.agent.resting import AWAKE, Rested, RestEngine, RestState
from sluice.detector.evidence import AnswerVerdict, EvidenceKind
from sluice.detector.record import CLEAN, Record, Suspicion

# Number of used processors above which an engine counts as busy. Heartbeats alone use 0.01 to 0.02.
_BUSY_RATIO = 0.1
# Share of its time that a starting engine must work at least, so that it never counts as frozen.
_START_WORK_RATIO = 0.1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine that a replica runs. A change of the spec requires a new engine process.

    Attributes:
        engine: Name of the driver.
        base_digest: Digest of the base artifact.
        options: Options of the driver, sorted by name.
        accelerators: Indexes of the accelerators that the engine may use, or empty for all.
    """

    engine: str
    base_digest: str
    options: tuple[tuple[str, str], ...] = ()
    accelerators: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EnginePatience:
    """Time limits for engines, in seconds.

    Attributes:
        start_s: Longest time from the start of the process to the first good canary. A slower
            engine is killed.
        start_poll_s: Pause between canaries while the engine starts.
        start_probe_s: Deadline of one canary while the engine starts. It is longer than
            `probe_s`, because loading may delay answers.
        start_stall_s: Time without an answer and without work after which a starting engine counts
            as frozen. For example, a Triton whose stub is stopped uses no processor time.
        probe_interval_s: Time from a good probe of a ready engine to the next probe.
        probe_s: Deadline of one probe of a ready engine.
        probe_retry_s: Pause between a missed probe and the next probe.
        misses_max: Number of consecutive missed probes after which an idle engine counts as dead.
        busy_misses_max: Number of consecutive missed probes after which an engine that used or
            wanted a processor counts as dead. The limit is high, because a kill would worsen an
            overload. The limit also applies if the agent itself was stalled during the probes.
        stall_s: Pause of the agent itself after which a missed probe is attributed to the agent.
        backoff_first_s: Pause before the first restart. It doubles up to `backoff_max_s`.
        healthy_s: Time of readiness after which the count of failures starts again.
        drain_settle_s: Shortest time of a drain. Meanwhile, routers that are not informed of the
            drain yet may still send requests.
        drain_s: Longest time of a drain, after which the engine is stopped with its requests.
    """

    start_s: float = 120.0
    start_poll_s: float = 0.1
    start_probe_s: float = 5.0
    start_stall_s: float = 10.0
    # At most 1.3 s from the first missed step to the decision, or 1.7 s if the agent also stalled.
    probe_interval_s: float = 0.4
    probe_s: float = 0.4
    probe_retry_s: float = 0.05
    misses_max: int = 2
    busy_misses_max: int = 25
    stall_s: float = 0.2
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0
    healthy_s: float = 30.0
    drain_settle_s: float = 2.0
    drain_s: float = 600.0


class ReplicaPhase(StrEnum):
    """The phase of a replica's engine. Only IDLE and WAITING guarantee that no process exists."""

    IDLE = "idle"
    ADOPTING = "adopting"  # an earlier agent's ready engine, whose health is being checked
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    WAITING = "waiting"  # the engine has failed, and its back-off has not ended


@dataclass(frozen=True, slots=True)
class Wanted:
    """Event: the desired state has changed. Without a spec, the replica is to be removed."""

    spec: EngineSpec | None
    is_draining: bool = False
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class Adopted:
    """Event: an earlier agent left this engine running. Only the very first event can be this one.

    The engine was started `age_s` ago. Its spec is desired until a desired state arrives.
    """

    run: int
    pid: int
    spec: EngineSpec
    was_ready: bool
    age_s: float
    restarts: int = 0
    is_asleep: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """Event: the engine's process is running and may be probed."""

    run: int
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """Event: the engine's process ended, could not be started, or must be replaced."""

    run: int
    message: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Event: a probe has ended.

    Attributes:
        run: Number of the engine's run.
        problem: Reason why the probe counts as missed, or empty for a good answer.
        active: Number of routers' sequences that the engine has.
        busy: Number of processors that the engine used since the previous probe, for example 0.3.
            If the engine was waiting for a processor or a disk, the number is at least 1.
        stalled_s: Longest pause of the agent itself during the probe, in seconds.
        is_wrong: Whether the problem is a wrong answer, which an overload does not excuse.
    """

    run: int
    problem: str = ""
    active: int = 0
    busy: float = 0.0
    stalled_s: float = 0.0
    is_wrong: bool = False

    @property
    def verdict(self) -> AnswerVerdict:
        """The verdict on the probe's answer."""
        if self.is_wrong:
            return AnswerVerdict.WRONG
        return AnswerVerdict.UNANSWERED if self.problem else AnswerVerdict.RIGHT


@dataclass(frozen=True, slots=True)
class EngineGone:
    """Event: all processes and all shared memory of the engine are gone."""

    run: int


@dataclass(frozen=True, slots=True)
class ReplicaTick:
    """Event: the time that `wake_at` returned has come."""


Event = Wanted | Adopted | Started | ProcessEnded | Probed | Rested | EngineGone | ReplicaTick


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Action: start the engine's process, and report `Started` or `ProcessEnded`."""

    run: int
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class ProbeEngine:
    """Action: run an inference, and report `Probed`."""

    run: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Action: end the engine's processes, remove its shared memory, and report `EngineGone`."""

    run: int
    is_kill: bool  # whether SIGKILL is sent at once instead of after SIGTERM


Action = StartEngine | ProbeEngine | RestEngine | StopEngine


@dataclass(frozen=True, slots=True)
class LocalReplicaState:
    """The agent's state of one replica.

    Attributes:
        wanted: Desired spec, or None if the replica is to be removed.
        is_draining: Whether the replica finishes its requests, then stops, and is not restarted.
        draining_at_s: Time when the drain began, or infinity without a drain.
        is_drained: Whether the replica is draining and its engine has no more sequences.
        rest: State of the engine's sleep.
        active: Number of routers' sequences in the engine at the last probe.
        run: Number of the last started run, or 0 before the first start.
        running: Spec of the engine, or None if no engine exists.
        pid: Process id of the engine, or 0 if it has not started or has ended.
        phase_at_s: Time when the phase began.
        probe_at_s: Time when the next probe is due, or infinity while a probe is in progress.
        retry_at_s: End of the back-off in the phase WAITING.
        misses: Number of consecutive missed probes during which the agent ran normally.
        stalls: Number of consecutive missed probes during which the agent was stalled.
        record: Record of the engine's answers.
        probed_at_s: For a starting engine, the time when the last probe ended, or before the first
            probe the start of the process.
        idle_s: Seconds for which a starting engine was idle. Work reduces them.
        failures: Number of failures since the engine was last healthy for `healthy_s`.
        restarts: Total number of engines that failed and were replaced.
        message: Reason why the replica is not ready, as text for operators.
    """

    wanted: EngineSpec | None = None
    is_draining: bool = False
    draining_at_s: float = inf
    is_drained: bool = False
    rest: RestState = AWAKE
    active: int = 0
    phase: ReplicaPhase = ReplicaPhase.IDLE
    run: int = 0
    running: EngineSpec | None = None
    pid: int = 0
    phase_at_s: float = 0.0
    probe_at_s: float = inf
    retry_at_s: float = inf
    misses: int = 0
    stalls: int = 0
    record: Record = CLEAN
    probed_at_s: float = 0.0
    idle_s: float = 0.0
    failures: int = 0
    has_failed: bool = False
    restarts: int = 0
    message: str = "not started yet"

    @property
    def is_finished(self) -> bool:
        """Whether the replica is to be removed and its engine is gone."""
        return self.wanted is None and self.phase is ReplicaPhase.IDLE

    @property
    def has_engine(self) -> bool:
        """Whether an engine exists that is not being stopped."""
        return self.phase in (ReplicaPhase.ADOPTING, ReplicaPhase.STARTING, ReplicaPhase.READY)


def decide(
    state: LocalReplicaState, event: Event, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    """Return the next state and the actions to perform.

    Args:
        state: State from the last call, or `LocalReplicaState()`.
        event: Event to process.
        now_s: Monotonic seconds.
        limits: Time limits.
    """
    state, first = _absorb(state, event, now_s, limits)
    state, second = _advance(state, now_s, limits)
    is_up = state.phase is ReplicaPhase.READY and not state.is_draining
    if is_up and state.rest.is_due(state.active, now_s, limits.drain_settle_s):
        second.append(RestEngine(state.run, state.rest.sleeps))
        state = replace(state, rest=replace(state.rest, is_asked=True))
    return state, first + second


def wake_at(state: LocalReplicaState, limits: EnginePatience) -> float:
    """Return the time at which a `ReplicaTick` is due if no other event arrives earlier."""
    if state.phase is ReplicaPhase.STARTING:
        return min(state.probe_at_s, state.phase_at_s + limits.start_s)
    if state.phase in (ReplicaPhase.ADOPTING, ReplicaPhase.READY):
        return state.probe_at_s
    if state.phase is ReplicaPhase.WAITING:
        return state.retry_at_s
    return inf


def _absorb(
    state: LocalReplicaState, event: Event, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    actions: list[Action] = []
    match event:
        case Wanted():
            state = _with_wish(state, event, now_s)
        case ReplicaTick():
            if state.phase is ReplicaPhase.STARTING and now_s >= state.phase_at_s + limits.start_s:
                waited = f"not ready after {limits.start_s:.0f} s; last canary: {state.message}"
                state, actions = _failed(state, waited, now_s, limits)
        case Adopted() if state.phase is ReplicaPhase.IDLE and not state.run:
            state = _with_found(state, event, now_s)
        case Started(run, pid) if (
            run == state.run and state.phase is ReplicaPhase.STARTING and not state.pid
        ):
            state = replace(state, pid=pid, probe_at_s=now_s, probed_at_s=now_s)
        case ProcessEnded(run, message) if run == state.run and state.has_engine:
            state, actions = _failed(state, message, now_s, limits)
        case Probed(run) if run == state.run and state.has_engine:
            state, actions = _with_probe(state, event, now_s, limits)
        case Rested(run) if run == state.run and state.has_engine:
            state = replace(state, rest=state.rest.after(event, now_s))
        case EngineGone(run) if run == state.run and state.phase is ReplicaPhase.STOPPING:
            state = _with_end(state, now_s, limits)
        case _:
            pass  # the event belongs to an earlier run, or an earlier event made it meaningless
    return state, actions


def _with_found(state: LocalReplicaState, found: Adopted, now_s: float) -> LocalReplicaState:
    return replace(
        state,
        wanted=found.spec,
        phase=ReplicaPhase.ADOPTING if found.was_ready else ReplicaPhase.STARTING,
        run=found.run,
        running=found.spec,
        pid=found.pid,
        phase_at_s=now_s if found.was_ready else now_s - found.age_s,
        probe_at_s=now_s,
        probed_at_s=now_s,
        restarts=found.restarts,
        rest=RestState(is_asleep=found.is_asleep, sleeps=found.is_asleep),
        message="left running by an earlier agent, and not asked yet",
    )


def _with_wish(state: LocalReplicaState, wish: Wanted, now_s: float) -> LocalReplicaState:
    state = replace(state, rest=state.rest.wished(now_s, sleeps=wish.sleeps))
    if wish.is_draining != state.is_draining:
        draining_at_s = now_s if wish.is_draining else inf
        state = replace(
            state,
            is_draining=wish.is_draining,
            draining_at_s=draining_at_s,
            is_drained=False,
        )
    if wish.spec != state.wanted:
        # A new spec starts at once, because the back-off belongs to the engine of the old spec.
        state = replace(state, wanted=wish.spec, failures=0)
        if state.phase is ReplicaPhase.WAITING:
            state = replace(state, phase=ReplicaPhase.IDLE)
    return state


def _with_probe(
    state: LocalReplicaState, probe: Probed, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    state = replace(state, record=state.record.with_answer(EvidenceKind.LIFE, probe.verdict))
    if probe.problem:
        state = replace(state, message=probe.problem)
        missed = _with_start_miss if state.phase is ReplicaPhase.STARTING else _with_miss
        return missed(state, probe, now_s, limits)
    has_settled = now_s >= state.draining_at_s + limits.drain_settle_s
    state = replace(
        state,
        misses=0,
        stalls=0,
        probe_at_s=now_s + limits.probe_interval_s,
        is_drained=has_settled and probe.active == 0,
        active=probe.active,
        message="",
    )
    if state.phase is not ReplicaPhase.READY:
        state = replace(state, phase=ReplicaPhase.READY, phase_at_s=now_s)
    return state, []


def _with_start_miss(
    state: LocalReplicaState, probe: Probed, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    # A probe takes no longer than this sum. A longer time means that the agent itself was stalled.
    watched_s = min(now_s - state.probed_at_s, limits.start_probe_s + limits.start_poll_s)
    change_s = watched_s if probe.busy < _BUSY_RATIO else -watched_s / _START_WORK_RATIO
    idle_s = max(0.0, state.idle_s + change_s)
    if idle_s >= limits.start_stall_s:
        frozen = f"frozen while starting: no work for {idle_s:.0f} s; last canary: {probe.problem}"
        return _failed(state, frozen, now_s, limits)
    probe_at_s = now_s + limits.start_poll_s
    return replace(state, idle_s=idle_s, probed_at_s=now_s, probe_at_s=probe_at_s), []


def _with_miss(
    state: LocalReplicaState, probe: Probed, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    if state.record.suspicion is Suspicion.ACCUSED:
        return _failed(state, f"answers wrongly: {probe.problem}", now_s, limits)
    if probe.stalled_s >= limits.stall_s:
        state = replace(state, stalls=state.stalls + 1)
    else:
        state = replace(state, misses=state.misses + 1)
    misses_max = limits.busy_misses_max if probe.busy >= _BUSY_RATIO else limits.misses_max
    total = state.misses + state.stalls
    if state.misses >= misses_max or total >= limits.busy_misses_max:
        return _failed(state, f"{total} probes missed: {probe.problem}", now_s, limits)
    return replace(state, probe_at_s=now_s + limits.probe_retry_s), []


def _failed(
    state: LocalReplicaState, message: str, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    was_healthy = state.phase is ReplicaPhase.READY and now_s - state.phase_at_s >= limits.healthy_s
    state = replace(
        state,
        phase=ReplicaPhase.STOPPING,
        phase_at_s=now_s,
        failures=0 if was_healthy else state.failures,
        has_failed=True,
        message=message,
    )
    return state, [StopEngine(state.run, is_kill=True)]


def _with_end(state: LocalReplicaState, now_s: float, limits: EnginePatience) -> LocalReplicaState:
    state = replace(
        state,
        pid=0,
        running=None,
        phase_at_s=now_s,
        misses=0,
        stalls=0,
        record=CLEAN,
        idle_s=0.0,
        is_drained=False,
        rest=state.rest.ended(),
    )
    if not state.has_failed:
        return replace(state, phase=ReplicaPhase.IDLE, message="stopped")
    pause_s = min(limits.backoff_max_s, limits.backoff_first_s * 2.0 ** min(state.failures, 32))
    return replace(
        state,
        phase=ReplicaPhase.WAITING,
        retry_at_s=now_s + pause_s,
        failures=state.failures + 1,
        has_failed=False,
        restarts=state.restarts + 1,
    )


def _has_drained(state: LocalReplicaState, now_s: float, limits: EnginePatience) -> bool:
    is_unused = state.phase is ReplicaPhase.STARTING
    is_over = now_s >= state.draining_at_s + limits.drain_s
    return state.is_draining and (is_unused or state.is_drained or is_over)


def _advance(
    state: LocalReplicaState, now_s: float, limits: EnginePatience
) -> tuple[LocalReplicaState, list[Action]]:
    actions: list[Action] = []
    wanted = state.wanted
    if state.phase is ReplicaPhase.WAITING and (wanted is None or now_s >= state.retry_at_s):
        state = replace(state, phase=ReplicaPhase.IDLE, phase_at_s=now_s)
    if state.has_engine and (wanted != state.running or _has_drained(state, now_s, limits)):
        state = replace(
            state, phase=ReplicaPhase.STOPPING, phase_at_s=now_s, message="stopping as desired"
        )
        actions.append(StopEngine(state.run, is_kill=False))
    elif state.has_engine and now_s >= state.probe_at_s:
        is_starting = state.phase is ReplicaPhase.STARTING
        timeout_s = limits.start_probe_s if is_starting else limits.probe_s
        state = replace(state, probe_at_s=inf)
        actions.append(ProbeEngine(state.run, timeout_s))
    elif state.phase is ReplicaPhase.IDLE and wanted is not None and not state.is_draining:
        state = replace(
            state,
            phase=ReplicaPhase.STARTING,
            phase_at_s=now_s,
            run=state.run + 1,
            running=wanted,
            probe_at_s=inf,
            message=state.message if state.failures else "starting",
        )
        actions.append(StartEngine(state.run, wanted))
    return state, actions
