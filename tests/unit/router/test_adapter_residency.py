"""Where adapters are, what a load is expected to take, and who uses which."""

import pytest

from router.core.fleet.adapters import IN_MEMORY_MAX, AdapterPlace, AdapterResidency


def test_an_adapter_is_free_in_a_slot_cheap_in_memory_and_dear_on_disk() -> None:
    residency = AdapterResidency()
    residency.resident("a", ["x", "y"])
    residency.resident("a", ["y"])
    assert [residency.place("a", digest) for digest in "yxz"] == [
        AdapterPlace.LOADED,
        AdapterPlace.MEMORY,
        AdapterPlace.COLD,
    ]
    in_slot, in_memory, cold = (residency.load_s("a", digest) for digest in "yxz")
    assert 0.0 == in_slot < in_memory < cold
    assert residency.load_s("stranger", "y") == cold


def test_an_adapter_on_no_replica_is_cold() -> None:
    residency = AdapterResidency()
    residency.resident("a", ["x"])
    residency.resident("b", [])
    assert (residency.is_cold("x"), residency.is_cold("y")) == (False, True)
    residency.forget("a")
    assert residency.is_cold("x")


def test_after_a_dispatch_the_next_one_finds_the_adapter_in_memory() -> None:
    residency = AdapterResidency()
    residency.acquire("a", "x")
    assert residency.place("a", "x") is AdapterPlace.MEMORY
    residency.release("a", "x")
    assert residency.place("a", "x") is AdapterPlace.MEMORY


def waited(residency: AdapterResidency, digest: str, queue_s: float, read_s: float = 0.0) -> None:
    """Let a sequence of an adapter come, wait and end at replica "a"."""
    residency.acquire("a", digest)
    residency.loaded("a", digest, queue_s, read_s)
    residency.release("a", digest)


def test_load_times_are_learned_from_requests_that_waited_for_a_load() -> None:
    residency = AdapterResidency()
    cold_before = residency.load_s("a", "new")
    for number in range(60):
        digest = f"d{number}"
        residency.acquire("a", digest)
        residency.acquire("a", digest)  # shares the wait: teaches nothing more
        residency.loaded("a", digest, 9.0, 4.0)
        residency.loaded("a", digest, 900.0, 900.0)
        residency.release("a", digest)
        residency.release("a", digest)
    assert residency.load_s("a", "new") == pytest.approx(4.0, rel=0.01)
    assert cold_before < 4.0
    memory_before = residency.load_s("a", "d59")
    waited(residency, "d59", 0.5)
    assert memory_before < residency.load_s("a", "d59") < 0.5
    residency.resident("a", ["d59"])
    waited(residency, "d59", 7.0)  # it was in a slot: nothing was loaded
    assert residency.load_s("a", "d59") == 0.0


def test_an_adapter_that_was_in_memory_teaches_nothing_about_reads() -> None:
    residency = AdapterResidency()
    before_s = residency.load_s("a", "new")
    for number in range(60):
        waited(residency, f"d{number}", 0.01)
    assert residency.load_s("a", "new") == before_s


def test_the_room_in_memory_is_learned_from_adapters_that_were_elsewhere() -> None:
    residency = AdapterResidency()
    assert residency.room("a", 0) == residency.room("b", 0)
    for number in range(2 * IN_MEMORY_MAX):  # none was read, so memory holds more than assumed
        waited(residency, f"d{number}", 0.01)
    assert residency.place("a", "d0") is AdapterPlace.MEMORY
    larger = residency.room("a", 0)
    for number in range(2 * IN_MEMORY_MAX):  # all were read, so memory holds less
        waited(residency, f"d{number}", 1.0, 1.0)
    assert residency.room("a", 0) < larger


def test_a_replica_with_all_slots_in_use_has_room_only_for_adapters_in_use() -> None:
    residency = AdapterResidency()
    residency.acquire("a", "x")
    residency.acquire("a", "x")
    residency.acquire("a", "y")
    assert residency.used("a") == {"x", "y"}
    assert [residency.has_room("a", digest, 2) for digest in "xyz"] == [True, True, False]
    residency.release("a", "x")
    assert not residency.has_room("a", "z", 2)
    residency.release("a", "x")
    assert residency.has_room("a", "z", 2)
    assert (residency.has_room("b", "z", 1), residency.has_room("b", "z", 0)) == (True, False)


def test_ends_after_a_loss_are_ignored() -> None:
    residency = AdapterResidency()
    residency.acquire("a", "x")
    residency.forget("a")
    residency.release("a", "x")
    residency.acquire("a", "x")
    residency.release("a", "x")
    residency.release("a", "x")
    assert residency.used("a") == set()


def test_adapters_assumed_in_memory_are_bounded_and_used_ones_stay() -> None:
    residency = AdapterResidency()
    residency.acquire("a", "kept")
    for number in range(3 * IN_MEMORY_MAX):
        residency.acquire("a", "kept")
        residency.resident("a", [f"d{number}"])
    tiers = [residency.place("a", f"d{number}") for number in range(3 * IN_MEMORY_MAX)]
    assert tiers[-1] is AdapterPlace.LOADED
    assert tiers.count(AdapterPlace.MEMORY) <= IN_MEMORY_MAX + 1
    assert tiers[0] is AdapterPlace.COLD
    assert residency.place("a", "kept") is AdapterPlace.MEMORY
