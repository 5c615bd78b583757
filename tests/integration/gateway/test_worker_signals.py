"""Signals to a parent and its workers in odd orders: no stream is cut, no worker is left over."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import running_gateway
from gateway.server.worker_link import HEARTBEAT_S, ParentEnd, WorkerEnd
from gateway.server.workers import READY_S, GatewayWorker, Slot
from gateway.settings import GatewaySettings
from sluice.process import ProcessSpec
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.test_workers import exchange, long_plan, plain_settings, request
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

WAIT_S = 60.0
NO_PROCESS: Any = None  # it is looked at when the worker is gone
STREAM = {"max_tokens": 150, "stream": True, "ignore_eos": True}
SUCCESS = b"data: [DONE]\n\n\r\n0\r\n\r\n"


async def test_a_roll_while_a_slot_waits_to_start_again_leaves_one_worker_in_it(
    tmp_path: Path,
) -> None:
    begun: list[GatewayWorker] = []
    settings = GatewaySettings(**plain_settings(tmp_path, "127.0.0.1:1"))
    with socket.socket() as sock:
        slot = Slot(settings, 0, sock, begun.append)
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(slot.run())
            await asyncio.sleep(0)
            slot.note_left(begun[0])  # the next start is 0.2 s away
            replaced = tasks.create_task(slot.replace())
            await asyncio.sleep(0)
            begun[1].ready.set()
            assert await replaced
            await asyncio.sleep(0.5)
            assert slot.current is begun[1]
            assert len(begun) == 2
            slot.note_left(begun[1])  # it is looked after like any other
            await asyncio.sleep(1.0)
            assert slot.current is begun[2]
            keeper.cancel()
    for end in (end for worker in begun for end in worker._sockets):
        end.close()


async def test_workers_that_are_told_to_hang_up_go_on_and_to_stop_with_their_parent_drain(
    world, fleets
) -> None:
    """Service managers signal each process of a service."""
    async with world() as w, fleets(w.settings) as fleet:
        before = set(fleet.workers)
        for pid in before:
            os.kill(pid, signal.SIGHUP)
        await asyncio.sleep(1.0)
        assert set(fleet.workers) == before
        w.router.plan, w.router.step_s = long_plan, 0.02
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(exchange(fleet.port, request(STREAM))) for _ in range(6)]
            while len(w.router.submits) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for pid in (*fleet.workers, fleet.parent.pid):
                os.kill(pid, signal.SIGTERM)
        for stream in streams:
            assert stream.result().endswith(SUCCESS), stream.result()[-300:]


async def test_no_worker_is_started_by_a_roll_once_the_parent_stops(world, fleets) -> None:
    async with world() as w, fleets(w.settings, drain_s=4.0) as fleet:
        w.router.plan, w.router.step_s = endless, 0.02
        before = set(fleet.workers)
        async with asyncio.TaskGroup() as tasks:
            cut = [tasks.create_task(exchange(fleet.port, request(STREAM))) for _ in range(6)]
            while len(w.router.submits) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(fleet.parent.pid, signal.SIGTERM)
            await asyncio.sleep(0.5)
            os.kill(fleet.parent.pid, signal.SIGHUP)
            await asyncio.sleep(1.0)
            assert set(fleet.workers) <= before
        assert b'"code":"draining"' in cut[0].result()
        await asyncio.wait_for(fleet.parent.wait(), WAIT_S)
        assert "rolling_restart_started" not in fleet.log_file.read_text()


async def test_a_request_that_comes_late_to_a_retired_worker_has_its_time(world) -> None:
    """What keeps the worker busy until then is told its end."""
    async with world(drain_s=2.0, unready_s=WAIT_S) as w, asyncio.TaskGroup() as tasks:
        plans: list[Plan] = []

        def plan(submit: wire.Submit) -> Plan:
            plans.append(endless(submit))
            return plans[-1]

        w.router.plan, port = plan, w.settings.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        cut = tasks.create_task(exchange(port, request(STREAM)))
        while not plans:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stopped = tasks.create_task(w.gateway.stop(is_replaced=True))
        while w.gateway.http.is_accepting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.write(request(STREAM))
        while not w.gateway.dispatcher.is_draining:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        plans[1].outcome = wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH)
        async with asyncio.timeout(WAIT_S):
            late = await reader.read()
        assert late.endswith(SUCCESS), late[-300:]
        assert not stopped.done()
        writer.close()
    assert b'"code":"draining"' in cut.result(), cut.result()[-300:]


async def test_a_parent_kills_no_retired_worker_that_drains(tmp_path: Path) -> None:
    times_s = {"drain_s": 100.0, "idle_grace_s": 20.0, "flush_s": 3.0}
    async with slot_alone(tmp_path, **times_s) as (slot, begun, tasks):
        keeper = tasks.create_task(slot.run())
        await asyncio.sleep(0)
        assert begun[0]._spec.stop_grace_s > 20.0 + 2 * 100.0 + 3.0
        keeper.cancel()


async def test_a_body_that_is_on_its_way_as_the_server_stops_is_answered(world, fleets) -> None:
    async with world() as w, fleets(w.settings, workers=1, idle_grace_s=0.0) as fleet:
        whole = request({"max_tokens": 2})
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
        writer.write(whole[:-10])
        await fleet.until(lambda: _is_connected(fleet))
        os.kill(fleet.parent.pid, signal.SIGTERM)
        while "drain_started" not in fleet.log_file.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        writer.write(whole[-10:])
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        assert b"HTTP/1.1 503 " in answer
        assert b'"code":"draining"' in answer
        writer.close()


async def _is_connected(fleet) -> bool:
    return "gateway_open_connections 1.0" in (await fleet.ops("/metrics")).text


def endless(submit: wire.Submit) -> Plan:
    return Plan(long_plan(submit).steps, None)


def endless_when_streamed(submit: wire.Submit) -> Plan:
    return (endless if submit.output_tokens_max == STREAM["max_tokens"] else long_plan)(submit)


async def test_a_worker_that_stops_alone_leaves_its_place_at_once(world, fleets) -> None:
    async with world() as w, fleets(w.settings, drain_s=60.0) as fleet:
        w.router.plan, w.router.step_s = endless_when_streamed, 0.02
        streams = [await asyncio.open_connection("127.0.0.1", fleet.port) for _ in range(16)]
        for reader, writer in streams:  # so many that each worker has some
            writer.write(request(STREAM))
            await reader.readuntil(b'"content":')
        os.kill(min(fleet.workers), signal.SIGTERM)
        await fleet.until(lambda: _has(fleet, 3))
        async with asyncio.timeout(20.0):
            await fleet.until_ready()
            for _ in range(16):
                assert b"HTTP/1.1 200 " in await exchange(fleet.port, request({"max_tokens": 2}))
        assert len(fleet.workers) == 3
        for _, writer in streams:
            writer.close()
        await fleet.until(lambda: _has(fleet, 2))


async def test_a_worker_that_is_retired_before_it_can_be_told_is_told_then(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    listens = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
    worker = GatewayWorker(
        ProcessSpec(
            name="worker",
            command=[sys.executable, "-c", listens, str(theirs.fileno())],
            env={},
            log_file=tmp_path / "log",
            ready=never,
            pass_fds=(theirs.fileno(),),
        ),
        (ours, theirs),
        lambda _: None,
    )
    worker.retire()
    async with asyncio.timeout(WAIT_S / 2):  # less than a worker may take to start
        await worker.run(10.0)
    assert worker.ended_because == "retired"


async def never() -> None:
    """Nobody asks."""


async def _has(fleet, count: int) -> bool:
    return len(fleet.workers) == count


async def test_a_worker_that_stops_before_it_ever_served_leaves_its_place(tmp_path: Path) -> None:
    async with slot_alone(tmp_path) as (slot, begun, tasks):
        keeper = tasks.create_task(slot.run())
        await asyncio.sleep(0)
        link, talk = await linked(begun[0], tasks)
        follow = tasks.create_task(begun[0]._follow(link, NO_PROCESS, 10.0))
        async with asyncio.timeout(WAIT_S):
            while len(begun) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(2 * HEARTBEAT_S)  # its next words move nobody
        assert slot.current is begun[1]
        for task in (keeper, talk, follow):
            task.cancel()


async def test_a_new_worker_that_stops_takes_no_place(tmp_path: Path) -> None:
    async with slot_alone(tmp_path) as (slot, begun, tasks):
        keeper = tasks.create_task(slot.run())
        replaced = tasks.create_task(slot.replace())
        await asyncio.sleep(0)
        before, new = begun
        _, talk = await linked(new, tasks)
        new.ready.set()  # it was, when it was told to stop
        assert not await replaced
        assert slot.current is before
        assert not before.is_retired
        keeper.cancel()
        talk.cancel()


async def test_a_roll_does_not_wait_for_a_new_worker_that_stops(tmp_path: Path) -> None:
    async with slot_alone(tmp_path) as (slot, begun, tasks):
        replaced = tasks.create_task(slot.replace())
        await asyncio.sleep(0)
        link, talk = await linked(begun[0], tasks)
        follow = tasks.create_task(begun[0]._follow(link, NO_PROCESS, 10.0))
        async with asyncio.timeout(READY_S / 2):
            assert not await replaced
        for task in (talk, follow):
            task.cancel()


async def test_a_new_worker_that_is_late_finishes_its_accepted_requests(
    tmp_path: Path, monkeypatch
) -> None:
    """It was ready for a moment, which its words do not tell."""
    monkeypatch.setattr("gateway.server.workers.READY_S", 0.1)
    stop = asyncio.Event()
    async with slot_alone(tmp_path) as (slot, begun, tasks):
        replaced = tasks.create_task(slot.replace())
        await asyncio.sleep(0)
        [worker] = begun
        ours, theirs = worker._sockets
        end = WorkerEnd(theirs, stop)
        end.serve(read_metrics=bytes, not_ready_because=lambda: "no router is connected")
        talk = tasks.create_task(end.run())
        worker.link = await ParentEnd.open(ours)
        assert not await replaced
        async with asyncio.timeout(WAIT_S):
            await stop.wait()
        assert end.is_retired
        talk.cancel()


async def test_a_worker_stopped_before_it_could_serve_ends_and_accepts_nothing(
    tmp_path: Path,
) -> None:
    stop = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as slot:
        port = slot.getsockname()[1]
        settings = GatewaySettings(
            **plain_settings(tmp_path, f"127.0.0.1:{port}"), flush_s=0.0, unready_s=2 * WAIT_S
        )
        with socket.create_connection(("127.0.0.1", port)), slot.dup() as ours:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_set_soon(stop))
                async with (
                    asyncio.timeout(WAIT_S / 2),
                    running_gateway(settings, ours, ready_wait_s=WAIT_S, stop=stop) as gateway,
                ):
                    assert gateway.not_ready_because()
            slot.setblocking(False)
            slot.accept()[0].close()  # it is still there for whoever can serve it


@asynccontextmanager
async def slot_alone(
    tmp_path: Path, **times_s: float
) -> AsyncIterator[tuple[Slot, list[GatewayWorker], asyncio.TaskGroup]]:
    """Yield a slot, the workers that it has begun, none of which has a process, and tasks."""
    begun: list[GatewayWorker] = []
    settings = GatewaySettings(**plain_settings(tmp_path, "127.0.0.1:1"), **times_s)
    with socket.socket() as sock:
        async with asyncio.TaskGroup() as tasks:
            yield Slot(settings, 0, sock, begun.append), begun, tasks
    for worker in begun:
        if worker.link is not None:
            worker.link.close()
            continue
        for end in worker._sockets:
            end.close()


async def _set_soon(stop: asyncio.Event) -> None:
    await asyncio.sleep(0.1)
    stop.set()


async def linked(
    worker: GatewayWorker, tasks: asyncio.TaskGroup
) -> tuple[ParentEnd, asyncio.Task[None]]:
    """Let a worker without a process say that it stops, and has never served."""
    ours, theirs = worker._sockets
    stop = asyncio.Event()
    stop.set()
    talk = tasks.create_task(WorkerEnd(theirs, stop).run())
    link = worker.link = await ParentEnd.open(ours)
    assert await link.next_word()
    return link, talk
