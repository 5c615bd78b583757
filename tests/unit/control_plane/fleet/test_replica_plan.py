"""The replicas of the fleet: the reconciler reaches what is wanted, and then stops."""

from collections import Counter
from dataclasses import replace
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import (
    Holdback,
    Node,
    Observed,
    Pool,
    Replica,
    ReplicaState,
    observe,
)
from control_plane.fleet.planner import FleetChanges, plan_replicas

_ENGINES = ["openvino", "sim", "trtllm"]
_POOLS = st.lists(
    st.tuples(st.sampled_from(_ENGINES), st.integers(0, 4)), min_size=1, max_size=3
).map(lambda found: [Pool(f"p{n}", engine, wanted) for n, (engine, wanted) in enumerate(found)])
_NODES = st.lists(
    st.tuples(st.frozensets(st.sampled_from(_ENGINES)), st.booleans()), max_size=4
).map(lambda found: [Node(f"n{n}", engines, lost) for n, (engines, lost) in enumerate(found)])
_REPLICAS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 3), st.booleans(), st.sampled_from(list(ReplicaState))
    ),
    max_size=10,
).map(
    lambda found: [
        Replica(f"r{n:03}", f"p{pool}", f"p{pool}-0", f"n{node}", draining, state)
        for n, (pool, node, draining, state) in enumerate(found)
    ]
)


def _consistent(replicas: list[Replica], pools: list[Pool], nodes: list[Node]) -> list[Replica]:
    """Keep the rows that the database allows, with lost nodes' replicas lost."""
    lost = {node.id: node.is_lost for node in nodes}
    kept = [r for r in replicas if r.node_id in lost and r.pool_id in {pool.id for pool in pools}]
    return [replace(r, state=ReplicaState.LOST) if lost[r.node_id] else r for r in kept]


def _plan(pools: list[Pool], nodes: list[Node], replicas: list[Replica]) -> FleetChanges:
    numbers = count(500)
    cells = {pool.id: (f"{pool.id}-0",) for pool in pools}
    return plan_replicas(pools, cells, nodes, replicas, lambda: f"r{next(numbers)}")


def _work(replicas: list[Replica], nodes: list[Node]) -> list[Replica]:
    """Let the agents of live nodes do what they are told."""
    lost = {node.id: node.is_lost for node in nodes}
    done = []
    for r in replicas:
        if not lost[r.node_id]:
            done.append(
                replace(r, state=ReplicaState.STOPPED if r.is_draining else ReplicaState.READY)
            )
        else:
            done.append(r)
    return done


@given(_POOLS, _NODES, _REPLICAS)
def test_the_fleet_reaches_the_wanted_state_and_stays(
    pools: list[Pool], nodes: list[Node], replicas: list[Replica]
) -> None:
    now = _consistent(replicas, pools, nodes)
    for _ in range(4):
        now = _work(_plan(pools, nodes, now).applied(now), nodes)
    assert _plan(pools, nodes, now) == FleetChanges()
    ready = Counter(r.pool_id for r in now if r.state is ReplicaState.READY and not r.is_draining)
    for pool in pools:
        possible = any(pool.engine in node.engines and not node.is_lost for node in nodes)
        live = {node.id for node in nodes if not node.is_lost}
        before = [
            r for r in replicas if r.pool_id == pool.id and r.node_id in live and not r.is_draining
        ]
        expected = pool.replicas_wanted if possible else min(pool.replicas_wanted, len(before))
        assert ready[pool.id] == expected


@given(_POOLS, _NODES, _REPLICAS)
def test_a_plan_is_minimal_and_possible(
    pools: list[Pool], nodes: list[Node], replicas: list[Replica]
) -> None:
    now = _consistent(replicas, pools, nodes)
    plan = _plan(pools, nodes, now)
    by_node = {node.id: node for node in nodes}
    engine = {pool.id: pool.engine for pool in pools}
    for created in plan.create:
        node = by_node[created.node_id]
        assert not node.is_lost
        assert engine[created.pool_id] in node.engines
        assert created.cell_id == f"{created.pool_id}-0"
    assert not set(plan.drain) & set(plan.forget)
    drained = {r.pool_id for r in now if r.id in plan.drain}
    assert not drained & {r.pool_id for r in plan.create}, "never both create and drain"
    assert _plan(pools, nodes, plan.applied(now)) == FleetChanges(), "nothing is decided twice"


def test_the_least_useful_replicas_leave_first() -> None:
    states = [ReplicaState.STARTING, ReplicaState.READY, ReplicaState.FAILED, ReplicaState.READY]
    replicas = [Replica(f"r{n}", "p", "p-0", "n", state=state) for n, state in enumerate(states)]
    node = Node("n", frozenset({"sim"}), is_lost=False)
    for wanted, drained in ((3, ()), (2, ("r0",)), (1, ("r3", "r0"))):
        plan = plan_replicas([Pool("p", "sim", wanted)], {"p": ("p-0",)}, [node], replicas, str)
        assert (plan.drain, plan.forget) == (drained, ("r2",)), "what failed has nothing to drain"


def test_a_lost_replica_is_kept_until_another_one_is_ready() -> None:
    lost = Replica("r0", "p", "p-0", "n0", state=ReplicaState.LOST)
    nodes = [
        Node("n0", frozenset({"sim"}), is_lost=True),
        Node("n1", frozenset({"sim"}), is_lost=False),
    ]
    pool = [Pool("p", "sim", 1)]
    first = _plan(pool, nodes, [lost])
    assert [r.node_id for r in first.create] == ["n1"]
    assert first.forget == ()
    after = [lost, replace(first.create[0], state=ReplicaState.READY)]
    assert _plan(pool, nodes, after) == FleetChanges(forget=("r0",))


def test_new_replicas_go_to_the_least_loaded_nodes() -> None:
    nodes = [Node(f"n{n}", frozenset({"sim"}), is_lost=False) for n in range(3)]
    plan = _plan([Pool("p", "sim", 7)], nodes, [])
    assert sorted(Counter(r.node_id for r in plan.create).values()) == [2, 2, 3]


_REPORTED = st.dictionaries(
    st.sampled_from([f"r{n:03}" for n in range(12)]),
    st.builds(Observed, st.sampled_from(list(ReplicaState)), st.sampled_from(["", "h:1", "h:2"])),
)


@given(_REPLICAS, _REPORTED)
def test_a_report_is_taken_over_whole(replicas: list[Replica], report: dict[str, Observed]) -> None:
    changed = {r.id: r for r in observe(replicas, report)}
    after = [changed.get(r.id, r) for r in replicas]
    assert observe(after, report) == []
    for replica in after:
        if replica.id in report:
            seen = report[replica.id]
            assert (replica.state, replica.grpc_address) == (seen.state, seen.grpc_address)
        else:
            assert replica.grpc_address == ""
            assert replica.state in {ReplicaState.STOPPED, ReplicaState.STARTING}


def test_ended_replicas_of_a_cordoned_node_are_made_elsewhere_and_the_rest_goes_on() -> None:
    cordoned = Node("n0", frozenset({"sim", "trtllm"}), is_lost=False, is_cordoned=True)
    other = Node("n1", frozenset({"sim", "trtllm"}), is_lost=False)
    stopped = Replica("r0", "gpu", "gpu-0", "n0", state=ReplicaState.STOPPED)
    serving = Replica("r1", "cpu", "cpu-0", "n0", state=ReplicaState.READY)
    pools = [Pool("gpu", "trtllm", 1), Pool("cpu", "sim", 1)]
    plan = _plan(pools, [cordoned, other], [stopped, serving])
    assert [(r.pool_id, r.node_id) for r in plan.create] == [("gpu", "n1")]
    assert (plan.drain, plan.forget) == ((), ())
    made = replace(plan.create[0], state=ReplicaState.READY)
    assert _plan(pools, [cordoned, other], [stopped, serving, made]).forget == ("r0",)
    assert _plan(pools, [cordoned], [stopped, serving]) == FleetChanges(), (
        "nobody else could serve it"
    )


def test_a_held_replica_is_not_replaced_and_no_other_drains_for_it() -> None:
    pool = Pool("p0", "sim", 6)
    nodes = [Node(name, frozenset(["sim"]), is_lost=False) for name in ("n0", "n1")]
    replicas = [
        Replica(f"r{n}", "p0", "p0-0", "n0", state=ReplicaState.READY, is_draining=n >= 4)
        for n in range(6)
    ]

    def planned(held: Holdback) -> FleetChanges:
        numbers = count(500)
        cells = {"p0": ("p0-0",)}
        return plan_replicas([pool], cells, nodes, replicas, lambda: f"r{next(numbers)}", held)

    assert [r.node_id for r in planned(Holdback({}, frozenset())).create] == ["n1", "n1"]
    plan = planned(Holdback({"p0": 2}, frozenset()))
    assert (plan.create, plan.drain) == ((), ())
    assert plan.conditions["p0"].unplaced == 2
    assert "4 of 6 placed: 2 answered wrongly" in plan.conditions["p0"].text
    assert [r.node_id for r in planned(Holdback({"p0": 1}, frozenset(["n1"]))).create] == ["n0"]
    plan = planned(Holdback({"p0": 1}, frozenset(["n0", "n1"])))
    assert (plan.create, plan.conditions["p0"].unplaced) == ((), 2)
    assert planned(Holdback({"p0": 9}, frozenset())).drain == ()
