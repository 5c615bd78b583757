"""One round of planning: what nodes said and should have goes in, what each shall fetch comes out.

No clock and no I/O; the service calls it in a thread, one round at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from control_plane.distribution.messages import merge
from control_plane.distribution.model import Answer, Artifact, Limits, Priority, Report
from control_plane.distribution.planner import Planner

_NOTHING: Mapping[str, Priority] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Turn:
    """A node that is planned for in a round.

    Attributes:
        report: What it said since the last round; without anything new if it said nothing.
        wanted: Everything that it should have; of what is not known nothing is planned.
    """

    report: Report
    wanted: Mapping[str, Priority]


class Coordinator:
    """Keeps a planner true to artifacts that become known, wants that change, nodes that leave."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        self._planner = Planner(limits, seed)
        self._known: set[str] = set()
        self._fresh: list[str] = []
        self._wanted: dict[str, Mapping[str, Priority]] = {}  # by node, as the planner was told
        # What a node told before its artifact was known must not be lost: it is not told again.
        self._reports: dict[str, Report] = {}

    def know(self, artifacts: Iterable[Artifact]) -> None:
        """Take artifacts that can be fetched; those that are known change nothing."""
        for artifact in artifacts:
            if artifact.digest not in self._known:
                self._planner.add(artifact)
                self._known.add(artifact.digest)
                self._fresh.append(artifact.digest)

    def unknown(self, digests: Iterable[str]) -> set[str]:
        """Return those that are not known."""
        return set(digests) - self._known

    def round(self, turns: Sequence[Turn], left: Iterable[str], now_s: float) -> dict[str, Answer]:
        """Plan for nodes.

        Args:
            turns: At most one for each node.
            left: Nodes that are connected no longer; nothing is wanted for them.
            now_s: Monotonic seconds.

        Returns:
            The answer for each node that has a turn, and for others that are asked for a report.
        """
        for node_id in left:
            self._want(node_id, _NOTHING)
            self._wanted.pop(node_id, None)
            self._reports.pop(node_id, None)
        for turn in turns:
            self._want(turn.report.node_id, turn.wanted)
        reports = {turn.report.node_id: turn.report for turn in turns}
        for node_id, report in self._recall().items():
            reports[node_id] = merge(report, reports[node_id]) if node_id in reports else report
        for turn in turns:
            self._remember(turn.report)
        return self._planner.plan(list(reports.values()), now_s)

    def _want(self, node_id: str, wanted: Mapping[str, Priority]) -> None:
        before = self._wanted.get(node_id, _NOTHING)
        after = {digest: p for digest, p in wanted.items() if digest in self._known}
        for digest in before.keys() - after.keys():
            self._planner.unwant(node_id, digest)
        for digest, priority in after.items():
            if before.get(digest) is not priority:
                self._planner.want(node_id, digest, priority)
        self._wanted[node_id] = after

    def _recall(self) -> dict[str, Report]:
        """Return what nodes said of artifacts that are known since."""
        fresh, self._fresh = self._fresh, []
        recalled: dict[str, Report] = {}
        for node_id, report in self._reports.items() if fresh else ():
            held = {digest: report.held[digest] for digest in fresh if digest in report.held}
            if held:
                recalled[node_id] = replace(report, held=held, failures=(), is_full=False)
        return recalled

    def _remember(self, report: Report) -> None:
        before = self._reports.get(report.node_id)
        told = report if before is None else merge(before, report)
        held = {digest: chunks for digest, chunks in told.held.items() if chunks}
        self._reports[report.node_id] = replace(told, held=held, failures=(), is_full=False)
