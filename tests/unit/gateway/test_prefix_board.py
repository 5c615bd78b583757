"""Sketches from a router to a gateway: live blocks are found, evicted ones go, bounds hold."""

import random
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.cell_choice import hashes_of
from gateway.dispatch.prefix_board import PrefixBoard
from router.core.fleet.prefix_index import BlockHashes
from router.core.fleet.prefix_sketch import MARKS_MAX, PrefixSketch
from sluice.hashing import BLOCK_TOKENS, chained_hashes
from sluice.prefix_marks import DEPTH_MIN, floored, following, mark_at, marks_of, rungs
from sluice.wire.router.v1 import router_pb2 as wire

CELLS = ("pool-0", "pool-1", "pool-2")
_USES = st.lists(
    st.tuples(st.sampled_from(CELLS[:2]), st.integers(0, 3), st.integers(1, 90), st.booleans()),
    max_size=30,
)


def prompt(root: int, blocks: int, own: int = 0) -> list[int]:
    """Return hashes of a prompt: up to 30 blocks that all of a root share, and its own."""
    shared = random.Random(f"{root}")
    rest = random.Random(f"{root} {own}")
    return [(shared if at < 30 else rest).getrandbits(64) for at in range(blocks)]


def hear(board: PrefixBoard, parts: Iterable[wire.CellSketch]) -> None:
    for part in parts:
        board.learn(part.cell_id, part.epoch, part.generation, part.marks[:])


@given(_USES)
def test_each_prompt_of_the_two_generations_is_found_in_its_cell(uses) -> None:
    sketches = {cell: PrefixSketch() for cell in CELLS[:2]}
    board = PrefixBoard()
    placed: list[tuple[str, list[int], int]] = []
    for number, (cell, root, blocks, is_alone) in enumerate(uses):
        sketch = sketches[cell]
        sketch.marks_max = 40
        hashes = prompt(root, blocks, number if is_alone else 0)
        sketch.use(hashes, 0, float(number))
        hear(board, sketch.news(cell, 1))
        placed.append((cell, hashes, sketch.generation))
    late = PrefixBoard()
    for cell, sketch in sketches.items():
        hear(late, sketch.whole(cell, 1))
    for cell, hashes, generation in placed:
        if generation >= sketches[cell].generation - 1:
            for one in (board, late):
                depth, cells = one.holders(hashes, [cell])
                assert depth >= floored(len(hashes))
                assert cells == [cell]


@given(st.integers(DEPTH_MIN, 500), st.integers(0, 500))
def test_a_longer_prompt_finds_the_cell_of_its_beginning(blocks: int, more: int) -> None:
    whole = prompt(1, blocks + more)
    sketch, board = PrefixSketch(), PrefixBoard()
    other = PrefixSketch()
    sketch.use(whole[:blocks], 0, 0.0)
    other.use(prompt(2, 50), 0, 0.0)
    hear(board, sketch.news(CELLS[0], 1))
    hear(board, other.news(CELLS[1], 1))
    depth, cells = board.holders(whole, CELLS)
    assert blocks * 15 / 16 < depth <= blocks
    assert cells == [CELLS[0]]
    assert board.holders(whole, CELLS[1:]) == (0, list(CELLS[1:]))


def test_the_shared_part_of_two_prompts_is_marked() -> None:
    one, other, third = (prompt(5, 60, own) for own in range(3))
    sketch, board = PrefixSketch(), PrefixBoard()
    sketch.use(one, 0, 0.0)
    sketch.use(other, 30, 1.0)  # blocks 0 to 29 are cached by now
    hear(board, sketch.news(CELLS[0], 1))
    assert board.holders(third, [CELLS[0]]) == (30, [CELLS[0]])


def test_evicted_blocks_leave() -> None:
    sketch, board = PrefixSketch(), PrefixBoard()
    hashes = prompt(0, 40)
    sketch.use(hashes, 0, 0.0)
    for evicted in (101, 202):
        assert board.holders(hashes, [CELLS[0]])[0] in (0, 40)
        sketch.age(evicted, 100)
        hear(board, sketch.news(CELLS[0], 1))
    assert board.holders(hashes, [CELLS[0]])[0] == 0
    assert not list(sketch.whole(CELLS[0], 1))


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 400), st.integers(0, 400)), max_size=40)
)
def test_gateways_hear_of_a_bounded_number_of_marks(uses: Sequence[tuple[float, int, int]]) -> None:
    sketch, now, told = PrefixSketch(), 0.0, 0
    for number, (pause_s, blocks, cached) in enumerate(uses):
        now += pause_s
        sketch.use(prompt(number, blocks), cached, now)
        told += sum(len(part.marks) for part in sketch.news("c", 1))
        assert told <= 400 + 200 * now + 1
        assert len(sketch) <= 2 * MARKS_MAX


def test_a_new_owner_of_a_cell_begins_behind_the_marks_of_the_old_one() -> None:
    board, first, second = PrefixBoard(), PrefixSketch(), PrefixSketch()
    old, new = prompt(1, 40), prompt(2, 40)
    first.use(old, 0, 0.0)
    hear(board, first.news(CELLS[0], 1))
    second.use(new, 0, 0.0)
    hear(board, second.news(CELLS[0], 2))
    assert board.holders(old, [CELLS[0]])[0] == board.holders(new, [CELLS[0]])[0] == 40
    second.age(101, 100)
    hear(board, second.news(CELLS[0], 2))
    assert board.holders(old, [CELLS[0]])[0] == 0
    assert board.holders(new, [CELLS[0]])[0] == 40


def test_many_generations_leave_no_marks_behind() -> None:
    board, sketch = PrefixBoard(), PrefixSketch()
    for number in range(12):
        sketch.use(prompt(number, 40), 0, float(number))
        hear(board, sketch.news(CELLS[0], 1))
        known = [board.holders(prompt(it, 40), CELLS[:1])[0] == 40 for it in range(number + 1)]
        assert known == [number - it < 2 for it in range(number + 1)]
        sketch.age(101 * (number + 1), 100)
        hear(board, [part for part in sketch.news(CELLS[0], 1) if number % 2])
    assert sum(row.bit_count() for row in board._rows) <= 4 * 8 * len(marks_of(prompt(0, 40)))


def test_a_link_that_comes_back_changes_nothing() -> None:
    board, sketch = PrefixBoard(), PrefixSketch()
    for number, root in enumerate((1, 2)):
        sketch.use(prompt(root, 40), 0, 0.0)
        if not number:
            sketch.age(101, 100)
        hear(board, sketch.news(CELLS[0], 1))
    hear(board, sketch.whole(CELLS[0], 1))
    assert [board.holders(prompt(root, 40), [CELLS[0]])[0] for root in (1, 2)] == [40, 40]


def test_cells_that_go_leave_their_place_to_others() -> None:
    board = PrefixBoard()
    hashes = prompt(1, 40)
    for cell in CELLS:
        board.learn(cell, 1, 1, marks_of(hashes))
    board.retain(CELLS[:1])
    assert len(board) == 1
    board.learn("pool-9", 1, 1, [])
    assert board.holders(hashes, ["pool-9"]) == (0, ["pool-9"])
    assert board.holders(hashes, [CELLS[0], "pool-9"]) == (40, [CELLS[0]])


def test_a_gateway_knows_at_once_of_its_own_prompts() -> None:
    board = PrefixBoard()
    board.learn(CELLS[0], 1, 1, [])
    hashes = prompt(3, 50)
    board.sent(CELLS[0], hashes, 0)
    board.sent("unknown", hashes, 0)
    assert board.holders(hashes, CELLS) == (floored(50), [CELLS[0]])


def test_full_sketches_are_mistaken_once_in_fifty_thousand_marks() -> None:
    draw = random.Random(1)
    board = PrefixBoard()
    cells = [f"pool-{number}" for number in range(8)]
    for cell in cells:
        for generation in (1, 2):
            board.learn(cell, 1, generation, [draw.getrandbits(32) for _ in range(MARKS_MAX)])
    strangers = [board._having(draw.getrandbits(32)) & 0x11111111 for _ in range(20_000)]
    mistaken = sum(found.bit_count() for found in strangers)
    assert mistaken <= len(strangers) * len(cells) / 50_000 * 2


@given(st.integers(0, 100_000))
def test_depths_with_marks_are_at_most_a_sixteenth_apart(depth: int) -> None:
    here, after = floored(depth), following(floored(depth))
    assert here <= depth
    assert depth < DEPTH_MIN or depth < after <= max(here + 1, here * 17 / 16 + 1)
    assert floored(after) == after
    assert all(floored(rung) == rung for rung in rungs(depth))


def test_router_and_gateway_read_the_same_marks() -> None:
    tokens = list(range(40 * BLOCK_TOKENS + 5))
    data = chained_hashes(tokens, b"r" * 16)
    ours, theirs = hashes_of(data), BlockHashes(data)
    assert len(ours) == len(theirs) == len(tokens) // BLOCK_TOKENS
    assert [mark_at(ours, depth + 1) for depth in range(len(ours))] == [
        int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 16)
    ]
    assert marks_of(ours) == marks_of(theirs)
