"""Pools in cells: every replica has one, none holds too many, and nobody moves without need."""

from collections import Counter
from dataclasses import replace
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.cells import CELL_DRAIN_S, Spread, cell_count, sizes, spread_pools
from control_plane.fleet.model import Cell, Node, Pool, Replica, ReplicaState, assign_roles
from control_plane.fleet.planner import FleetChanges, plan_replicas

_LIMITS = st.sampled_from([0, 1, 2, 3, 8])
_POOLS = st.lists(st.tuples(st.integers(0, 12), _LIMITS), min_size=1, max_size=3).map(
    lambda found: [Pool(f"p{n}", "sim", wanted, limit) for n, (wanted, limit) in enumerate(found)]
)
_CELLS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from([None, 0.0, CELL_DRAIN_S])),
    unique_by=lambda cell: cell[:2],
    max_size=8,
).map(
    lambda found: [
        Cell(f"p{pool}-{n}", f"p{pool}", is_draining=since is not None, draining_s=since or 0.0)
        for pool, n, since in found
    ]
)
_REPLICAS = st.lists(
    st.tuples(st.integers(0, 50), st.booleans(), st.sampled_from(list(ReplicaState))), max_size=20
)
_NODES = [Node("n0", frozenset({"sim"}), is_lost=False)]


def _members(
    cells: list[Cell], drawn: list[tuple[int, bool, ReplicaState]], pools: list[Pool]
) -> list[Replica]:
    """Put the drawn replicas into the cells of pools that exist."""
    homes = [cell for cell in cells if cell.pool_id in {pool.id for pool in pools}]
    return [
        Replica(
            f"r{n:03}",
            homes[at % len(homes)].pool_id,
            homes[at % len(homes)].id,
            "n0",
            draining,
            state,
        )
        for n, (at, draining, state) in enumerate(drawn)
        if homes
    ]


def _spread(
    cells: list[Cell], replicas: list[Replica], spread: Spread
) -> tuple[list[Cell], list[Replica]]:
    after = [
        replace(cell, is_draining=True, draining_s=0.0)
        if cell.id in spread.drain
        else replace(cell, is_draining=False, draining_s=0.0)
        if cell.id in spread.revive
        else cell
        for cell in cells
        if cell.id not in spread.remove
    ]
    moved = [replace(r, cell_id=spread.move.get(r.id, r.cell_id)) for r in replicas]
    return [*after, *spread.create], moved


def _later(cells: list[Cell]) -> list[Cell]:
    return [replace(c, draining_s=c.draining_s + CELL_DRAIN_S * c.is_draining) for c in cells]


@given(_POOLS, _CELLS, _REPLICAS)
def test_only_surplus_replicas_move_and_a_plan_is_stable(
    pools: list[Pool], cells: list[Cell], drawn: list[tuple[int, bool, ReplicaState]]
) -> None:
    replicas = _members(cells, drawn, pools)
    spread = spread_pools(pools, cells, replicas)
    before, held = {cell.id: cell for cell in cells}, sizes(replicas)
    limit = {pool.id: pool.cell_replicas_max for pool in pools}
    for replica in replicas:
        if (target := spread.move.get(replica.id)) is None:
            continue
        home = before[replica.cell_id]
        is_over = held[home.id] > limit[replica.pool_id] > 0
        assert is_over or (home.is_draining and home.draining_s >= CELL_DRAIN_S)
        assert target in spread.open[replica.pool_id]
        assert not replica.is_draining
    for cell_id in spread.remove:
        assert before[cell_id].is_draining
        assert all(replica.cell_id != cell_id for replica in replicas), "deleting would end them"
    after, moved = _spread(cells, replicas, spread)
    again = spread_pools(pools, after, moved)
    assert (again.create, again.drain, again.revive, again.move) == ((), (), (), {})
    for pool in pools:
        room = pool.cell_replicas_max * len(spread.open[pool.id])
        shares = {cell_id: sizes(moved)[cell_id] for cell_id in spread.open[pool.id]}
        if pool.cell_replicas_max and sum(shares.values()) <= room:
            assert max(shares.values()) <= pool.cell_replicas_max


@given(_POOLS, _CELLS, _REPLICAS)
def test_the_fleet_comes_to_rest_with_every_replica_in_a_cell_of_its_pool(
    pools: list[Pool], cells: list[Cell], drawn: list[tuple[int, bool, ReplicaState]]
) -> None:
    replicas = _members(cells, drawn, pools)
    cells = [cell for cell in cells if cell.pool_id in {pool.id for pool in pools}]
    numbers = count(500)
    for _ in range(8):
        spread = spread_pools(pools, cells, replicas)
        cells, replicas = _spread(cells, replicas, spread)
        plan = plan_replicas(pools, spread.open, _NODES, replicas, lambda: f"r{next(numbers)}")
        replicas = [
            replace(r, state=ReplicaState.STOPPED if r.is_draining else ReplicaState.READY)
            for r in plan.applied(replicas)
        ]
        cells = _later(cells)
    assert not spread_pools(pools, cells, replicas).is_change
    for pool in pools:
        own = {cell.id for cell in cells if cell.pool_id == pool.id}
        shares = [sizes(replicas)[cell_id] for cell_id in own]
        assert sum(shares) == pool.replicas_wanted
        assert all(r.cell_id in own for r in replicas if r.pool_id == pool.id)
        assert max(shares) <= (pool.cell_replicas_max or pool.replicas_wanted)


@given(st.integers(0, 70), _LIMITS, st.integers(0, 70))
def test_new_replicas_make_cells_even(first: int, limit: int, more: int) -> None:
    """From nothing, and for those that come later as far as they reach."""
    numbers = count(100)
    replicas: list[Replica] = []
    cells: list[Cell] = []
    for wanted in (first, first + more):
        pool = Pool("p", "sim", wanted, limit)
        spread = spread_pools([pool], cells, replicas)
        assert not spread.move
        cells, _ = _spread(cells, replicas, spread)
        plan = plan_replicas([pool], spread.open, _NODES, replicas, lambda: f"r{next(numbers)}")
        had = sizes(replicas)
        replicas = plan.applied(replicas)
        shares = {cell_id: sizes(replicas)[cell_id] for cell_id in spread.open["p"]}
        grown = [share for cell_id, share in shares.items() if share > had[cell_id]]
        if grown:
            assert max(grown) - min(shares.values()) <= 1, "the smallest cells grow first"
        if wanted == first:
            assert max(shares.values()) - min(shares.values()) <= 1


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 600))
def test_the_number_of_cells_fits_and_does_not_swing(wanted: int, limit: int, had: int) -> None:
    now = cell_count(Pool("p", "sim", wanted, limit), had)
    assert now * limit >= wanted
    fewer = cell_count(Pool("p", "sim", wanted - 1, limit), now)
    assert fewer >= now - 1
    assert cell_count(Pool("p", "sim", wanted, limit), fewer) in {fewer, now}
    assert cell_count(Pool("p", "sim", wanted, limit), now) == now


def test_a_pool_at_the_edge_keeps_its_cell_when_one_replica_goes() -> None:
    assert [cell_count(Pool("p", "sim", n, 64), 1) for n in (0, 1, 64, 65)] == [1, 1, 1, 2]
    assert [cell_count(Pool("p", "sim", n, 64), 2) for n in (65, 64, 49, 48, 0)] == [
        2,
        2,
        2,
        1,
        1,
    ]
    assert cell_count(Pool("p", "sim", 1000, 0), 3) == 1


def test_a_cell_that_is_removed_drains_first() -> None:
    pool = Pool("p", "sim", 2, 4)
    cells = [Cell("p-0", "p"), Cell("p-1", "p")]
    replicas = [
        Replica("r0", "p", "p-0", "n0", state=ReplicaState.READY),
        Replica("r1", "p", "p-1", "n0", state=ReplicaState.READY),
        Replica("r2", "p", "p-1", "n0", is_draining=True, state=ReplicaState.READY),
    ]
    first = spread_pools([pool], cells, replicas)
    assert (first.drain, dict(first.move), first.remove) == (("p-1",), {}, ())
    cells, replicas = _spread(cells, replicas, first)
    assert not spread_pools([pool], cells, replicas).is_change, "what waits there is served"
    second = spread_pools([pool], _later(cells), replicas)
    assert (dict(second.move), second.remove) == ({"r1": "p-0"}, ())
    cells, replicas = _spread(_later(cells), replicas, second)
    assert not spread_pools([pool], cells, replicas).is_change, "what drains there ends there"
    assert spread_pools([pool], cells, replicas[:2]).remove == ("p-1",)
    back = spread_pools([replace(pool, replicas_wanted=5)], cells, replicas)
    assert (back.revive, back.create) == (("p-1",), ())


def test_a_pool_that_shrinks_takes_from_its_cells_in_turn() -> None:
    replicas = [
        Replica(f"r{n}", "p", f"p-{n // 3}", "n0", state=ReplicaState.READY) for n in range(6)
    ]
    plan = plan_replicas(
        [Pool("p", "sim", 4, 3)], {"p": ("p-0", "p-1")}, _NODES, replicas, lambda: "new"
    )
    assert plan.drain == ("r2", "r5")
    leaving = plan_replicas([Pool("p", "sim", 3, 3)], {"p": ("p-1",)}, _NODES, replicas, lambda: "")
    assert leaving.drain == ("r0", "r1", "r2"), "first those whose cell goes"


def _roles(pool: Pool, replicas: list[Replica]) -> list[Replica]:
    changed = assign_roles([pool], replicas)
    return [replace(r, role=changed.get(r.id, r.role)) for r in replicas]


def _fresh(number: int, cells: int = 1) -> list[Replica]:
    return [Replica(f"r{n:02}", "p", f"p-{n % cells}", "n0") for n in range(number)]


def test_the_first_prefill_the_next_decode_and_the_rest_do_both() -> None:
    after = _roles(Pool("p", "sim", 6, prefill=2, decode=3), _fresh(6))
    assert [r.role for r in after] == ["prefill"] * 2 + ["decode"] * 3 + [""]
    spread = _roles(Pool("p", "sim", 8, prefill=2, decode=4), _fresh(8, cells=2))
    assert Counter((r.cell_id, r.role) for r in spread) == {
        (f"p-{n}", role): k for n in (0, 1) for role, k in (("prefill", 1), ("decode", 2), ("", 1))
    }


def test_a_role_stays_and_the_next_replica_fills_the_vacancy() -> None:
    pool = Pool("p", "sim", 4, prefill=2, decode=2)
    after = _roles(pool, _fresh(4))
    lost = [replace(after[0], state=ReplicaState.LOST), *after[1:]]
    assert assign_roles([pool], lost) == {}, "nobody who runs is turned round"
    assert assign_roles([pool], [*lost, Replica("r99", "p", "p-0", "n0")]) == {"r99": "prefill"}
    turned = replace(pool, prefill=1, decode=3)
    assert [r.role for r in _roles(turned, after)] == ["prefill", "decode", "decode", "decode"]
    assert [r.role for r in _roles(Pool("p", "sim", 4), after)] == [""] * 4


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 12), st.integers(1, 3), st.data())
def test_roles_are_assigned_once_and_leave_a_replica_for_the_other_half(
    prefill: int, decode: int, number: int, cells: int, data: st.DataObject
) -> None:
    pool = Pool("p", "sim", number, prefill=prefill, decode=decode)
    drawn = [
        replace(
            r,
            role=data.draw(st.sampled_from(["", "prefill", "decode"])),
            state=data.draw(st.sampled_from([ReplicaState.STARTING, ReplicaState.READY])),
            is_draining=data.draw(st.booleans()),
        )
        for r in _fresh(number, cells)
    ]
    after = _roles(pool, drawn)
    assert assign_roles([pool], after) == {}
    counted = [r for r in after if not r.is_draining]
    roles = Counter(r.role for r in counted)
    assert roles["prefill"] <= prefill
    assert roles["decode"] <= decode
    fresh = Counter(r.role for r in _roles(pool, _fresh(number, cells)))
    if number >= prefill + decode and number > max(prefill, decode):
        assert (fresh["prefill"], fresh["decode"]) == (prefill, decode)
    elif number > 1:
        assert fresh["prefill"] < number
        assert fresh["decode"] < number
    else:
        assert fresh == {"": number} or not number


def test_a_plan_is_applied_as_the_database_does() -> None:
    replicas = _fresh(3)
    plan = FleetChanges(create=(Replica("new", "p", "p-0", "n0"),), drain=("r01",), forget=("r00",))
    assert [(r.id, r.is_draining) for r in plan.applied(replicas)] == [
        ("r01", True),
        ("r02", False),
        ("new", False),
    ]


def test_a_role_that_shrinks_loses_its_own_replicas_and_the_other_keeps_its() -> None:
    replicas = [
        Replica(f"r{n}", "p", "p-0", "n0", state=ReplicaState.READY, role=role)
        for n, role in enumerate(["prefill"] * 4 + ["decode"] * 4)
    ]
    pool = Pool("p", "sim", 6, 0, prefill=2, decode=4)
    plan = plan_replicas([pool], {"p": ("p-0",)}, _NODES, replicas, lambda: "new")
    assert sorted(plan.drain) == ["r2", "r3"]
    assert assign_roles([pool], plan.applied(replicas)) == {}


def test_a_role_grows_by_a_replica_of_the_other_without_a_boot() -> None:
    replicas = [
        Replica(f"r{n}", "p", "p-0", "n0", state=ReplicaState.READY, role=role)
        for n, role in enumerate(["prefill"] * 3 + ["decode"] * 3)
    ]
    pool = Pool("p", "sim", 6, 0, prefill=1, decode=5)
    plan = plan_replicas([pool], {"p": ("p-0",)}, _NODES, replicas, lambda: "new")
    assert (plan.create, plan.drain) == ((), ())
    assert assign_roles([pool], replicas) == {"r1": "decode", "r2": "decode"}


def test_the_only_ready_replica_does_both_until_another_one_decodes() -> None:
    pool = Pool("p", "sim", 3, 0, prefill=1, decode=2)
    ready, booting = ReplicaState.READY, ReplicaState.STARTING
    states = {"prefill": ready, "decode": booting, "other": booting}
    replicas = [
        Replica(
            name, "p", "p-0", "n0", state=state, role="prefill" if name == "prefill" else "decode"
        )
        for name, state in states.items()
    ]
    assert assign_roles([pool], replicas) == {"prefill": ""}
    alone = _roles(pool, replicas)
    assert assign_roles([pool], alone) == {}, "a second look changes nothing"
    elsewhere = [replace(r, cell_id="p-1") if r.id == "other" else r for r in alone]
    elsewhere[2] = replace(elsewhere[2], state=ready)
    assert assign_roles([pool], elsewhere) == {}, "a replica of another cell does not help"
    served = [replace(r, state=ready) for r in alone]
    assert assign_roles([pool], served) == {"prefill": "prefill"}


def test_a_missing_decode_replica_is_replaced_by_one_of_the_prefill_replicas_at_once() -> None:
    pool = Pool("p", "sim", 4, 0, prefill=2, decode=2)
    replicas = [
        Replica(f"r{n}", "p", "p-0", "n0", state=ReplicaState.READY, role="prefill")
        for n in range(2)
    ]
    assert assign_roles([pool], replicas) == {"r0": "decode"}
    assert assign_roles([pool], _roles(pool, replicas)) == {}
