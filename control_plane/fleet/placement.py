"""Chooses the node and the accelerators of a new replica; pure.

Pools declare a replica's needs, nodes their resources. A pool's replicas are spread first, over
racks and then over nodes, so that one failure takes few of them. Among equal nodes the fullest one
with room is taken (best fit), so that large replicas find whole accelerators elsewhere. A replica
keeps its accelerators: none is ever assigned twice, and no replica moves while it lives. A replica
of a pool without needs goes to the least loaded node. Sizes that a node does not report are not
checked.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from control_plane.fleet.model import Needs, Node, Pool, Replica

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The place of a replica; no accelerators: it may use all of the node's."""

    node_id: str
    accelerators: tuple[int, ...] = ()


class NodeRoom:
    """The free room of a node.

    Attributes:
        load: Number of its replicas that are not draining.
    """

    def __init__(self, node: Node) -> None:
        """Begin with an empty node."""
        self.node = node
        self.load = 0
        self._memory_bytes = node.memory_bytes
        self._free: dict[int, int] | None = None  # bytes left, by index
        if node.accelerators is not None:
            self._free = {a.index: a.memory_bytes for a in node.accelerators if not a.is_cordoned}
        self._used: set[int] = set()  # by anybody
        self._taken: set[int] = set()  # by one alone

    def take(self, needs: Needs, accelerators: Sequence[int]) -> None:
        """Assign the resources that a replica needs."""
        if self._memory_bytes is not None:
            self._memory_bytes -= needs.memory_bytes
        # A replica made before its node reported its hardware may use all of it.
        all_of_them = tuple(self._free or ()) if needs.accelerators else ()
        for index in accelerators or all_of_them:
            self._used.add(index)
            if needs.is_dedicated:
                self._taken.add(index)
            if self._free is not None and index in self._free:
                self._free[index] -= needs.accelerator_memory_bytes

    def has_memory(self, needs: Needs) -> bool:
        """Return whether so much memory is free; true where it is not known."""
        return self._memory_bytes is None or needs.memory_bytes <= self._memory_bytes

    def accelerators_for(self, needs: Needs) -> tuple[int, ...] | None:
        """Return the fullest accelerators with room for a replica; None: there are none.

        Where they are not known, the replica may use all.
        """
        if self._free is None or not needs.accelerators:
            return ()
        barred = self._used if needs.is_dedicated else self._taken
        fitting = sorted(
            (free, index)
            for index, free in self._free.items()
            if index not in barred and free >= needs.accelerator_memory_bytes
        )
        if len(fitting) < needs.accelerators:
            return None
        return tuple(sorted(index for _, index in fitting[: needs.accelerators]))

    def left_after(self, needs: Needs, accelerators: Sequence[int]) -> tuple[int, int]:
        """Return the rest: bytes on these accelerators, and of memory; 0 if not known."""
        free = self._free or {}
        on_them = sum(free.get(index, 0) - needs.accelerator_memory_bytes for index in accelerators)
        memory_bytes = self._memory_bytes
        return on_them, 0 if memory_bytes is None else memory_bytes - needs.memory_bytes


class Placement:
    """Finds places one after the other; each place reduces the free room."""

    def __init__(self, nodes: Iterable[Node], replicas: Iterable[Replica]) -> None:
        """Take the present state; draining replicas hold their place until they are gone."""
        self._rooms = {node.id: NodeRoom(node) for node in nodes}
        self._open: dict[str, list[NodeRoom]] = {}  # by engine
        self._by_load: dict[str, list[tuple[int, str]]] = {}  # by engine; loads may be outdated
        self._in_rack: Counter[tuple[str, str]] = Counter()  # pool, rack
        self._on_node: Counter[tuple[str, str]] = Counter()  # pool, node
        for replica in replicas:
            if replica.node_id in self._rooms:
                self._add(replica)

    def place(self, pool: Pool) -> ReplicaPlace | str:
        """Return the place of the pool's next replica, or the reason why there is none."""
        open_ = self._open_to(pool.engine)
        if not open_:
            if not any(pool.engine in room.node.engines for room in self._rooms.values()):
                return f"no node runs engine {pool.engine}"
            return f"all nodes with engine {pool.engine} are lost, cordoned, draining or distrusted"
        if pool.needs == Needs():
            return self._given(pool, self._least_loaded(pool.engine), ())
        options = [
            (room, accelerators)
            for room in open_
            if room.has_memory(pool.needs)
            and (accelerators := room.accelerators_for(pool.needs)) is not None
        ]
        if not options:
            return _why_nowhere(pool.needs, open_)
        chosen, accelerators = min(options, key=lambda option: self._order(pool, *option))
        return self._given(pool, chosen, accelerators)

    def _open_to(self, engine: str) -> list[NodeRoom]:
        """Return the nodes that run an engine and may get more replicas."""
        if engine not in self._open:
            self._open[engine] = [
                room
                for room in self._rooms.values()
                if room.node.is_schedulable and engine in room.node.engines
            ]
        return self._open[engine]

    def _least_loaded(self, engine: str) -> NodeRoom:
        """Return the node with the fewest replicas of all that may get more; there must be one."""
        if engine not in self._by_load:
            found = [(room.load, room.node.id) for room in self._open_to(engine)]
            heapify(found)
            self._by_load[engine] = found
        heap = self._by_load[engine]
        while True:
            load, node_id = heap[0]
            room = self._rooms[node_id]
            if load == room.load:
                return room
            heapreplace(heap, (room.load, node_id))  # it has got more since

    def _order(
        self, pool: Pool, room: NodeRoom, accelerators: tuple[int, ...]
    ) -> tuple[int, int, tuple[int, int], int, str]:
        node = room.node
        return (
            self._in_rack[pool.id, node.rack],
            self._on_node[pool.id, node.id],
            room.left_after(pool.needs, accelerators),
            room.load,
            node.id,
        )

    def _given(self, pool: Pool, room: NodeRoom, accelerators: tuple[int, ...]) -> ReplicaPlace:
        made = Replica("", pool.id, "", room.node.id)
        self._add(replace(made, accelerators=accelerators, reserved=pool.needs))
        return ReplicaPlace(room.node.id, accelerators)

    def _add(self, replica: Replica) -> None:
        room = self._rooms[replica.node_id]
        room.take(replica.reserved, replica.accelerators)
        if not replica.is_draining:
            room.load += 1
            self._in_rack[replica.pool_id, room.node.rack] += 1
            self._on_node[replica.pool_id, room.node.id] += 1


def in_order(pools: Iterable[Pool]) -> list[Pool]:
    """Return the pools in the order in which they are placed: the hardest to place first."""

    def size(needs: Needs) -> tuple[bool, int, int, int]:
        on_each = needs.accelerator_memory_bytes
        return needs.is_dedicated, needs.accelerators, on_each, needs.memory_bytes

    by_id = sorted(pools, key=lambda pool: pool.id)
    return sorted(by_id, key=lambda pool: size(pool.needs), reverse=True)


def _why_nowhere(needs: Needs, rooms: Sequence[NodeRoom]) -> str:
    """Return in words the resource that no node has."""
    memory = f"{_size(needs.memory_bytes)} of memory free"
    count = needs.accelerators
    each = f" of {_size(needs.accelerator_memory_bytes)}" if needs.accelerator_memory_bytes else ""
    whole = f"{count} accelerator{'s' if count > 1 else ''}{each}"
    accelerators = f"{whole} unused" if needs.is_dedicated else f"{whole} free"
    with_memory = [room for room in rooms if room.has_memory(needs)]
    if not with_memory:
        return f"no node has {memory}"
    if all(room.accelerators_for(needs) is None for room in rooms):
        return f"no node has {accelerators}"
    return f"no node has {accelerators} and {memory}"


def _size(count_bytes: int) -> str:
    return f"{count_bytes / _GIB:.4g} GiB"
