"""One round of planning, which turns the reports and wants of nodes into orders for each node.

The wants of a node are the artifacts that the node should have (`Wants`). Their shared mapping is
the part that is one object for many nodes. The module has no clock and no I/O. The service calls it
in a thread, one round at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.distribution.messages import merge
from control_plane.distribution.model import (
    Artifact,
    FetchPlan,
    NodeReport,
    PlannerLimits,
    Priority,
)
from control_plane.distribution.planner import Planner
from control_plane.distribution.wants import Wants

_NOTHING = Wants()
_SIFTED_MAX = 1024  # largest number of cached shared mappings of wants


@dataclass(frozen=True, slots=True)
class Turn:
    """The input of one node to a round of planning.

    Attributes:
        report: The node's report since the last round, or an empty report if the node sent none.
        wants: All artifacts that the node should have. Unknown artifacts are not planned.
    """

    report: NodeReport
    wants: Wants


@dataclass(frozen=True, slots=True)
class _SiftedMapping:
    """The artifacts of a shared mapping, split into known and unknown artifacts.

    `known_count` is the number of artifacts that the coordinator knew at the time of the split.
    """

    shared: Mapping[str, Priority]
    known_count: int
    known: Mapping[str, Priority]
    unknown: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Between:
    """The difference of two mappings.

    The object references both mappings, so that their `id()` values stay unique while it is cached.
    """

    before: Mapping[str, Priority]
    after: Mapping[str, Priority]
    differing: tuple[str, ...]


class Coordinator:
    """Updates a planner when artifacts are added, wants change, or nodes disconnect."""

    def __init__(self, limits: PlannerLimits, seed: int = 0) -> None:
        self._planner = Planner(limits, seed)
        self._known: set[str] = set()
        self._fresh: list[str] = []
        self._wanted: dict[str, Wants] = {}  # wants by node, in the form that the planner received
        self._sifted: dict[int, _SiftedMapping] = {}  # by the `id()` of a shared mapping
        # Differences of two shared mappings in this round, because many nodes have the same change.
        self._between: dict[tuple[int, int], _Between] = {}
        # A report that arrived before its artifact was added must be stored, because agents send it
        # only once.
        self._reports: dict[str, NodeReport] = {}

    def know(self, artifacts: Iterable[Artifact]) -> None:
        """Add artifacts that can be fetched. Artifacts that were added before do not change."""
        for artifact in artifacts:
            if artifact.digest not in self._known:
                self._planner.add(artifact)
                self._known.add(artifact.digest)
                self._fresh.append(artifact.digest)

    def unknown(self, wants: Iterable[Wants]) -> set[str]:
        """Return the unknown artifacts that at least one of the given nodes should have."""
        found = set[str]()
        looked = set[int]()
        for each in wants:
            if id(each.shared) not in looked:
                looked.add(id(each.shared))
                found |= self._sift(each.shared).unknown
            found.update(digest for digest, priority in each.own.items() if priority is not None)
        return found - self._known

    def round(
        self, turns: Sequence[Turn], left: Iterable[str], now_s: float
    ) -> dict[str, FetchPlan]:
        """Return the orders of one round of planning.

        Args:
            turns: Inputs of nodes, at most one per node.
            left: Ids of nodes that have disconnected, and whose wants are dropped.
            now_s: Time in monotonic seconds.

        Returns:
            Orders by node id, for each node in `turns`, and for other nodes that must send a full
            report.
        """
        self._between.clear()
        for node_id in left:
            self._want(node_id, _NOTHING)
            self._wanted.pop(node_id, None)
            self._reports.pop(node_id, None)
        for turn in turns:
            self._want(turn.report.node_id, turn.wants)
        reports = {turn.report.node_id: turn.report for turn in turns}
        for node_id, report in self._recall().items():
            reports[node_id] = merge(report, reports[node_id]) if node_id in reports else report
        for turn in turns:
            self._remember(turn.report)
        return self._planner.plan(list(reports.values()), now_s)

    def _want(self, node_id: str, wants: Wants) -> None:
        before = self._wanted.get(node_id, _NOTHING)
        own = {digest: p for digest, p in wants.own.items() if digest in self._known}
        after = Wants(self._sift(wants.shared).known, own)
        self._wanted[node_id] = after
        differing = self._differing(before.shared, after.shared)
        for digest in (*differing, *sorted(before.own.keys() | after.own.keys())):
            priority = after.of(digest)
            if priority is before.of(digest):
                continue
            if priority is None:
                self._planner.unwant(node_id, digest)
            else:
                self._planner.want(node_id, digest, priority)

    def _sift(self, shared: Mapping[str, Priority]) -> _SiftedMapping:
        """Return the artifacts of a shared mapping, divided into known and unknown artifacts.

        While none of its artifacts becomes known, the result has the same mapping object `known`.
        """
        sifted = self._sifted.get(id(shared))
        if sifted is not None and sifted.known_count == len(self._known):
            return sifted
        if sifted is not None and not sifted.unknown & self._known:
            known, unknown = sifted.known, sifted.unknown
        else:
            known = {digest: p for digest, p in shared.items() if digest in self._known}
            unknown = frozenset(shared.keys() - known.keys())
        while len(self._sifted) >= _SIFTED_MAX:
            del self._sifted[next(iter(self._sifted))]  # the oldest entry, by dict order
        self._sifted[id(shared)] = sifted = _SiftedMapping(shared, len(self._known), known, unknown)
        return sifted

    def _differing(
        self, before: Mapping[str, Priority], after: Mapping[str, Priority]
    ) -> tuple[str, ...]:
        if before is after:
            return ()
        key = id(before), id(after)
        if key not in self._between:
            among = before.keys() | after.keys()
            found = sorted(d for d in among if before.get(d) is not after.get(d))
            self._between[key] = _Between(before, after, tuple(found))
        return self._between[key].differing

    def _recall(self) -> dict[str, NodeReport]:
        """Return the stored reports about artifacts that were added since the last round."""
        fresh, self._fresh = self._fresh, []
        recalled: dict[str, NodeReport] = {}
        for node_id, report in self._reports.items() if fresh else ():
            held = {digest: report.held[digest] for digest in fresh if digest in report.held}
            if held:
                recalled[node_id] = replace(report, held=held, failures=(), is_full=False)
        return recalled

    def _remember(self, report: NodeReport) -> None:
        before = self._reports.get(report.node_id)
        says_nothing = not report.held and not report.is_full
        if says_nothing and before is not None and before.boot_id == report.boot_id:
            # Most reports change nothing. The earlier report may be long, so its content is not
            # copied.
            self._reports[report.node_id] = replace(report, held=before.held, failures=())
            return
        told = report if before is None else merge(before, report)
        held = {digest: chunks for digest, chunks in told.held.items() if chunks}
        self._reports[report.node_id] = replace(told, held=held, failures=(), is_full=False)
