"""What the fleet should look like; pure decisions over records.

Who owns a cell, which replicas to create, drain and forget, and what an agent's report changes.
Each function is idempotent: applied to its own result it changes nothing more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import IntEnum

# A router that vanished may be restarting: its cells wait this long for it.
ROUTER_GRACE_S = 2.0
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
    """A router that is or was there. `absent_s` is 0 while its watch is open."""

    id: str
    address: str
    absent_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its owner; `router_id` is empty before the first one."""

    id: str
    pool_id: str
    router_id: str = ""
    router_address: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """What decides about a pool's replicas."""

    id: str
    engine: str
    replicas_wanted: int


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


def assign_cells(
    cells: Iterable[Cell], routers: Mapping[str, Router], *, may_take: bool
) -> list[Cell]:
    """Return the cells that get another owner, or the same one at another address.

    A cell stays with its owner while that lives, and for `ROUTER_GRACE_S` after. Then it goes to
    the live router with the fewest cells. When no router lives it stays where it is: gateways see
    for themselves whether a router answers, and our own view may be what is wrong.

    Args:
        cells: All cells.
        routers: By id; those that were never seen, or long ago, may be missing.
        may_take: False while we cannot know who lives, e.g. shortly after our own start: owners
            then keep their cells, however absent.
    """
    ordered = sorted(cells, key=lambda cell: cell.id)
    live = sorted(router.id for router in routers.values() if router.absent_s <= 0)
    owned = Counter(cell.router_id for cell in ordered)
    changed: list[Cell] = []
    for cell in ordered:
        owner = routers.get(cell.router_id)
        if owner is not None and owner.absent_s <= 0:
            chosen = owner
        elif not live or (cell.router_id and not _is_gone(owner, may_take=may_take)):
            continue
        else:
            chosen = routers[min(live, key=lambda router_id: (owned[router_id], router_id))]
        if (chosen.id, chosen.address) == (cell.router_id, cell.router_address):
            continue
        owned[cell.router_id] -= 1
        owned[chosen.id] += 1
        changed.append(
            replace(cell, router_id=chosen.id, router_address=chosen.address, epoch=cell.epoch + 1)
        )
    return changed


def _is_gone(owner: Router | None, *, may_take: bool) -> bool:
    return may_take and (owner is None or owner.absent_s > ROUTER_GRACE_S)


def plan_replicas(
    pools: Iterable[Pool],
    cells: Mapping[str, str],
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
        cells: The cell of each pool that has one.
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
        oldest_first = sorted(counted, key=lambda replica: replica.id)
        surplus = sorted(oldest_first, key=_worth, reverse=True)[pool.replicas_wanted :]
        drain += [replica.id for replica in surplus if not _has_ended(replica)]
        forget += [replica.id for replica in surplus if _has_ended(replica)]
        ready = sum(replica.state is ReplicaState.READY for replica in counted)
        if ready >= pool.replicas_wanted:
            forget += sorted(stranded)
        hosts = [node.id for node in live if pool.engine in node.engines]
        missing = pool.replicas_wanted - len(counted) if hosts and pool.id in cells else 0
        for _ in range(missing):
            host = min(hosts, key=lambda node_id: (load[node_id], node_id))
            load[host] += 1
            create.append(Replica(new_id(), pool.id, cells[pool.id], host))
    return Plan(tuple(create), tuple(drain), tuple(forget))


def _is_stranded(replica: Replica, cordoned: AbstractSet[str]) -> bool:
    """Whether nothing will come of a replica where it is."""
    is_lost = replica.state is ReplicaState.LOST
    return is_lost or (replica.node_id in cordoned and _has_ended(replica))


def _worth(replica: Replica) -> int:
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
