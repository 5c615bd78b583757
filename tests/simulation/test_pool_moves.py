"""A queue in one pool while another pool of its model wakes: the product's moves, in virtual time.

Run with -rP for the figures.
"""

import random
from dataclasses import dataclass, field
from statistics import fmean

import pytest
import structlog

from gateway.dispatch.cell_choice import CellView
from gateway.dispatch.pool_moves import PoolMoves
from gateway.pool_choice import ServingPool, choose_pool

log = structlog.get_logger(__name__)

STEP_S = 0.05
REPORT_S = 0.1  # routers report ten times a second
SEQUENCES = 4  # that a replica serves at once
SERVE_S = 1.0
PAIR = (ServingPool("own", 1, 1), ServingPool("far", 1, 1))


@dataclass(eq=False)
class Asked:
    """A request, which waits in a pool until a replica begins it."""

    came_at: float
    pool_id: str
    session: int = 0
    priority: int = 1
    began_at: float | None = None
    moves: int = 0
    offered: str = ""

    @property
    def cell_id(self) -> str:
        return f"{self.pool_id}-0"

    @property
    def is_queued(self) -> bool:
        return self.began_at is None

    def offer(self, pool_id: str) -> None:
        self.offered = pool_id


@dataclass
class Cell:
    """A router with a queue in the order of arrival, and replicas of some sequences each."""

    pool_id: str
    replicas: int
    queue: list[Asked] = field(default_factory=list[Asked])
    free_at: list[float] = field(default_factory=list[float])

    def step(self, now: float, draw: random.Random) -> None:
        self.free_at = [at for at in self.free_at if at > now]
        while self.queue and len(self.free_at) < self.replicas * SEQUENCES:
            self.queue.pop(0).began_at = now
            self.free_at.append(now + draw.uniform(0.5, 1.5) * SERVE_S)

    def view(self) -> CellView:
        rate = max(1, self.replicas) * SEQUENCES / SERVE_S
        wait_ms = round(len(self.queue) / rate * 1000)
        return CellView(f"{self.pool_id}-0", self.replicas, wait_ms=wait_ms, queued=len(self.queue))


@dataclass
class Played:
    """How the requests of a run fared."""

    asked: list[Asked]
    counted: int

    @property
    def waits_s(self) -> list[float]:
        return [(it.began_at or 1e9) - it.came_at for it in self.asked]


def play(
    *,
    moves: bool,
    burst: int = 120,
    wakes_at: float = 3.0,
    far: int = 1,
    sessions: bool = False,
    workers: int = 4,
) -> Played:
    """Let a burst come to one replica, and replicas of another pool wake three seconds later."""
    draw, now = random.Random(3), 0.0
    cells = {"own": Cell("own", 1), "far": Cell("far", 0)}
    views = {key: [cell.view()] for key, cell in cells.items()}
    counted: list[str] = []
    gateways = [
        PoolMoves(views.__getitem__, lambda pool_id, _: counted.append(pool_id))
        for _ in range(workers)
    ]
    coming = sorted(draw.uniform(0, 2) for _ in range(burst))
    asked: list[tuple[Asked, PoolMoves]] = []
    told_at = 0.0
    while coming or any(it.is_queued for it, _ in asked):
        now += STEP_S
        if now >= wakes_at:
            cells["far"].replicas = far
        while coming and coming[0] <= now:
            came, session = coming.pop(0), draw.getrandbits(60) | 1 if sessions else 0
            waits = [it[0].wait_ms if it[0].replicas_ready else None for it in views.values()]
            number, _ = choose_pool(PAIR, waits, session, draw.getrandbits(32))
            one, gateway = Asked(came, PAIR[number].pool_id, session), draw.choice(gateways)
            asked.append((one, gateway))
            cells[one.pool_id].queue.append(one)
            gateway.add(PAIR, one, now)
        for cell in cells.values():
            cell.step(now, draw)
        if now >= told_at + REPORT_S:
            told_at = now
            views |= {key: [cell.view()] for key, cell in cells.items()}
            for gateway in gateways if moves else ():
                gateway.look(now)
            _carry_out(asked, cells)
    return Played([it for it, _ in asked], len(counted))


def _carry_out(asked: list[tuple[Asked, PoolMoves]], cells: dict[str, Cell]) -> None:
    for one, gateway in asked:
        if one.offered and one.is_queued:
            cells[one.pool_id].queue.remove(one)
            one.pool_id, one.offered, one.moves = one.offered, "", one.moves + 1
            cells[one.pool_id].queue.append(one)
            gateway.discard(PAIR, one)


def _p99(waits_s: list[float]) -> float:
    return sorted(waits_s)[int(0.99 * len(waits_s))]


@pytest.mark.parametrize("far", [1, 4])
def test_a_queue_is_served_by_the_pool_that_has_woken(far: int) -> None:
    """All requests have come before the other pool wakes, so only moves can help them."""
    stay, go = play(moves=False, far=far), play(moves=True, far=far)
    for name, it in (("without moves", stay), ("with moves", go)):
        mean_s, p99_s = round(fmean(it.waits_s), 1), round(_p99(it.waits_s), 1)
        log.info("burst_waited", far=far, played=name, mean_s=mean_s, p99_s=p99_s)
    assert max(it.moves for it in go.asked) == 1
    assert _p99(go.waits_s) < (0.65 if far == 1 else 0.35) * _p99(stay.waits_s)
    assert fmean(go.waits_s) < (0.7 if far == 1 else 0.4) * fmean(stay.waits_s)
    # The oldest move first, so the moves let few overtake older ones by much.
    began = [it.began_at or 0.0 for it in go.asked]
    late = [max(began[:n], default=0.0) - at for n, at in enumerate(began)]
    assert max(late) < 2.0


def test_moves_do_not_flood_the_woken_replica() -> None:
    go = play(moves=True, burst=400, workers=16)
    waited = [
        (it.began_at or 1e9) - it.came_at for it in go.asked if it.moves and it.began_at is not None
    ]
    stayed = [(it.began_at or 1e9) - it.came_at for it in go.asked if not it.moves]
    assert max(waited) < max(stayed) + 2 * SERVE_S, "who moved does not wait longer for it"


def test_sessions_move_when_their_pool_is_much_slower() -> None:
    stay, go = play(moves=False, sessions=True), play(moves=True, sessions=True)
    assert 0 < go.counted < len(go.asked)
    assert _p99(go.waits_s) < _p99(stay.waits_s)
    calm = play(moves=True, sessions=True, burst=7, wakes_at=0.1)
    assert calm.counted == 0, "a session stays for a wait of a second"
