"""Carries out what the state machine of one replica decides: processes, probes, waiting.

All events of a replica go through one queue to `decide`; every action is a task that reports its
outcome as an event. The engine process of a run has one owner task from start to end, and the end
of that task, for whatever reason, is the end of the process group.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from replica.agent.model_kinds import Canary
from replica.agent.replica_state import (
    Action,
    Ended,
    EngineSpec,
    Event,
    Gone,
    Limits,
    Phase,
    Probed,
    ProbeEngine,
    ReplicaState,
    Started,
    StartEngine,
    StopEngine,
    Tick,
    Wanted,
    decide,
    wake_at,
)
from replica.agent.triton import Launch, LaunchError, last_error
from sluice.errors import PlatformError
from sluice.process import ChildProcess
from sluice.procfs import cpu_s, first_end, group_processes, memory_bytes, program_name

log = structlog.get_logger(__name__)

# At most one wish waits, and each run brings four kinds of events; a full queue is a bug.
_EVENTS_MAX = 64


class Launcher(Protocol):
    """Prepares engine processes; blocks."""

    def prepare(self, replica_id: str, spec: EngineSpec) -> Launch:
        """Return how to start the engine; LaunchError or OSError when that is impossible."""
        ...


class Observer(Protocol):
    """Told about what happens to engines, for metrics."""

    def probed(self, took_s: float, *, is_good: bool) -> None:
        """A probe of a ready engine is over."""
        ...

    def failed(self) -> None:
        """An engine failed: crashed, froze, or did not start."""
        ...

    def became_ready(self, took_s: float) -> None:
        """An engine gave its first good answer, `took_s` after its start was decided."""
        ...


@dataclass(slots=True)
class _Run:
    """What the owner task of an engine is told."""

    became_ready: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_kill: bool = False


class ReplicaRunner:
    """One replica: what is wanted of it, and the engine that it has."""

    def __init__(
        self,
        replica_id: str,
        launcher: Launcher,
        prober: Canary,
        limits: Limits,
        *,
        on_change: Callable[[], None],
        observer: Observer,
    ) -> None:
        self.replica_id = replica_id
        self.state = ReplicaState()
        self.launch: Launch | None = None
        self.memory_bytes = 0
        self._launcher = launcher
        self._prober = prober
        self._limits = limits
        self._on_change = on_change
        self._observer = observer
        self._wish = Wanted(None)
        self._has_new_wish = False
        self._events: asyncio.Queue[Event] = asyncio.Queue(_EVENTS_MAX)
        self._runs: dict[int, _Run] = {}
        self._members: list[int] = []  # processes of the engine, when last looked at

    def want(self, spec: EngineSpec | None, *, is_draining: bool = False) -> None:
        """Change what is desired; None ends the replica."""
        wish = Wanted(spec, is_draining)
        if wish == self._wish:
            return
        self._wish = wish
        if not self._has_new_wish:
            self._has_new_wish = True
            self._events.put_nowait(wish)  # stands for the latest wish when its turn comes

    @property
    def is_wanted(self) -> bool:
        """Whether the replica is to exist."""
        return self._wish.spec is not None

    @property
    def is_draining(self) -> bool:
        """Whether the replica is to finish what it runs and take nothing new."""
        return self._wish.is_draining

    @property
    def is_ready(self) -> bool:
        """Whether nothing is missing: it serves, or need not."""
        return self.state.phase is Phase.READY or self.is_draining or not self.is_wanted

    async def run(self) -> None:
        """Do what is wanted until nothing is and nothing is left; cancelled, kill the engine."""
        probe: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
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
                probe.cancel()  # nobody waits for its answer any more

    async def measure_memory(self) -> None:
        """Update `memory_bytes`, in a thread: the kernel walks page tables for it."""
        pid = self.state.pid
        self._members = await asyncio.to_thread(group_processes, pid) if pid else []
        self.memory_bytes = await asyncio.to_thread(memory_bytes, self._members)

    async def _next_event(self) -> Event:
        delay_s = wake_at(self.state, self._limits) - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, delay_s) if delay_s < float("inf") else None):
                event = await self._events.get()
        except TimeoutError:
            return Tick()
        if isinstance(event, Wanted):
            self._has_new_wish = False
            return self._wish
        return event

    def _run_of(self, action: Action) -> _Run:
        """Return what belongs to the action's run, made before any of its tasks runs."""
        return self._runs.setdefault(action.run, _Run())

    async def _perform(self, action: Action, told: _Run) -> None:
        match action:
            case StartEngine(run, spec):
                await self._own_engine(run, spec, told)
                del self._runs[run]
                await self._events.put(Gone(run))
            case StopEngine(_, is_kill):
                told.is_kill = is_kill
                told.stop.set()
            case ProbeEngine(run, timeout_s):
                await self._events.put(await self._probe(run, timeout_s))

    async def _own_engine(self, run: int, spec: EngineSpec, told: _Run) -> None:
        """Start the engine and see to its end; returns when nothing is left of it."""
        try:
            launch = await asyncio.to_thread(self._launcher.prepare, self.replica_id, spec)
            child = await ChildProcess.start(launch.process)
        except (LaunchError, OSError) as error:
            await self._events.put(Ended(run, str(error)))
            await told.stop.wait()
            return
        try:
            self.launch = launch
            await self._events.put(Started(run, child.pid))
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(self._watch_server(run, child)),
                    group.create_task(self._watch_stubs(run, child, launch, told)),
                ]
                await told.stop.wait()
                for watch in watches:
                    watch.cancel()
            await child.stop(grace_s=0 if told.is_kill else None)
        finally:
            self.launch = None
            await child.stop(grace_s=0)

    async def _watch_server(self, run: int, child: ChildProcess) -> None:
        status = await child.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        log_file = child.spec.log_file
        said = last_error(log_file)
        reason = f": {said} (see {log_file})" if said else f"; {child.log_tail()}"
        await self._events.put(Ended(run, f"the engine ended with {how}{reason}"))

    async def _watch_stubs(self, run: int, child: ChildProcess, launch: Launch, told: _Run) -> None:
        """Notice a dead stub at once: Triton stays "ready" without it, and probes take seconds."""
        await told.became_ready.wait()
        self._members = group_processes(child.pid)
        stubs = [pid for pid in self._members if program_name(pid) == launch.vital_program]
        pid = await first_end(stubs)
        message = f"Triton's stub, process {pid}, ended; see {child.spec.log_file}"
        await self._events.put(Ended(run, message))

    async def _probe(self, run: int, timeout_s: float) -> Probed:
        launch, spec = self.launch, self.state.running
        if launch is None or spec is None:
            return Probed(run, 0.0, "the engine is gone")
        members = self._members
        begin_s, begin_cpu_s = time.monotonic(), cpu_s(members)
        problem, active = "", 0
        try:
            active = await self._prober(launch.grpc_address, spec, timeout_s)
        except (PlatformError, OSError, TimeoutError) as error:
            problem = str(error) or repr(error)
        took_s = time.monotonic() - begin_s
        if self.state.phase is Phase.READY:
            self._observer.probed(took_s, is_good=not problem)
        used_s = cpu_s(members) - begin_cpu_s if problem else 0.0
        return Probed(run, took_s, problem, active, used_s)

    def _note_change(self, before: ReplicaState) -> None:
        after = self.state
        if (after.phase, after.is_draining, after.pid) == (
            before.phase,
            before.is_draining,
            before.pid,
        ):
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
        if after.phase is Phase.READY and before.phase is not Phase.READY:
            self._observer.became_ready(after.phase_at_s - before.phase_at_s)
            self._runs[after.run].became_ready.set()
        self._on_change()
