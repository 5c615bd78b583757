"""A waiting request that is offered another pool goes there once, and the client notices nothing."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.generation import EndKind, Generation, GenerationEnd, WholeGeneration
from gateway.dispatch.pool_moves import PoolMoves, WaitingRequest
from gateway.pool_choice import PoolReason, ServingPool
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from tests.unit.gateway.test_dispatcher import Request, made_by, running, turns

PAIR = (ServingPool("own", 1, 1), ServingPool("far", 1, 1))
FULL = GenerationEnd(EndKind.REFUSED, ErrorCode.OVERLOADED, "full")
STOP = GenerationEnd(EndKind.STOP)


def _uncounted(_: str, __: PoolReason) -> None: ...


class Moves(PoolMoves):
    """Records which requests wait and may move."""

    def __init__(self) -> None:
        super().__init__(lambda _: (), _uncounted)
        self.watched: list[WaitingRequest] = []

    def add(self, pools: tuple[ServingPool, ...], request: WaitingRequest, now_s: float) -> None:
        assert pools == PAIR
        self.watched.append(request)

    def discard(self, pools: tuple[ServingPool, ...], request: WaitingRequest) -> None:
        if request in self.watched:
            self.watched.remove(request)


class Links:
    """A router for each pool, which does nothing by itself."""

    router_id = "r"

    def __init__(self) -> None:
        self.moves = Moves()
        self.open = {"own", "far"}
        self.submitted: list[tuple[Generation, str, int, int]] = []  # with cell and deadlines
        self.cancelled: list[int] = []
        self.is_stopping = False

    def find(self, pool_id: str, _: object) -> tuple["Links", str] | None:
        return (self, f"{pool_id}-0") if pool_id in self.open else None

    def watch(self, hear: Callable[[], None]) -> None: ...

    def unwatch(self, hear: Callable[[], None]) -> None: ...

    def submit(
        self, generation: Generation, cell_id: str, deadline_ms: int, admission_ms: int
    ) -> int:
        self.submitted.append((generation, cell_id, deadline_ms, admission_ms))
        return len(self.submitted)

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)

    @property
    def cells(self) -> list[str]:
        return [cell_id for _, cell_id, *_ in self.submitted]


def _request(links: Links, generations: Sequence[Generation] = (), **fields: Any) -> Request:
    own: dict[str, Any] = {
        "pool_id": "own",
        "pools": PAIR,
        "deadline_ms": 5000,
        "admission_ms": 700,
    } | fields
    return Request(GatewayDispatcher(cast("Any", links)), generations or [made_by(**own)])


async def test_a_waiting_request_moves_and_is_answered_there() -> None:
    links = Links()
    request = _request(links)
    async with running(request):
        (waiting,) = links.moves.watched
        assert (waiting.pool_id, waiting.cell_id, waiting.is_queued) == ("own", "own-0", True)
        waiting.offer("far")
        await turns()
        assert links.cells == ["own-0", "far-0"]
        assert links.cancelled == [1]
        assert links.moves.watched == [], "it moves once"
        generation, _, deadline_ms, admission_ms = links.submitted[-1]
        assert deadline_ms <= 5000, "the deadline stays that of its arrival"
        assert admission_ms == 0, "it has been let in already"
        generation.push([40], 1.0)
        generation.end(STOP)
        assert await request.result is None
    first, last = generation.attempts
    assert (first.outcome, first.reason) == ("moved", "pool far can start the request at once")
    assert last.outcome == "stop"
    assert (first.number, last.number) == (0, 1), "by its number a later attempt is no demand"
    assert generation.spec.pool_id == "far"


async def test_a_request_that_is_placed_before_the_move_stays() -> None:
    links = Links()
    request = _request(links)
    async with running(request):
        (waiting,) = links.moves.watched
        links.submitted[0][0].place(wire.Placed(replica_id="r1"))
        assert not waiting.is_queued
        waiting.offer("far")
        await turns()
        assert links.cells == ["own-0"]


async def test_an_offer_without_a_router_is_ignored() -> None:
    links = Links()
    request = _request(links)
    async with running(request):
        links.open.remove("far")
        links.moves.watched[0].offer("far")
        await turns()
        assert (links.cells, links.cancelled) == (["own-0"], [])


async def test_a_request_that_the_new_pool_refuses_returns_to_its_own() -> None:
    links = Links()
    request = _request(links)
    async with running(request):
        links.moves.watched[0].offer("far")
        await turns()
        links.submitted[-1][0].end(FULL)
        while len(links.submitted) < 3:
            await turns()
        assert links.cells == ["own-0", "far-0", "own-0"]
        assert links.moves.watched == [], "it does not move again"
        links.submitted[-1][0].push([40], 1.0)
        links.submitted[-1][0].end(STOP)
        assert await request.result is None


async def test_further_answers_to_the_prompt_follow_the_first() -> None:
    links = Links()
    own: dict[str, Any] = {"pool_id": "own", "pools": PAIR}
    rest = made_by(choice=1, is_begun=True, **own)  # the client has a part of the response by then
    request = _request(links, [made_by(**own), rest])
    async with running(request):
        links.moves.watched[0].offer("far")
        await turns()
        links.submitted[-1][0].push([40], 1.0)
        await turns()
        assert links.cells == ["own-0", "far-0", "far-0"]
        assert links.moves.watched == [], "an answer that has begun stays"


def test_the_event_of_a_killed_gateway_names_the_new_pool() -> None:
    generation = WholeGeneration(made_by(pool_id="own", pools=PAIR).spec)
    generation.closing = RequestEvent(request_id="r", pool_id="own").SerializeToString()
    generation.use_pool("far")
    event = RequestEvent.FromString(generation.closing)
    assert (event.request_id, event.pool_id) == ("r", "far")
