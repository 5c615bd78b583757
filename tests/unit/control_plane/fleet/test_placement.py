"""Which node and accelerators a replica gets: never too much, spread first, then packed."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import Accelerator, Needs, Node, Pool, Replica, ReplicaState
from control_plane.fleet.planner import FleetChanges, plan_replicas

GIB = 1 << 30


def _node(name: str, *accelerators: int, memory: int | None = 512, rack: str = "") -> Node:
    found = tuple(Accelerator(index, size * GIB) for index, size in enumerate(accelerators))
    memory_bytes = None if memory is None else memory * GIB
    return Node(
        name,
        frozenset({"trtllm"}),
        is_lost=False,
        memory_bytes=memory_bytes,
        accelerators=found,
        rack=rack,
    )


def _large(accelerators: int, each: int, *, memory: int = 0) -> Needs:
    return Needs(memory * GIB, accelerators, each * GIB, is_dedicated=True)


def _small(each: int) -> Needs:
    return Needs(0, 1, each * GIB)


def _plan(pools: list[Pool], nodes: list[Node], replicas: list[Replica]) -> FleetChanges:
    numbers = count(500)
    cells = {pool.id: (f"{pool.id}-0",) for pool in pools}
    return plan_replicas(pools, cells, nodes, replicas, lambda: f"r{next(numbers)}")


def _places(plan: FleetChanges, pool: str) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((r.node_id, r.accelerators) for r in plan.create if r.pool_id == pool)


_NEEDS = st.builds(
    Needs,
    st.integers(0, 6).map(lambda gib: gib * GIB),
    st.integers(0, 3),
    st.integers(0, 90).map(lambda gib: gib * GIB),
    st.booleans(),
)
_POOLS = st.lists(st.tuples(st.integers(0, 5), _NEEDS), min_size=1, max_size=4).map(
    lambda found: [
        Pool(f"p{n}", "trtllm", wanted, needs=needs) for n, (wanted, needs) in enumerate(found)
    ]
)
_NODES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([24, 80, 141]), max_size=4),
        st.one_of(st.none(), st.integers(0, 12)),
        st.sampled_from(["", "a", "b"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda found: [
        replace(_node(f"n{n}", *sizes, memory=memory, rack=rack), is_draining=is_draining)
        for n, (sizes, memory, rack, is_draining) in enumerate(found)
    ]
)


def _check_room(nodes: list[Node], replicas: list[Replica]) -> None:
    """Nothing is given twice, nobody shares what is dedicated."""
    for node in nodes:
        held = [r for r in replicas if r.node_id == node.id]
        if node.memory_bytes is not None:
            assert sum(r.reserved.memory_bytes for r in held) <= node.memory_bytes
        for accelerator in node.accelerators or ():
            users = [r for r in held if accelerator.index in r.accelerators]
            given_away = sum(r.reserved.accelerator_memory_bytes for r in users)
            assert given_away <= accelerator.memory_bytes
            assert len(users) <= 1 or not any(r.reserved.is_dedicated for r in users)


@given(_POOLS, _NODES, st.lists(_POOLS, max_size=2))
def test_nothing_is_given_twice(
    pools: list[Pool], nodes: list[Node], later: list[list[Pool]]
) -> None:
    """Also not when pools change what they want and need, and nodes begin to drain or stop it."""
    replicas: list[Replica] = []
    for number, wanted in enumerate([pools, *later]):
        flipped = [replace(n, is_draining=n.is_draining != bool(number % 2)) for n in nodes]
        before = {r.id: r for r in replicas}
        for _ in range(3):
            plan = _plan(wanted, flipped, replicas)
            numbered = [replace(r, id=f"{number}-{r.id}-{len(before)}") for r in plan.create]
            replicas = replace(plan, create=tuple(numbered)).applied(replicas)
            _check_room(nodes, replicas)
            for created in numbered:
                needs = created.reserved
                assert len(created.accelerators) == needs.accelerators
                assert not next(n for n in flipped if n.id == created.node_id).is_draining
            replicas = [
                replace(r, state=ReplicaState.STOPPED if r.is_draining else ReplicaState.READY)
                for r in replicas
            ]
        for replica in replicas:
            if replica.id in before:
                known = before[replica.id]
                assert replica.accelerators == known.accelerators, "for as long as it lives"


@given(_POOLS, _NODES)
def test_missing_resources_are_named(pools: list[Pool], nodes: list[Node]) -> None:
    plan = _plan(pools, nodes, [])
    made = Counter(r.pool_id for r in plan.create)
    for pool in pools:
        condition = plan.conditions.get(pool.id)
        unplaced = 0 if condition is None else condition.unplaced
        assert made[pool.id] + unplaced == pool.replicas_wanted
        if condition is not None:
            assert condition.text.startswith(f"{made[pool.id]} of {pool.replicas_wanted} placed: ")


def test_large_ones_get_whole_accelerators_and_small_ones_share() -> None:
    nodes = [_node("n0", 80, 80, 80, 80), _node("n1", 80, 80)]
    pools = [
        Pool("large", "trtllm", 1, needs=_large(3, 70)),
        Pool("a", "trtllm", 1, needs=_small(30)),
        Pool("b", "trtllm", 1, needs=_small(30)),
        Pool("c", "trtllm", 1, needs=_small(60)),
    ]
    plan = _plan(pools, nodes, [])
    assert _places(plan, "large") == [("n0", (0, 1, 2))]
    shared = [_places(plan, name)[0] for name in "abc"]
    assert shared[0] == shared[1] != shared[2], "the small ones are together, out of the way"
    assert plan.conditions == {}


def test_replicas_of_a_pool_are_spread_over_racks_first() -> None:
    nodes = [
        _node("n0", 80, 80, rack="a"),
        _node("n1", 80, 80, rack="a"),
        _node("n2", 80, rack="b"),
    ]
    plan = _plan([Pool("p", "trtllm", 3, needs=_small(20))], nodes, [])
    assert [node for node, _ in _places(plan, "p")] == ["n0", "n1", "n2"]
    two = _plan([Pool("p", "trtllm", 2, needs=_small(20))], nodes, [])
    assert "n2" in {node for node, _ in _places(two, "p")}


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (_large(2, 80), "no node has 2 accelerators of 80 GiB unused"),
        (_small(90), "no node has 1 accelerator of 90 GiB free"),
        (Needs(memory_bytes=600 * GIB), "no node has 600 GiB of memory free"),
        (_large(1, 80, memory=500), "no node has 1 accelerator of 80 GiB unused"),
    ],
)
def test_why_there_is_no_place(needs: Needs, why: str) -> None:
    nodes = [_node("n0", 24, 24), _node("n1", 24)]
    (condition,) = _plan([Pool("p", "trtllm", 4, needs=needs)], nodes, []).conditions.values()
    assert condition.unplaced == 4
    assert condition.text.startswith(f"0 of 4 placed: {why}, and no empty node is large enough")


def test_a_full_node_is_not_called_too_small() -> None:
    pool = Pool("p", "trtllm", 2, needs=_large(1, 80))
    (condition,) = _plan([pool], [_node("n0", 80)], []).conditions.values()
    assert condition.text == "1 of 2 placed: no node has 1 accelerator of 80 GiB unused"


def test_why_no_node_is_open() -> None:
    pool = Pool("p", "trtllm", 2)
    (condition,) = _plan([pool], [], []).conditions.values()
    assert condition.text == "0 of 2 placed: no node runs engine trtllm"
    cordoned = replace(_node("n0"), is_unschedulable=True)
    (condition,) = _plan([pool], [cordoned], []).conditions.values()
    assert (
        "all nodes with engine trtllm are lost, cordoned, draining or distrusted" in condition.text
    )


def test_an_unreported_resource_is_not_required() -> None:
    unknown = Node("n0", frozenset({"trtllm"}), is_lost=False)
    plan = _plan([Pool("p", "trtllm", 2, needs=_large(8, 80, memory=1000))], [unknown], [])
    assert _places(plan, "p") == [("n0", ()), ("n0", ())]
    told = _node("n0", 80, 80)
    pool = Pool("q", "trtllm", 1, needs=_small(1))
    held = _plan([pool], [told], list(plan.create))
    assert held.create == (), "those that were made before may use all"


def test_a_cordoned_accelerator_is_given_to_no_replica() -> None:
    broken = (Accelerator(0, 80 * GIB, is_cordoned=True), Accelerator(1, 80 * GIB))
    node = replace(_node("n0"), accelerators=broken)
    pool = Pool("p", "trtllm", 2, needs=_large(1, 80))
    plan = _plan([pool], [node], [])
    assert _places(plan, "p") == [("n0", (1,))]
    assert plan.conditions["p"].unplaced == 1
