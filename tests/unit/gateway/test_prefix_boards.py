"""Boards follow the cells of pools, and choose among those."""

from gateway.dispatch.cell_choice import CellView, Wish
from gateway.dispatch.prefix_boards import PrefixBoards
from sluice.prefix_marks import marks_of
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire

_PROMPT = tuple(range(1000, 1040))
_WISH = Wish(0, _PROMPT, 1280, 1)


class Site:
    """Pools with cells, which change."""

    def __init__(self, **cells: int) -> None:
        self.cells = cells
        self.boards = PrefixBoards(self.of)
        self.follow()

    def of(self, pool_id: str) -> list[control.Cell]:
        names = range(self.cells[pool_id])
        return [control.Cell(id=f"{pool_id}-{name}", pool_id=pool_id) for name in names]

    def follow(self) -> None:
        self.boards.follow(self.cells)

    def tell(self, cell_id: str, marks: list[int]) -> None:
        self.boards.learn(wire.CellSketch(cell_id=cell_id, epoch=1, generation=1, marks=marks))

    def chosen(self, pool_id: str, wish: Wish = _WISH) -> str:
        views = [CellView(cell.id, replicas_ready=8) for cell in self.of(pool_id)]
        return self.boards.choose(pool_id, views, wish).cell_id


def test_each_pool_is_asked_about_its_own_cells() -> None:
    site = Site(one=4, two=4)
    site.tell("one-2", marks_of(_PROMPT))
    site.tell("two-3", marks_of(_PROMPT))
    assert (site.chosen("one"), site.chosen("two")) == ("one-2", "two-3")


def test_lone_and_unknown_cells_are_ignored() -> None:
    site = Site(one=1)
    site.tell("one-0", marks_of(_PROMPT))
    site.tell("gone-0", marks_of(_PROMPT))
    assert site.chosen("one") == "one-0"
    site.cells["one"] = 3
    site.follow()
    site.tell("one-1", marks_of(_PROMPT))
    assert site.chosen("one") == "one-1"


def test_a_cell_that_went_is_forgotten() -> None:
    site = Site(one=3)
    site.tell("one-2", marks_of(_PROMPT))
    site.tell("one-1", marks_of(_PROMPT[:8]))
    site.cells["one"] = 2
    site.follow()
    assert site.chosen("one") == "one-1"
    site.cells["one"] = 3
    site.follow()
    assert site.chosen("one") == "one-1"


def test_a_message_that_is_too_long_is_ignored() -> None:
    site = Site(one=2)
    site.tell("one-1", list(range(9000)))
    assert not site.boards._boards


def test_a_prompt_goes_again_where_it_went() -> None:
    site = Site(one=8)
    site.tell("one-0", [])
    first = {}
    for number in range(20):
        hashes = tuple(range(number << 20, (number << 20) + 40))
        first[number] = site.chosen("one", Wish(0, hashes, 1280, number))
        assert site.chosen("one", Wish(0, (*hashes, 7, 8, 9, 10), 1400, -number)) == first[number]
    assert len(set(first.values())) > 4
