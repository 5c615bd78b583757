"""The shared history: catching up leads to the newest state from wherever a watcher is."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.watch.history import Delta, History, joined
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=30),
    st.integers(1, 8),
    st.integers(1, 200),
    st.integers(90, 200),
)
def test_catching_up(
    steps: list[tuple[int, int]], deltas_max: int, bytes_max: int, known: int
) -> None:
    history = History(deltas_max=deltas_max, bytes_max=bytes_max)
    history.restart(100)
    all_of_them, version = [], 100
    for distance, size in steps:
        version += distance
        all_of_them.append(Delta(version, b"x" * size))
        history.append(all_of_them[-1])
    assert history.version == version
    newer = history.since(known)
    kept = history.since(history.base)
    assert kept is not None
    assert len(kept) <= deltas_max
    assert sum(len(delta.payload) for delta in kept) <= bytes_max
    if newer is None:
        assert known < history.base or known > version
    else:
        assert newer == [delta for delta in all_of_them if delta.version > known]


def test_an_empty_history_knows_only_its_own_version() -> None:
    history = History()
    history.restart(7)
    assert (history.since(7), history.since(6), history.since(8)) == ([], None, None)


_IDS = st.sampled_from("abcd")


@given(
    st.lists(st.tuples(st.lists(_IDS, max_size=3), st.lists(_IDS, max_size=2)), max_size=30),
    st.integers(0, 40),
)
def test_joined_deltas_equal_single_ones(
    changes: list[tuple[list[str], list[str]]], bytes_max: int
) -> None:
    deltas: list[Delta] = []
    one_by_one, at_once = ControlState(), ControlState()
    for version, (upserts, removals) in enumerate(changes, 1):
        tiers = [wire.Tier(id=key, rpm=version) for key in upserts]
        response = wire.WatchResponse(version=version, upserts=wire.Objects(tiers=tiers))
        response.removals.tiers.extend(key for key in removals if key not in upserts)
        has_removals = bool(response.removals.tiers)
        deltas.append(Delta(version, response.SerializeToString(), has_removals))
        one_by_one.apply(response)
    longest = max((len(delta.payload) for delta in deltas), default=0)
    for delta in joined(deltas, bytes_max=bytes_max):
        assert len(delta.payload) <= max(bytes_max, longest)
        assert at_once.apply(wire.WatchResponse.FromString(delta.payload))
        assert at_once.version == delta.version
    assert (at_once.tiers, at_once.version) == (one_by_one.tiers, one_by_one.version)


def test_changes_without_removals_come_in_one_message() -> None:
    deltas = [Delta(version, b"x") for version in range(100)]
    assert list(joined(deltas)) == [Delta(99, b"x" * 100)]
