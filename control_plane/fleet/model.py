"""What the fleet should look like; pure decisions over records.

Which replicas to create, drain and forget, what each is for, and what an agent's report changes;
cells are decided about in `control_plane.fleet.cells`. Each function is idempotent: applied to its
own result it changes nothing more.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heapify, heapreplace

# An agent's heartbeat comes every 5 s; three missed ones mean the node is lost.
NODE_LOST_AFTER_S = 15.0


class ReplicaState(IntEnum):
    """States of control.proto, with the same numbers."""

    STARTING = 1
    READY = 2
    DRAINING = 3
    FAILED = 4
    LOST = 5
    STOPPED = 6


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is or was there.

    Attributes:
        absent_s: 0 while its watch is open.
        is_gone: It said goodbye, or nobody listens at its address any more.
        here_s: Since it came.
    """

    id: str
    address: str
    absent_s: float
    is_gone: bool = False
    here_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its owner; `router_id` is empty before the first one.

    A cell that is draining is to be removed; `draining_s` says since when.
    """

    id: str
    pool_id: str
    router_id: str = ""
    router_address: str = ""
    epoch: int = 0
    is_draining: bool = False
    draining_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """What decides about a pool's replicas.

    Attributes:
        cell_replicas_max: Of each of its cells; 0 is one cell for all.
        prefill: How many replicas only prefill.
        decode: How many only decode; the others do both.
    """

    id: str
    engine: str
    replicas_wanted: int
    cell_replicas_max: int = 64
    prefill: int = 0
    decode: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with an agent; `is_cordoned` when its agent found an accelerator broken."""

    id: str
    engines: frozenset[str]
    is_lost: bool
    is_cordoned: bool = False


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica: what is wanted of it, and what its agent last said."""

    id: str
    pool_id: str
    cell_id: str
    node_id: str
    is_draining: bool = False
    state: ReplicaState = ReplicaState.STARTING
    grpc_address: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """What an agent says about one replica."""

    state: ReplicaState
    grpc_address: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Changes that bring the replicas to what is wanted."""

    create: tuple[Replica, ...] = ()
    drain: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()

    def applied(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Return the replicas as they are after these changes."""
        drain, forget = set(self.drain), set(self.forget)
        kept = (replica for replica in replicas if replica.id not in forget)
        return [
            *(replace(r, is_draining=True) if r.id in drain else r for r in kept),
            *self.create,
        ]


def plan_replicas(
    pools: Iterable[Pool],
    cells: Mapping[str, Sequence[str]],
    nodes: Iterable[Node],
    replicas: Sequence[Replica],
    new_id: Callable[[], str],
) -> Plan:
    """Return what to create, drain and forget so that every pool has the replicas it wants.

    A replica counts while it is neither draining, nor lost with its node, nor ended on a node that
    is cordoned. Such a one is forgotten once enough others are ready, so that a node that returns
    soon finds its work still wanted. A cordoned node gets nothing new.

    Args:
        pools: All pools.
        cells: Of each pool that has any, the cells for new replicas; the smallest gets the next.
        nodes: All nodes.
        replicas: All replicas.
        new_id: Source of ids; sorted by time.
    """
    known = list(nodes)
    cordoned = {node.id for node in known if node.is_cordoned}
    live = [node for node in known if not node.is_lost and not node.is_cordoned]
    load = Counter(replica.node_id for replica in replicas if not replica.is_draining)
    create: list[Replica] = []
    drain: list[str] = []
    forget = [replica.id for replica in replicas if replica.is_draining and _has_ended(replica)]
    for pool in sorted(pools, key=lambda pool: pool.id):
        wanted_ones = [r for r in replicas if r.pool_id == pool.id and not r.is_draining]
        stranded = {r.id for r in wanted_ones if _is_stranded(r, cordoned)}
        counted = [r for r in wanted_ones if r.id not in stranded]
        homes = cells.get(pool.id, ())
        surplus = _most_useful_first(counted, homes)[pool.replicas_wanted :]
        drain += [replica.id for replica in surplus if not _has_ended(replica)]
        forget += [replica.id for replica in surplus if _has_ended(replica)]
        ready = sum(replica.state is ReplicaState.READY for replica in counted)
        if ready >= pool.replicas_wanted:
            forget += sorted(stranded)
        hosts = [node.id for node in live if pool.engine in node.engines]
        missing = pool.replicas_wanted - len(counted) if hosts and homes else 0
        sizes = Counter(replica.cell_id for replica in counted)
        least_loaded = [(load[node_id], node_id) for node_id in hosts]
        heapify(least_loaded)
        for _ in range(missing):
            host = least_loaded[0][1]
            load[host] += 1
            heapreplace(least_loaded, (load[host], host))
            home = min(homes, key=lambda cell_id: sizes[cell_id])
            sizes[home] += 1
            create.append(Replica(new_id(), pool.id, home, host))
    return Plan(tuple(create), tuple(drain), tuple(forget))


def _is_stranded(replica: Replica, cordoned: AbstractSet[str]) -> bool:
    """Whether nothing will come of a replica where it is."""
    is_lost = replica.state is ReplicaState.LOST
    return is_lost or (replica.node_id in cordoned and _has_ended(replica))


def _most_useful_first(replicas: Iterable[Replica], homes: Sequence[str]) -> list[Replica]:
    """Order a pool's replicas by which are kept: those that serve, in cells that stay, oldest.

    Cells take turns, so that they shrink evenly.
    """
    ordered = sorted(replicas, key=lambda r: (-worth(r), r.id))
    seen: Counter[str] = Counter()
    graded: list[tuple[int, bool, int, str, Replica]] = []
    for replica in ordered:
        turn = seen[replica.cell_id]
        seen[replica.cell_id] += 1
        graded.append((-worth(replica), replica.cell_id not in homes, turn, replica.id, replica))
    return [grade[-1] for grade in sorted(graded, key=lambda grade: grade[:-1])]


def assign_roles(pools: Iterable[Pool], replicas: Iterable[Replica]) -> dict[str, str]:
    """Return the replicas whose role changes, with the new one; empty is both.

    In a pool that has all its replicas the first `prefill` ones by id prefill, the next `decode`
    ones decode, evenly over its cells. A replica keeps its role for as long as the pool has it: who
    comes later fills what is vacant. While replicas are missing both roles get fewer, and always
    somebody is left for the other half of the work.
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
    """Return how many of the replicas that are there should only prefill, and only decode."""
    both = pool.prefill + pool.decode
    if both <= there and max(pool.prefill, pool.decode) < there:
        return pool.prefill, pool.decode
    if there < 2:
        return 0, 0
    prefill = min(pool.prefill, there - 1, max(1, there * pool.prefill // both))
    return prefill, min(pool.decode, there - max(prefill, 1))


def worth(replica: Replica) -> int:
    """Grade by which replicas are kept: ready ones, then those that may become so."""
    grades = {ReplicaState.READY: 3, ReplicaState.STARTING: 2, ReplicaState.DRAINING: 1}
    return grades.get(replica.state, 0)


def _has_ended(replica: Replica) -> bool:
    return replica.state in {ReplicaState.STOPPED, ReplicaState.FAILED, ReplicaState.LOST}


def observe(replicas: Iterable[Replica], report: Mapping[str, Observed]) -> list[Replica]:
    """Return the node's replicas that its agent's report changes.

    The report is complete: what it leaves out does not run there. That is the end of a draining
    replica; another one is about to be started (again). Reports about replicas that nobody wants
    any more change nothing: the agent is told to stop them.
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
