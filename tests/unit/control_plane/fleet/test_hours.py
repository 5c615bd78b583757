"""Hours out of begins and ends are those of the intervals, however they are cut; by hypothesis."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.hours import HOUR_US, Clock, Edges, HoursRow, ReplicaCounts, buckets, rows
from control_plane.fleet.model import Replica, ReplicaState

_TIME = st.integers(0, 8 * HOUR_US)


@dataclass(frozen=True)
class Interval:
    """A replica's, in microseconds."""

    name: str
    begin: int
    end: int
    is_running: bool
    accelerators: int

    @property
    def counts(self) -> ReplicaCounts:
        running = int(self.is_running)
        return ReplicaCounts(running, 1 - running, self.accelerators, int(not self.accelerators))

    def cut(self, span: tuple[int, int]) -> tuple[int, int]:
        return max(self.begin, span[0]), min(self.end, span[1])

    def held(self, part: tuple[int, int]) -> ReplicaCounts:
        begin, end = self.cut(part)
        return ReplicaCounts().plus(self.counts, max(0, end - begin))


INTERVALS = st.lists(
    st.builds(Interval, st.sampled_from("pq"), _TIME, _TIME, st.booleans(), st.integers(0, 8))
)


def edges(
    intervals: list[Interval], span: tuple[int, int], parts: list[tuple[int, int]]
) -> list[Edges]:
    """What PostgreSQL makes of intervals (`hours_repository`)."""
    found: dict[tuple[str, int], Edges] = {}
    for interval in intervals:
        begin, end = interval.cut(span)
        if end <= begin:
            continue
        for at, sign in ((begin, 1), (end, -1)):
            for part in parts:
                if part[0] <= at < part[1]:
                    key = interval.name, part[0]
                    known = found.get(key, Edges(*key, ReplicaCounts(), ReplicaCounts()))
                    found[key] = Edges(
                        *key,
                        known.change.plus(interval.counts, sign),
                        known.inside.plus(interval.counts, sign * (part[1] - at)),
                    )
    return list(found.values())


@given(INTERVALS, st.tuples(_TIME, _TIME).filter(lambda it: it[0] < it[1]), st.booleans())
def test_each_bucket_sums_its_intervals(intervals, span, are_hours) -> None:
    parts = buckets(span, are_hours=are_hours)
    assert sum(end - begin for begin, end in parts) == span[1] - span[0]
    wanted: list[HoursRow] = []
    for part in parts:
        for name in "pq":
            held = ReplicaCounts()
            for interval in intervals:
                if interval.name == name:
                    held = held.plus(interval.held(part))
            if held != ReplicaCounts():
                wanted.append(HoursRow(name, part[0], held))
    found = rows(edges(intervals, span, parts), parts)
    assert found == wanted
    ids = [row.id for row in found]
    assert ids == sorted(ids)
    assert max(Counter(ids).values(), default=1) == 1, "pages go on behind an id"


def test_seconds_are_counted_while_we_lead() -> None:
    counted: Counter[tuple[str, str]] = Counter()
    clock = Clock(lambda pool, state, seconds: counted.update({(pool, state): seconds}))
    states = ("READY", "DRAINING", "STARTING", "FAILED", "LOST", "STOPPED")
    replicas = [Replica(it, "p", "p-0", "n", state=ReplicaState[it]) for it in states]
    clock.tick(100.0, replicas)
    clock.tick(103.0, replicas)
    clock.stop()
    clock.tick(200.0, replicas)
    clock.tick(201.5, replicas[:1])
    assert counted == {("p", "running"): 7.5, ("p", "reserved"): 6.0}
