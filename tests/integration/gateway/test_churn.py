"""Thousands of streams come and go, in every way there is: nothing of them stays."""

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from gateway.bodies.messages import Message
from gateway.bodies.parsing import Body
from gateway.dispatch.generation import Generation
from gateway.dispatch.pursuit import Pursuit
from gateway.endpoints.exchange import HttpExchange
from gateway.endpoints.keep_alive import KeepAlive
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

ROUND = 300
KINDS = (Generation, Pursuit, HttpExchange, KeepAlive)
BODIES = (Body, Message)
# Of a stream that is open, without what others than the gateway and aiohttp allocate: it is 10.3 kB.
# One that keeps the body that it was asked with takes 2.5 kB more, one that keeps the head 1.5 kB.
BYTES_MAX = 11_000
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def plan_of(submit: wire.Submit) -> Plan:
    """Some end well, some are refused, few are lost at first, some would go on for ever.

    One of sixteen is lost: all of them together stay within what a worker may always try again.
    """
    kind = (submit.output_tokens_max + submit.resumed_tokens) % 16  # the same after a loss
    steps = [[token] for token in (65, 66, 67)]
    if kind % 4 == 1:
        return Plan([], wire.Outcome(kind=wire.OUTCOME_KIND_REJECTED, code="queue_full"))
    if kind % 4 == 3:
        return Plan(steps * 10_000, None)
    if kind == 2 and not submit.resumed_tokens:
        return Plan(steps[:1], wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost"))
    return Plan(steps)


async def one(world, number: int) -> None:
    length = {"max_tokens": 48 + number % 16}
    reader, writer = await world.raw(
        BODY | length | {"logprobs": number % 3 == 0, "n": 1 + number % 2}
    )
    if number % 4 == 3:  # would go on for ever: the client leaves
        await reader.readuntil(b'"content":"')
    elif number % 4 == 1:
        await reader.readuntil(b'"code":')
    else:
        assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


def left() -> list[str]:
    """Return what is there of the kinds. Must not keep a list of all objects: it would hold them."""
    gc.collect()
    return [type(it).__name__ for it in gc.get_objects() if isinstance(it, KINDS)]


@pytest.fixture
def new_objects_only() -> Iterator[None]:
    """Let the collector see none that was there before: all of them take it seconds when busy."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("new_objects_only")
async def test_nothing_stays(world, eventually) -> None:
    async with world() as w:
        w.router.plan = plan_of
        tasks = len(asyncio.all_tasks())
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                for number in range(ROUND):
                    group.create_task(one(w, number))
                    if number % 50 == 49:
                        await asyncio.sleep(0.05)
            await eventually(lambda: w.gateway.dispatcher.open == 0)
            await eventually(lambda: not left())
            await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 2)
        assert w.gateway.links.in_flight == 0


async def test_a_stream_that_runs_keeps_nothing_of_its_body(world, eventually) -> None:
    async with world() as w:
        w.router.plan = lambda _: Plan([[65], *[[]] * 100_000], None)
        others = {id(it) for it in gc.get_objects() if isinstance(it, BODIES)}
        reader, writer = await w.raw(BODY | {"max_tokens": 40})
        await reader.readuntil(b'"content":"')

        def kept() -> set[int]:
            gc.collect()
            return {id(it) for it in gc.get_objects() if isinstance(it, BODIES)} - others

        await eventually(lambda: not kept())
        assert w.gateway.dispatcher.open == 1
        writer.close()
        await eventually(lambda: w.gateway.dispatcher.open == 0)


def allocated() -> int:
    """Return the bytes that the gateway's own code and its HTTP library have allocated."""
    gc.collect()
    wanted = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("gateway", "aiohttp")]
    of_tests = tracemalloc.Filter(False, "*/tests/*")
    found = tracemalloc.take_snapshot().filter_traces([*wanted, of_tests])
    return sum(it.size for it in found.statistics("filename"))


async def test_an_open_stream_takes_little(world, eventually) -> None:
    async with world() as w:
        w.router.plan = lambda _: Plan([[65], *[[]] * 100_000], None)
        clients: list[asyncio.StreamWriter] = []

        async def open_streams(number: int) -> None:
            for _ in range(number):
                reader, writer = await w.raw(BODY | {"max_tokens": 40})
                clients.append(writer)
                await reader.readuntil(b'"content":"')

        tracemalloc.start()
        try:
            await open_streams(50)  # what is made once for all is there
            before = allocated()
            await open_streams(200)
            each = (allocated() - before) / 200
        finally:
            tracemalloc.stop()
        for writer in clients:
            writer.close()
        await eventually(lambda: w.gateway.dispatcher.open == 0)
        assert each < BYTES_MAX
