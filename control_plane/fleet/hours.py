"""Computes replica-hours from the intervals in which replicas existed. Pure.

PostgreSQL sums up the starts and ends of intervals by hour, and this module integrates the sums. So
the cost depends on the number of intervals, not on their lengths.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from control_plane.fleet.model import Replica, ReplicaState

# The same groups of states as in the trigger of migration 0013.
_RUNNING = (ReplicaState.READY, ReplicaState.DRAINING)
_NOTHING = (ReplicaState.LOST, ReplicaState.STOPPED)
HOUR_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Numbers of replicas and accelerators, or their summed time in microseconds.

    Attributes:
        running: Replicas that serve, or finish their requests.
        reserved: Replicas that are starting or have failed, and still occupy their nodes.
        accelerators: Accelerators that are assigned to these replicas.
        unassigned: Replicas without assigned accelerators, which may use all accelerators of a
            node.
    """

    running: int = 0
    reserved: int = 0
    accelerators: int = 0
    unassigned: int = 0

    def plus(self, other: "ReplicaCounts", times: int = 1) -> "ReplicaCounts":
        """Return the sum of these counts and a multiple of other counts."""
        return ReplicaCounts(
            self.running + other.running * times,
            self.reserved + other.reserved * times,
            self.accelerators + other.accelerators * times,
            self.unassigned + other.unassigned * times,
        )


@dataclass(frozen=True, slots=True)
class Edges:
    """The starts (+) and ends (-) of the intervals of a group within one bucket of time.

    Attributes:
        name: Name of the group, which is a pool or a node.
        bucket_us: Start of the bucket, in Unix microseconds.
        change: Difference of the number of replicas between the bucket's start and end.
        inside: Sum over all changes of the change times the microseconds until the bucket's end.
    """

    name: str
    bucket_us: int
    change: ReplicaCounts
    inside: ReplicaCounts


@dataclass(frozen=True, slots=True)
class HoursRow:
    """The replica and accelerator time of a group within one bucket, in microseconds."""

    name: str
    bucket_us: int
    held: ReplicaCounts

    @property
    def id(self) -> str:
        """Id of the row, which sorts in the same order as the rows of one answer."""
        return f"{self.bucket_us:020d}/{self.name}"

    def as_json(self, start: str) -> dict[str, Any]:
        """Return the row as JSON, in hours."""
        held = self.held
        return {
            "id": self.id,
            "start": start,
            "name": self.name,
            "replica_hours": _hours(held.running + held.reserved),
            "running_hours": _hours(held.running),
            "reserved_hours": _hours(held.reserved),
            "accelerator_hours": _hours(held.accelerators),
            "unassigned_hours": _hours(held.unassigned),
        }


def _hours(microseconds: int) -> float:
    return round(microseconds / HOUR_US, 9)


def buckets(span_us: tuple[int, int], *, are_hours: bool) -> list[tuple[int, int]]:
    """Return pairs (start, end) of the time range, split at full UTC hours if `are_hours`."""
    begin, end = span_us
    if not are_hours:
        return [span_us]
    starts = range(begin // HOUR_US * HOUR_US, end, HOUR_US)
    return [(max(begin, start), min(end, start + HOUR_US)) for start in starts]


def rows(edges: Iterable[Edges], parts: Iterable[tuple[int, int]]) -> list[HoursRow]:
    """Return the time of each group in each bucket, in chronological order, without empty rows.

    Args:
        edges: Edges, at most one per group and bucket. `bucket_us` is the start of the bucket's
            part of the time range.
        parts: Parts from `buckets`, in order.
    """
    at: dict[int, list[Edges]] = defaultdict(list)
    for edge in edges:
        at[edge.bucket_us].append(edge)
    there: dict[str, ReplicaCounts] = {}
    found: list[HoursRow] = []
    for begin, end in parts:
        held = {name: ReplicaCounts().plus(count, end - begin) for name, count in there.items()}
        for edge in at[begin]:
            held[edge.name] = held.get(edge.name, ReplicaCounts()).plus(edge.inside)
            there[edge.name] = there.get(edge.name, ReplicaCounts()).plus(edge.change)
        there = {name: count for name, count in there.items() if count != ReplicaCounts()}
        found += [
            HoursRow(name, begin, it) for name, it in sorted(held.items()) if it != ReplicaCounts()
        ]
    return found


class Clock:
    """Adds up replica-seconds while this control plane leads, for the metric only."""

    def __init__(self, count: Callable[[str, str, float], None]) -> None:
        """Create the clock, which calls `count` with pool, `running` or `reserved`, and seconds."""
        self._count = count
        self._last_s: float | None = None

    def tick(self, now_s: float, replicas: Iterable[Replica]) -> None:
        """Add the time since the last tick for each of the present replicas."""
        since_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        there = Counter(
            (replica.pool_id, "running" if replica.state in _RUNNING else "reserved")
            for replica in replicas
            if replica.state not in _NOTHING
        )
        for (pool_id, state), replicas_count in there.items():
            self._count(pool_id, state, replicas_count * since_s)

    def stop(self) -> None:
        """Ignore the time until the next tick, because this control plane does not lead."""
        self._last_s = None
