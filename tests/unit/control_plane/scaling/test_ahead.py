"""Nodes that fetch bases ahead: those on which the next replicas boot."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import Needs, Node, Pool, Replica, ReplicaState
from control_plane.fleet.planner import plan_replicas
from control_plane.scaling.ahead import AHEAD_MAX, ahead_count, next_places

GIB = 1 << 30
READY = ReplicaState.READY


def _node(name: str, gib: int = 8) -> Node:
    return Node(name, frozenset({"sim"}), is_lost=False, memory_bytes=gib * GIB, accelerators=())


def _pool(name: str, gib: int = 2, wanted: int = 1) -> Pool:
    return Pool(name, "sim", wanted, needs=Needs(gib * GIB))


def _replica(name: str, node: str, pool: Pool) -> Replica:
    return Replica(name, pool.id, f"{pool.id}-0", node, state=READY, reserved=pool.needs)


A, B = _pool("a"), _pool("b")
NODES = [_node("n0"), _node("n1"), _node("n2")]


def _next(
    counts: dict[str, int],
    replicas: list[Replica],
    before: dict[str, frozenset[str]] | None = None,
    bases_max: int = 2,
) -> dict[str, frozenset[str]]:
    pools = {"a": (A, "base-a"), "b": (B, "base-b"), "c": (_pool("c"), "base-a")}
    return next_places(counts, pools, NODES, replicas, before or {}, bases_max)


@pytest.mark.parametrize(
    ("wanted", "growth", "most", "found"),
    [(1, 0, 4, 1), (1, 2, 4, 2), (3, 9, 4, 1), (4, 9, 4, 0), (0, 99, 99, AHEAD_MAX)],
)
def test_one_next_replica_is_expected_and_more_if_the_forecast_says_so(
    wanted: int, growth: int, most: int, found: int
) -> None:
    assert ahead_count(wanted, growth, most) == found


def test_the_node_of_the_next_replica_fetches_its_base() -> None:
    here = [_replica("r0", "n0", A)]
    assert _next({"a": 1}, here) == {"a": frozenset({"n1"})}
    assert _next({"a": 2}, here) == {"a": frozenset({"n1", "n2"})}
    assert _next({"a": 0}, here) == _next({}, here) == {}


def test_a_node_that_has_the_base_fetches_nothing() -> None:
    here = [_replica("r0", "n0", A), _replica("r1", "n1", A), _replica("r2", "n2", A)]
    assert _next({"a": 1, "c": 1}, here) == {}


def test_a_node_fetches_few_bases() -> None:
    assert _next({"a": 1, "b": 1}, [], bases_max=1) == {"a": frozenset({"n0"})}
    assert _next({"a": 1, "c": 1}, [], bases_max=1) == dict.fromkeys("ac", frozenset({"n0"}))
    assert _next({"a": 1, "b": 1}, []) == dict.fromkeys("ab", frozenset({"n0"}))


def test_nodes_of_the_last_round_are_taken_again() -> None:
    before = {"a": frozenset({"n2"})}
    assert _next({"a": 1}, [], before) == before
    fuller = [_replica("r0", "n1", B)]
    assert _next({"a": 1}, fuller) == {"a": frozenset({"n1"})}
    assert _next({"a": 1}, fuller, before) == before


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    memory=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    counts=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    bases_max=st.integers(1, 3),
)
def test_the_next_replicas_boot_where_their_bases_are(
    sizes: list[int], memory: list[int], counts: list[int], bases_max: int
) -> None:
    nodes = [_node(f"n{at}", gib) for at, gib in enumerate(memory)]
    pools = {f"p{at}": (_pool(f"p{at}", gib, 0), f"base-{at}") for at, gib in enumerate(sizes)}
    wished = dict(zip(pools, counts, strict=False))
    found = next_places(wished, pools, nodes, [], {}, bases_max)
    assert next_places(wished, pools, nodes, [], found, bases_max) == found, "it does not change"
    fetched: dict[str, set[str]] = {}
    for pool_id, node_ids in found.items():
        assert len(node_ids) <= wished[pool_id]
        for node_id in node_ids:
            fetched.setdefault(node_id, set()).add(pool_id)
    assert all(len(bases) <= bases_max for bases in fetched.values())
    numbers = count()
    for pool, _ in pools.values():
        if pool.needs == Needs() or not found.get(pool.id):
            continue
        one = Pool(pool.id, "sim", 1, needs=pool.needs)
        cells = {pool.id: (f"{pool.id}-0",)}
        plan = plan_replicas([one], cells, nodes, [], lambda: f"r{next(numbers)}", ahead=found)
        assert plan.create[0].node_id in found[pool.id]
