"""Tests which artifacts are evicted from a node's disk, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.agent.artifacts.eviction import HALF_LIFE_S, EvictionCandidate, Heat, Hold, to_evict


def item(
    digest: str, size: int = 10, heat: float = 1.0, hold: Hold = Hold.NONE
) -> EvictionCandidate:
    return EvictionCandidate(
        digest, size, heat, is_adapter=not digest.startswith("base"), hold=hold
    )


def test_the_coldest_goes_first_and_only_as_much_as_is_needed() -> None:
    items = [item("warm", heat=5), item("cold", heat=1), item("mild", heat=2)]
    assert to_evict(items, 10, needed=False) == ["cold"]
    assert to_evict(items, 11, needed=False) == ["cold", "mild"]
    assert to_evict(items, 0, needed=False) == []
    assert to_evict(items, 31, needed=True) is None


def test_a_base_goes_after_all_adapters() -> None:
    items = [item("base", heat=0.1), item("hot", heat=9)]
    assert to_evict(items, 10, needed=False) == ["hot"]
    assert to_evict(items, 20, needed=False) == ["hot", "base"]


def test_only_an_awaited_artifact_takes_the_place_of_a_wanted_one() -> None:
    items = [item("used", hold=Hold.FAST), item("next", hold=Hold.PREFETCHED)]
    assert to_evict(items, 5, needed=False) is None
    assert to_evict(items, 5, needed=True) == ["next"]
    assert to_evict(items, 15, needed=True) is None


def test_heat_fades_so_that_recent_uses_count_more_than_many_old_ones() -> None:
    old = Heat(0.0, 0.0).used(8, 0.0)
    assert old.at(HALF_LIFE_S) == pytest.approx(4.0)
    recent = Heat(0.0, 0.0).used(1, 4 * HALF_LIFE_S)
    assert recent.at(4 * HALF_LIFE_S) > old.at(4 * HALF_LIFE_S)
    assert old.used(1, -5.0).score == pytest.approx(9.0)  # the clock was set back


ITEMS = st.lists(
    st.builds(
        EvictionCandidate,
        digest=st.text("abcdef", min_size=1, max_size=4),
        size_bytes=st.integers(0, 50),
        heat=st.floats(0, 100),
        is_adapter=st.booleans(),
        hold=st.sampled_from(Hold),
    ),
    max_size=12,
    unique_by=lambda item: item.digest,
)


@given(items=ITEMS, room=st.integers(-5, 200), needed=st.booleans())
def test_enough_is_evicted_and_nothing_held_or_in_vain(
    items: list[EvictionCandidate], room: int, needed: bool
) -> None:
    allowed = Hold.PREFETCHED if needed else Hold.NONE
    movable = {entry.digest: entry for entry in items if entry.hold <= allowed}
    chosen = to_evict(items, room, needed=needed)
    if chosen is None:
        assert sum(entry.size_bytes for entry in movable.values()) < room
        return
    assert len(chosen) == len(set(chosen))
    freed = sum(movable[digest].size_bytes for digest in chosen)
    assert freed >= room
    for digest in chosen:
        assert freed - movable[digest].size_bytes < room
    assert chosen == to_evict(items[::-1], room, needed=needed)
