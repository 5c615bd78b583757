"""Runs the replicas of this node, with one runner per replica, and reports their observed state."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

import structlog

from replica.agent.model_kinds import KINDS, Canary
from replica.agent.replica_state import EnginePatience, EngineSpec, LocalReplicaState, ReplicaPhase
from replica.agent.runner import Launcher, Leftover, ReplicaRunner, RunnerObserver
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.control.v1 import control_pb2 as control

log = structlog.get_logger(__name__)

STATES: dict[ReplicaPhase, control.ReplicaState] = {
    ReplicaPhase.IDLE: control.REPLICA_STATE_STOPPED,
    ReplicaPhase.ADOPTING: control.REPLICA_STATE_STARTING,
    ReplicaPhase.STARTING: control.REPLICA_STATE_STARTING,
    ReplicaPhase.READY: control.REPLICA_STATE_READY,
    ReplicaPhase.STOPPING: control.REPLICA_STATE_STOPPED,
    ReplicaPhase.WAITING: control.REPLICA_STATE_FAILED,
}


class NodeLauncher(Launcher, Protocol):
    """A launcher that also removes the files of deleted replicas."""

    def forget(self, replica_id: str) -> None:
        """Remove the replica's files from the disk."""
        ...


def reported_state(state: LocalReplicaState) -> control.ReplicaState:
    """Return the reported state of a replica.

    Routers do not attach to STOPPED and FAILED replicas. A replica is SLEEPING once its engine has
    released its memory.
    """
    if state.has_failed:
        return control.REPLICA_STATE_FAILED
    if state.phase is ReplicaPhase.READY and state.is_draining:
        return control.REPLICA_STATE_DRAINING
    if state.phase is ReplicaPhase.READY and state.rest.is_asleep:
        return control.REPLICA_STATE_SLEEPING
    return STATES[state.phase]


class NodeReplicas:
    """Runs the replicas of the node inside the agent's `TaskGroup`."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        launcher: NodeLauncher,
        prober: Canary,
        limits: EnginePatience,
        *,
        on_change: Callable[[], None],
        observer: RunnerObserver,
        why_cordoned: Callable[[Collection[int]], str],
        problem_of: Callable[[str], Awaitable[str]],
        why_waiting: Callable[[str], str] = lambda base_digest: "",  # noqa: ARG005
    ) -> None:
        """Create an empty set of replicas.

        Args:
            group: TaskGroup in which all tasks run.
            launcher: Launcher that starts engines.
            prober: Prober of engines.
            limits: Time limits for engines.
            on_change: Function that is called after every change to report to the control plane.
            observer: Receiver of events, for metrics.
            why_cordoned: Function that returns why one of some accelerators is out of service, or
                empty.
            problem_of: Function that returns why a base's artifact is unusable, or empty.
            why_waiting: Function that returns why a base is not on the disk yet, or empty.
        """
        self.runners: dict[str, ReplicaRunner] = {}
        self._group = group
        self._launcher = launcher
        self._prober = prober
        self._limits = limits
        self._on_change = on_change
        self._observer = observer
        self._why_cordoned = why_cordoned
        self._problem_of = problem_of
        self._why_waiting = why_waiting
        # id of a replica whose base is being fetched -> progress of the fetch as text
        self._waiting: dict[str, str] = {}
        self._desired: agent.SyncResponse | None = None
        self._is_stopping = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, leftovers: Mapping[str, Leftover]) -> None:
        """Adopt engines by replica id. Until `apply` is called, these replicas count as desired."""
        for replica_id, leftover in leftovers.items():
            self._runner(replica_id, leftover)

    async def settled(self) -> None:
        """Wait until the health of adopted engines is known, which takes some probes."""
        for runner in list(self.runners.values()):
            await runner.has_settled.wait()

    def apply(self, desired: agent.SyncResponse) -> None:
        """Start and stop replicas in the background until the node has the desired replicas.

        Replicas with cordoned accelerators drain, regardless of the desired state. A replica whose
        base is being fetched waits for the base.
        """
        if self._is_stopping:
            return
        self._desired = desired
        self._waiting = {}
        wanted = {wish.replica_id: wish for wish in desired.replicas}
        for replica_id, runner in self.runners.items():
            if replica_id not in wanted:
                runner.want(None)
        for replica_id, wish in wanted.items():
            spec = EngineSpec(
                wish.engine,
                wish.base_digest,
                tuple(sorted(wish.engine_options.items())),
                tuple(sorted(wish.accelerators)),
            )
            is_draining = wish.is_draining or bool(self._cordon(spec))
            if (why := self._waits_for(replica_id, spec)) and not is_draining:
                self._waiting[replica_id] = why
                continue
            runner = self._runner(replica_id)
            runner.want(spec, is_draining=is_draining, sleeps=wish.sleeps)

    def refresh(self) -> None:
        """Start replicas whose base is complete, and update the progress of all waiting ones."""
        if self._waiting and self._desired is not None:
            before = self._waiting
            self.apply(self._desired)
            if self._waiting != before:
                self._on_change()

    def apply_cordons(self) -> None:
        """Drain replicas with cordoned accelerators, and start replicas without cordons again."""
        if self._desired is not None:
            self.apply(self._desired)

    def fail(self, base_digest: str, problem: str) -> None:
        """Stop the engines of a base as failed. They start again when the base is usable."""
        for runner in self.runners.values():
            runner.fail(base_digest, problem)

    async def stop(self) -> None:
        """Drain and end all replicas, and wait until all their processes are gone."""
        self._is_stopping = True
        for runner in self.runners.values():
            runner.want(None)
        await self._is_empty.wait()

    async def leave(self) -> None:
        """Stop watching the engines, and leave them running."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def measure(self) -> None:
        """Measure the memory use of the engines."""
        for runner in list(self.runners.values()):
            await runner.measure_memory()

    @property
    def is_ready(self) -> bool:
        """Whether every desired replica is ready. True if no replica is desired."""
        return not self._waiting and all(runner.is_ready for runner in self.runners.values())

    @property
    def waiting(self) -> Mapping[str, str]:
        """Reasons why desired replicas have not been started, by replica id."""
        return self._waiting

    def observed(self) -> list[agent.ObservedReplica]:
        """Return the observed replicas of the node, sorted by id."""
        found = [
            _observed(runner, self._cordon(runner.wanted))
            for runner in self.runners.values()
            if runner.is_wanted and runner.replica_id not in self._waiting
        ]
        found += [
            agent.ObservedReplica(
                replica_id=replica_id, state=control.REPLICA_STATE_STARTING, message=why
            )
            for replica_id, why in self._waiting.items()
        ]
        return sorted(found, key=lambda replica: replica.replica_id)

    def _waits_for(self, replica_id: str, spec: EngineSpec) -> str:
        """Return why a replica cannot start yet. Empty if it can, or already runs this base."""
        runner = self.runners.get(replica_id)
        wanted = runner.wanted if runner is not None else None
        if wanted is not None and wanted.base_digest == spec.base_digest:
            return ""
        why = self._why_waiting(spec.base_digest)
        if why and runner is not None:
            runner.want(None)
        return why

    def _cordon(self, spec: EngineSpec | None) -> str:
        """Return why one of the spec's accelerators is out of service, or empty if none is."""
        if spec is None:
            return ""
        kind = KINDS.get(spec.engine)
        uses_some = bool(spec.accelerators) or (kind is not None and kind.uses_accelerators)
        return self._why_cordoned(spec.accelerators) if uses_some else ""

    def _runner(self, replica_id: str, leftover: Leftover | None = None) -> ReplicaRunner:
        runner = self.runners.get(replica_id)
        if runner is None:
            runner = ReplicaRunner(
                replica_id,
                self._launcher,
                self._prober,
                self._limits,
                on_change=self._on_change,
                observer=self._observer,
                problem_of=self._problem_of,
                leftover=leftover,
            )
            self.runners[replica_id] = runner
            self._is_empty.clear()
            task = self._group.create_task(self._run(runner))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return runner

    async def _run(self, runner: ReplicaRunner) -> None:
        while True:
            await runner.run()
            if not runner.is_wanted and not self._is_stopping:
                await asyncio.to_thread(self._launcher.forget, runner.replica_id)
            # the replica may have become wanted again, and then runs again
            if not runner.is_wanted:
                break
        del self.runners[runner.replica_id]
        if not self.runners:
            self._is_empty.set()
        self._on_change()


def _observed(runner: ReplicaRunner, cordon: str) -> agent.ObservedReplica:
    state, launch = runner.state, runner.launch
    is_serving = state.has_engine and launch is not None
    return agent.ObservedReplica(
        replica_id=runner.replica_id,
        state=reported_state(state),
        grpc_address=launch.grpc_address if is_serving and launch else "",
        metrics_address=launch.metrics_address if is_serving and launch else "",
        pid=state.pid,
        memory_bytes=runner.memory_bytes,
        restarts=state.restarts,
        message=f"cordoned: {cordon}" if cordon else state.message or state.rest.problem,
    )
