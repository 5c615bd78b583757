"""Requests that wait are offered a free pool: the oldest of the highest tier first, few at once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.cell_choice import CellView
from gateway.dispatch.pool_moves import LOOK_S, OFFERS_MAX, WAITED_S, PoolMoves
from gateway.pool_choice import (
    HOME_FACTOR,
    HOME_SLACK_MS,
    PoolReason,
    ServingPool,
    better_pool,
    choose_pool,
)

PAIR = (ServingPool("own", 1, 1), ServingPool("far", 1, 1))
KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(1, 51)]
_FACTORS = st.floats(0.001, 1000)
_POOLS = st.lists(
    st.builds(ServingPool, st.sampled_from([f"pool-{n}" for n in range(6)]), _FACTORS, _FACTORS),
    min_size=1,
    unique_by=lambda pool: pool.pool_id,
)
_WAITS = st.lists(st.none() | st.integers(0, 60_000), min_size=6, max_size=6)


@dataclass(eq=False)
class Waiting:
    """A request that waits."""

    pool_id: str = "own"
    cell_id: str = "own-0"
    priority: int = 1
    session: int = 0
    is_queued: bool = True
    offers: list[str] = field(default_factory=list)

    def offer(self, pool_id: str) -> None:
        self.offers.append(pool_id)


class Site:
    """Two pools, of which `own` has a queue and `far` is free unless a test says otherwise."""

    def __init__(self) -> None:
        self.cells = {
            "own": [CellView("own-0", replicas_ready=1, wait_ms=5000, queued=40)],
            "far": [CellView("far-0", replicas_ready=1)],
        }
        self.counted: list[tuple[str, PoolReason]] = []
        self.moves = PoolMoves(self.cells.__getitem__, self._count)
        self.now_s = 100.0

    def _count(self, pool_id: str, reason: PoolReason) -> None:
        self.counted.append((pool_id, reason))

    def wait(self, *requests: Waiting) -> list[Waiting]:
        for request in requests:
            self.moves.add(PAIR, request, self.now_s)
        return list(requests)

    def look(self, requests: list[Waiting], after_s: float = WAITED_S) -> list[Waiting]:
        """Return the requests that are offered the other pool, which leave as they do."""
        self.now_s += after_s
        self.moves.look(self.now_s)
        offered = [it for it in requests if it.offers]
        for it in offered:
            self.moves.discard(PAIR, it)
            requests.remove(it)
        return offered


def test_the_oldest_of_the_highest_tier_is_offered_the_free_pool_first() -> None:
    site = Site()
    low, first, second = site.wait(Waiting(), Waiting(priority=9), Waiting(priority=9))
    left = [low, first, second]
    assert site.look(left) == [first]
    assert first.offers == ["far"]
    assert site.counted == [("far", PoolReason.MOVE)]
    assert site.look(left) == [low, second]


def test_each_look_offers_twice_as_many_up_to_a_bound_while_the_pool_stays_free() -> None:
    site = Site()
    left = site.wait(*(Waiting() for _ in range(60)))
    assert [len(site.look(left)) for _ in range(6)] == [1, 2, 4, 8, OFFERS_MAX, OFFERS_MAX]
    site.cells["far"][0].queued = 1
    assert site.look(left) == []
    site.cells["far"][0].queued = 0
    assert len(site.look(left)) == 1, "it begins with one again"


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas_ready": 0},
        {"queued": 1},
        {"is_refusing": True},
        {"is_draining": True},
        {"wait_ms": 4000},
    ],
)
def test_no_request_moves_to_a_pool_that_is_not_free(fields: dict[str, object]) -> None:
    site = Site()
    for name, value in fields.items():
        setattr(site.cells["far"][0], name, value)
    assert site.look(site.wait(Waiting())) == []


def test_a_request_that_has_just_come_or_is_placed_stays() -> None:
    site = Site()
    new, placed = site.wait(Waiting(), Waiting(is_queued=False))
    assert site.look([new, placed], LOOK_S) == []
    assert site.look([new, placed], WAITED_S) == [new]


def test_a_session_stays_while_its_pool_begins_about_as_soon() -> None:
    site = Site()
    (waiting,) = left = site.wait(Waiting(session=7))
    site.cells["own"][0].wait_ms = 900
    assert site.look(left) == []
    site.cells["own"][0].replicas_ready = 0
    assert site.look(left) == [waiting], "nobody serves its own pool"


def test_a_wait_that_no_prediction_told_counts_as_it_lasts() -> None:
    site = Site()
    site.cells["own"][0].wait_ms = 1  # short prompts, and all sequences of the replicas are taken
    session, other = left = site.wait(Waiting(session=7), Waiting())
    assert site.look(left) == []
    assert site.look(left) == [other]
    assert site.look(left, 1.0) == [session]


def test_a_request_that_has_left_is_forgotten() -> None:
    site = Site()
    (waiting,) = site.wait(Waiting())
    site.moves.discard(PAIR, waiting)
    site.moves.discard(PAIR, waiting)
    site.look([waiting])
    assert waiting.offers == []


@given(_POOLS, _WAITS, st.none() | st.integers(0, 60_000), st.just(0) | st.sampled_from(KEYS))
def test_a_waiting_request_moves_only_where_a_new_one_would_never_stay(
    pools: list[ServingPool], waits: list[int | None], here_ms: int | None, session: int
) -> None:
    others = {number: waits[number] for number in range(1, len(pools))}
    number = better_pool(pools, others, 0, here_ms, session)
    if number is None:
        return
    wait_ms = others[number]
    assert wait_ms is not None
    if here_ms is None:
        return
    assert here_ms > wait_ms or pools[number].price < pools[0].price
    pair = [pools[0], pools[number]]
    chosen = [choose_pool(pair, [here_ms, wait_ms], session, salt)[0] for salt in KEYS]
    assert set(chosen) == {1}


def test_the_cheapest_free_pool_takes_a_waiting_request() -> None:
    pools = [ServingPool("own", 1, 1), ServingPool("rented", 1, 4), ServingPool("twin", 1, 1)]
    assert better_pool(pools, {1: 0, 2: 0}, 0, 2000, 0) == 2
    assert better_pool(pools, {1: 0}, 0, 2000, 0) == 1
    assert better_pool(pools, {1: 0}, 0, 1500, 0) is None, "1.75 s here cost less than twice 1 s"
    assert better_pool(pools, {1: 0, 2: None}, 0, None, 0) == 1, "no replica serves here"
    assert better_pool(pools, {}, 0, None, 0) is None


def test_a_waiting_session_moves_only_to_a_much_shorter_wait() -> None:
    pools = list(PAIR)
    limit_ms = 500 * HOME_FACTOR + HOME_SLACK_MS
    assert better_pool(pools, {1: 500}, 0, limit_ms, 7) is None
    assert better_pool(pools, {1: 500}, 0, limit_ms + 1, 7) == 1
