"""The shared history: catching up leads to the newest state from wherever a watcher is."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.watch.history import Delta, History


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
