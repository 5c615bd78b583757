"""Who owns a cell: live owners keep theirs, cells of the dead move, nothing moves twice."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.cells import REBALANCE_PAUSE_S, ROUTER_GRACE_S, assign_cells, even_out
from control_plane.fleet.model import Cell, Router

_ROUTER_IDS = ["r0", "r1", "r2", "r3"]
_ABSENCES = st.sampled_from([0.0, 0.0, 0.5, 0.9, 1.1, 100.0])
_ROUTERS = st.dictionaries(
    st.sampled_from(_ROUTER_IDS),
    st.tuples(st.sampled_from(["a:1", "b:2"]), _ABSENCES, st.booleans()),
).map(
    lambda found: {
        key: Router(key, address, absent_s, is_gone=absent_s > 0 and is_gone)
        for key, (address, absent_s, is_gone) in found.items()
    }
)
_CELLS = st.lists(
    st.tuples(
        st.sampled_from(["", *_ROUTER_IDS, "unknown"]),
        st.sampled_from(["a:1", "b:2"]),
        st.integers(1, 9),
    ),
    max_size=12,
).map(
    lambda found: [
        Cell(f"c{number:02}", "p", owner, address, epoch) if owner else Cell(f"c{number:02}", "p")
        for number, (owner, address, epoch) in enumerate(found)
    ]
)
_SIZES = st.dictionaries(st.sampled_from([f"c{n:02}" for n in range(12)]), st.integers(0, 64))


def _applied(cells: list[Cell], changed: list[Cell]) -> list[Cell]:
    by_id = {cell.id: cell for cell in cells} | {cell.id: cell for cell in changed}
    return [by_id[cell.id] for cell in cells]


def _is_waited_for(router: Router | None) -> bool:
    return router is not None and not router.is_gone and router.absent_s <= ROUTER_GRACE_S


@given(_CELLS, _ROUTERS, _SIZES, st.booleans())
def test_every_cell_ends_with_an_allowed_owner(
    cells: list[Cell], routers: dict[str, Router], sizes: dict[str, int], may_take: bool
) -> None:
    changed = assign_cells(cells, routers, sizes, may_take=may_take)
    before = {cell.id: cell for cell in cells}
    live = {key for key, router in routers.items() if router.absent_s == 0}
    for cell in changed:
        old = before[cell.id]
        assert cell.epoch == old.epoch + 1
        assert cell.router_id in live
        assert cell.router_address == routers[cell.router_id].address
        if old.router_id in live:
            assert cell.router_id == old.router_id, "a live owner keeps its cell"
        elif old.router_id:
            assert may_take
            assert not _is_waited_for(routers.get(old.router_id))
    for cell in _applied(cells, changed):
        if live and (may_take or not before[cell.id].router_id):
            assert cell.router_id in live or _is_waited_for(routers.get(cell.router_id))


@given(_CELLS, _ROUTERS, _SIZES, st.booleans())
def test_assigning_again_changes_nothing(
    cells: list[Cell], routers: dict[str, Router], sizes: dict[str, int], may_take: bool
) -> None:
    after = _applied(cells, assign_cells(cells, routers, sizes, may_take=may_take))
    assert assign_cells(after, routers, sizes, may_take=may_take) == []


@given(_CELLS, _ROUTERS, _SIZES, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    cells: list[Cell], routers: dict[str, Router], sizes: dict[str, int], random
) -> None:
    expected = assign_cells(cells, routers, sizes, may_take=True)
    shuffled, keys = list(cells), list(routers)
    random.shuffle(shuffled)
    random.shuffle(keys)
    found = assign_cells(shuffled, {key: routers[key] for key in keys}, sizes, may_take=True)
    assert found == expected


@given(st.integers(1, 4), st.lists(st.integers(0, 64), max_size=30))
def test_new_cells_are_spread_by_their_replicas(router_count: int, sizes: list[int]) -> None:
    routers = {key: Router(key, key, 0.0) for key in _ROUTER_IDS[:router_count]}
    replicas_of = {f"{n:02}": size for n, size in enumerate(sizes)}
    new = [Cell(cell_id, "p") for cell_id in replicas_of]
    cells = assign_cells(new, routers, replicas_of, may_take=True)
    assert len(cells) == len(sizes)
    shares = Counter(dict.fromkeys(routers, 0))
    for cell in cells:
        shares[cell.router_id] += max(1, replicas_of[cell.id])
    assert max(shares.values()) - min(shares.values()) <= max([1, *sizes])


def test_a_router_that_takes_over_gets_the_cells_of_different_pools() -> None:
    cells = [Cell(f"{pool}-{n}", pool, "r0", "r0", 1) for pool in "ab" for n in range(2)]
    routers = {"r0": Router("r0", "r0", 9.0)} | {key: Router(key, key, 0.0) for key in ("r1", "r2")}
    after = assign_cells(
        cells, routers, dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), 8), may_take=True
    )
    assert {(cell.router_id, cell.pool_id) for cell in after} == {
        (router, pool) for router in ("r1", "r2") for pool in "ab"
    }


def test_without_a_live_router_cells_stay() -> None:
    cell = Cell("c", "p", "r0", "a:1", 4)
    gone = {"r0": Router("r0", "a:1", 99.0, is_gone=True)}
    assert assign_cells([cell], gone, {}, may_take=True) == []


@pytest.mark.parametrize(("is_gone", "owner"), [(False, "r0"), (True, "r1")])
def test_a_departed_router_is_not_waited_for(is_gone: bool, owner: str) -> None:
    cell = Cell("c", "p", "r0", "a:1", 4)
    routers = {"r0": Router("r0", "a:1", 0.01, is_gone=is_gone), "r1": Router("r1", "b:2", 0.0)}
    changed = assign_cells([cell], routers, {}, may_take=True)
    assert _applied([cell], changed)[0].router_id == owner
    assert assign_cells([cell], routers, {}, may_take=False) == [], "who knows, after our start"


def test_a_router_at_a_new_address_keeps_its_cells_under_a_new_epoch() -> None:
    cell = Cell("c", "p", "r0", "a:1", 4)
    routers = {"r0": Router("r0", "b:2", 0.0), "r1": Router("r1", "x", 0.0)}
    assert assign_cells([cell], routers, {}, may_take=False) == [
        replace(cell, router_address="b:2", epoch=5)
    ]


def _shares(cells: list[Cell], sizes: dict[str, int], routers: dict[str, Router]) -> Counter[str]:
    shares = Counter(dict.fromkeys(routers, 0))
    for cell in cells:
        shares[cell.router_id] += max(1, sizes.get(cell.id, 0))
    return shares


@given(st.lists(st.sampled_from(_ROUTER_IDS), max_size=12), _SIZES)
def test_shares_become_even_step_by_step_and_then_rest(
    owners: list[str], sizes: dict[str, int]
) -> None:
    routers = {key: Router(key, key, 0.0, here_s=REBALANCE_PAUSE_S) for key in _ROUTER_IDS}
    cells = [Cell(f"c{n:02}", "p", owner, owner, 1) for n, owner in enumerate(owners)]
    largest = [max(_shares(cells, sizes, routers).values())]
    while moved := even_out(cells, routers, sizes, quiet_s=REBALANCE_PAUSE_S):
        cells = _applied(cells, [moved])
        assert assign_cells(cells, routers, sizes, may_take=True) == []
        largest.append(max(_shares(cells, sizes, routers).values()))
        assert len(largest) < 50, "it never rests"
    assert all(after <= before for before, after in pairwise(largest))
    shares = _shares(cells, sizes, routers)
    least = min(shares.values())
    for cell in cells:
        share, weight = shares[cell.router_id], max(1, sizes.get(cell.id, 0))
        assert share < 4 / 3 * least or weight >= share - least, "that one could have moved"


@pytest.mark.parametrize(
    ("routers", "quiet_s"),
    [
        ([Router("r0", "r0", 0.0, here_s=90), Router("r1", "r1", 0.0, here_s=59)], 90),
        ([Router("r0", "r0", 0.0, here_s=90), Router("r1", "r1", 0.0, here_s=90)], 59),
        ([Router("r0", "r0", 0.5, here_s=90), Router("r1", "r1", 0.0, here_s=90)], 90),
        ([Router("r0", "r0", 0.0, here_s=90)], 90),
    ],
    ids=["it has just come", "something has just moved", "an owner is missing", "nobody else"],
)
def test_nothing_is_evened_out_in_troubled_times(routers: list[Router], quiet_s: float) -> None:
    cells = [Cell(f"c{n}", "p", "r0", "r0", 1) for n in range(4)]
    assert even_out(cells, {router.id: router for router in routers}, {}, quiet_s=quiet_s) is None


def test_a_cell_too_large_to_move_and_a_crashing_router_hinder_no_other() -> None:
    cells = [
        Cell("big", "p", "r0", "r0", 1),
        *(Cell(f"c{n}", "p", "r1", "r1", 1) for n in range(8)),
    ]
    routers = {key: Router(key, key, 0.0, here_s=60) for key in ("r0", "r1", "r2")}
    routers["r3"] = Router("r3", "r3", 0.0, here_s=5)
    moved = even_out(cells, routers, {"big": 64} | {f"c{n}": 8 for n in range(8)}, quiet_s=60)
    assert moved == Cell("c0", "p", "r2", "r2", 2)


def test_a_new_router_gets_one_cell_at_a_time() -> None:
    cells = [Cell(f"c{n}", "p", "r0", "r0", 1) for n in range(4)]
    routers = {key: Router(key, key, 0.0, here_s=60) for key in ("r0", "r1")}
    assert even_out(cells, routers, {}, quiet_s=60) == Cell("c0", "p", "r1", "r1", 2)
