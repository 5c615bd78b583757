"""Moves that empty a node: never beyond the room, one at a time, never in a circle."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.fleet.model import Accelerator, Needs, Node, Pool, Replica, ReplicaState
from control_plane.fleet.planner import FleetChanges, plan_replicas
from control_plane.scaling.consolidation import (
    Consolidation,
    Move,
    PackedFleet,
    PackedPool,
    by_hand,
    hindrance,
    next_move,
    soon_replicas,
)
from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.model import PoolFacts, PoolPlan, PoolState, ScalingSettings
from control_plane.scaling.moves_repository import OpenMove
from control_plane.scaling.moving import MovablePool, outcome_of
from control_plane.scaling.nodes import GroupNode, NodeGroup

GIB = 1 << 30
READY, STARTING = ReplicaState.READY, ReplicaState.STARTING
OLD_S = 1000.0


def _node(name: str, gib: int = 8, **fields: object) -> Node:
    node = Node(name, frozenset({"sim"}), is_lost=False, memory_bytes=gib * GIB, accelerators=())
    return replace(node, **fields)


def _pool(name: str, gib: int = 2, wanted: int = 1) -> Pool:
    return Pool(name, "sim", wanted, needs=Needs(gib * GIB))


def _replica(name: str, node: str, pool: Pool, state: ReplicaState = READY) -> Replica:
    return Replica(name, pool.id, f"{pool.id}-0", node, state=state, reserved=pool.needs)


A, B, C = _pool("a"), _pool("b"), _pool("c")
HALF = PackedFleet(
    [_node("n0"), _node("n1")],
    [_replica("r0", "n0", A), _replica("r1", "n1", B)],
    {"a": PackedPool(A), "b": PackedPool(B)},
    {"r0": OLD_S, "r1": OLD_S},
    {},
)
ALWAYS, NEEDED = Consolidation.ALWAYS, Consolidation.NEEDED


def _told(move: Move | None) -> tuple[str, str] | None:
    return None if move is None else (move.replica.id, move.moves_to)


def _first(fleet: PackedFleet, pool: PackedPool) -> PackedFleet:
    return replace(fleet, pools=dict.fromkeys("ab", pool))


def test_two_nodes_half_full_become_one() -> None:
    move = next_move(HALF, ALWAYS)
    assert _told(move) == ("r0", "n1")
    assert move is not None
    assert move.text == "r0 moves from n0 to n1: n0 becomes empty, and no replica needs it"


def test_a_free_node_that_serves_nothing_is_no_gain_by_default() -> None:
    assert next_move(HALF, NEEDED) is None
    assert next_move(HALF, Consolidation.OFF) is None


def test_a_node_is_emptied_for_a_replica_that_waits() -> None:
    large = _pool("large", gib=7)
    move = next_move(replace(HALF, waiting=[large]), NEEDED)
    assert move is not None
    assert "a replica of large then has room" in move.why
    assert next_move(replace(HALF, waiting=[_pool("large", gib=9)]), NEEDED) is None


def _cloud(*foreign: int, least: int = 0) -> NodeGroup:
    nodes = [GroupNode(f"n{at}", 1, count) for at, count in enumerate(foreign)]
    return NodeGroup(nodes, {"c": (1, 2)}, least, 9)


def test_a_node_is_emptied_that_its_actuator_then_ends() -> None:
    move = next_move(replace(HALF, groups={"cloud": _cloud(1, 1)}), NEEDED)
    assert _told(move) == ("r0", "n1")
    assert move is not None
    assert "actuator cloud then ends it" in move.why
    kept = replace(HALF, groups={"cloud": _cloud(1, 1, least=2)})
    assert next_move(kept, ALWAYS) is None, "an actuator that keeps its nodes gains nothing"


@pytest.mark.parametrize(
    "fleet",
    [
        replace(HALF, ages_s={"r0": OLD_S - 500, "r1": OLD_S - 500}),
        _first(HALF, PackedPool(A, hindrance="its work waits")),
        replace(HALF, pools={}),
        replace(HALF, kept=frozenset({"n0"})),
        replace(HALF, nodes=[_node("n0", 3), _node("n1", 3)]),
        replace(HALF, nodes=[_node("n0"), _node("n1", is_unschedulable=True)]),
        replace(HALF, nodes=[replace(it, memory_bytes=None) for it in HALF.nodes]),
        replace(HALF, replicas=[replace(it, moves_to="n9") for it in HALF.replicas]),
        replace(HALF, replicas=[replace(it, reserved=Needs()) for it in HALF.replicas]),
        replace(HALF, replicas=[replace(it, state=STARTING) for it in HALF.replicas]),
        replace(HALF, replicas=[_replica("r0", "n0", A), _replica("r1", "n1", A)]),
    ],
    ids=[
        *("young", "hindered", "unscaled", "given up", "no room", "cordoned", "unknown memory"),
        *("already moving", "unknown need", "starting", "same pool on both"),
    ],
)
def test_nothing_moves(fleet: PackedFleet) -> None:
    assert next_move(fleet, ALWAYS) is None


def test_a_node_that_the_forecast_needs_soon_is_kept() -> None:
    assert next_move(_first(HALF, PackedPool(A, growth=2)), ALWAYS) is None
    assert next_move(_first(HALF, PackedPool(A, growth=1)), ALWAYS) is not None


def test_a_pool_keeps_its_racks() -> None:
    nodes = [_node("n0", rack="r0"), _node("n1", rack="r1"), _node("n2", rack="r1")]
    replicas = [_replica("r0", "n0", A), _replica("r1", "n1", A), _replica("r2", "n2", B)]
    ages = dict.fromkeys(("r0", "r1"), OLD_S)
    fleet = replace(HALF, nodes=nodes, replicas=replicas, ages_s=ages)
    assert _told(next_move(fleet, ALWAYS)) == ("r1", "n2"), "within the rack"
    apart = replace(fleet, nodes=[*nodes[:2], replace(nodes[2], rack="r0")])
    assert _told(next_move(apart, ALWAYS)) == ("r0", "n2")


def test_dedicated_accelerators_of_two_replicas_differ_in_a_trial() -> None:
    devices = (Accelerator(0, 80 * GIB), Accelerator(1, 80 * GIB))
    needs = Needs(0, 1, 0, is_dedicated=True)
    pools = [replace(_pool(name), needs=needs) for name in "abcd"]
    nodes = [_node(name, accelerators=devices) for name in ("n0", "n1")]
    places = zip(pools, ("n0", "n0", "n1", "n1"), (0, 1, 0, 1), strict=True)
    replicas = [
        replace(_replica(f"r{pool.id}", node, pool), accelerators=(at,))
        for pool, node, at in places
    ]
    known = {pool.id: PackedPool(pool) for pool in pools}
    fleet = PackedFleet(nodes, replicas[:3], known, {it.id: OLD_S for it in replicas}, {})
    assert _told(next_move(fleet, ALWAYS)) is None, "n1 lends one, and n0 has two replicas"
    three = replace(nodes[1], accelerators=(*devices, Accelerator(2, 80 * GIB)))
    roomy = replace(fleet, nodes=[nodes[0], three], replicas=replicas)
    assert next_move(roomy, ALWAYS) is None, "one of two replicas has no accelerator"


# --- the whole way, with the planner that carries the moves out ----------------------------------

_SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=7)


@st.composite
def _fleets(draw: st.DrawFn) -> PackedFleet:
    nodes = [_node(f"n{at}", draw(st.integers(2, 8))) for at in range(draw(st.integers(1, 5)))]
    nodes = [replace(it, rack=draw(st.sampled_from(("", "x", "y")))) for it in nodes]
    free = {node.id: node.memory_bytes or 0 for node in nodes}
    pools = [_pool(f"p{at}", gib, 0) for at, gib in enumerate(draw(_SIZES))]
    replicas: list[Replica] = []
    for pool in pools:
        for node_id in draw(st.lists(st.sampled_from(sorted(free)), max_size=2)):
            if free[node_id] >= pool.needs.memory_bytes:
                free[node_id] -= pool.needs.memory_bytes
                replicas.append(_replica(f"r{len(replicas):02}", node_id, pool))
    wanted = Counter(it.pool_id for it in replicas)
    pools = [replace(pool, replicas_wanted=wanted[pool.id]) for pool in pools]
    known = {pool.id: PackedPool(pool, draw(st.integers(0, 1))) for pool in pools}
    return PackedFleet(nodes, replicas, known, {it.id: OLD_S for it in replicas}, {})


def _carried(fleet: PackedFleet, move: Move, numbers: "count[int]") -> PackedFleet:
    """Return the fleet after a move, and check every step of the fleet's loop."""
    replicas = [
        replace(it, moves_to=move.moves_to) if it.id == move.replica.id else it
        for it in fleet.replicas
    ]
    pools = [it.pool for it in fleet.pools.values()]
    cells = {pool.id: (f"{pool.id}-0",) for pool in pools}
    for _ in range(10):
        plan = plan_replicas(pools, cells, fleet.nodes, replicas, lambda: f"s{next(numbers):03}")
        replicas = plan.applied(replicas)
        again = plan_replicas(pools, cells, fleet.nodes, replicas, lambda: "none")
        assert again == FleetChanges(), "a second plan changes nothing"
        for node in fleet.nodes:
            held = sum(it.reserved.memory_bytes for it in replicas if it.node_id == node.id)
            assert held <= (node.memory_bytes or 0)
        serving = Counter(it.pool_id for it in replicas if it.state is READY and not it.is_draining)
        assert all(serving[pool.id] >= pool.replicas_wanted for pool in pools)
        if plan == FleetChanges() and not any(it.moves_to for it in replicas):
            break
        replicas = [
            replace(it, state=ReplicaState.STOPPED if it.is_draining else READY) for it in replicas
        ]
    assert not any(it.moves_to or it.is_draining for it in replicas)
    return replace(fleet, replicas=replicas, ages_s={it.id: OLD_S for it in replicas})


def _squares(fleet: PackedFleet) -> int:
    return sum(it**2 for it in Counter(it.node_id for it in fleet.replicas).values())


@given(fleet=_fleets())
@settings(max_examples=300)
def test_moves_end_with_fewer_nodes_and_never_go_in_a_circle(fleet: PackedFleet) -> None:
    numbers, moves = count(), 0
    occupied = {it.node_id for it in fleet.replicas}
    while move := next_move(fleet, ALWAYS):
        assert move.moves_to in occupied, "an empty node stays empty"
        before = _squares(fleet)
        nodes = [replace(it, is_vacated=it.id == move.replica.node_id) for it in fleet.nodes]
        fleet = _carried(replace(fleet, nodes=nodes), move, numbers)
        assert _squares(fleet) > before
        moves += 1
    after = {it.node_id for it in fleet.replicas}
    assert after <= occupied
    assert len(after) < len(occupied) or not moves


@pytest.mark.parametrize("needed", [1, 3, 4])
def test_as_many_nodes_as_are_needed_become_empty_one_after_another(needed: int) -> None:
    smalls, large = [_pool(f"p{at}") for at in range(6)], _pool("large", gib=7, wanted=needed)
    replicas = [_replica(f"r{at}", f"n{at}", pool) for at, pool in enumerate(smalls)]
    ages_s = {it.id: OLD_S for it in replicas}
    known = {pool.id: PackedPool(pool) for pool in smalls}
    nodes = [_node(f"n{at}") for at in range(6)]
    fleet = PackedFleet(nodes, replicas, known, ages_s, {}, [large])
    numbers, placed, moves = count(), 0, 0
    while move := next_move(fleet, NEEDED):
        marked = [replace(it, is_vacated=it.id == move.replica.node_id) for it in fleet.nodes]
        fleet, moves = _carried(replace(fleet, nodes=marked), move, numbers), moves + 1
        if all(it.node_id != move.replica.node_id for it in fleet.replicas):
            new = _replica(f"large{placed}", move.replica.node_id, large)
            placed += 1
            waiting = [large] if placed < needed else []
            fleet = replace(fleet, replicas=[*fleet.replicas, new], waiting=waiting)
    assert placed == needed
    assert moves == needed, "each move empties a node, and no move is for nothing"


# --- the planner alone ---------------------------------------------------------------------------


def _plan(replicas: list[Replica], nodes: list[Node], wanted: int = 1) -> FleetChanges:
    numbers = count()
    pool = replace(A, replicas_wanted=wanted)
    return plan_replicas([pool], {"a": ("a-0",)}, nodes, replicas, lambda: f"s{next(numbers)}")


def test_a_moving_replica_serves_until_its_replacement_is_ready() -> None:
    nodes = [_node("n0"), _node("n1")]
    here = [replace(_replica("r0", "n0", A), moves_to="n1")]
    first = _plan(here, nodes)
    assert ([it.node_id for it in first.create], first.drain) == (["n1"], ())
    booting = first.applied(here)
    assert _plan(booting, nodes) == FleetChanges()
    ready = [replace(it, state=READY) for it in booting]
    assert _plan(ready, nodes).drain == ("r0",)


def test_a_moving_replica_stays_without_room_or_when_its_new_node_is_lost() -> None:
    here = [replace(_replica("r0", "n0", A), moves_to="n1")]
    assert _plan(here, [_node("n0"), _node("n1", 1)]) == FleetChanges()
    lost = [_node("n0"), _node("n1", is_lost=True)]
    assert _plan(here, lost) == FleetChanges()
    there = [*here, _replica("s0", "n1", A, ReplicaState.LOST)]
    assert _plan(there, lost).drain == ()


def test_a_move_that_is_given_up_removes_the_replacement_and_not_the_replica() -> None:
    nodes = [_node("n0"), _node("n1")]
    here = [_replica("r0", "n0", A), _replica("s0", "n1", A, STARTING)]
    assert _plan(here, nodes).drain == ("s0",)


def test_a_vacated_node_is_used_only_if_no_other_has_room() -> None:
    nodes = [_node("n0", is_vacated=True), _node("n1", 4)]
    here = [_replica("r0", "n1", B)]
    assert [it.node_id for it in _plan(here, nodes, 2).create] == ["n1", "n0"]


# --- reasons -------------------------------------------------------------------------------------

MOVE = OpenMove(1, "a", "r0", "n0", "n1", "", 10.0, True, False, False)
CALM = MovablePool(0, "", "", 300.0)


def test_a_move_ends_when_the_replica_has_left_or_its_replacement_is_late() -> None:
    def told(move: OpenMove, pool: MovablePool | None = CALM, **which: bool) -> str | None:
        found = outcome_of(move, pool, **{"is_on": True, "is_in_rollout": False} | which)
        return None if found is None else found[0]

    assert told(MOVE) is None
    assert told(replace(MOVE, is_there=False)) == "done"
    assert told(replace(MOVE, running_s=301.0)) == "given_up"
    assert told(replace(MOVE, running_s=301.0, is_draining=True)) is None
    assert told(MOVE, None) == told(MOVE, is_on=False) == told(MOVE, is_in_rollout=True) == "ended"
    assert told(MOVE, replace(CALM, by_hand="the pool is paused")) == "ended"
    assert told(MOVE, replace(CALM, hindrance="its work waits")) is None, "it makes more capacity"


def test_only_a_calm_pool_moves() -> None:
    plan = PoolPlan(1, 1.0, ())
    facts = PoolFacts(ready=1, booting=0, backlog_work_s=0.0)

    def why(facts: PoolFacts, refused: int = 0, late_s: float = 0.0) -> str:
        return hindrance(PoolState(ScalingSettings(), facts), plan, refused, late_s)

    assert why(facts) == ""
    assert why(replace(facts, unknown="no report")) == "no report"
    for other in ({"ready": 2}, {"ready": 0}, {"booting": 1}, {"asleep": 1}, {"unplaced": 1}):
        assert why(replace(facts, **other)) == "its replicas are not all ready"
    assert why(facts, late_s=1.0) == "its replicas are not all ready"
    assert why(facts, refused=1) == why(replace(facts, backlog_work_s=1.0)) == "its work waits"
    assert why(replace(facts, deferred_work_s=1.0)) == "its work waits"
    full = replace(plan, has_room=False)
    told = hindrance(PoolState(ScalingSettings(), facts), full, 0, 0.0)
    assert told == "the budget has no room for its replacement"
    assert by_hand(PoolState(ScalingSettings(is_paused=True), facts), 0.0)
    pinned = PoolState(ScalingSettings(pin=2, pin_until=9.0), facts)
    assert by_hand(pinned, 8.0)
    assert not by_hand(pinned, 9.0)


def _days(*quarters: float) -> DemandHistory:
    history = DemandHistory()
    for demand in quarters:
        for _ in range(60):
            history.add(demand)
    return history


def test_the_growth_of_the_day_before_is_expected() -> None:
    day = [2.0] * 94 + [2.0, 4.0, 6.0] + [2.0] * 92 + [2.0]
    assert soon_replicas(_days(*day[:97], *([2.0] * 93)), 4, 20) > 0
    assert soon_replicas(_days(*([2.0] * 190)), 4, 20) == 0
    assert soon_replicas(_days(*([0.0] * 90), 1.0, *([0.0] * 94)), 0, 3) == 1
    assert soon_replicas(_days(*([0.0] * 190)), 0, 3) == 0
