"""Derives this router's cells, replica plans and attachments from the control plane's state."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from router.attach import Attachment, Stream
from router.core.types.canary import CanaryAnswer
from router.core.types.plan import ReplicaPlan, ReplicaRole
from router.hub import Hub
from sluice.profiles import FRAMES
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control

_STOP_TIMEOUT_S = 5.0
# Routers use only the profile of step frames. Older control planes have no other profile, and leave
# the name empty.
_PROFILES = ("", FRAMES.name)
_ROLES = {"prefill": ReplicaRole.PREFILL, "decode": ReplicaRole.DECODE}
# States in which a replica finishes its requests but is sent no new requests.
_ENDING = (control.REPLICA_STATE_DRAINING, control.REPLICA_STATE_SLEEPING)
_ENDED = (control.REPLICA_STATE_STOPPED, control.REPLICA_STATE_FAILED)


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a replica, and the base that it serves."""

    address: str
    model: str
    base_digest: str = ""


class ReplicaAttachments:
    """The attachments to all replicas of this router's cells that have an address."""

    def __init__(
        self,
        hub: Hub,
        tasks: asyncio.TaskGroup,
        open_stream: Callable[[Target], Stream],
        probe: Callable[[Target, float], Awaitable[CanaryAnswer]],
        *,
        router_id: str,
        silence_s: float,
    ) -> None:
        """Create an empty set of attachments, which will run in `tasks`."""
        self._hub = hub
        self._tasks = tasks
        self._open_stream = open_stream
        self._probe = probe
        self._router_id = router_id
        self._silence_s = silence_s
        self._attachments: dict[str, tuple[Target, Attachment, asyncio.Task[None]]] = {}
        self._is_stopping = False

    def follow(self, state: ControlState) -> None:
        """Apply the control plane's assignment of cells and replicas.

        The caller calls this method after every change, and at intervals for postponed changes.
        """
        if self._is_stopping:
            return
        cells = [cell.id for cell in state.cells.values() if cell.router_id == self._router_id]
        owned = frozenset(cells)
        replicas = [
            replica
            for replica in state.replicas.values()
            if replica.cell_id in owned and replica.profile in _PROFILES
        ]
        live = [entry for entry in replicas if entry.state not in _ENDED]
        plans = [
            ReplicaPlan(
                entry.id,
                entry.cell_id,
                is_draining=entry.state in _ENDING,
                role=_ROLES.get(entry.role, ReplicaRole.BOTH),
            )
            for entry in live
        ]
        self._hub.plan(cells, plans, _with_siblings(state))
        asleep = {it.cell_id for it in live if it.state == control.REPLICA_STATE_SLEEPING}
        asleep |= _beside_sleepers(state) & owned
        self._hub.note_wakeable(asleep | (owned - {entry.cell_id for entry in live}))
        wanted = {
            entry.id: Target(entry.grpc_address, entry.triton_model, _base(state, entry.pool_id))
            for entry in live
            if entry.grpc_address
        }
        for replica_id, (target, attachment, task) in list(self._attachments.items()):
            if task.done():
                del self._attachments[replica_id]
            elif wanted.get(replica_id, target) != target or self._hub.core.is_surplus(replica_id):
                _stop(attachment, task)
        for replica_id, target in wanted.items():
            if replica_id not in self._attachments:
                self._start(replica_id, target)

    def target(self, replica_id: str) -> Target | None:
        """Return the address of a replica, or None if the router has no attachment for it."""
        entry = self._attachments.get(replica_id)
        return None if entry is None else entry[0]

    def _start(self, replica_id: str, target: Target) -> None:
        attachment = Attachment(
            self._hub,
            replica_id,
            lambda: self._open_stream(target),
            lambda timeout_s: self._probe(target, timeout_s),
            router_id=self._router_id,
            silence_s=self._silence_s,
        )
        task = self._tasks.create_task(attachment.run())
        self._attachments[replica_id] = (target, attachment, task)

    async def stop(self) -> None:
        """Detach from all replicas, within the attachments' own deadlines."""
        self._is_stopping = True
        tasks: list[asyncio.Task[None]] = []
        for _, attachment, task in self._attachments.values():
            _stop(attachment, task)
            tasks.append(task)
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)


def _stop(attachment: Attachment, task: "asyncio.Task[None]") -> None:
    attachment.stop()
    if not attachment.is_attached:
        task.cancel()  # the task waits for a connection or for its next attempt


def _with_siblings(state: ControlState) -> set[str]:
    """Return the cells whose pool has several cells."""
    counts = Counter(cell.pool_id for cell in state.cells.values())
    return {cell.id for cell in state.cells.values() if counts[cell.pool_id] > 1}


def _beside_sleepers(state: ControlState) -> set[str]:
    """Return the cells whose pool shares a model with a pool that has sleeping replicas."""
    lists = [{it.pool_id for it in told.pools} for told in state.model_pools.values()]
    if not lists:
        return set()
    asleep = {
        it.pool_id for it in state.replicas.values() if it.state == control.REPLICA_STATE_SLEEPING
    }
    pools = set[str]().union(*(of for of in lists if of & asleep))
    return {cell.id for cell in state.cells.values() if cell.pool_id in pools}


def _base(state: ControlState, pool_id: str) -> str:
    pool = state.pools.get(pool_id)
    return pool.base_digest if pool is not None else ""
