"""Records of the fleet, and decisions about the roles, the sleep and the states of replicas. Pure.

`control_plane.fleet.planner` decides the creation, drain and removal of replicas, and
`control_plane.fleet.cells` decides about cells. Each function is idempotent, so that a second
application to its own result changes nothing.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

# Seconds of silence after which a node is lost. Agents send a heartbeat every 5 s, so three
# heartbeats are missing.
NODE_LOST_AFTER_S = 15.0
REPLICAS_MAX = 10_000  # largest number of replicas per pool


class ReplicaState(IntEnum):
    """The states of a replica in control.proto, with the same numbers."""

    STARTING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4
    LOST = 5
    STOPPED = 6
    SLEEPING = 7


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is connected or was connected before.

    Attributes:
        absent_s: Seconds since the router's watch ended, or 0 while the watch is open.
        is_gone: Whether the router announced its end, or its address refuses connections.
        here_s: Seconds since the router connected.
    """

    id: str
    address: str
    absent_s: float
    is_gone: bool = False
    here_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its owner. `router_id` is empty before the cell has its first owner.

    A draining cell will be removed. `draining_s` are the seconds since the drain began.
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
    """The resources that one replica needs.

    Without needs a replica is placed without a check for room.

    Attributes:
        memory_bytes: Main memory of the machine, in bytes.
        accelerators: Number of accelerators.
        accelerator_memory_bytes: Memory on each accelerator in bytes, or 0 for any amount.
        is_dedicated: Whether no other replica may use the replica's accelerators.
    """

    memory_bytes: int = 0
    accelerators: int = 0
    accelerator_memory_bytes: int = 0
    is_dedicated: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """The settings of a pool that determine its replicas.

    Attributes:
        replicas_wanted: Number of replicas that operators or the scaling loop have set. If rollouts
            need more replicas, their number applies. Sleeping replicas are included.
        cell_replicas_max: Largest number of replicas per cell, or 0 for one cell with all replicas.
        prefill: Number of replicas that only prefill.
        decode: Number of replicas that only decode. The remaining replicas do both.
        sleepers: Number of wanted replicas that should sleep.
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
    """An accelerator of a node. A cordoned accelerator is assigned to no replica."""

    index: int
    memory_bytes: int
    is_cordoned: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with an agent.

    Attributes:
        is_cordoned: Whether the node's agent found a broken accelerator.
        is_unschedulable: Whether operators want no new replicas on the node.
        is_draining: Whether operators want all replicas moved off the node.
        is_distrusted: Whether the node receives no new replicas because too many of its replicas
            answered wrongly.
        memory_bytes: Main memory of the machine in bytes, or None if unknown.
        accelerators: All accelerators of the node, or None if unknown.
        rack: Rack of the node, or empty if unknown.
        is_vacated: Whether scaling moves the node's replicas away, or has done so. The node then
            receives a new replica only if no other node has room.
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
    is_vacated: bool = False

    @property
    def is_schedulable(self) -> bool:
        """Whether new replicas may be placed on the node."""
        is_left = self.is_lost or self.is_draining
        return not (is_left or self.is_cordoned or self.is_unschedulable or self.is_distrusted)


@dataclass(frozen=True, slots=True)
class Holdback:
    """Limits on new replicas while too many replicas answer wrongly.

    Attributes:
        pools: Number of wanted replicas that are not created at present, by pool.
        nodes: Ids of nodes that receive no new replicas at present.
    """

    pools: Mapping[str, int]
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica, with its desired state and its agent's last report.

    Attributes:
        accelerators: Indices of the replica's accelerators on its node. If empty, the replica may
            use all accelerators.
        reserved: Resources that the replica's pool needed when the replica was created.
        sleeps: Whether the replica should sleep.
        moves_to: Node on which a new replica shall replace this one, or empty.
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
    moves_to: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """An agent's report on one replica."""

    state: ReplicaState
    grpc_address: str


def assign_roles(pools: Iterable[Pool], replicas: Iterable[Replica]) -> dict[str, str]:
    """Return the replicas whose role changes, with the new role. An empty role means both.

    In a complete pool the first `prefill` replicas by id only prefill, and the next `decode`
    replicas only decode, spread evenly over the cells. A replica keeps its role as long as the pool
    has this role, and later replicas fill vacant roles. While replicas are missing, both roles have
    fewer replicas. No role then has all replicas, because each request needs prefill and decode.
    If all ready replicas of a cell only prefill, the first of them fills another vacant role, or
    does both. A replica that sleeps has no role until it is woken.
    """
    counted: dict[str, list[Replica]] = {}
    ordered = sorted(replicas, key=lambda replica: replica.id)
    changed = {it.id: "" for it in ordered if it.sleeps and it.role}
    for replica in ordered:
        if not (replica.is_draining or replica.sleeps or replica.state is ReplicaState.LOST):
            counted.setdefault(replica.pool_id, []).append(replica)
    for pool in pools:
        own = counted.get(pool.id, [])
        configured = {"prefill": pool.prefill, "decode": pool.decode}
        having: dict[str, list[Replica]] = {role: [] for role in configured}
        waiting: dict[str, deque[Replica]] = {}  # replicas without a role, by cell
        lone = _lone_prefills(own, {replica.id: replica.role for replica in own})
        for replica in own:
            is_kept = len(having.get(replica.role, ())) < configured.get(replica.role, 0)
            if is_kept and replica.id not in lone:
                having[replica.role].append(replica)
            else:
                waiting.setdefault(replica.cell_id, deque()).append(replica)
        for role, target in zip(configured, role_targets(pool, len(own)), strict=True):
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
        for replica_id in _lone_prefills(own, roles):
            del roles[replica_id]
        changed |= {r.id: roles.get(r.id, "") for r in own if r.role != roles.get(r.id, "")}
    return changed


def _lone_prefills(replicas: Iterable[Replica], roles: Mapping[str, str]) -> list[str]:
    """Return the first ready replica of each cell whose ready replicas all only prefill."""
    ready: dict[str, list[str]] = {}
    for replica in replicas:
        if replica.state is ReplicaState.READY:
            ready.setdefault(replica.cell_id, []).append(replica.id)
    return [ids[0] for ids in ready.values() if all(roles.get(it) == "prefill" for it in ids)]


def role_targets(pool: Pool, there: int) -> tuple[int, int]:
    """Return how many present replicas should only prefill, and how many should only decode."""
    both = pool.prefill + pool.decode
    if both <= there and max(pool.prefill, pool.decode) < there:
        return pool.prefill, pool.decode
    if there < 2:
        return 0, 0
    prefill = min(pool.prefill, there - 1, max(1, there * pool.prefill // both))
    return prefill, min(pool.decode, there - max(prefill, 1))


def assign_sleep(pools: Iterable[Pool], replicas: Iterable[Replica]) -> dict[str, bool]:
    """Return the replicas that should fall asleep (True) or wake (False), by id.

    Sleeping replicas stay asleep if possible, and the longest sleepers are woken first. A serving
    replica is put to sleep only when enough other replicas are ready. A replica of a role that the
    pool has too often sleeps first. A starting replica may be planned to sleep from the beginning.
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
        surplus = surplus_of(pool, awake)
        for replica in sorted(awake, key=lambda it: (it.id in surplus, it.id), reverse=True):
            if missing <= 0:
                break
            is_ready = replica.state is ReplicaState.READY
            if not is_ready or ready > needed:
                changed[replica.id] = True
                missing -= 1
                ready -= is_ready
    return changed


def surplus_of(pool: Pool, replicas: Iterable[Replica]) -> set[str]:
    """Return the replicas of roles that the pool has too often, of which the first ones stay."""
    left = Counter({"prefill": pool.prefill, "decode": pool.decode})
    left[""] = max(0, pool.replicas_wanted - left.total())
    surplus: set[str] = set()
    for replica in replicas:
        left[replica.role] -= 1
        if left[replica.role] < 0:
            surplus.add(replica.id)
    return surplus


def worth(replica: Replica) -> int:
    """Return a grade for keeping a replica, from 4 (ready) to 0 (failed, lost or stopped).

    Between them, a replica that may be ready sooner has a higher grade.
    """
    grades = {
        ReplicaState.READY: 4,
        ReplicaState.SLEEPING: 3,
        ReplicaState.STARTING: 2,
        ReplicaState.DRAINING: 1,
    }
    return grades.get(replica.state, 0)


def has_ended(replica: Replica) -> bool:
    """Return whether a replica has no running process."""
    return replica.state in {ReplicaState.STOPPED, ReplicaState.FAILED, ReplicaState.LOST}


def observe(replicas: Iterable[Replica], report: Mapping[str, Observed]) -> list[Replica]:
    """Return the replicas of a node that change by the report of the node's agent.

    The report is complete, so a replica that is missing in the report does not run on the node. If
    a draining replica is missing, it has ended. Any other missing replica is about to be started.
    Reports on unwanted replicas change nothing, because the agent is ordered to stop them.
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
