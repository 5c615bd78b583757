"""Records of the fleet, and decisions over them: roles, states, lost nodes; pure.

This module decides the roles of replicas and the effects of an agent's report;
`control_plane.fleet.planner` decides on creation, drain and removal, `control_plane.fleet.cells` on
cells. Each function is idempotent: applied to its own result it changes nothing more.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

# An agent's heartbeat comes every 5 s; three missed ones mean the node is lost.
NODE_LOST_AFTER_S = 15.0
REPLICAS_MAX = 10_000  # per pool


class ReplicaState(IntEnum):
    """States of control.proto, with the same numbers."""

    STARTING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4
    LOST = 5
    STOPPED = 6
    SLEEPING = 7


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is or was connected.

    Attributes:
        absent_s: Seconds since its watch ended; 0 while it is open.
        is_gone: Whether the router said goodbye, or its address refuses connections.
        here_s: Seconds since it connected.
    """

    id: str
    address: str
    absent_s: float
    is_gone: bool = False
    here_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its owner; `router_id` is empty before the first one.

    A draining cell is to be removed; `draining_s` is the time since that began.
    """

    id: str
    pool_id: str
    router_id: str = ""
    router_address: str = ""
    epoch: int = 0
    is_draining: bool = False
    draining_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that one replica needs; none: it is placed without regard to room.

    Attributes:
        memory_bytes: Memory of the machine, in bytes.
        accelerators: Number of accelerators.
        accelerator_memory_bytes: Bytes of memory on each accelerator; 0: any.
        is_dedicated: Whether no other replica may use its accelerators.
    """

    memory_bytes: int = 0
    accelerators: int = 0
    accelerator_memory_bytes: int = 0
    is_dedicated: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """The settings that decide about a pool's replicas.

    Attributes:
        replicas_wanted: Replicas that operators or the scaling loop want, or a rollout if that is
            more; with those that shall sleep.
        cell_replicas_max: Most replicas of each of its cells; 0 is one cell for all.
        prefill: Number of replicas that only prefill.
        decode: Number of replicas that only decode; the others do both.
        sleepers: Number of wanted replicas that shall sleep.
    """

    id: str
    engine: str
    replicas_wanted: int
    cell_replicas_max: int = 64
    prefill: int = 0
    decode: int = 0
    needs: Needs = Needs()
    sleepers: int = 0


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator of a node; a cordoned one is assigned to no replica."""

    index: int
    memory_bytes: int
    is_cordoned: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with an agent.

    Attributes:
        is_cordoned: Whether its agent found an accelerator broken.
        is_unschedulable: Whether operators want no new replicas on it.
        is_draining: Whether operators want it empty.
        is_distrusted: Whether so many of its replicas answered wrongly that it gets no others.
        memory_bytes: Memory of the machine, in bytes; None: not known.
        accelerators: All accelerators; None: not known.
        rack: Rack of the node; empty: not known.
    """

    id: str
    engines: frozenset[str]
    is_lost: bool
    is_cordoned: bool = False
    is_unschedulable: bool = False
    is_draining: bool = False
    is_distrusted: bool = False
    memory_bytes: int | None = None
    accelerators: tuple[Accelerator, ...] | None = None
    rack: str = ""

    @property
    def is_schedulable(self) -> bool:
        """Whether new replicas may be placed on it."""
        is_left = self.is_lost or self.is_draining
        return not (is_left or self.is_cordoned or self.is_unschedulable or self.is_distrusted)


@dataclass(frozen=True, slots=True)
class Holdback:
    """Replicas that are not replaced for a while, because some answered wrongly.

    Attributes:
        pools: Number of wanted replicas that are not created, by pool.
        nodes: Nodes that get no new replica.
    """

    pools: Mapping[str, int]
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica: its desired state, and its agent's last report.

    Attributes:
        accelerators: Indices of its accelerators on the node; none: it may use all.
        reserved: Resources that its pool needed when it was made.
        sleeps: Whether the replica shall sleep.
    """

    id: str
    pool_id: str
    cell_id: str
    node_id: str
    is_draining: bool = False
    state: ReplicaState = ReplicaState.STARTING
    grpc_address: str = ""
    role: str = ""
    accelerators: tuple[int, ...] = ()
    reserved: Needs = Needs()
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """An agent's report on one replica."""

    state: ReplicaState
    grpc_address: str


def assign_roles(pools: Iterable[Pool], replicas: Iterable[Replica]) -> dict[str, str]:
    """Return the replicas whose role changes, with the new one; empty is both.

    In a complete pool the first `prefill` replicas by id prefill, the next `decode` ones decode,
    evenly over its cells. A replica keeps its role for as long as the pool has it: later replicas
    fill vacant roles. While replicas are missing both roles get fewer, and at least one replica is
    left for the other half of the work.
    """
    counted: dict[str, list[Replica]] = {}
    for replica in sorted(replicas, key=lambda replica: replica.id):
        if not replica.is_draining and replica.state is not ReplicaState.LOST:
            counted.setdefault(replica.pool_id, []).append(replica)
    changed: dict[str, str] = {}
    for pool in pools:
        own = counted.get(pool.id, [])
        configured = {"prefill": pool.prefill, "decode": pool.decode}
        having: dict[str, list[Replica]] = {role: [] for role in configured}
        waiting: dict[str, deque[Replica]] = {}  # by cell
        for replica in own:
            if len(having.get(replica.role, ())) < configured.get(replica.role, 0):
                having[replica.role].append(replica)
            else:
                waiting.setdefault(replica.cell_id, deque()).append(replica)
        for role, target in zip(configured, _role_targets(pool, len(own)), strict=True):
            in_cell = Counter(replica.cell_id for replica in having[role])
            for _ in range(target - in_cell.total()):
                cell_id = min(
                    (cell_id for cell_id, queue in waiting.items() if queue),
                    key=lambda cell_id: (in_cell[cell_id], waiting[cell_id][0].id),
                    default=None,
                )
                if cell_id is None:
                    break
                having[role].append(waiting[cell_id].popleft())
                in_cell[cell_id] += 1
        roles = {replica.id: role for role, held in having.items() for replica in held}
        changed |= {r.id: roles.get(r.id, "") for r in own if r.role != roles.get(r.id, "")}
    return changed


def _role_targets(pool: Pool, there: int) -> tuple[int, int]:
    """Return how many of the present replicas should only prefill, and only decode."""
    both = pool.prefill + pool.decode
    if both <= there and max(pool.prefill, pool.decode) < there:
        return pool.prefill, pool.decode
    if there < 2:
        return 0, 0
    prefill = min(pool.prefill, there - 1, max(1, there * pool.prefill // both))
    return prefill, min(pool.decode, there - max(prefill, 1))


def assign_sleep(pools: Iterable[Pool], replicas: Iterable[Replica]) -> dict[str, bool]:
    """Return the replicas that shall change between sleep and service.

    Sleepers stay asleep, and the longest sleepers wake first. A serving replica falls asleep only
    when enough others are ready; a starting one may be meant to sleep from the beginning.
    """
    counted: dict[str, list[Replica]] = {}
    for replica in sorted(replicas, key=lambda replica: replica.id):
        if not (replica.is_draining or has_ended(replica)):
            counted.setdefault(replica.pool_id, []).append(replica)
    changed: dict[str, bool] = {}
    for pool in pools:
        own = counted.get(pool.id, [])
        asleep = [it for it in own if it.sleeps]
        awake = [it for it in own if not it.sleeps]
        needed = pool.replicas_wanted - pool.sleepers
        waking = max(0, len(asleep) - pool.sleepers, needed - len(awake))
        for replica in asleep[:waking]:
            changed[replica.id] = False
        missing = min(pool.sleepers - len(asleep), len(awake) - needed)
        ready = sum(it.state is ReplicaState.READY for it in awake)
        for replica in reversed(awake):
            if missing <= 0:
                break
            is_ready = replica.state is ReplicaState.READY
            if not is_ready or ready > needed:
                changed[replica.id] = True
                missing -= 1
                ready -= is_ready
    return changed


def worth(replica: Replica) -> int:
    """Grade replicas for keeping: ready ones first, then those that may become ready."""
    grades = {
        ReplicaState.READY: 4,
        ReplicaState.SLEEPING: 3,
        ReplicaState.STARTING: 2,
        ReplicaState.DRAINING: 1,
    }
    return grades.get(replica.state, 0)


def has_ended(replica: Replica) -> bool:
    """Return whether no process of a replica runs."""
    return replica.state in {ReplicaState.STOPPED, ReplicaState.FAILED, ReplicaState.LOST}


def observe(replicas: Iterable[Replica], report: Mapping[str, Observed]) -> list[Replica]:
    """Return the node's replicas that its agent's report changes.

    The report is complete: a replica that it leaves out does not run there. A draining replica has
    then ended; another one is about to be started (again). Reports on unwanted replicas change
    nothing: the agent gets the order to stop them.
    """
    changed: list[Replica] = []
    for known in replicas:
        seen = report.get(known.id)
        if seen is None:
            state = ReplicaState.STOPPED if known.is_draining else ReplicaState.STARTING
            seen = Observed(state, "")
        now = replace(known, state=seen.state, grpc_address=seen.grpc_address)
        if now != known:
            changed.append(now)
    return changed
