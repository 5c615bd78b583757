"""Splits pools into cells, and assigns cells to routers. Pure decisions over records.

One router owns each cell, and has exact records of its replicas. Replicas move between cells only
if necessary, because the queue of the old cell then has fewer replicas. Running requests stay with
the old cell's router.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from control_plane.fleet.model import Cell, Pool, Replica, ReplicaState, Router, worth

# Seconds for which a router keeps its cells after its watch has closed, because it may reconnect. A
# router that announced its end, or whose address refuses connections, loses its cells at once.
ROUTER_GRACE_S = 1.0
# Seconds for which waiting requests may still be served in a cell that will be removed.
CELL_DRAIN_S = 5.0
# A surplus cell is kept if the other cells would be fuller than this share without it. So a varying
# number of replicas does not create and drain a cell again and again.
_FULL_SHARE = 0.75
# Rebalancing moves one cell at a time, a minute after the last change of cells or routers. The old
# router's load must be a third larger than the new router's load.
REBALANCE_PAUSE_S = 60.0
_UNEVEN_FACTOR = 4 / 3


@dataclass(frozen=True, slots=True)
class Spread:
    """The changes after which every pool has its cells, and every replica is in a cell.

    Attributes:
        create: New cells.
        drain: Cells to be removed, which receive no new requests from now on.
        revive: Draining cells that are needed again.
        move: Replicas that change their cell, as replica id -> cell id.
        remove: Cells that have drained and have no replicas left.
        open: Cells to which new replicas may be added, by pool, in the order of the cells.
    """

    create: tuple[Cell, ...]
    drain: tuple[str, ...]
    revive: tuple[str, ...]
    move: Mapping[str, str]
    remove: tuple[str, ...]
    open: Mapping[str, tuple[str, ...]]

    @property
    def is_change(self) -> bool:
        """Whether there are any changes."""
        return any((self.create, self.drain, self.revive, self.move, self.remove))


def sizes(replicas: Iterable[Replica]) -> Counter[str]:
    """Return the number of replicas in each cell, without draining or lost replicas."""
    return Counter(replica.cell_id for replica in replicas if _counts(replica))


def _counts(replica: Replica) -> bool:
    return not replica.is_draining and replica.state is not ReplicaState.LOST


def cell_count(pool: Pool, existing: int) -> int:
    """Return the number of cells that a pool with `existing` cells should have."""
    limit = pool.cell_replicas_max
    if not limit:
        return 1
    needed = max(1, ceil(pool.replicas_wanted / limit))
    tolerated = min(ceil(pool.replicas_wanted / (limit * _FULL_SHARE)), pool.replicas_wanted)
    return max(needed, min(existing, tolerated))


def spread_pools(
    pools: Iterable[Pool], cells: Iterable[Cell], replicas: Iterable[Replica]
) -> Spread:
    """Return the changes after which every pool has its cells, none with too many replicas.

    The cells of pool `p` are named `p-0`, `p-1` and so on, and the last cells are removed first. A
    running replica stays in its cell unless the cell has drained or has too many replicas. New
    replicas are added to the smallest cell.
    """
    cells_of: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell.id):
        cells_of[cell.pool_id].append(cell)
    members: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in sorted(replicas, key=lambda replica: replica.id):
        members[replica.cell_id].append(replica)
    create: list[Cell] = []
    drain: list[str] = []
    revive: list[str] = []
    remove: list[str] = []
    move: dict[str, str] = {}
    opened: dict[str, tuple[str, ...]] = {}
    for pool in sorted(pools, key=lambda pool: pool.id):
        own = {cell.id: cell for cell in cells_of[pool.id]}
        count = cell_count(pool, sum(not cell.is_draining for cell in own.values()))
        wanted = opened[pool.id] = tuple(f"{pool.id}-{number}" for number in range(count))
        create += [Cell(cell_id, pool.id) for cell_id in wanted if cell_id not in own]
        revive += [cell_id for cell_id in wanted if cell_id in own and own[cell_id].is_draining]
        leaving = [cell for cell in own.values() if cell.id not in wanted]
        drain += [cell.id for cell in leaving if not cell.is_draining]
        drained = [c for c in leaving if c.is_draining and c.draining_s >= CELL_DRAIN_S]
        remove += [cell.id for cell in drained if not members[cell.id]]
        homeless = [r for cell in drained for r in members[cell.id] if not r.is_draining]
        move |= _moves(pool, wanted, members, homeless)
    return Spread(tuple(create), tuple(drain), tuple(revive), move, tuple(remove), opened)


def _moves(
    pool: Pool,
    wanted: Sequence[str],
    members: Mapping[str, Sequence[Replica]],
    homeless: Sequence[Replica],
) -> dict[str, str]:
    """Return the moves of replicas without a cell and from overfull cells, as replica -> cell."""
    size = {cell_id: sum(map(_counts, members.get(cell_id, ()))) for cell_id in wanted}
    moved: dict[str, str] = {}

    def smallest() -> str:
        return min(wanted, key=lambda cell_id: size[cell_id])

    for replica in homeless:
        moved[replica.id] = target = smallest()
        size[target] += _counts(replica)
    limit = pool.cell_replicas_max
    for cell_id in wanted if limit else ():
        # Replicas that do not serve yet are moved first, then the newest replicas.
        newest_first = reversed([r for r in members.get(cell_id, ()) if _counts(r)])
        for replica in sorted(newest_first, key=worth):
            target = smallest()
            if size[cell_id] <= limit or size[target] >= limit:
                break
            moved[replica.id] = target
            size[cell_id] -= 1
            size[target] += 1
    return moved


def assign_cells(
    cells: Iterable[Cell],
    routers: Mapping[str, Router],
    replicas_of: Mapping[str, int],
    *,
    may_take: bool,
) -> list[Cell]:
    """Return the cells with another owner, or with a new address of their owner.

    A cell keeps its owner until the owner is known to have ended, or has been absent for
    `ROUTER_GRACE_S`. Then the live router with the fewest replicas becomes the owner. If no router
    is live, the cell keeps its owner, because this process may itself be disconnected. Gateways
    also check whether a router answers.

    Args:
        cells: All cells.
        routers: Routers by id. Routers that were never seen or have long been absent may be
            missing.
        replicas_of: Number of replicas by cell. A missing cell has none.
        may_take: Whether owners may be replaced. False while it is unknown which routers are live,
            for example shortly after this process started.
    """
    largest_first = sorted(cells, key=lambda cell: (-replicas_of.get(cell.id, 0), cell.id))
    live = sorted(router.id for router in routers.values() if router.absent_s <= 0)
    owned = _loads(largest_first, replicas_of)
    of_pool = Counter((cell.router_id, cell.pool_id) for cell in largest_first)
    changed: list[Cell] = []
    for cell in largest_first:
        owner = routers.get(cell.router_id)
        if owner is not None and owner.absent_s <= 0:
            chosen = owner
        elif not live or (cell.router_id and not _is_lost(owner, may_take=may_take)):
            continue
        else:
            pool_id = cell.pool_id
            chosen = routers[min(live, key=lambda r: (owned[r], of_pool[r, pool_id], r))]
        if (chosen.id, chosen.address) == (cell.router_id, cell.router_address):
            continue
        owned[cell.router_id] -= _weight(cell, replicas_of)
        owned[chosen.id] += _weight(cell, replicas_of)
        of_pool[cell.router_id, cell.pool_id] -= 1
        of_pool[chosen.id, cell.pool_id] += 1
        changed.append(_given(cell, chosen))
    return sorted(changed, key=lambda cell: cell.id)


def even_out(
    cells: Sequence[Cell],
    routers: Mapping[str, Router],
    replicas_of: Mapping[str, int],
    *,
    quiet_s: float,
) -> Cell | None:
    """Return a cell to move so that the routers' loads become more even, or None in most cases.

    A router's load is the number of replicas in its cells, at least one per cell. A new router
    receives no cell at once, because it may soon disconnect again. A move also makes the requests
    in the cell's queue wait again. After a quiet minute the router receives one cell, and one more
    each minute as long as a move makes two loads more even. So loads recover after a rolling
    restart or a crash without an operator. A router that crashes repeatedly receives no cells.

    Args:
        cells: All cells.
        routers: Routers by id.
        replicas_of: Number of replicas by cell.
        quiet_s: Seconds since a cell last changed its owner.
    """
    live = {router.id: router for router in routers.values() if router.absent_s <= 0}
    settled = {key for key, router in live.items() if router.here_s >= REBALANCE_PAUSE_S}
    is_quiet = quiet_s >= REBALANCE_PAUSE_S and all(cell.router_id in live for cell in cells)
    if not is_quiet or len(settled) < 2:
        return None
    loads = _loads(cells, replicas_of)
    least = min(settled, key=lambda router_id: (loads[router_id], router_id))
    for giver in sorted(settled, key=lambda router_id: (-loads[router_id], router_id)):
        gap = loads[giver] - loads[least]
        if loads[giver] < _UNEVEN_FACTOR * loads[least]:
            return None
        movable = [
            cell
            for cell in cells
            if cell.router_id == giver and not cell.is_draining and _weight(cell, replicas_of) < gap
        ]
        if movable:
            best = min(movable, key=lambda c: (abs(gap - 2 * _weight(c, replicas_of)), c.id))
            return _given(best, live[least])
    return None


def _loads(cells: Iterable[Cell], replicas_of: Mapping[str, int]) -> Counter[str]:
    loads: Counter[str] = Counter()
    for cell in cells:
        loads[cell.router_id] += _weight(cell, replicas_of)
    return loads


def _weight(cell: Cell, replicas_of: Mapping[str, int]) -> int:
    """Return a cell's weight in its router's load, which is its number of replicas, at least 1."""
    return max(1, replicas_of.get(cell.id, 0))


def _given(cell: Cell, router: Router) -> Cell:
    return replace(cell, router_id=router.id, router_address=router.address, epoch=cell.epoch + 1)


def _is_lost(owner: Router | None, *, may_take: bool) -> bool:
    return may_take and (owner is None or owner.is_gone or owner.absent_s > ROUTER_GRACE_S)
