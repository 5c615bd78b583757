"""Chooses the next replica to move to another node, so that a node becomes free. Pure.

A node is emptied if all of its replicas fit on other occupied nodes, with a gain. The gain is that
its actuator ends the node, or that a replica without a place fits on it. One replica moves at a
time. A target has at least as many replicas as the emptied node has left. So each move raises the
sum of the squared numbers of replicas per node, and moves alone cannot form a cycle.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from control_plane.fleet.model import Needs, Node, Pool, Replica, ReplicaState
from control_plane.fleet.placement import NodeRoom, in_order
from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.model import PoolPlan, PoolState
from control_plane.scaling.nodes import NodeGroup, asked_nodes

_EMPTIED_MAX = 16  # largest number of replicas of a node that is emptied
_TRIALS_MAX = 20  # largest number of nodes that one round tries to empty
_GROWTH_MAX = 200  # largest number of forecast replicas for which a round looks for room
SOON_S = 3600.0  # seconds within which a forecast replica needs its room
_QUARTER_S = 900.0


class Consolidation(StrEnum):
    """The gains for which scaling moves replicas.

    `NEEDED` means that an actuator ends the node, or that a waiting replica fits on it. With
    `ALWAYS` a free node is a gain by itself.
    """

    OFF = "off"
    NEEDED = "needed"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class PackedPool:
    """A scaled pool, as a choice of moves needs it.

    Attributes:
        growth: Number of replicas that the forecast adds within an hour.
        hindrance: Reason why no replica of the pool may move now, or empty.
    """

    pool: Pool
    growth: int = 0
    hindrance: str = ""


@dataclass(frozen=True, slots=True)
class PackedFleet:
    """The facts from which the next move is chosen.

    Attributes:
        pools: Scaled pools. Replicas of other pools do not move.
        ages_s: Seconds for which each replica has run without a break. A missing replica is young.
        groups: Nodes of each actuator.
        waiting: Pools with a replica that no node has room for.
        kept: Nodes that take no part, because a move from or to them was given up lately.
        hold_s: Least age of a replica that moves.
    """

    nodes: Sequence[Node]
    replicas: Sequence[Replica]
    pools: Mapping[str, PackedPool]
    ages_s: Mapping[str, float]
    groups: Mapping[str, NodeGroup]
    waiting: Sequence[Pool] = ()
    kept: AbstractSet[str] = frozenset()
    hold_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Move:
    """A replica that moves, with the nodes and the reason in words."""

    replica: Replica
    moves_to: str
    why: str

    @property
    def text(self) -> str:
        """The move in words."""
        replica = self.replica
        return f"{replica.id} moves from {replica.node_id} to {self.moves_to}: {self.why}"


def next_move(fleet: PackedFleet, mode: Consolidation) -> Move | None:
    """Return the next move, or None if no node can be emptied with a gain, or a move is under way.

    The node that earlier moves have begun to empty comes first, then the node with the fewest
    replicas.
    """
    if mode is Consolidation.OFF or any(replica.moves_to for replica in fleet.replicas):
        return None
    packing = _Packing(fleet)
    order = sorted(
        (it for it in packing.candidates() if packing.gains_something(it, mode)),
        key=lambda node: (not node.is_vacated, len(packing.on_node[node.id]), node.id),
    )
    for node in order[:_TRIALS_MAX]:
        targets = packing.targets(node)
        why = "" if targets is None else packing.gain(node, targets, mode)
        if targets and why and packing.has_room_soon(node, targets):
            replica, new = targets[0]
            return Move(replica, new.node_id, f"{node.id} becomes empty, and {why}")
    return None


def by_hand(state: PoolState, now: float) -> str:
    """Return the reason for which operators keep a pool as it is, or empty."""
    if state.settings.is_paused:
        return "the pool is paused"
    return "its number is set by hand" if state.is_pinned(now) else ""


def hindrance(state: PoolState, decided: PoolPlan, refused: int, late_s: float) -> str:
    """Return the reason why a pool's replicas must not move now, or empty.

    Args:
        state: Facts of the pool.
        decided: Plan of this round.
        refused: Number of requests that were refused since the last round.
        late_s: Seconds by which replicas are late.
    """
    facts = state.facts
    is_whole = (facts.ready, facts.asleep) == (decided.wanted, decided.asleep)
    if facts.unknown:
        return facts.unknown
    if not is_whole or facts.booting or facts.unplaced or late_s:
        return "its replicas are not all ready"
    if facts.backlog_work_s or facts.deferred_work_s or refused:
        return "its work waits"
    if not decided.has_room:
        return "the budget has no room for its replacement"
    return "a surge is under way" if state.history.forecast(0.0).is_surge else ""


def soon_replicas(history: DemandHistory, wanted: int, most: int) -> int:
    """Return the number of replicas that a pool needs in addition within the next hour.

    The forecast is the growth that earlier days had at this time of day.
    """
    quarters = range(1, round(SOON_S / _QUARTER_S) + 1)
    found = [history.forecast(it * _QUARTER_S) for it in quarters]
    base = max(found[0].base, found[0].now)
    if base <= 0:
        # An idle pool has no growth factor. It needs a replica if it had demand a day ago.
        day = round(24 * 3600 / _QUARTER_S)
        coming = list(history.days)[-day : -day + len(quarters)] if len(history.days) >= day else []
        return min(max(0, most - wanted), int(max(coming, default=0.0) > 0))
    grown = max(it.expected for it in found) / base
    return max(0, min(most, ceil(wanted * grown - 1e-9)) - wanted)


class _Packing:
    """The free resources of all nodes, for trials."""

    def __init__(self, fleet: PackedFleet) -> None:
        self._fleet = fleet
        self._nodes = {node.id: node for node in fleet.nodes}
        self.on_node: dict[str, list[Replica]] = {}
        for replica in fleet.replicas:
            if replica.node_id in self._nodes:
                self.on_node.setdefault(replica.node_id, []).append(replica)
        self._rooms = {node.id: _room(node, self.on_node.get(node.id, ())) for node in fleet.nodes}
        self._group_of = {it.id: name for name, group in fleet.groups.items() for it in group.nodes}

    def candidates(self) -> list[Node]:
        """Return the occupied nodes whose replicas may all move."""
        return [
            node
            for node in self._fleet.nodes
            if self._takes_part(node)
            and 0 < len(self.on_node.get(node.id, ())) <= _EMPTIED_MAX
            and all(map(self._may_move, self.on_node[node.id]))
        ]

    def gains_something(self, node: Node, mode: Consolidation) -> bool:
        """Return whether a free node could be a gain, before targets are known."""
        is_ended = node.id in self._group_of
        return is_ended or mode is Consolidation.ALWAYS or self._waiting_for(node) is not None

    def targets(self, node: Node) -> list[tuple[Replica, Replica]] | None:
        """Return a new replica for each replica of a node, the largest first, or None.

        The fullest node with room is taken. A target has no other replica of the pool, so that one
        failure affects no more replicas of a pool than before.
        """
        leaving = self.on_node[node.id]
        rooms = [self._rooms[it.id] for it in self._fleet.nodes if self._may_receive(it, node)]
        found: list[tuple[Replica, Replica]] = []
        for pool in in_order({it.pool_id: self._pool(it) for it in leaving}.values()):
            for replica in (it for it in leaving if it.pool_id == pool.id):
                room = self._target(pool, node, rooms, found)
                if room is None:
                    return None
                found.append((replica, _placed(replica, pool, room)))
                new = [it for _, it in found if it.node_id == room.node.id]
                held = [*self.on_node[room.node.id], *new]
                rooms = [_room(it.node, held) if it is room else it for it in rooms]
        return found

    def has_room_soon(self, node: Node, moves: Sequence[tuple[Replica, Replica]]) -> bool:
        """Return whether all replicas that the forecast adds fit without the node."""
        growth = {key: it.growth for key, it in self._fleet.pools.items() if it.growth > 0}
        if sum(growth.values()) > _GROWTH_MAX:
            return False
        held = {it.id: list(self.on_node.get(it.id, ())) for it in self._fleet.nodes}
        for _, new in moves:
            held[new.node_id].append(new)
        open_ = [it for it in self._fleet.nodes if it.is_schedulable and it.id != node.id]
        # The first node with room is taken, because the best one of a large fleet takes too long.
        rooms = [_room(it, held[it.id]) for it in open_] if growth else []
        for pool in in_order(self._fleet.pools[key].pool for key in growth):
            for _ in range(growth[pool.id]):
                room = next((it for it in rooms if _fits(it, pool)), None)
                if room is None:
                    return False
                room.take(pool.needs, room.accelerators_for(pool.needs) or ())
        return True

    def gain(
        self, node: Node, moves: Sequence[tuple[Replica, Replica]], mode: Consolidation
    ) -> str:
        """Return the gain of a free node in words, or empty without a gain."""
        name = self._group_of.get(node.id)
        if name is not None:
            after = self._group_after(self._fleet.groups[name], node, moves)
            if node.id in asked_nodes(after).surplus:
                return f"actuator {name} then ends it"
        if (pool := self._waiting_for(node)) is not None:
            return f"a replica of {pool.id} then has room"
        return "no replica needs it" if mode is Consolidation.ALWAYS and name is None else ""

    def _takes_part(self, node: Node) -> bool:
        return node.is_schedulable and node.id not in self._fleet.kept

    def _pool(self, replica: Replica) -> Pool:
        return self._fleet.pools[replica.pool_id].pool

    def _may_move(self, replica: Replica) -> bool:
        fleet, found = self._fleet, self._fleet.pools.get(replica.pool_id)
        if found is None or found.hindrance or found.pool.prefill or found.pool.decode:
            return False
        is_up = replica.state in {ReplicaState.READY, ReplicaState.SLEEPING}
        is_known = Needs() not in {replica.reserved, found.pool.needs} and not replica.role
        is_old = fleet.ages_s.get(replica.id, 0.0) >= fleet.hold_s
        return is_up and is_known and is_old and not replica.is_draining

    def _may_receive(self, target: Node, source: Node) -> bool:
        """Return whether a node is occupied, and all that it holds is known."""
        held = self.on_node.get(target.id, [])
        is_known = bool(held) and all(it.reserved != Needs() for it in held)
        is_fuller = sum(not it.is_draining for it in held) >= len(self.on_node[source.id])
        is_other = target.id != source.id and not target.is_vacated
        return is_known and is_fuller and is_other and self._takes_part(target)

    def _target(
        self,
        pool: Pool,
        source: Node,
        rooms: Iterable[NodeRoom],
        moved: Sequence[tuple[Replica, Replica]],
    ) -> NodeRoom | None:
        """Return the fullest room for a replica of a pool, or None."""
        leaving = {it.id for it in self.on_node[source.id] if it.pool_id == pool.id}
        own = [it for it in self._fleet.replicas if it.pool_id == pool.id and it.id not in leaving]
        own += [new for _, new in moved if new.pool_id == pool.id]
        taken = {it.node_id for it in own}
        racks = {self._nodes[it].rack for it in taken if it in self._nodes}
        # A move must not make the pool depend on fewer racks.
        is_alone = source.rack not in racks and bool(racks)
        fitting = [
            room
            for room in rooms
            if room.node.id not in taken
            and _fits(room, pool)
            and not (is_alone and room.node.rack in racks)
        ]
        return min(fitting, key=lambda it: (_left(it, pool), it.node.id), default=None)

    def _waiting_for(self, node: Node) -> Pool | None:
        """Return a pool whose waiting replica fits on the node once the node is empty."""
        room = self._rooms[node.id]
        return next(
            (
                pool
                for pool in self._fleet.waiting
                if pool.engine in node.engines and room.fits_when_empty(pool.needs)
            ),
            None,
        )

    @staticmethod
    def _group_after(
        group: NodeGroup, node: Node, moves: Sequence[tuple[Replica, Replica]]
    ) -> NodeGroup:
        """Return the nodes of an actuator after the moves."""
        came = Counter(new.node_id for _, new in moves)
        foreign = Counter(new.node_id for _, new in moves if new.pool_id not in group.replicas)
        nodes = [
            replace(it, replicas=0, foreign=0)
            if it.id == node.id
            else replace(
                it, replicas=it.replicas + came[it.id], foreign=it.foreign + foreign[it.id]
            )
            for it in group.nodes
        ]
        return replace(group, nodes=nodes)


def _room(node: Node, replicas: Iterable[Replica]) -> NodeRoom:
    room = NodeRoom(node)
    for replica in replicas:
        room.take(replica.reserved, replica.accelerators)
    return room


def _placed(replica: Replica, pool: Pool, room: NodeRoom) -> Replica:
    """Return the replica that replaces another replica in a room."""
    accelerators = room.accelerators_for(pool.needs) or ()
    node_id = room.node.id
    return replace(replica, node_id=node_id, reserved=pool.needs, accelerators=accelerators)


def _fits(room: NodeRoom, pool: Pool) -> bool:
    """Return whether a node is known to have room. Unreported resources do not count as room."""
    node, needs = room.node, pool.needs
    is_known = (node.memory_bytes is not None or not needs.memory_bytes) and (
        node.accelerators is not None or not needs.accelerators
    )
    has_memory = is_known and pool.engine in node.engines and room.has_memory(needs)
    return has_memory and room.accelerators_for(needs) is not None


def _left(room: NodeRoom, pool: Pool) -> tuple[int, int]:
    return room.left_after(pool.needs, room.accelerators_for(pool.needs) or ())
