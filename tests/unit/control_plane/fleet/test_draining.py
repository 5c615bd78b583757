"""A draining node is emptied: others are ready first, and never are too few."""

from dataclasses import replace
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import Needs, Node, Pool, Replica, ReplicaState
from control_plane.fleet.planner import DRAINED, DRAINING_MAX, FleetChanges, plan_replicas

GIB = 1 << 30
READY, STARTING = ReplicaState.READY, ReplicaState.STARTING


def _node(name: str, *, draining: bool = False, gib: int | None = None) -> Node:
    memory_bytes = None if gib is None else gib * GIB
    engines = frozenset({"sim"})
    return Node(name, engines, is_lost=False, is_draining=draining, memory_bytes=memory_bytes)


def _replica(number: int, node: str, state: ReplicaState = READY, gib: int = 0) -> Replica:
    return Replica(f"r{number}", "p", "p-0", node, state=state, reserved=Needs(gib * GIB))


def _plan(pool: Pool, nodes: list[Node], replicas: list[Replica]) -> FleetChanges:
    numbers = count(500)
    return plan_replicas([pool], {"p": ("p-0",)}, nodes, replicas, lambda: f"r{next(numbers)}")


def test_others_are_ready_before_a_replica_leaves() -> None:
    pool = Pool("p", "sim", 2)
    nodes = [_node("n0", draining=True), _node("n1")]
    here = [_replica(0, "n0"), _replica(1, "n0")]
    first = _plan(pool, nodes, here)
    assert [r.node_id for r in first.create] == ["n1", "n1"]
    assert first.drain == ()
    assert first.notes == {"n0": "2 of pool p wait for others to be ready instead"}
    one, two = first.create
    assert _plan(pool, nodes, first.applied(here)) == FleetChanges()
    next_ = _plan(pool, nodes, [*here, replace(one, state=READY), two])
    assert (next_.create, next_.drain) == ((), ("r0",))
    assert "1 finish what they run" in next_.notes["n0"]
    ended = [replace(r, is_draining=True, state=ReplicaState.STOPPED) for r in here]
    ready = [replace(one, state=READY), replace(two, state=READY)]
    last = _plan(pool, nodes, [*ended, *ready])
    assert (last.forget, last.notes) == (("r0", "r1"), {"n0": DRAINED})


def test_without_room_one_less_is_put_up_with_and_never_none() -> None:
    nodes = [_node("n0", draining=True, gib=8), _node("n1", gib=8)]
    needs = Needs(8 * GIB)
    here = [_replica(0, "n0", gib=8), _replica(1, "n1", gib=8)]
    plan = _plan(Pool("p", "sim", 2, needs=needs), nodes, here)
    assert (plan.create, plan.drain) == ((), ("r0",))
    alone = _plan(Pool("p", "sim", 1, needs=needs), [nodes[0]], here[:1])
    assert (alone.create, alone.drain) == ((), ())
    assert alone.notes["n0"] == (
        "1 of pool p wait for room elsewhere: 0 of 1 placed: "
        "all nodes with engine sim are lost, cordoned, draining or distrusted"
    )


def test_a_replica_that_does_not_serve_leaves_at_once() -> None:
    nodes = [_node("n0", draining=True), _node("n1")]
    here = [_replica(0, "n0", STARTING), _replica(1, "n0", ReplicaState.FAILED), _replica(2, "n1")]
    plan = _plan(Pool("p", "sim", 3), nodes, here)
    assert len(plan.create) == 2
    assert (plan.drain, plan.forget) == (("r0",), ("r1",))


def test_few_leave_at_once() -> None:
    nodes = [_node("n0", draining=True), _node("n1")]
    here = [_replica(n, "n0") for n in range(9)]
    there = [_replica(n, "n1") for n in range(10, 19)]
    plan = _plan(Pool("p", "sim", 9), nodes, [*here, *there])
    assert len(plan.drain) == DRAINING_MAX
    assert _plan(Pool("p", "sim", 9), nodes, plan.applied([*here, *there])) == FleetChanges()


def test_a_cordoned_node_keeps_its_replicas() -> None:
    cordoned = replace(_node("n0"), is_unschedulable=True)
    here = [_replica(0, "n0"), _replica(1, "n0")]
    assert _plan(Pool("p", "sim", 2), [cordoned, _node("n1")], here) == FleetChanges()
    more = _plan(Pool("p", "sim", 3), [cordoned, _node("n1")], here)
    assert [r.node_id for r in more.create] == ["n1"]


@given(
    wanted=st.integers(0, 8),
    rooms=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    held=st.integers(0, 10),
    slow=st.sets(st.integers(0, 30)),
)
def test_capacity_is_kept_and_the_node_is_emptied_if_there_is_room(
    wanted: int, rooms: list[int], held: int, slow: set[int]
) -> None:
    pool = Pool("p", "sim", wanted, needs=Needs(GIB))
    nodes = [_node("n0", draining=True, gib=10)]
    nodes += [_node(f"n{n}", gib=gib) for n, gib in enumerate(rooms, 1)]
    replicas = [_replica(n, "n0", gib=1) for n in range(held)]
    at_first = min(held, wanted)
    for step in range(61):  # of the last 30 none is slow: all can be moved in them
        plan = _plan(pool, nodes, replicas)
        created = [replace(r, id=f"s{step:02}-{n}") for n, r in enumerate(plan.create)]
        replicas = replace(plan, create=tuple(created)).applied(replicas)
        serving = sum(r.state is READY and not r.is_draining for r in replicas)
        assert serving >= min(at_first, max(min(wanted, 1), wanted - 1))
        for number, replica in enumerate(replicas):
            if replica.is_draining:
                replicas[number] = replace(replica, state=ReplicaState.STOPPED)
            elif step not in slow:  # nothing gets ready in some steps
                replicas[number] = replace(replica, state=READY)
    room = sum(rooms)
    left = [r for r in replicas if r.node_id == "n0"]
    if room >= wanted:
        assert not left
        assert plan.notes["n0"] == DRAINED
    elif left:
        assert "room elsewhere" in plan.notes["n0"]
