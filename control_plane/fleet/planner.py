"""Plans which replicas to create, drain and delete, with reasons for missing replicas. Pure.

A second plan, after the first is applied, changes nothing. If a bound limited the first plan, the
second plan continues it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from control_plane.fleet.model import (
    Holdback,
    Node,
    Pool,
    Replica,
    ReplicaState,
    has_ended,
    surplus_of,
    worth,
)
from control_plane.fleet.placement import Placement, in_order

CREATED_MAX = 100  # largest number of new replicas of a pool per step
DRAINING_MAX = 4  # largest number of replicas of a pool that leave draining nodes at the same time
DRAINED = "empty"
NO_HOLDBACK = Holdback({}, frozenset())
_NOWHERE: Mapping[str, AbstractSet[str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Condition:
    """The reason why a pool has fewer replicas than wanted.

    Attributes:
        text: Text for operators.
        unplaced: Number of wanted replicas without a place.
    """

    text: str
    unplaced: int


def _no_conditions() -> dict[str, Condition]:
    return {}


def _no_notes() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """The changes after which the replicas are in the desired state.

    Attributes:
        conditions: Reason for replicas without a place, by pool. Reasons are reports, so they do
            not affect the equality of plans.
        notes: Progress of each draining node, as text.
    """

    create: tuple[Replica, ...] = ()
    drain: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    conditions: Mapping[str, Condition] = field(default_factory=_no_conditions, compare=False)
    notes: Mapping[str, str] = field(default_factory=_no_notes, compare=False)

    def applied(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Return the replicas after these changes."""
        drain, forget = set(self.drain), set(self.forget)
        kept = (replica for replica in replicas if replica.id not in forget)
        return [
            *(replace(r, is_draining=True) if r.id in drain else r for r in kept),
            *self.create,
        ]


@dataclass(frozen=True, slots=True)
class _Members:
    """The replicas of a pool, grouped for planning.

    Attributes:
        going: Number of draining replicas on draining nodes.
        stranded: Replicas that can never serve again on their nodes.
        staying: Other counted replicas, on nodes that are not draining.
        leaving: Counted replicas on draining nodes.
        moving: Staying replicas that another replica shall replace on a given node.
    """

    going: int
    stranded: list[Replica]
    staying: list[Replica]
    leaving: list[Replica]
    moving: list[Replica]


def plan_replicas(
    pools: Iterable[Pool],
    cells: Mapping[str, Sequence[str]],
    nodes: Iterable[Node],
    replicas: Sequence[Replica],
    new_id: Callable[[], str],
    holdback: Holdback = NO_HOLDBACK,
    ahead: Mapping[str, AbstractSet[str]] = _NOWHERE,
) -> FleetChanges:
    """Return the replicas to create, drain and delete so that every pool has its wanted number.

    A replica counts unless it is draining, is lost with its node, or has ended on a cordoned node.
    A replica that does not count is deleted only when enough other replicas are ready. So a node
    that soon returns still has its replicas. A cordoned, unschedulable or draining node receives no
    new replicas. Replicas of a draining node are replaced elsewhere first, and drain when the
    replacements are ready. If there is no room for a replacement, the pool runs with one replica
    less than wanted. A moving replica drains when its replacement and all other wanted replicas are
    ready. It stays if its new node has no room, or is lost.

    Args:
        pools: All pools.
        cells: Cells for new replicas, by pool. The next replica is added to the smallest cell.
        nodes: All nodes.
        replicas: All replicas.
        new_id: Returns a new id. Ids sort by time.
        holdback: Limits on new replicas while too many replicas answer wrongly.
        ahead: Nodes that fetch a pool's base ahead, by pool.
    """
    known = [replace(node, is_distrusted=node.id in holdback.nodes) for node in nodes]
    of_pool: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in replicas:
        of_pool[replica.pool_id].append(replica)
    cordoned = {node.id for node in known if node.is_cordoned}
    draining = {node.id for node in known if node.is_draining}
    placement = Placement(known, replicas, ahead)
    create: list[Replica] = []
    drain: list[str] = []
    forget = [replica.id for replica in replicas if replica.is_draining and has_ended(replica)]
    conditions: dict[str, Condition] = {}
    for pool in in_order(pools):
        members = _members(of_pool[pool.id], cordoned, draining)
        homes = cells.get(pool.id, ())
        held = holdback.pools.get(pool.id, 0)
        moved, members = _moved(pool, homes, members, placement, new_id, held)
        made, condition = _made(pool, homes, members.staying, placement, new_id, held)
        create += (*moved, *made)
        if condition is not None:
            conditions[pool.id] = condition
        surplus = _most_useful_first(members.staying, homes, pool)[pool.replicas_wanted :]
        surplus += _replaced(pool, members)
        for replica in (*surplus, *_may_leave(pool, members, has_room=condition is None)):
            (forget if has_ended(replica) else drain).append(replica.id)
        ready = sum(map(_is_ready, (*members.staying, *members.leaving)))
        if ready >= pool.replicas_wanted:
            forget += sorted(replica.id for replica in members.stranded)
    plan = FleetChanges(tuple(create), tuple(drain), tuple(forget), conditions)
    return replace(plan, notes=_notes(draining, plan.applied(replicas), conditions))


def _members(
    replicas: Iterable[Replica], cordoned: AbstractSet[str], draining: AbstractSet[str]
) -> _Members:
    wanted = [r for r in replicas if not r.is_draining]
    going = [r for r in replicas if r.is_draining and r.node_id in draining and not has_ended(r)]
    stranded = [r for r in wanted if _is_stranded(r, cordoned)]
    counted = [r for r in wanted if not _is_stranded(r, cordoned)]
    return _Members(
        len(going),
        stranded,
        [r for r in counted if r.node_id not in draining],
        [r for r in counted if r.node_id in draining],
        [r for r in counted if r.node_id not in draining and r.moves_to],
    )


def _is_stranded(replica: Replica, cordoned: AbstractSet[str]) -> bool:
    """Return whether a replica can never become ready on its node."""
    is_lost = replica.state is ReplicaState.LOST
    return is_lost or (replica.node_id in cordoned and has_ended(replica))


def _is_ready(replica: Replica) -> bool:
    return replica.state in {ReplicaState.READY, ReplicaState.SLEEPING}


def _moved(
    pool: Pool,
    homes: Sequence[str],
    members: _Members,
    placement: Placement,
    new_id: Callable[[], str],
    held: int,
) -> tuple[list[Replica], _Members]:
    """Return the new replicas that replace moving ones, and the members without the replaced.

    A replica whose replacement exists, or has just been made, no longer counts as staying. The
    replacement is the pool's replica on the new node. No move leads to a node that already has a
    replica of the pool.
    """
    made: list[Replica] = []
    staying, moving = list(members.staying), list[Replica]()
    for replica in members.moving:
        others = [it for it in staying if it.id != replica.id]
        if not any(it.node_id == replica.moves_to for it in others):
            is_wanted = homes and not held and len(others) < pool.replicas_wanted
            place = placement.place_on(pool, replica.moves_to) if is_wanted else None
            if place is None:
                continue
            sizes = Counter(it.cell_id for it in others)
            home = min(homes, key=lambda cell_id: sizes[cell_id])
            new = Replica(new_id(), pool.id, home, place.node_id)
            new = replace(new, accelerators=place.accelerators, reserved=pool.needs)
            made.append(new)
            others.append(new)
        staying = others
        moving.append(replica)
    return made, replace(members, staying=staying, moving=moving)


def _replaced(pool: Pool, members: _Members) -> list[Replica]:
    """Return the moving replicas that may leave, because enough other replicas are ready."""
    wanted = pool.replicas_wanted
    ready = sum(map(_is_ready, _most_useful_first(members.staying, (), pool)[:wanted]))
    return members.moving if ready >= wanted else []


def _made(
    pool: Pool,
    homes: Sequence[str],
    staying: Sequence[Replica],
    placement: Placement,
    new_id: Callable[[], str],
    held: int,
) -> tuple[list[Replica], Condition | None]:
    """Return the pool's new replicas, and the reason if there are fewer than needed."""
    wanted = pool.replicas_wanted - len(staying) if homes else 0
    held = max(0, min(held, wanted))
    missing = wanted - held
    sizes = Counter(replica.cell_id for replica in staying)
    made: list[Replica] = []
    while len(made) < min(missing, CREATED_MAX):
        place = placement.place(pool)
        if isinstance(place, str):
            placed = len(staying) + len(made)
            text = f"{placed} of {pool.replicas_wanted} placed: {place}"
            return made, Condition(text, wanted - len(made))
        home = min(homes, key=lambda cell_id: sizes[cell_id])
        sizes[home] += 1
        replica = Replica(new_id(), pool.id, home, place.node_id)
        made.append(replace(replica, accelerators=place.accelerators, reserved=pool.needs))
    if held:
        placed = len(staying) + len(made)
        text = (
            f"{placed} of {pool.replicas_wanted} placed: {held} answered wrongly and are not"
            " replaced within the hour; see `sluice fleet quarantines`"
        )
        return made, Condition(text, held)
    return made, None


def _may_leave(pool: Pool, members: _Members, *, has_room: bool) -> list[Replica]:
    """Return the replicas that may leave draining nodes now.

    Serving replicas leave when enough other replicas are ready. If there is no room for
    replacements, all but the last replica may leave, one at a time. Replicas that do not serve yet
    are started elsewhere at once.
    """
    wanted = pool.replicas_wanted
    floor = wanted if has_room else max(1, wanted - 1)
    kept = _most_useful_first(members.staying, (), pool)[:wanted]
    ready = sum(map(_is_ready, (*kept, *members.leaving)))
    left = DRAINING_MAX - members.going
    found: list[Replica] = []
    for replica in sorted(members.leaving, key=lambda r: (worth(r), r.id)):
        if has_ended(replica):
            found.append(replica)
        elif left > 0 and (ready - 1 >= floor if _is_ready(replica) else has_room):
            found.append(replica)
            left -= 1
            ready -= _is_ready(replica)
    return found


def _notes(
    draining: AbstractSet[str],
    replicas: Iterable[Replica],
    conditions: Mapping[str, Condition],
) -> dict[str, str]:
    """Return the progress of each draining node, with the reason if the drain waits."""
    on_node: dict[str, list[Replica]] = {node_id: [] for node_id in draining}
    for replica in replicas:
        if replica.node_id in on_node:
            on_node[replica.node_id].append(replica)
    notes: dict[str, str] = {}
    for node_id, held in on_node.items():
        going = sum(replica.is_draining for replica in held)
        waiting = Counter(replica.pool_id for replica in held if not replica.is_draining)
        said = [f"{going} finish what they run"] if going else []
        for pool_id, count in sorted(waiting.items()):
            condition = conditions.get(pool_id)
            reason = (
                f"room elsewhere: {condition.text}" if condition else "others to be ready instead"
            )
            said.append(f"{count} of pool {pool_id} wait for {reason}")
        notes[node_id] = "; ".join(said) or DRAINED
    return notes


def _most_useful_first(
    replicas: Iterable[Replica], homes: Sequence[str], pool: Pool
) -> list[Replica]:
    """Return a pool's replicas sorted for keeping, with serving replicas first.

    Replicas in cells that stay precede replicas in other cells. Replicas of a role that the pool
    has too often come later, and older replicas precede newer ones. The order alternates between
    the cells, so that the cells shrink evenly.
    """
    ordered = sorted(replicas, key=lambda r: (-worth(r), r.id))
    seen: Counter[str] = Counter()
    graded: list[tuple[int, bool, int, str, Replica]] = []
    for replica in ordered:
        turn = seen[replica.cell_id]
        seen[replica.cell_id] += 1
        graded.append((-worth(replica), replica.cell_id not in homes, turn, replica.id, replica))
    graded.sort(key=lambda grade: grade[:-1])
    surplus = surplus_of(pool, (grade[-1] for grade in graded))
    graded.sort(key=lambda grade: (*grade[:2], grade[-1].id in surplus))
    return [grade[-1] for grade in graded]
