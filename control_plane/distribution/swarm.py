"""The holders of each chunk group of one artifact, and the rarity of groups, updated incrementally.

Nodes and regions are numbers here. A set of nodes or of groups is an integer with one bit per
member.
"""

from collections import defaultdict

from control_plane.distribution.bits import every, members, starts_of_runs
from control_plane.distribution.model import Artifact

# Number of levels. Level 0 has the groups without a copy, and level n the groups with 2^(n-1) to
# 2^n - 1 copies. The last level also has all groups with more copies.
LEVELS = 16


class Rarity:
    """The number of copies of each group in a region, existing or in transit."""

    __slots__ = ("_copies", "_held", "held", "levels")

    def __init__(self, groups: int) -> None:
        self._copies = [0] * groups
        self._held = [0] * groups
        # Bit masks of the groups in each level, which are the groups with 0, 1, 2 to 3, 4 to 7
        # copies, and so on.
        self.levels = [(1 << groups) - 1] + [0] * (LEVELS - 1)
        self.held = 0  # bits of the groups that any source in the region has

    def count(self, group: int, change: int) -> None:
        """Add `change` to the number of copies of a group."""
        before = self._copies[group]
        after = self._copies[group] = before + change
        assert after >= 0, group
        old = min(before.bit_length(), LEVELS - 1)
        new = min(after.bit_length(), LEVELS - 1)
        if old != new:
            self.levels[old] ^= 1 << group
            self.levels[new] ^= 1 << group

    def hold(self, group: int, change: int) -> None:
        """Record that a source has gained or lost a group."""
        self.count(group, change)
        self._held[group] += change
        if self._held[group] == 0:
            self.held &= ~(1 << group)
        else:
            self.held |= 1 << group

    def thin(self, seeds: int) -> int:
        """Return the groups with fewer copies than `seeds`, which is a power of two."""
        found = 0
        for mask in self.levels[: seeds.bit_length()]:
            found |= mask
        return found


class Swarm:
    """An artifact, with the groups that each node has or fetches, and the servers of each group."""

    def __init__(self, artifact: Artifact, groups_max: int) -> None:
        self.artifact = artifact
        self.group_chunks = -(-artifact.chunk_count // groups_max)
        self.groups = -(-artifact.chunk_count // self.group_chunks)
        self.group_bytes = self.group_chunks * artifact.chunk_bytes
        self.all = (1 << self.groups) - 1
        self.have: dict[int, int] = {}  # bits of the groups that a node has, by node
        self.asked: dict[int, int] = {}  # bits of the groups that a node is fetching, by node
        self.holders = [0] * self.groups  # bits of the nodes that serve a group, by group
        self.regions: defaultdict[int, Rarity] = defaultdict(lambda: Rarity(self.groups))
        self._starts: dict[int, int] = {}  # bits of the first chunks of complete groups, by node
        self._first_chunks = every(self.group_chunks, self.groups)
        planned = self.groups * self.group_chunks
        self._beyond = ((1 << planned) - 1) ^ ((1 << artifact.chunk_count) - 1)
        self._chunks = (1 << artifact.chunk_count) - 1

    def chunks_of(self, group: int) -> tuple[int, int]:
        """Return the first chunk of a group, and the chunk after the last of the group."""
        start = group * self.group_chunks
        return start, min(start + self.group_chunks, self.artifact.chunk_count)

    def missing(self, node: int) -> int:
        """Return the groups that the node does not have and is not fetching."""
        return self.all & ~(self.have.get(node, 0) | self.asked.get(node, 0))

    def is_complete(self, node: int) -> bool:
        """Return whether the node has all groups of the artifact."""
        return self.have.get(node, 0) == self.all

    def observe(self, node: int, region: int, held: int, *, serves: bool) -> list[int]:
        """Apply the chunks that a node has, and return the groups that became complete."""
        starts = starts_of_runs((held & self._chunks) | self._beyond, self.group_chunks)
        starts &= self._first_chunks
        before = self._starts.get(node, 0)
        if starts == before:
            return []
        self._starts[node] = starts
        gained = [bit // self.group_chunks for bit in members(starts & ~before)]
        dropped = [bit // self.group_chunks for bit in members(before & ~starts)]
        have = self.have.get(node, 0)
        for group in (*gained, *dropped):
            have ^= 1 << group
        self.have[node] = have
        if serves:
            self._serve(node, region, gained, 1)
            self._serve(node, region, dropped, -1)
        return gained

    def serve(self, node: int, region: int, *, serves: bool) -> None:
        """Record that a node begins or stops to serve all of its groups."""
        self._serve(node, region, list(members(self.have.get(node, 0))), 1 if serves else -1)

    def begin_fetch(self, node: int, region: int, group: int) -> None:
        """Record that the node is fetching the group."""
        self.asked[node] = self.asked.get(node, 0) | 1 << group
        self.regions[region].count(group, 1)

    def unask(self, node: int, region: int, group: int) -> None:
        """Record that the node is no longer fetching the group."""
        assert self.asked[node] >> group & 1, (node, group)
        self.asked[node] ^= 1 << group
        self.regions[region].count(group, -1)

    def forget(self, node: int) -> None:
        """Drop the state of a node that neither serves nor fetches."""
        assert not self.asked.pop(node, 0), node
        self.have.pop(node, None)
        self._starts.pop(node, None)

    def _serve(self, node: int, region: int, groups: list[int], change: int) -> None:
        rarity, bit = self.regions[region], 1 << node
        for group in groups:
            assert bool(self.holders[group] & bit) is (change < 0), (node, group)
            self.holders[group] ^= bit
            rarity.hold(group, change)
