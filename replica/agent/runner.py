"""Starts, probes and stops a replica's engines, as its state machine decides.

All events of a replica pass through one queue to `decide`. Each action is a task that reports its
result as an event. One task owns the engine process of a run from start to end. Only a decision of
the state machine ends an engine. If the owning task is cancelled or fails, the agent ends, but its
engines continue to run. The next agent adopts them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from replica.agent.activity import Activity, ProbeWatch
from replica.agent.model_kinds import KINDS, Canary
from replica.agent.replica_state import (
    Action,
    Adopted,
    EngineGone,
    EnginePatience,
    EngineSpec,
    Event,
    LocalReplicaState,
    Probed,
    ProbeEngine,
    ProcessEnded,
    ReplicaPhase,
    ReplicaTick,
    Started,
    StartEngine,
    StopEngine,
    Wanted,
    decide,
    wake_at,
)
from replica.agent.resting import Rested, RestEngine
from replica.agent.runs import RunRecord
from replica.agent.triton import Launch, LaunchError
from replica.agent.triton_log import last_error
from sluice.detector.replies import WrongAnswerError
from sluice.errors import ErrorCode, PlatformError
from sluice.kserve import rest
from sluice.process import AdoptedProcess, OwnedProcess
from sluice.procfs import first_end, group_processes, memory_bytes, program_name, start_ticks

log = structlog.get_logger(__name__)

# Largest number of queued events. At most one is a change of the desired state, and each run has
# four kinds of events.
_EVENTS_MAX = 64
# Seconds between two lists of a starting engine's processes. Its stub is missing at first.
_MEMBERS_EVERY_S = 1.0
_REST_S = 30.0  # deadline in seconds of a request to release or to allocate KV memory


class Launcher(Protocol):
    """Prepares engine processes. The method blocks its thread."""

    def prepare(self, replica_id: str, spec: EngineSpec) -> Launch:
        """Return the launch of an engine. Raises LaunchError or OSError if it is impossible."""
        ...


class RunnerObserver(Protocol):
    """Observes engines for metrics."""

    def probed(self, took_s: float, *, is_good: bool) -> None:
        """Record that a probe of a ready engine has ended."""
        ...

    def failed(self) -> None:
        """Record that an engine crashed, froze, or did not start."""
        ...

    def became_ready(self, took_s: float) -> None:
        """Record an engine's first good answer, `took_s` seconds after the decision to start it."""
        ...

    def adopted(self) -> None:
        """Record the first good answer of an engine that an earlier agent started."""
        ...


@dataclass(frozen=True, slots=True)
class Leftover:
    """An engine that an earlier agent left running.

    Attributes:
        record: The earlier agent's record of the engine.
        launch: Addresses of the engine, and the files to remove after its end.
        process: Process group of the engine. This agent owns it from now on.
        age_s: Seconds since the engine's start.
    """

    record: RunRecord
    launch: Launch
    process: AdoptedProcess
    age_s: float


@dataclass(slots=True)
class _Run:
    """Signals to the task that owns the engine of a run."""

    became_ready: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_kill: bool = False


class ReplicaRunner:
    """Runs one replica by its state machine, from its first desired state to its removal."""

    def __init__(
        self,
        replica_id: str,
        launcher: Launcher,
        prober: Canary,
        limits: EnginePatience,
        *,
        on_change: Callable[[], None],
        observer: RunnerObserver,
        problem_of: Callable[[str], Awaitable[str]],
        leftover: Leftover | None = None,
    ) -> None:
        """Create a replica that `run` starts.

        Args:
            replica_id: Id of the replica, unique on the node.
            launcher: Launcher that starts engines.
            prober: Prober of engines.
            limits: Time limits for engines.
            on_change: Function that is called at every change of the observed state.
            observer: Observer of engines, for metrics.
            problem_of: Function that returns why a base's artifact is unusable, or empty.
            leftover: Engine that an earlier agent left running, or None. Its spec is desired until
                a desired state arrives.
        """
        self.replica_id = replica_id
        self.state = LocalReplicaState()
        self.launch: Launch | None = None
        self.memory_bytes = 0
        self._launcher = launcher
        self._prober = prober
        self._limits = limits
        self._on_change = on_change
        self._observer = observer
        self._problem_of = problem_of
        self._leftover = leftover
        record = leftover.record if leftover else None
        self._wish = Wanted(record.spec, sleeps=record.is_asleep) if record else Wanted(None)
        self._has_new_wish = False
        self._events: asyncio.Queue[Event] = asyncio.Queue(_EVENTS_MAX)
        self._runs: dict[int, _Run] = {}
        # process ids of the engine when its processes were last listed
        self._members: list[int] = []
        self._members_at_s = 0.0
        self._activity = Activity()
        self.has_settled = asyncio.Event()  # set when the health of a leftover engine is known
        if leftover is None:
            self.has_settled.set()

    def want(
        self, spec: EngineSpec | None, *, is_draining: bool = False, sleeps: bool = False
    ) -> None:
        """Change the desired spec. None removes the replica."""
        wish = Wanted(spec, is_draining, sleeps)
        if wish == self._wish:
            return
        self._wish = wish
        if not self._has_new_wish:
            self._has_new_wish = True
            self._events.put_nowait(wish)  # the reader of the queue then uses the latest wish

    def fail(self, base_digest: str, problem: str) -> None:
        """End the engine as failed if it runs this base. The state machine then starts another."""
        running = self.state.running
        if running is not None and running.base_digest == base_digest:
            self._events.put_nowait(ProcessEnded(self.state.run, problem))

    @property
    def wanted(self) -> EngineSpec | None:
        """The engine that the replica has to run, or None if the replica has to be removed."""
        return self._wish.spec

    @property
    def is_wanted(self) -> bool:
        """Whether the replica has to exist."""
        return self._wish.spec is not None

    @property
    def is_draining(self) -> bool:
        """Whether the replica has to finish its requests and accept no new requests."""
        return self._wish.is_draining

    @property
    def is_ready(self) -> bool:
        """Whether the replica is ready, is draining, or is to be removed."""
        return self.state.phase is ReplicaPhase.READY or self.is_draining or not self.is_wanted

    async def run(self) -> None:
        """Run until the replica and its engine are gone.

        A cancellation of this method leaves the engine running.
        """
        probe: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            if self._leftover is not None:
                self._adopt(self._leftover, group)
                self._leftover = None
            while True:
                event = await self._next_event()
                before = self.state
                self.state, actions = decide(before, event, time.monotonic(), self._limits)
                for action in actions:
                    task = group.create_task(self._perform(action, self._run_of(action)))
                    if isinstance(action, ProbeEngine):
                        probe = task
                self._note_change(before)
                if self.state.is_finished and not self._has_new_wish:
                    break
            if probe is not None:
                probe.cancel()  # nothing reads this probe's answer any more

    async def measure_memory(self) -> None:
        """Update `memory_bytes` in a thread, because the kernel reads whole page tables."""
        await self._list_members()
        self.memory_bytes = await asyncio.to_thread(memory_bytes, self._members)

    async def _list_members(self) -> None:
        pid = self.state.pid
        self._members_at_s = time.monotonic()
        self._members = await asyncio.to_thread(group_processes, pid) if pid else []

    async def _next_event(self) -> Event:
        delay_s = wake_at(self.state, self._limits) - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, delay_s) if delay_s < float("inf") else None):
                event = await self._events.get()
        except TimeoutError:
            return ReplicaTick()
        if isinstance(event, Wanted):
            self._has_new_wish = False
            return self._wish
        return event

    def _run_of(self, action: Action) -> _Run:
        """Return the signals of an action's run, which are created before the run's first task."""
        return self._runs.setdefault(action.run, _Run())

    async def _perform(self, action: Action, told: _Run) -> None:
        match action:
            case StartEngine(run, spec):
                await self._own_engine(run, spec, told)
                del self._runs[run]
                await self._events.put(EngineGone(run))
            case StopEngine(_, is_kill):
                told.is_kill = is_kill
                told.stop.set()
            case RestEngine(run, is_asleep):
                await self._events.put(await self._rest(run, is_asleep=is_asleep))
            case ProbeEngine(run, timeout_s):
                await self._events.put(await self._probe(run, timeout_s))

    def _adopt(self, leftover: Leftover, group: asyncio.TaskGroup) -> None:
        """Adopt the leftover engine as if it had just been started."""
        record = leftover.record
        self.launch = leftover.launch
        self._members = group_processes(record.pid)
        told = self._runs[record.run] = _Run()
        group.create_task(self._own_leftover(leftover, told))
        self._events.put_nowait(
            Adopted(
                record.run,
                record.pid,
                record.spec,
                record.was_ready,
                leftover.age_s,
                record.restarts,
                record.is_asleep,
            )
        )

    async def _own_leftover(self, leftover: Leftover, told: _Run) -> None:
        run = leftover.record.run
        await self._own_process(run, leftover.process, leftover.launch, told)
        del self._runs[run]
        await self._events.put(EngineGone(run))

    async def _own_engine(self, run: int, spec: EngineSpec, told: _Run) -> None:
        """Start the engine of a run, own it, and return when it is gone."""
        try:
            launch = await self._prepare(spec)
            child = await launch.start()
        except (LaunchError, OSError) as error:
            await self._events.put(ProcessEnded(run, str(error)))
            await told.stop.wait()
            return
        launch.run_file.save(
            RunRecord(
                self.replica_id,
                spec,
                run,
                child.pid,
                start_ticks(child.pid),
                launch.ports.grpc,
                launch.ports.metrics,
                restarts=self.state.restarts,
            )
        )
        self._events.put_nowait(Started(run, child.pid))
        await self._own_process(run, child, launch, told)

    async def _prepare(self, spec: EngineSpec) -> Launch:
        """Verify the base and return the launch of an engine. Raises LaunchError or OSError."""
        if problem := await self._problem_of(spec.base_digest):
            raise LaunchError(problem)
        return await asyncio.to_thread(self._launcher.prepare, self.replica_id, spec)

    async def _own_process(
        self, run: int, process: OwnedProcess, launch: Launch, told: _Run
    ) -> None:
        """Watch a running engine until it fails or a signal arrives, and then end it."""
        self.launch, self._activity = launch, Activity()
        try:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(self._watch_server(run, process)),
                    group.create_task(self._watch_stubs(run, process, launch, told)),
                ]
                await told.stop.wait()
                for watch in watches:
                    watch.cancel()
        except BaseException:
            process.release()
            raise
        try:
            await process.stop(grace_s=0 if told.is_kill else None)
        finally:
            self.launch = None
            launch.run_file.remove()

    async def _watch_server(self, run: int, process: OwnedProcess) -> None:
        await process.ended()
        status, log_file = process.status, process.spec.log_file
        how = "" if status is None else f" with status {status}"
        if status is not None and status < 0:
            how = f" with signal {-status}"
        said = last_error(log_file)
        reason = f": {said} (see {log_file})" if said else f"; {process.log_tail()}"
        await self._events.put(ProcessEnded(run, f"the engine ended{how}{reason}"))

    async def _watch_stubs(
        self, run: int, process: OwnedProcess, launch: Launch, told: _Run
    ) -> None:
        """Detect the death of a stub at once. Triton would still report itself as ready."""
        await told.became_ready.wait()
        self._members = group_processes(process.pid)
        stubs = [pid for pid in self._members if program_name(pid) == launch.vital_program]
        pid = await first_end(stubs)
        message = f"Triton's stub, process {pid}, ended; see {process.spec.log_file}"
        await self._events.put(ProcessEnded(run, message))

    async def _probe(self, run: int, timeout_s: float) -> Probed:
        launch, spec = self.launch, self.state.running
        if launch is None or spec is None:
            return Probed(run, "the engine is gone")
        begin_s = time.monotonic()
        problem, active, is_wrong = "", 0, False
        async with ProbeWatch(self._members, timeout_s) as watch:
            try:
                active = await self._probe_engine(launch, spec, timeout_s)
            except (PlatformError, OSError, TimeoutError) as error:
                problem = str(error) or repr(error)
                is_wrong = isinstance(error, WrongAnswerError)
        if self.state.phase is ReplicaPhase.READY:
            self._observer.probed(time.monotonic() - begin_s, is_good=not problem)
        if problem and time.monotonic() > self._members_at_s + _MEMBERS_EVERY_S:
            await self._list_members()
        busy = self._activity.look(self._members)
        if problem and watch.wants_processor():
            busy = max(busy, 1.0)
        return Probed(run, problem, active, busy, watch.stalled_s, is_wrong)

    async def _rest(self, run: int, *, is_asleep: bool) -> Rested:
        """Put the engine to sleep, or wake it."""
        launch, spec = self.launch, self.state.running
        if launch is None or spec is None:
            return Rested(run, is_asleep=False, problem="the engine is gone")
        kind = KINDS[spec.engine]
        if not kind.can_sleep:
            told = f"engine {spec.engine} cannot sleep: set the pool's sleepers to 0"
            return Rested(run, is_asleep=False, problem=told, is_refused=True)
        try:
            is_now = await rest(launch.grpc_address, kind.model, _REST_S, is_asleep=is_asleep)
        except (PlatformError, OSError, TimeoutError) as error:
            code = error.code if isinstance(error, PlatformError) else None
            is_refused = code is ErrorCode.UNSUPPORTED_PARAMETER
            problem = str(error) or repr(error)
            return Rested(run, not is_asleep and not is_refused, problem, is_refused)
        await asyncio.to_thread(launch.run_file.mark_asleep, is_asleep=is_now)
        return Rested(run, is_now)

    async def _probe_engine(self, launch: Launch, spec: EngineSpec, timeout_s: float) -> int:
        if self.state.phase is ReplicaPhase.STARTING:
            # A plain connection fails at once if nothing listens yet. gRPC would instead pause
            # before its next attempt.
            async with asyncio.timeout(timeout_s):
                await launch.process.ready()
        return await self._prober(launch.grpc_address, spec, timeout_s)

    def _note_change(self, before: LocalReplicaState) -> None:
        after = self.state
        if after.phase is not ReplicaPhase.ADOPTING:
            self.has_settled.set()
        if _reported(after) == _reported(before):
            return
        if after.phase is not before.phase:
            log.info(
                "replica_changed",
                replica_id=self.replica_id,
                phase=after.phase,
                run=after.run,
                pid=after.pid,
                message=after.message,
            )
        if after.has_failed and not before.has_failed:
            self._observer.failed()
        if after.phase is ReplicaPhase.READY and before.phase is not ReplicaPhase.READY:
            self._note_ready(before)
        self._on_change()

    def _note_ready(self, before: LocalReplicaState) -> None:
        if before.phase is ReplicaPhase.ADOPTING:
            self._observer.adopted()
        else:
            self._observer.became_ready(self.state.phase_at_s - before.phase_at_s)
        if self.launch is not None:
            self.launch.run_file.mark_ready()
        self._runs[self.state.run].became_ready.set()


def _reported(state: LocalReplicaState) -> tuple[object, ...]:
    """Return the fields whose changes are reported to the control plane."""
    return state.phase, state.is_draining, state.pid, state.rest.is_asleep, state.rest.problem
