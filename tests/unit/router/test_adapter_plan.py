"""Copies of adapters by demand: the most wanted first, within each replica's memory."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.adapter_plan import KNOWN_MAX, LOADS_MAX, AdapterDemand, missing_copies
from router.core.fleet.adapters import IN_MEMORY_MAX, AdapterPlace, AdapterResidency

_ROOMS = st.dictionaries(
    st.sampled_from([f"r{n}" for n in range(6)]), st.integers(0, 40), min_size=1
)
_WEIGHTS = st.lists(st.floats(0.001, 1.0), max_size=60)


def _shares(weights: list[float]) -> dict[str, float]:
    total = sum(weights) or 1.0
    ordered = sorted(weights, reverse=True)
    return {f"a{number}": weight / total for number, weight in enumerate(ordered)}


def _settled(shares: dict[str, float], rooms: dict[str, int], held: dict[str, set[str]]) -> None:
    for _ in range(200):
        loads = missing_copies(shares, rooms, held)
        if not loads:
            return
        for replica_id, adapters in loads.items():
            assert len(adapters) <= LOADS_MAX
            assert held[replica_id].isdisjoint(adapters)
            held[replica_id].update(adapters)
    raise AssertionError("the plan orders loads without end")


@given(_WEIGHTS, _ROOMS)
def test_the_plan_comes_to_rest_within_the_memory(weights: list[float], rooms) -> None:
    shares = _shares(weights)
    held: dict[str, set[str]] = {replica_id: set() for replica_id in rooms}
    _settled(shares, rooms, held)
    for replica_id, room in rooms.items():
        assert len(held[replica_id]) <= room
    copies = Counter(adapter for adapters in held.values() for adapter in adapters)
    without = [adapter for adapter in shares if not copies[adapter]]
    if without:  # the least wanted ones
        last = min(shares[adapter] for adapter in copies) if copies else 1.0
        assert max(shares[adapter] for adapter in without) <= last + 1e-9


@given(_WEIGHTS, st.integers(1, 12))
def test_adapters_get_copies_by_their_load(weights: list[float], replicas: int) -> None:
    shares = _shares(weights)
    rooms = {f"r{number}": 1000 for number in range(replicas)}
    held: dict[str, set[str]] = {replica_id: set() for replica_id in rooms}
    _settled(shares, rooms, held)
    copies = Counter(adapter for adapters in held.values() for adapter in adapters)
    for adapter, share in shares.items():
        assert min(replicas, max(1, 2 * share * replicas)) <= copies[adapter]
        assert copies[adapter] <= max(1, 2 * share * replicas + 1)


def test_copies_that_are_there_stay() -> None:
    held = {"r0": {"a"}, "r1": {"b"}, "r2": set[str]()}
    assert missing_copies({"a": 0.1, "b": 0.1, "c": 0.1}, dict.fromkeys(held, 8), held) == {
        "r2": ["c"]
    }


def test_old_requests_count_less() -> None:
    demand = AdapterDemand()
    for _ in range(10):
        demand.came("old", 0.0)
    for _ in range(6):
        demand.came("new", 600.0)
    demand.came("", 600.0)
    shares = demand.shares(2)
    assert list(shares) == ["new", "old"]
    assert shares["new"] == 6 / 12
    assert list(demand.shares(1)) == ["new"]
    demand.came("new", 1e7)
    assert 0.99 < demand.shares(1)["new"] <= 1.0


def test_counts_of_adapters_are_bounded() -> None:
    demand = AdapterDemand()
    for number in range(KNOWN_MAX + 10):
        demand.came("busy", 0.0)
        demand.came(f"a{number}", 0.0)
    known = demand.shares(10 * KNOWN_MAX)
    assert len(known) <= KNOWN_MAX
    assert next(iter(known)) == "busy"


def test_a_full_memory_is_learned_from_the_answer_to_a_load() -> None:
    residency = AdapterResidency()
    assert residency.room("r", 4) == 4 + IN_MEMORY_MAX
    residency.reported("r", [f"a{number}" for number in range(10)])
    assert residency.room("r", 4) == 4 + IN_MEMORY_MAX
    residency.reported("r", [f"a{number}" for number in range(3, 13)])
    assert residency.room("r", 4) == 4 + 10
    assert residency.place("r", "a0") is AdapterPlace.COLD
    assert set(residency.held("r")) == {f"a{number}" for number in range(3, 13)}
    residency.reported("r", [f"a{number}" for number in range(3, 18)])
    assert residency.room("r", 4) == 4 + 15, "it grew"
