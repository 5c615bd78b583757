"""What nodes should have."""

from control_plane.distribution.model import Priority
from control_plane.distribution.wanted import WantedIndex, wanted
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


def state_of(*messages: object) -> ControlState:
    state = ControlState()
    upserts = wire.Objects()
    for message in messages:
        getattr(upserts, f"{type(message).__name__.lower()}s").append(message)
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=upserts))
    return state


POOL = wire.Pool(id="p", base_digest="base")
REPLICA = wire.Replica(id="r", pool_id="p", node_id="n", state=wire.REPLICA_STATE_READY)
CHAT = wire.Model(id="chat", base_digest="base", adapter_digest="one", pool_id="p")


def test_a_node_wants_its_bases_and_the_adapters_that_it_serves() -> None:
    other = wire.Model(id="other", base_digest="b2", adapter_digest="two", pool_id="elsewhere")
    plain = wire.Model(id="plain", base_digest="base", pool_id="p")
    state = state_of(POOL, REPLICA, CHAT, other, plain)
    assert wanted(state, "n") == {"base": Priority.WARMING, "one": Priority.PREFETCH}
    assert wanted(state, "unknown") == {}


def test_both_releases_of_a_rollout_come_before_other_adapters() -> None:
    split = wire.Split(id="chat", control="v1", canary="v2", share=100)
    releases = [
        wire.Release(id="chat@v1", model_id="chat", adapter_digest="one", pool_id="p"),
        wire.Release(id="chat@v2", model_id="chat", adapter_digest="next", pool_id="p"),
        wire.Release(id="chat@v0", model_id="chat", adapter_digest="old", pool_id="p"),
    ]
    found = wanted(state_of(POOL, REPLICA, CHAT, split, *releases), "n")
    assert found == dict.fromkeys(("base", "one", "next"), Priority.WARMING)


def test_the_canary_of_another_base_is_wanted_where_its_own_pool_runs() -> None:
    split = wire.Split(id="chat", control="v1", canary="v2")
    release = wire.Release(id="chat@v2", model_id="chat", adapter_digest="next", pool_id="q")
    canary = wire.Replica(id="r2", pool_id="q", node_id="m", state=wire.REPLICA_STATE_STARTING)
    state = state_of(
        POOL, wire.Pool(id="q", base_digest="b2"), REPLICA, canary, CHAT, split, release
    )
    assert wanted(state, "m") == {"b2": Priority.WARMING, "next": Priority.WARMING}
    assert wanted(state, "n") == {"base": Priority.WARMING, "one": Priority.PREFETCH}


def test_a_replica_that_leaves_asks_for_nothing_and_one_without_a_pool_does_no_harm() -> None:
    leaving = wire.Replica(id="r", pool_id="p", node_id="n", state=wire.REPLICA_STATE_DRAINING)
    lost = wire.Replica(id="r2", pool_id="gone", node_id="n")
    assert wanted(state_of(POOL, leaving, lost, CHAT), "n") == {}


def test_nodes_with_equal_pools_share_one_answer_until_the_state_changes() -> None:
    twin = wire.Replica(id="r2", pool_id="p", node_id="m")
    state = state_of(POOL, REPLICA, twin, CHAT)
    index = WantedIndex(state)
    first = index.of("n")
    assert index.of("m") is first
    removal = wire.WatchResponse(version=2, removals=wire.Removals(models=["chat"]))
    assert state.apply(removal)
    assert index.of("m") == {"base": Priority.WARMING}
    assert dict(first) == {"base": Priority.WARMING, "one": Priority.PREFETCH}


def test_a_new_key_causes_no_new_look_and_unchanged_wishes_stay_the_same_object() -> None:
    state = state_of(POOL, REPLICA, CHAT)
    index = WantedIndex(state)
    first = index.of("n")
    keys = wire.Objects(keys=[wire.ApiKey(id="k")])
    assert state.apply(wire.WatchResponse(version=2, upserts=keys))
    assert index.of("n") is first
    assert index.looks == 1
    twin = wire.Objects(replicas=[wire.Replica(id="r2", pool_id="p", node_id="m")])
    assert state.apply(wire.WatchResponse(version=3, upserts=twin))
    assert index.of("m") is first
    assert index.of("n") is first
    assert index.looks == 2
    state.become(state_of(POOL, REPLICA))
    assert index.of("n") == {"base": Priority.WARMING}


def test_a_node_fetches_the_base_of_its_next_replica_after_all_others() -> None:
    other = wire.Pool(id="q", base_digest="b2")
    state = state_of(POOL, other, REPLICA, CHAT)
    index = WantedIndex(state)
    first = index.of("n")
    index.prefetch({"n": frozenset({"q"}), "m": frozenset({"p", "gone"})})
    assert index.of("n") == {**first, "b2": Priority.PREFETCH}
    assert index.of("m") == {"base": Priority.PREFETCH}
    looks, found = index.looks, index.of("m")
    index.prefetch({"n": frozenset({"q"}), "m": frozenset({"p", "gone"})})
    assert index.of("m") is found
    assert index.looks == looks
    index.prefetch({"n": frozenset({"p"})})
    assert index.of("n") == first, "the base of a replica on the node stays more urgent"
    assert index.of("m") == {}
