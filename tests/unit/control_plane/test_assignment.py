"""Who owns a cell: live owners keep theirs, cells of the dead move, nothing moves twice."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.model import ROUTER_GRACE_S, Cell, Router, assign_cells

_ROUTER_IDS = ["r0", "r1", "r2", "r3"]
_ABSENCES = st.sampled_from([0.0, 0.0, 1.0, 1.9, 2.1, 100.0])
_ROUTERS = st.dictionaries(
    st.sampled_from(_ROUTER_IDS), st.tuples(st.sampled_from(["a:1", "b:2"]), _ABSENCES)
).map(lambda found: {key: Router(key, *value) for key, value in found.items()})
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


def _applied(cells: list[Cell], changed: list[Cell]) -> list[Cell]:
    by_id = {cell.id: cell for cell in cells} | {cell.id: cell for cell in changed}
    return [by_id[cell.id] for cell in cells]


@given(_CELLS, _ROUTERS, st.booleans())
def test_every_cell_ends_with_who_may_have_it(
    cells: list[Cell], routers: dict[str, Router], may_take: bool
) -> None:
    changed = assign_cells(cells, routers, may_take=may_take)
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
            absent_s = routers[old.router_id].absent_s if old.router_id in routers else 1e9
            assert absent_s > ROUTER_GRACE_S
    for cell in _applied(cells, changed):
        if live and (may_take or not before[cell.id].router_id):
            waiting = routers.get(cell.router_id)
            assert cell.router_id in live or (waiting and waiting.absent_s <= ROUTER_GRACE_S)


@given(_CELLS, _ROUTERS, st.booleans())
def test_assigning_again_changes_nothing(
    cells: list[Cell], routers: dict[str, Router], may_take: bool
) -> None:
    after = _applied(cells, assign_cells(cells, routers, may_take=may_take))
    assert assign_cells(after, routers, may_take=may_take) == []


@given(_CELLS, _ROUTERS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    cells: list[Cell], routers: dict[str, Router], random
) -> None:
    expected = assign_cells(cells, routers, may_take=True)
    shuffled, keys = list(cells), list(routers)
    random.shuffle(shuffled)
    random.shuffle(keys)
    assert assign_cells(shuffled, {key: routers[key] for key in keys}, may_take=True) == expected


@given(st.integers(1, 4), st.integers(0, 30))
def test_new_cells_are_spread_evenly(router_count: int, cell_count: int) -> None:
    routers = {key: Router(key, key, 0.0) for key in _ROUTER_IDS[:router_count]}
    cells = assign_cells([Cell(str(n), "p") for n in range(cell_count)], routers, may_take=True)
    shares = [sum(cell.router_id == key for cell in cells) for key in routers]
    assert sum(shares) == cell_count
    assert max(shares) - min(shares) <= 1


def test_without_a_live_router_cells_stay() -> None:
    cell = Cell("c", "p", "r0", "a:1", 4)
    assert assign_cells([cell], {"r0": Router("r0", "a:1", 99.0)}, may_take=True) == []


def test_a_router_at_a_new_address_keeps_its_cells_under_a_new_epoch() -> None:
    cell = Cell("c", "p", "r0", "a:1", 4)
    routers = {"r0": Router("r0", "b:2", 0.0), "r1": Router("r1", "x", 0.0)}
    assert assign_cells([cell], routers, may_take=False) == [
        replace(cell, router_address="b:2", epoch=5)
    ]
