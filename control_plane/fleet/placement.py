"""Chooses the node and the accelerators of a new replica. Pure.

Pools declare the needs of a replica, and nodes report their resources. A pool's replicas are first
spread over racks and then over nodes, so that one failure affects few replicas. Among equal nodes
the fullest node with room is chosen (best fit), so that free accelerators remain for large
replicas. A replica keeps its accelerators for its lifetime and never moves. No dedicated
accelerator is assigned twice. A replica of a pool without needs is placed on the least loaded node.
Resources that a node does not report are not checked. A vacated node is used only if no other node
has room. Among nodes of equal spread, those that fetch the pool's base ahead are first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from types import MappingProxyType

from control_plane.fleet.model import Needs, Node, Pool, Replica

_GIB = 1 << 30
_NOWHERE: Mapping[str, AbstractSet[str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The place of a replica.

    Without listed accelerators, the replica may use all accelerators of the node.
    """

    node_id: str
    accelerators: tuple[int, ...] = ()


class NodeRoom:
    """The free resources of a node.

    Attributes:
        load: Number of the node's replicas that are not draining.
    """

    def __init__(self, node: Node) -> None:
        """Create the free resources of a node that has no replicas yet."""
        self.node = node
        self.load = 0
        self._memory_bytes = node.memory_bytes
        self._free: dict[int, int] | None = None  # free bytes, by index of the accelerator
        if node.accelerators is not None:
            self._free = {a.index: a.memory_bytes for a in node.accelerators if not a.is_cordoned}
        self._used: set[int] = set()  # indices used by any replica
        self._taken: set[int] = set()  # indices used by a dedicated replica

    def take(self, needs: Needs, accelerators: Sequence[int]) -> None:
        """Reserve the resources that a replica needs."""
        if self._memory_bytes is not None:
            self._memory_bytes -= needs.memory_bytes
        # A replica that was created before its node reported its hardware may use all accelerators
        # of the node.
        all_of_them = tuple(self._free or ()) if needs.accelerators else ()
        for index in accelerators or all_of_them:
            self._used.add(index)
            if needs.is_dedicated:
                self._taken.add(index)
            if self._free is not None and index in self._free:
                self._free[index] -= needs.accelerator_memory_bytes

    def fits_when_empty(self, needs: Needs) -> bool:
        """Return whether the node without any replica has room for a replica."""
        empty = NodeRoom(self.node)
        return empty.has_memory(needs) and empty.accelerators_for(needs) is not None

    def has_memory(self, needs: Needs) -> bool:
        """Return whether enough main memory is free. An unknown memory counts as enough."""
        return self._memory_bytes is None or needs.memory_bytes <= self._memory_bytes

    def accelerators_for(self, needs: Needs) -> tuple[int, ...] | None:
        """Return the fullest accelerators with room for a replica, or None if too few have room.

        If the node's accelerators are unknown, the result is empty, and the replica may use all.
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
        """Return the free bytes of accelerator and main memory after a placement, 0 if unknown."""
        free = self._free or {}
        on_them = sum(free.get(index, 0) - needs.accelerator_memory_bytes for index in accelerators)
        memory_bytes = self._memory_bytes
        return on_them, 0 if memory_bytes is None else memory_bytes - needs.memory_bytes


class Placement:
    """Finds places for new replicas one by one. Each place reduces the free resources."""

    def __init__(
        self,
        nodes: Iterable[Node],
        replicas: Iterable[Replica],
        ahead: Mapping[str, AbstractSet[str]] = _NOWHERE,
    ) -> None:
        """Reserve the resources of the present replicas.

        Draining replicas occupy their resources until they have ended.

        Args:
            nodes: All nodes.
            replicas: All replicas.
            ahead: Nodes that fetch a pool's base ahead, by pool.
        """
        self._ahead = ahead
        self._rooms = {node.id: NodeRoom(node) for node in nodes}
        self._open: dict[str, list[NodeRoom]] = {}  # nodes that may run more replicas, by engine
        # heap of (vacated, load, node) by engine, in which loads may be outdated
        self._by_load: dict[str, list[tuple[bool, int, str]]] = {}
        self._in_rack: Counter[tuple[str, str]] = Counter()  # number of replicas by pool and rack
        self._on_node: Counter[tuple[str, str]] = Counter()  # number of replicas by pool and node
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
            text = _why_nowhere(pool.needs, open_)
            if not any(room.fits_when_empty(pool.needs) for room in open_):
                text += ", and no empty node is large enough: change the pool's needs or add nodes"
            return text
        chosen, accelerators = min(options, key=lambda option: self._order(pool, *option))
        return self._given(pool, chosen, accelerators)

    def place_on(self, pool: Pool, node_id: str) -> ReplicaPlace | None:
        """Return the place of the pool's next replica on one node, or None without room."""
        room = self._rooms.get(node_id)
        if room is None or room not in self._open_to(pool.engine):
            return None
        accelerators = room.accelerators_for(pool.needs) if room.has_memory(pool.needs) else None
        return None if accelerators is None else self._given(pool, room, accelerators)

    def _open_to(self, engine: str) -> list[NodeRoom]:
        """Return the nodes that run an engine and accept more replicas."""
        if engine not in self._open:
            self._open[engine] = [
                room
                for room in self._rooms.values()
                if room.node.is_schedulable and engine in room.node.engines
            ]
        return self._open[engine]

    def _least_loaded(self, engine: str) -> NodeRoom:
        """Return the node with the fewest replicas, of the nodes that `_open_to` returns."""
        if engine not in self._by_load:
            found = [_load(room) for room in self._open_to(engine)]
            heapify(found)
            self._by_load[engine] = found
        heap = self._by_load[engine]
        while True:
            room = self._rooms[heap[0][-1]]
            if heap[0] == _load(room):
                return room
            # the node's load has grown since its entry was pushed
            heapreplace(heap, _load(room))

    def _order(
        self, pool: Pool, room: NodeRoom, accelerators: tuple[int, ...]
    ) -> tuple[bool, int, int, bool, tuple[int, int], int, str]:
        node = room.node
        return (
            node.is_vacated,
            self._in_rack[pool.id, node.rack],
            self._on_node[pool.id, node.id],
            node.id not in self._ahead.get(pool.id, ()),
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


def _load(room: NodeRoom) -> tuple[bool, int, str]:
    return room.node.is_vacated, room.load, room.node.id


def in_order(pools: Iterable[Pool]) -> list[Pool]:
    """Return the pools in the order of placement, the hardest to place first."""

    def size(needs: Needs) -> tuple[bool, int, int, int]:
        on_each = needs.accelerator_memory_bytes
        return needs.is_dedicated, needs.accelerators, on_each, needs.memory_bytes

    by_id = sorted(pools, key=lambda pool: pool.id)
    return sorted(by_id, key=lambda pool: size(pool.needs), reverse=True)


def _why_nowhere(needs: Needs, rooms: Sequence[NodeRoom]) -> str:
    """Return a text that names the resource that no node has."""
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
