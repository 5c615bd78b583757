"""What the dispatcher does with several answers, signs of life, and a process that ends."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.directory import Directory
from gateway.dispatch import patience, pursuit, retry_budget
from gateway.dispatch.answers import Answers
from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.generation import EndKind, Generation, GenerationEnd, WholeGeneration
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.patience import Patience
from gateway.dispatch.pursuit import Pursuit
from gateway.dispatch.routers import RouterLinks
from gateway.server.loop_lag import LoopLag
from sluice.errors import ErrorCode
from sluice.watch import ControlState
from tests.unit.gateway.test_streamed import SPEC

REFUSED = GenerationEnd(EndKind.REFUSED, ErrorCode.ENGINE_FAILED, "no")
LOST = GenerationEnd(EndKind.LOST, ErrorCode.REPLICA_LOST, "gone")
STOP = GenerationEnd(EndKind.STOP)


class Links:
    """The one link to the one router, which does nothing by itself."""

    router_id = "r"

    def __init__(self) -> None:
        self.submitted: list[Generation] = []
        self.homes: list[object] = []
        self.cancelled: list[int] = []
        self.is_open = True
        self.is_stopping = False
        self.waiting: set[Callable[[], None]] = set()

    def find(self, *_: object) -> tuple["Links", str] | None:
        return self._found(None)

    def owner(self, _: str, cell_id: str) -> tuple["Links", str] | None:
        return self._found(cell_id)

    def _found(self, home: str | None) -> tuple["Links", str] | None:
        if not self.is_open:
            return None
        self.homes.append(home)
        return self, "cell"

    def watch(self, hear: Callable[[], None]) -> None:
        self.waiting.add(hear)

    def unwatch(self, hear: Callable[[], None]) -> None:
        self.waiting.discard(hear)

    def let_in(self) -> None:
        self.is_open = True
        for hear in tuple(self.waiting):
            hear()

    def submit(self, generation: Generation, *_: object) -> int:
        self.submitted.append(generation)
        return len(self.submitted)

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)

    def stop(self) -> None:
        self.is_stopping = True


async def turns(number: int = 20) -> None:
    """Let everything run that can."""
    for _ in range(number):
        await asyncio.sleep(0)


def nothing() -> None:
    return None


def made_by(**fields: Any) -> Generation:
    return WholeGeneration(SPEC._replace(**fields))


def made(number: int) -> list[Generation]:
    return [made_by(choice=index) for index in range(number)]


class Request:
    """One request that is being answered."""

    def __init__(
        self,
        dispatcher: GatewayDispatcher,
        generations: Sequence[Generation],
        on_first: Callable[[], object] = nothing,
        answers_per_prompt: int = 0,
    ) -> None:
        self.generations = generations
        self.endings: list[tuple[int, EndKind]] = []
        self.result: asyncio.Future[GenerationEnd | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._on_first = on_first
        self._answers = dispatcher.dispatch(generations, answers_per_prompt or len(generations))

    async def run(self) -> None:
        try:
            self.result.set_result(await self._ended())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.result.set_exception(error)

    async def _ended(self) -> GenerationEnd | None:
        with self._answers as answers:
            if (refusal := await answers.begun()) is not None:
                return refusal
            self._on_first()
            while True:
                for generation in answers.take_ended():
                    assert generation.ending is not None
                    self.endings.append((generation.spec.choice, generation.ending.kind))
                if answers.is_over:
                    break
                await answers.next_change()
        return answers.refusal


@asynccontextmanager
async def running(request: Request) -> AsyncIterator[None]:
    """End it at the latest with the block."""
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(request.run())
        await turns()
        yield
        task.cancel()


@pytest.mark.parametrize("number", [1, 3])
async def test_a_client_that_does_not_read_is_no_failure_of_ours(number: int) -> None:
    def fails() -> None:
        raise ConnectionResetError("the client does not read")

    links = Links()
    request = Request(GatewayDispatcher(links), made(number), fails)
    async with running(request):
        links.submitted[0].push([40], 1.0)
        with pytest.raises(ConnectionResetError):
            await request.result
    assert links.cancelled


async def test_the_others_wait_for_a_token_not_for_a_sign_of_life() -> None:
    links, signs = Links(), []

    def begin() -> None:
        signs.append(len(links.submitted))

    request = Request(GatewayDispatcher(links), made(3), begin)
    async with running(request):
        for generation in request.generations:
            generation.nudge()
        await turns()
        assert signs == [1], "the client has its sign of life"
        assert len(links.submitted) == 1, "nobody has computed the prompt yet"
        links.submitted[0].push([40], 1.0)
        await turns()
        assert len(links.submitted) == 3


async def test_a_sign_of_life_is_given_while_no_router_is_there() -> None:
    links, signs = Links(), []

    def begin() -> None:
        signs.append(len(links.submitted))

    links.is_open = False
    request = Request(GatewayDispatcher(links), made(1), begin)
    async with running(request):
        request.generations[0].nudge()
        await turns()
        assert signs == [0]
        links.let_in()
        await turns()
        assert (signs, len(links.submitted)) == ([0], 1)


async def test_the_others_are_not_asked_for_when_the_first_is_refused() -> None:
    links = Links()
    request = Request(GatewayDispatcher(links), made(3))
    async with running(request):
        links.submitted[0].end(REFUSED)
        assert await request.result == REFUSED
    assert len(links.submitted) == 1
    assert request.endings == []


async def test_a_first_answer_without_tokens_is_an_answer() -> None:
    links = Links()
    request = Request(GatewayDispatcher(links), made(2))
    async with running(request):
        links.submitted[0].end(STOP)
        await turns()
        links.submitted[1].end(STOP)
        assert await request.result is None
    assert request.endings == [(0, EndKind.STOP), (1, EndKind.STOP)]


async def test_a_router_that_says_nothing_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pursuit, "_GRACE_S", 0.0)
    links = Links()
    request = Request(GatewayDispatcher(links), [made_by(deadline_ms=1)])
    async with running(request):
        ending = await request.result
    assert ending is not None
    assert (ending.kind, ending.code) == (EndKind.REFUSED, ErrorCode.DEADLINE_EXCEEDED)
    assert links.cancelled == [1]
    assert request.endings == []


@pytest.mark.parametrize("number", [1, 2])
async def test_an_answer_that_has_begun_has_no_deadline(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(pursuit, "_GRACE_S", 0.0)
    links = Links()
    generations = [made_by(deadline_ms=200, choice=index) for index in range(number)]
    request = Request(GatewayDispatcher(links), generations)
    async with running(request):
        for generation in generations:
            generation.push([40], 1.0)
            await turns()
        await asyncio.sleep(0.3)
        for generation in generations:
            generation.end(STOP)
        assert await request.result is None


async def test_one_refused_answer_cancels_the_answers_of_all_prompts() -> None:
    links = Links()
    request = Request(GatewayDispatcher(links), made(4), answers_per_prompt=2)
    async with running(request):
        assert [it.spec.choice for it in links.submitted] == [0, 2], "each prompt's first answer"
        links.submitted[0].push([40], 1.0)
        await turns()
        links.submitted[2].end(REFUSED)
        assert await request.result == REFUSED
    assert sorted(links.cancelled) == [1, 2, 3]


async def test_a_waiting_retry_ends_with_the_process() -> None:
    links = Links()
    dispatcher = GatewayDispatcher(links)
    request = Request(dispatcher, made(1))
    async with running(request):
        links.submitted[0].push([40], 1.0)
        links.submitted[0].end(LOST)
        await turns()
        dispatcher.stop_all()
        ending = await request.result
    assert ending is not None
    assert (ending.kind, ending.code) == (EndKind.REFUSED, ErrorCode.DRAINING)
    assert len(links.submitted) == 1
    assert request.endings == []


async def test_a_request_waiting_for_a_router_ends_with_the_process_at_once() -> None:
    pace = AttemptPace(LoopLag(lambda _: None))
    dispatcher = GatewayDispatcher(RouterLinks(Directory(ControlState()), "g", pace))
    requests = [Request(dispatcher, made(1)) for _ in range(2)]
    async with running(requests[0]), running(requests[1]):
        assert not any(request.result.done() for request in requests)
        dispatcher.stop_all()
        await turns()
        assert all(request.result.done() for request in requests)
        for request in requests:
            ending = await request.result
            assert ending is not None
            assert (ending.kind, ending.code) == (EndKind.REFUSED, ErrorCode.DRAINING)


async def test_a_request_lost_at_the_end_of_the_process_is_no_success() -> None:
    links = Links()
    dispatcher = GatewayDispatcher(links)
    request = Request(dispatcher, made(1))
    async with running(request):
        links.submitted[0].end(LOST)
        dispatcher.stop_all()
        ending = await request.result
    assert ending is not None
    assert (ending.kind, ending.code) == (EndKind.REFUSED, ErrorCode.DRAINING)


async def test_a_drain_waits_for_answers_that_have_not_been_asked_for_yet() -> None:
    links = Links()
    dispatcher = GatewayDispatcher(links)
    request = Request(dispatcher, made(2))
    async with running(request), asyncio.TaskGroup() as tasks:
        drain = tasks.create_task(dispatcher.drain(5))
        await turns()
        links.submitted[0].push([40], 1.0)
        links.submitted[0].end(STOP)
        await turns()
        assert not drain.done()
        assert len(links.submitted) == 2
        links.submitted[1].end(STOP)
        assert await request.result is None
        assert await drain == 0
    assert dispatcher.open == 0


def kept() -> list[str]:
    """Return what is there of the kinds that a request in flight is made of."""
    kinds = (Answers, Pursuit, Patience)
    return [type(it).__name__ for it in gc.get_objects() if type(it) in kinds]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("ending", [STOP, REFUSED])
async def test_an_ended_request_is_freed(number: int, ending: GenerationEnd) -> None:
    links = Links()
    gc.collect()
    gc.disable()  # what needs it keeps prompts until it comes
    try:
        request = Request(GatewayDispatcher(links), made(number))
        assert "Answers" in kept()
        async with running(request):
            for place in range(number):
                links.submitted[place].end(ending)
                await turns()
                if ending is REFUSED:
                    break
            assert await request.result == (ending if ending is REFUSED else None)
        del request
        assert kept() == []
        assert not links.waiting
    finally:
        gc.enable()


async def test_a_request_during_draining_is_sent_elsewhere() -> None:
    links = Links()
    dispatcher = GatewayDispatcher(links)
    assert await dispatcher.drain(5) == 0
    request = Request(dispatcher, made(2))
    async with running(request):
        ending = await request.result
    assert ending is not None
    assert (ending.code, ending.retry_after_s) == (ErrorCode.DRAINING, 1.0)
    assert not links.submitted


async def test_only_the_loss_of_its_router_sends_an_answer_back_to_its_cell() -> None:
    links, [generation] = Links(), made(1)
    endings = [
        GenerationEnd(EndKind.LOST, ErrorCode.UNAVAILABLE, "the router is gone"),
        GenerationEnd(EndKind.REFUSED, ErrorCode.NO_CAPACITY, "nobody is there"),
        STOP,
    ]
    async with running(Request(GatewayDispatcher(links), [generation])):
        for number, ending in enumerate(endings, 1):
            while len(links.submitted) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await turns()
            generation.push([65], 1.0)
            generation.end(ending)
    assert [home is not None for home in links.homes] == [False, True, False]


async def test_a_full_queue_is_no_loss_that_a_begun_answer_has_to_pay_for(monkeypatch) -> None:
    monkeypatch.setattr(patience, "_RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "_RETRY_PAUSE_MAX_S", 0.001)
    links, [generation] = Links(), made(1)
    full = GenerationEnd(EndKind.REFUSED, ErrorCode.QUEUE_FULL, "4096 requests wait")
    request = Request(GatewayDispatcher(links), [generation])
    async with running(request):
        generation.push([65], 1.0)
        for number, ending in enumerate([LOST, *[full] * 100], 2):
            generation.end(ending)
            while len(links.submitted) < number and not request.result.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        generation.push([66], 2.0)
        generation.end(STOP)
        assert await request.result is None


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.QUEUE_FULL])
async def test_further_answers_wait_as_begun_ones_do(monkeypatch, code: ErrorCode) -> None:
    monkeypatch.setattr(patience, "_RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "_RETRY_PAUSE_MAX_S", 0.001)
    monkeypatch.setattr(patience, "_CONNECT_WAIT_S", 0.01)
    links, [generation] = Links(), [made_by(is_begun=True)]
    request = Request(GatewayDispatcher(links), [generation])
    async with running(request):
        for number in range(2, 102):
            generation.end(GenerationEnd(EndKind.REFUSED, code, "not here, not now"))
            while len(links.submitted) < number and not request.result.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        generation.push([66], 2.0)
        generation.end(STOP)
        assert await request.result is None


async def test_a_request_that_costs_replicas_is_not_retried_without_end(monkeypatch) -> None:
    monkeypatch.setattr(patience, "_RETRY_PAUSE_S", 0.0001)
    monkeypatch.setattr(patience, "_RETRY_PAUSE_MAX_S", 0.0001)
    links, [generation] = Links(), made(1)
    request = Request(GatewayDispatcher(links), [generation])
    async with running(request):
        generation.push([65], 1.0)
        while not request.result.done():
            generation.end(
                GenerationEnd(EndKind.REFUSED, ErrorCode.REPLICA_LOST, "three were lost")
            )
            await asyncio.sleep(0.0005)
        refused = await request.result
    assert refused is not None
    assert refused.code is ErrorCode.REPLICA_LOST
    assert len(links.submitted) <= retry_budget.AGAIN + retry_budget.ALWAYS + 1


async def lose(links: Links, generation: Generation, times: int) -> None:
    first = len(links.submitted)
    for number in range(first, first + times):
        while len(links.submitted) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await turns()
        generation.push([65], 1.0)
        generation.end(GenerationEnd(EndKind.LOST, ErrorCode.REPLICA_LOST, "replica r1 was lost"))


async def test_a_caller_is_not_told_which_replica_was_lost() -> None:
    links, [generation] = Links(), made(1)
    request = Request(GatewayDispatcher(links), [generation])
    async with running(request):
        await lose(links, generation, patience.RESUMES_MAX + 1)
        ending = await request.result
    assert ending is not None
    assert (ending.code, ending.message) == (
        ErrorCode.REPLICA_LOST,
        "The engine was lost; try again.",
    )


async def test_a_tenants_storm_leaves_the_retries_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_budget, "ALWAYS", 0)
    monkeypatch.setattr(retry_budget, "AGAIN", 1)
    links = Links()
    dispatcher = GatewayDispatcher(links)
    stormy, calm = (made_by(tenant_id=name) for name in ("stormy", "calm"))
    request = Request(dispatcher, [stormy])
    async with running(request):
        await lose(links, stormy, 2)
        assert await request.result is not None
    assert dispatcher.retries_refused == 1
    request = Request(dispatcher, [calm])
    async with running(request):
        await lose(links, calm, 1)
        while len(links.submitted) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await turns()
        calm.end(STOP)
        assert await request.result is None
    assert dispatcher.retries_refused == 1


async def test_whole_answers_wait_for_the_last_while_others_have_ended() -> None:
    links, generations = Links(), made(3)

    async def wait_for_all() -> GenerationEnd | None:
        with GatewayDispatcher(links).dispatch(generations, 3) as answers:
            return await answers.finished()

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait_for_all())
        await turns()
        links.submitted[0].push([40], 1.0)
        await turns()
        for generation in generations[:2]:
            generation.end(GenerationEnd(EndKind.STOP))
            await turns()
        assert not waiting.done()
        generations[2].end(GenerationEnd(EndKind.STOP))
        assert await waiting is None
