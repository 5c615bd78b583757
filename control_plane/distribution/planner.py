"""Decides which node fetches which chunks from which source (`Planner.plan(reports, now)`).

The planner is a pure state machine without clock, storage or randomness, except a hash. After a
restart the nodes' full reports restore the whole state. A group is a run of neighbouring chunks of
one artifact. The work per report is proportional to the number of new orders and of groups that
became complete. It does not grow with the number of nodes times the number of chunks.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from control_plane.distribution.bits import first_from
from control_plane.distribution.model import (
    STORE,
    Artifact,
    FetchPlan,
    NodePlace,
    NodeReport,
    Order,
    PlannerLimits,
    Priority,
    Trouble,
)
from control_plane.distribution.swarm import Swarm
from control_plane.distribution.trust import StoreGate, Trust

_STORE = -1
_VAIN_MAX = 32  # largest number of failed searches for a source, per node and artifact in one round
_Key = tuple[str, int]  # digest of the artifact, number of the group


@dataclass(slots=True)
class _Task:
    """An open order, with its nodes, its size in bytes, and the time until which it may last."""

    order: Order
    node: "_Node"
    source: int
    size: int
    until_s: float
    is_across: bool = False


@dataclass(slots=True, eq=False)
class _Node:
    number: int
    node_id: str
    place: NodePlace
    region: int
    rack: int
    boot_id: str
    seen_s: float
    is_server: bool
    held: dict[str, int] = field(default_factory=dict[str, int])
    tasks: dict[_Key, _Task] = field(default_factory=dict[_Key, _Task])
    serving: dict[tuple[int, str, int], _Task] = field(
        default_factory=dict[tuple[int, str, int], _Task]
    )
    down_bytes: int = 0
    up_bytes: int = 0
    is_here: bool = True


class Planner:
    """Plans for a fleet and any number of artifacts. Equal seeds and reports cause equal plans."""

    def __init__(self, limits: PlannerLimits, seed: int = 0) -> None:
        self._limits = limits
        self._seed = seed
        self._swarms: dict[str, Swarm] = {}
        # wanted artifacts with priority, by node id
        self._wants: dict[str, dict[str, Priority]] = {}
        # the part of `_wants` that is not complete yet
        self._todo: dict[str, dict[str, Priority]] = {}
        self._nodes: dict[str, _Node] = {}
        self._by_number: list[_Node] = []
        self._last_seen: OrderedDict[str, None] = OrderedDict()
        self._regions: dict[str, int] = {}
        self._racks: dict[tuple[str, str], int] = {}
        self._region_nodes: list[int] = []
        self._rack_nodes: list[int] = []
        self._free = 0  # bits of the nodes that can serve more orders
        self._free_low = 0  # bits of the nodes that can serve more prefetch orders
        self._gates: list[StoreGate] = []
        self._across: list[int] = []  # number of orders of a region that others serve, by region
        self._trust = Trust(limits)
        self._timeouts: deque[_Task] = deque()
        self._round = 0
        self._tries = 0
        # Groups for which this round has found no peer with capacity. Capacity only shrinks within
        # a round, so a second search would be in vain.
        self._dry: dict[tuple[str, int, bool], int] = {}

    def add(self, artifact: Artifact) -> None:
        """Add an artifact. It must be added before it is wanted, and before a node reports it."""
        if artifact.digest not in self._swarms:
            self._swarms[artifact.digest] = Swarm(artifact, self._limits.groups_max)

    def want(self, node_id: str, digest: str, priority: Priority) -> None:
        """Plan an artifact for a node, starting with the answer to the node's next report."""
        assert digest in self._swarms, digest
        self._wants.setdefault(node_id, {})[digest] = priority
        if not self.is_complete(node_id, digest):
            self._todo.setdefault(node_id, {})[digest] = priority

    def unwant(self, node_id: str, digest: str) -> None:
        """Stop planning an artifact for a node. The node continues to serve its chunks."""
        self._wants.get(node_id, {}).pop(digest, None)
        self._todo.get(node_id, {}).pop(digest, None)
        node = self._nodes.get(node_id)
        if node is not None:
            for key in [key for key in node.tasks if key[0] == digest]:
                self._close(node.tasks[key])

    def is_complete(self, node_id: str, digest: str) -> bool:
        """Return whether the node has reported all chunks of the artifact."""
        node = self._nodes.get(node_id)
        return node is not None and self._swarms[digest].is_complete(node.number)

    def plan(self, reports: Sequence[NodeReport], now_s: float) -> dict[str, FetchPlan]:
        """Apply the reports of a round, and return the orders of each sender.

        Args:
            reports: Reports in any order, at most one per node.
            now_s: Time in monotonic seconds.

        Returns:
            One plan for every report.
        """
        self._round += 1
        self._tries = self._limits.tries_max
        self._dry.clear()
        for number in self._trust.returned(now_s):
            self._serve(self._by_number[number], serves=True)
        ordered = sorted(reports, key=lambda report: report.node_id)
        unknown = {report.node_id for report in ordered if not self._take(report, now_s)}
        self._drop_late(now_s)
        nodes = [self._nodes[r.node_id] for r in ordered if r.node_id not in unknown]
        nodes.sort(key=lambda node: (self._hash(node.node_id, self._round), node.number))
        for priority in Priority:
            for node in nodes:
                self._fill(node, priority, now_s)
        answers = {node_id: FetchPlan(wants_full=True) for node_id in unknown}
        for node in nodes:
            tasks = sorted(node.tasks.values(), key=lambda task: task.order.priority)
            answers[node.node_id] = FetchPlan(tuple(task.order for task in tasks))
        return answers

    # --- reports of nodes

    def _take(self, report: NodeReport, now_s: float) -> bool:
        """Apply a report. Return False if it lists only changes to an unknown earlier report."""
        node = self._nodes.get(report.node_id)
        is_known = node is not None and node.is_here
        if not is_known or node is None or node.boot_id != report.boot_id:
            if not report.is_full:
                return False
            if node is not None and node.is_here:
                self._lose(node)
            node = self._join(report, now_s)
        elif node.place != report.place or node.is_server is not report.serves:
            self._lose(node)
            return False
        node.seen_s = now_s
        self._last_seen[report.node_id] = None
        self._last_seen.move_to_end(report.node_id)
        self._observe(node, report)
        for failure in report.failures:
            swarm = self._swarms.get(failure.digest)
            if swarm is not None:
                task = node.tasks.get((failure.digest, failure.chunk // swarm.group_chunks))
                if task is not None and task.order.source == failure.source:
                    self._fail(task, failure.trouble, now_s)
        return True

    def _observe(self, node: _Node, report: NodeReport) -> None:
        held = dict(report.held)
        if report.is_full:
            held = dict.fromkeys(node.held, 0) | held
        serves = node.is_server and not self._trust.is_shunned(node.number)
        for digest, chunks in held.items():
            swarm = self._swarms.get(digest)
            if swarm is None or node.held.get(digest) == chunks:
                continue
            node.held[digest] = chunks
            for group in swarm.observe(node.number, node.region, chunks, serves=serves):
                task = node.tasks.get((digest, group))
                if task is not None:
                    self._close(task)
                    if task.source == _STORE:
                        self._gates[node.region].succeeded()
            self._note_todo(node, digest)

    def _note_todo(self, node: _Node, digest: str) -> None:
        todo = self._todo.setdefault(node.node_id, {})
        priority = self._wants.get(node.node_id, {}).get(digest)
        if priority is None or self._swarms[digest].is_complete(node.number):
            todo.pop(digest, None)
        else:
            todo[digest] = priority

    def _join(self, report: NodeReport, now_s: float) -> _Node:
        place = report.place
        region = self._regions.setdefault(place.region, len(self._regions))
        rack = self._racks.setdefault((place.region, place.rack), len(self._racks))
        if region == len(self._region_nodes):
            self._region_nodes.append(0)
            self._gates.append(StoreGate(self._limits))
            self._across.append(0)
        if rack == len(self._rack_nodes):
            self._rack_nodes.append(0)
        old = self._nodes.get(report.node_id)
        number = len(self._by_number) if old is None else old.number
        node = _Node(
            number, report.node_id, place, region, rack, report.boot_id, now_s, report.serves
        )
        self._nodes[node.node_id] = node
        if old is None:
            self._by_number.append(node)
        else:
            self._by_number[number] = node
        self._region_nodes[region] |= 1 << number
        self._rack_nodes[rack] |= 1 << number
        self._note_room(node)
        return node

    def _lose(self, node: _Node) -> None:
        """Drop the state of a node, without an accusation of any source."""
        for task in [*node.tasks.values(), *node.serving.values()]:
            self._close(task)
        if not self._trust.is_shunned(node.number):
            self._serve(node, serves=False)
        for digest in node.held:
            self._swarms[digest].forget(node.number)
        node.held.clear()
        self._todo[node.node_id] = dict(self._wants.get(node.node_id, {}))
        node.is_here = False
        bit = 1 << node.number
        self._region_nodes[node.region] &= ~bit
        self._rack_nodes[node.rack] &= ~bit
        self._free &= ~bit
        self._free_low &= ~bit
        self._last_seen.pop(node.node_id, None)

    def _drop_late(self, now_s: float) -> None:
        while self._last_seen:
            node = self._nodes[next(iter(self._last_seen))]
            if now_s - node.seen_s < self._limits.lost_after_s:
                break
            self._lose(node)
        while self._timeouts and self._timeouts[0].until_s <= now_s:
            task = self._timeouts.popleft()
            if task.node.tasks.get(self._key(task)) is task:
                # no source is accused, because the node would have reported a faulty source
                self._close(task)

    def _fail(self, task: _Task, trouble: Trouble, now_s: float) -> None:
        self._close(task)
        if task.source == _STORE:
            self._gates[task.node.region].failed(now_s)
            return
        for number in self._trust.accuse(task.node.number, task.source, trouble, now_s):
            node = self._by_number[number]
            if node.is_here:
                self._serve(node, serves=False)
                for served in list(node.serving.values()):
                    self._close(served)

    def _serve(self, node: _Node, *, serves: bool) -> None:
        if not node.is_server:
            return
        for digest in node.held:
            self._swarms[digest].serve(node.number, node.region, serves=serves)

    # --- orders for nodes

    def _fill(self, node: _Node, priority: Priority, now_s: float) -> None:
        """Add new orders of one priority to a node, alternating between its artifacts."""
        digests = [d for d, p in self._todo.get(node.node_id, {}).items() if p is priority]
        if not digests or not self._has_room(node, priority):
            return
        digests.sort(key=lambda digest: self._hash(node.node_id + digest, self._round))
        picks = deque(self._offers(node, self._swarms[d], priority, now_s) for d in digests)
        while picks and self._tries > 0 and self._has_room(node, priority):
            offers = picks.popleft()
            found = next(offers, None)
            if found is not None:
                self._open(node, *found, priority, now_s)
                picks.append(offers)

    def _offers(
        self, node: _Node, swarm: Swarm, priority: Priority, now_s: float
    ) -> Iterator[tuple[Swarm, int, int]]:
        """Yield groups with sources, in the order of peers, other regions and the store."""
        rarity = swarm.regions[node.region]
        offset = self._hash(node.node_id + swarm.artifact.digest) % swarm.groups
        is_suspect = self._trust.is_suspect(node.number, now_s)
        vain = _VAIN_MAX if is_suspect else 0
        is_low = priority is Priority.PREFETCH
        place = (swarm.artifact.digest, node.region, is_low)
        for level in list(rarity.levels):
            among = level & rarity.held
            while vain < _VAIN_MAX and (left := among & swarm.missing(node.number)):
                left &= ~self._dry.get(place, 0)
                if not left:
                    break
                group = first_from(left, offset)
                among = left ^ (1 << group)
                source = self._near(node, swarm.holders[group], priority)
                if source is None:
                    vain += 1
                    self._dry[place] = self._dry.get(place, 0) | 1 << group
                else:
                    yield swarm, group, source
        missing = swarm.missing(node.number)
        left = missing if is_suspect else missing & rarity.thin(self._limits.seeds)
        # With this limit, the first readers of the store divide the groups among each other.
        takes = -(-swarm.groups * self._limits.seeds // self._limits.store_readers_max)
        vain = 0
        while left and takes > 0 and vain < _VAIN_MAX:
            group = first_from(left, offset)
            left ^= 1 << group
            source = self._far(node, swarm.holders[group], priority, now_s, is_suspect=is_suspect)
            if source is None:
                vain += 1
            else:
                takes -= 1
                yield swarm, group, source

    def _near(self, node: _Node, holders: int, priority: Priority) -> int | None:
        """Return a peer with capacity in the same rack, or else in the same region."""
        self._tries -= 1
        room = self._free_low if priority is Priority.PREFETCH else self._free
        holders &= room & self._region_nodes[node.region]
        if not holders:
            return None
        return self._lighter(node, (holders & self._rack_nodes[node.rack]) or holders)

    def _far(
        self, node: _Node, holders: int, priority: Priority, now_s: float, *, is_suspect: bool
    ) -> int | None:
        """Return a peer of another region, or else the store, or else None."""
        self._tries -= 1
        if not is_suspect and self._across[node.region] < self._limits.across_max:
            room = self._free_low if priority is Priority.PREFETCH else self._free
            holders &= room & ~self._region_nodes[node.region]
            if holders:
                return self._lighter(node, holders)
        return _STORE if self._gates[node.region].admits(node.number, now_s) else None

    def _lighter(self, node: _Node, holders: int) -> int:
        """Return the less loaded of two holders that are drawn by hash."""
        width = len(self._by_number)
        draw = self._hash(node.node_id, self._tries)
        one = first_from(holders, draw % width)
        two = first_from(holders, (draw >> 12) % width)
        nodes = self._by_number
        return one if nodes[one].up_bytes <= nodes[two].up_bytes else two

    def _open(
        self, node: _Node, swarm: Swarm, group: int, source: int, priority: Priority, now_s: float
    ) -> None:
        start, stop = swarm.chunks_of(group)
        peer = None if source == _STORE else self._by_number[source]
        name = STORE if peer is None else peer.node_id
        digest = swarm.artifact.digest
        order = Order(digest, start, stop, name, priority)
        until_s = now_s + self._limits.order_timeout_s
        task = _Task(order, node, source, swarm.group_bytes, until_s)
        node.tasks[digest, group] = task
        node.down_bytes += task.size
        swarm.begin_fetch(node.number, node.region, group)
        self._timeouts.append(task)
        if peer is None:
            self._gates[node.region].begin(node.number, task.size)
            return
        peer.serving[node.number, digest, group] = task
        peer.up_bytes += task.size
        task.is_across = peer.region != node.region
        self._across[node.region] += task.is_across
        self._note_room(peer)

    def _close(self, task: _Task) -> None:
        """Remove an order after any result."""
        node, key = task.node, self._key(task)
        if node.tasks.pop(key, None) is None:
            return  # already closed, because the lost node is both requester and source
        node.down_bytes -= task.size
        self._swarms[key[0]].unask(node.number, node.region, key[1])
        if task.source == _STORE:
            self._gates[node.region].end(node.number, task.size)
            return
        peer = self._by_number[task.source]
        del peer.serving[node.number, *key]
        peer.up_bytes -= task.size
        self._across[node.region] -= task.is_across
        if peer.is_here:
            self._note_room(peer)

    def _key(self, task: _Task) -> _Key:
        digest = task.order.digest
        return digest, task.order.start // self._swarms[digest].group_chunks

    def _has_room(self, node: _Node, priority: Priority) -> bool:
        room = self._limits.down_bytes_s * self._limits.horizon_s
        if priority is Priority.PREFETCH:
            room *= self._limits.prefetch_ratio
        return node.down_bytes < room and len(node.tasks) < self._limits.downloads_max

    def _note_room(self, node: _Node) -> None:
        limits, bit = self._limits, 1 << node.number
        room = limits.up_bytes_s * limits.horizon_s
        is_open = len(node.serving) < limits.uploads_max
        if is_open and node.up_bytes < room:
            self._free |= bit
        else:
            self._free &= ~bit
        if is_open and node.up_bytes < room * limits.prefetch_ratio:
            self._free_low |= bit
        else:
            self._free_low &= ~bit

    def _hash(self, text: str, number: int = 0) -> int:
        return crc32(text.encode(), self._seed * 1_000_003 + number & 0xFFFFFFFF)
