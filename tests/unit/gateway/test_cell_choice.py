"""Which cell a request goes to: with its session, with its like, or where the least is owed."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.cell_choice import (
    AFFINITY_BLOCKS,
    IDLE_TOKENS,
    LOAD_FACTOR,
    CellView,
    Wish,
    load_bound,
)
from gateway.dispatch.cell_choice import choose as choice_of
from gateway.dispatch.prefix_board import PrefixBoard
from sluice.prefix_marks import DEPTH_MIN, marks_of

NOTHING = Wish(session=0, hashes=(), prompt_tokens=100, salt=1)
_KEYS = st.integers(1, 2**64 - 1)
_CELLS = st.lists(
    st.builds(
        CellView,
        st.sampled_from([f"pool-{n}" for n in range(8)]),
        st.integers(0, 4),
        st.integers(0, 100_000),
        st.integers(0, 5_000),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    unique_by=lambda cell: cell.cell_id,
)
_WISHES = st.builds(
    Wish,
    st.one_of(st.just(0), _KEYS),
    st.one_of(st.just(()), st.integers(0, 9).map(lambda key: document(key))),
    st.integers(1, 50_000),
    _KEYS,
    st.one_of(st.just(0), _KEYS),
)


def document(key: int, blocks: int = AFFINITY_BLOCKS) -> tuple[int, ...]:
    """Return hashes of a long prompt; those of the same key have the same beginning."""
    return tuple((key + block * 0x9E3779B97F4A7C15) % 2**64 for block in range(blocks))


def choose(cells: list[CellView], wish: Wish, board: PrefixBoard | None = None) -> CellView:
    return choice_of(cells, wish, board).cell


def _idle(number: int) -> list[CellView]:
    return [CellView(f"pool-{n}", replicas_ready=8) for n in range(number)]


def _owed(cell: CellView) -> float:
    return cell.tokens_owed / max(1, cell.replicas_ready)


@given(_CELLS, _WISHES, st.randoms(use_true_random=False))
def test_the_order_of_the_cells_decides_nothing(cells, wish: Wish, random) -> None:
    chosen = choose(cells, wish)
    random.shuffle(cells)
    assert choose(cells, wish).cell_id == chosen.cell_id


@given(_CELLS, _WISHES)
def test_cells_that_serve_and_stay_come_first(cells: list[CellView], wish: Wish) -> None:
    chosen = choose(cells, wish)
    assert not chosen.is_refusing or all(cell.is_refusing for cell in cells)
    taking = [cell for cell in cells if not cell.is_refusing]
    serving = [cell for cell in taking if cell.replicas_ready]
    staying = [cell for cell in serving if not cell.is_draining]
    assert not taking or chosen in (staying or serving or taking)


@given(_CELLS, _WISHES)
def test_affinity_never_makes_a_cell_much_fuller_than_the_others(
    cells: list[CellView], wish: Wish
) -> None:
    fit = [
        replace(c, replicas_ready=c.replicas_ready + 1, is_draining=False, is_refusing=False)
        for c in cells
    ]
    chosen = choose(fit, wish._replace(session=0))
    mean = sum(cell.tokens_owed for cell in fit) / sum(cell.replicas_ready for cell in fit)
    idle = min(IDLE_TOKENS, wish.prompt_tokens)
    assert load_bound(fit, wish.prompt_tokens) == pytest.approx(max(idle, LOAD_FACTOR * mean))
    assert _owed(chosen) <= load_bound(fit, wish.prompt_tokens)
    if not wish.hashes and not wish.adapter:
        assert _owed(chosen) == min(map(_owed, fit))


@given(st.lists(st.tuples(_KEYS, st.integers(100, 9_000)), max_size=300), st.integers(2, 6))
def test_a_flood_of_one_document_fills_the_cells_evenly(arrivals, number: int) -> None:
    """Nothing is ever finished here, and most requests want the same cell."""
    cells = _idle(number)
    largest = 0
    for key, tokens in arrivals:
        wish = Wish(0, document(7 if key % 4 else key), prompt_tokens=tokens, salt=key)
        choose(cells, wish).tokens_owed += tokens
        largest = max(largest, tokens)
        bound = max(IDLE_TOKENS, LOAD_FACTOR * sum(c.tokens_owed for c in cells) / (8 * number))
        assert max(map(_owed, cells)) <= bound + largest / 8


@given(_KEYS, st.integers(2, 12))
def test_a_key_moves_only_with_the_cell_that_comes_or_goes(key: int, number: int) -> None:
    cells = _idle(number)
    for wish in (Wish(key, (), 10, 1), Wish(0, document(key), 10, 1), Wish(0, (), 10, 1, key)):
        home = choose(cells, wish)
        for gone in cells:
            left = [cell for cell in cells if cell is not gone]
            moved = choose(left, wish)
            assert gone is home or moved is home
            refusing = [replace(cell, is_refusing=cell is gone) for cell in cells]
            assert choose(refusing, wish).cell_id == moved.cell_id
        more = [*cells, CellView("pool-new", replicas_ready=8)]
        assert choose(more, wish).cell_id in {home.cell_id, "pool-new"}


def test_keys_are_spread_and_about_one_in_n_moves() -> None:
    keys = [Wish(0, document(key * 0x9E3779B97F4A7C15), 10, 1) for key in range(1, 4001)]
    homes = [choose(_idle(8), wish).cell_id for wish in keys]
    shares = Counter(homes)
    assert len(shares) == 8
    assert max(shares.values()) < 1.25 * 500
    after = [choose(_idle(9), wish).cell_id for wish in keys]
    moved = sum(before != now for before, now in zip(homes, after, strict=True))
    assert 0.75 / 9 < moved / len(keys) < 1.25 / 9


def test_a_session_stays_until_waiting_costs_more_than_computing_anew() -> None:
    wish = Wish(session=5, hashes=document(9), prompt_tokens=10_000, salt=1)
    cells = _idle(4)
    home = choose(cells, wish)
    home.tokens_owed, home.wait_ms = 10**9, 1200
    assert choose(cells, wish) is home, "load alone does not move it"
    home.wait_ms = 1300
    second = choose(cells, wish)
    assert second is not home
    third = next(cell for cell in cells if cell not in (home, second))
    third.wait_ms = 100
    assert choose(cells, wish) is second, "those that were moved stay together too"
    assert choose(cells, wish._replace(prompt_tokens=11_000)) is home
    for cell in cells:
        cell.wait_ms = 5000
    assert choose(cells, wish) is home, "no better anywhere"


def test_short_and_equal_ones_are_spread_by_their_salt() -> None:
    chosen = {choose(_idle(4), NOTHING._replace(salt=salt)).cell_id for salt in range(64)}
    assert len(chosen) == 4


def test_the_affinity_without_sketches_is_that_of_a_long_beginning() -> None:
    cells = _idle(64)
    system = document(1, 50)
    one, other = (system + document(key) for key in (2, 3))
    homes = {choose(cells, Wish(0, hashes, 10, 1)).cell_id for hashes in (one, other)}
    assert len(homes) == 2, "a system prompt in common is not enough"
    longer = Wish(0, one + document(4), 10, 2)
    assert choose(cells, longer) is choose(cells, Wish(0, one, 10, 1))
    short = {choose(cells, Wish(0, one[:63], 10, salt)).cell_id for salt in range(64)}
    assert len(short) > 16, "prompts below it are spread by their salt"


def _with_sketches(cells: list[CellView]) -> PrefixBoard:
    board = PrefixBoard()
    for cell in cells:
        board.learn(cell.cell_id, 1, 1, [])
    return board


def test_a_prompt_goes_to_the_cell_that_has_most_of_it() -> None:
    cells = _idle(8)
    board = _with_sketches(cells)
    whole = document(1, 40)
    board.learn("pool-3", 1, 1, marks_of(whole[:10]))
    board.learn("pool-5", 1, 1, marks_of(whole[:20]))
    for blocks, home in ((40, "pool-5"), (20, "pool-5")):
        wish = Wish(0, whole[:blocks], 32 * blocks, 1)
        assert choice_of(cells, wish, board).cell.cell_id == home
        assert choice_of(cells, wish, board).known == 20
    full = [replace(cell, tokens_owed=10**6 * (cell.cell_id == "pool-5")) for cell in cells]
    assert choose(full, Wish(0, whole, 1280, 1), board).cell_id == "pool-3", "the fuller one waits"


def test_conversations_stay_where_their_first_own_block_sends_them() -> None:
    """All cells have the system prompt; none remembers any of the conversations."""
    cells = _idle(8)
    board = _with_sketches(cells)
    system = document(1, 13)
    for cell in cells:
        board.learn(cell.cell_id, 1, 1, marks_of(system))
    homes: list[str] = []
    for key in range(200):
        turn = system + document(2 + key, 30)
        blocks = (15, 22, 43)
        chosen = {
            choose(cells, Wish(0, turn[:end], 32 * end, end), board).cell_id for end in blocks
        }
        assert len(chosen) == 1
        homes += chosen
    assert max(Counter(homes).values()) < 50


def test_short_prompts_ignore_sketches() -> None:
    cells = _idle(4)
    board = _with_sketches(cells)
    hashes = document(1, DEPTH_MIN - 1)
    chosen = {choose(cells, Wish(0, hashes, 90, salt), board).cell_id for salt in range(64)}
    assert len(chosen) == 4


@given(_KEYS, st.lists(_KEYS, min_size=8, max_size=8, unique=True))
def test_requests_for_an_adapter_share_a_cell_until_one_caches_more(adapter: int, keys) -> None:
    cells = _idle(8)
    board = _with_sketches(cells)
    prompts = [(), *(document(key, 20) for key in keys)]
    homes = {choose(cells, Wish(0, it, 640, 1, adapter), board).cell_id for it in prompts}
    assert len(homes) == 1
    board.learn("pool-1", 1, 1, marks_of(prompts[1]))
    assert choose(cells, Wish(0, prompts[1], 640, 1, adapter), board).cell_id == "pool-1"
