"""The router's shell over real gRPC, with real engine hosts (sim driver) behind it."""

import asyncio
import urllib.request
from typing import Any

import grpc
import grpc.aio
import pytest

from router import attach, outgoing
from router.app import run
from sluice.errors import FailedError
from sluice.kserve import HostStream, probe
from sluice.process import free_port
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.links import trusted_channel


def get(router: Any, path: str) -> tuple[int, str]:
    url = f"http://{router.settings.http_address}{path}"
    with urllib.request.urlopen(url, timeout=60) as page:
        return page.status, page.read().decode()


async def until_told(router: Any, line: str) -> None:
    """Wait until the router's metrics have this line."""
    async with asyncio.timeout(60):
        while line not in (await asyncio.to_thread(get, router, "/metrics"))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def all_have(gateway: Any, handles: list[int], tokens: int) -> bool:
    return all(len(gateway.tokens.get(handle, ())) >= tokens for handle in handles)


async def test_a_batch_streams_to_its_end(hosts: Any, start_router: Any, connect: Any):
    host = await hosts()
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    handles = await gateway.submit(count=50, output=30)
    await gateway.until_over(handles)
    for handle in handles:
        outcome = gateway.outcomes[handle]
        assert outcome.kind == wire.OUTCOME_KIND_LENGTH
        assert outcome.output_tokens == len(gateway.tokens[handle]) == 30
        assert len(gateway.placed[handle]) == 1


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_stream_that_breaks_while_its_host_lives_costs_nothing(
    hosts: Any, start_router: Any, connect: Any, monkeypatch: Any, status: grpc.StatusCode
):
    monkeypatch.setattr(attach, "RESUME_S", 3.0)  # what matters here is what a resume brings
    first, second = await hosts(speed=2.0), await hosts(speed=2.0)
    router = await start_router(first.address, second.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready(2)
    handles = await gateway.submit(count=20, output=600)
    for cuts, share in enumerate((1, 50, 100, 200, 300), 1):
        await gateway.until(lambda share=share: all_have(gateway, handles, share))
        first.cut(status)
        second.cut(status)
        await until_told(router, f"router_streams_resumed_total {2.0 * cuts}")
    await gateway.until_over(handles)
    for handle in handles:
        assert gateway.outcomes[handle].kind == wire.OUTCOME_KIND_LENGTH
        assert gateway.outcomes[handle].output_tokens == len(gateway.tokens[handle]) == 600
        assert len(gateway.placed[handle]) == 1
    _, text = await asyncio.to_thread(get, router, "/metrics")
    for name in ("requeues", "replicas_lost", "stray_tokens", "count_mismatches"):
        assert f"router_{name}_total 0.0" in text


async def test_probes_of_the_core_reach_every_host(hosts: Any, start_router: Any, connect: Any):
    started = [await hosts() for _ in range(3)]
    router = await start_router(*(host.address for host in started))
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready(3)
    probed = [host.host.counters for host in started]
    async with asyncio.timeout(60):
        while not all(counters.ended["length"] for counters in probed):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    _, text = await asyncio.to_thread(get, router, "/metrics")
    assert 'router_replicas{health="healthy"} 3.0' in text


async def test_cancel_and_hang_up_free_the_engine(hosts: Any, start_router: Any, connect: Any):
    host = await hosts(speed=0.2)
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    other = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    await other.until_ready()
    handles = await gateway.submit(count=3, output=3000)
    await other.submit(count=3, output=3000)
    await gateway.until(lambda: len(gateway.tokens) == 3)
    await other.until(lambda: len(other.tokens) == 3)
    await gateway.cancel(*handles[:2])
    await gateway.until_over(handles[:2])
    assert gateway.outcomes[handles[0]].kind == wire.OUTCOME_KIND_CANCELLED
    await other.close()
    await gateway.until(lambda: gateway.cells["cell-contract"].running == 1)
    assert host.host.load.running == 1


async def test_an_unservable_request_is_answered_at_once(
    hosts: Any, start_router: Any, connect: Any
):
    host = await hosts(sequences_max=2, speed=0.05)
    router = await start_router(host.address, queue_requests_max=3)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    [elsewhere] = await gateway.submit(cell_id="cell-of-somebody-else")
    [too_long] = await gateway.submit(prompt_tokens=9000)
    await gateway.until_over([elsewhere, too_long])
    assert gateway.outcomes[elsewhere].code == "unavailable"
    assert gateway.outcomes[too_long].code == "context_length_exceeded"
    # One write: three are queued, the fourth and fifth find the queue full.
    flood = await gateway.submit(count=5, output=4000)
    await gateway.until_over(flood[3:])
    for handle in flood[3:]:
        assert gateway.outcomes[handle].code == "queue_full"
        assert gateway.outcomes[handle].retry_after_ms > 0


async def test_a_deadline_evicts_waiting_requests(hosts: Any, start_router: Any, connect: Any):
    host = await hosts(sequences_max=1, speed=0.05)
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    running, late = await gateway.submit(count=2, output=4000, deadline_ms=2000)
    await gateway.until_over([late])
    outcome = gateway.outcomes[late]
    assert (outcome.kind, outcome.code) == (wire.OUTCOME_KIND_EVICTED, "deadline_exceeded")
    assert outcome.retry_after_ms > 0
    assert running not in gateway.outcomes


async def test_drain_finishes_running_requests_and_rejects_the_rest(
    hosts: Any, start_router: Any, connect: Any
):
    host = await hosts(speed=1.0)
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    handles = await gateway.submit(count=4, output=300)
    await gateway.until(lambda: len(gateway.tokens) == 4)
    router.stop.set()
    await gateway.until(lambda: True)
    [late] = await gateway.submit()
    await gateway.until_over([*handles, late])
    assert {gateway.outcomes[handle].kind for handle in handles} == {wire.OUTCOME_KIND_LENGTH}
    assert gateway.outcomes[late].code == "draining"
    await asyncio.wait_for(router.task, 60)
    assert host.host.load.running == 0


async def test_a_drain_that_takes_too_long_hands_the_streams_over(
    hosts: Any, start_router: Any, connect: Any
):
    host = await hosts(speed=0.05)
    router = await start_router(host.address, drain_s=0.2)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    handles = await gateway.submit(count=2, output=4000)
    await gateway.until(lambda: len(gateway.tokens) == 2)
    router.stop.set()
    await gateway.until_over(handles)
    assert {gateway.outcomes[handle].kind for handle in handles} == {wire.OUTCOME_KIND_LOST}
    await asyncio.wait_for(router.task, 60)


async def test_signs_of_life_stream_until_the_router_ends(hosts: Any, start_router: Any):
    router = await start_router((await hosts()).address)
    async with asyncio.timeout(60), trusted_channel(router.settings.grpc_address) as channel:
        stub = RouterServiceStub(channel)
        await stub.Ping(wire.PingRequest())  # control planes of the last release
        signs = stub.Live(wire.LiveRequest())
        for _ in range(3):
            assert await signs.read() == wire.LiveResponse()
        router.stop.set()
        while await signs.read() is not grpc.aio.EOF:
            pass
        await router.task


async def test_a_broken_gateway_is_told_so(hosts: Any, start_router: Any, connect: Any):
    host = await hosts(speed=0.1)
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.submit(output=4000)
    gateway.handles -= 1
    await gateway.submit(output=4000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.until(lambda: False)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_probe_runs_a_real_inference(hosts: Any):
    host = await hosts()
    reply = await probe(host.address, "llm", [5, 6, 7], 4, 5.0)
    assert len(reply.tokens) == 4
    assert reply.engine == "sim"


async def test_status_pages(hosts: Any, start_router: Any, connect: Any):
    host = await hosts()
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    await gateway.until_over(await gateway.submit(output=7))

    assert (await asyncio.to_thread(get, router, "/healthz"))[0] == 200
    assert (await asyncio.to_thread(get, router, "/readyz"))[0] == 200
    _, text = await asyncio.to_thread(get, router, "/metrics")
    assert "router_tokens_total 7.0" in text
    assert 'router_outcomes_total{code="",kind="length"} 1.0' in text
    assert "router_replicas_ready 1.0" in text


async def test_a_gateway_that_does_not_read_is_cut(
    hosts: Any, start_router: Any, connect: Any, monkeypatch: Any
):
    monkeypatch.setattr(outgoing, "PENDING_TOKENS_MAX", 5_000)
    host = await hosts()
    router = await start_router(host.address)
    # gRPC grows its windows to megabytes on a fast link; fixed ones make the test short.
    windows = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
    slow = await connect(router.settings.grpc_address, *windows)
    other = await connect(router.settings.grpc_address)
    await slow.until_ready()
    await slow.submit(count=200, output=4000)

    await until_told(router, "router_gateways_cut_total 1.0")
    await other.until_ready()
    await other.until(lambda: other.cells["cell-contract"].running == 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow.until(lambda: False)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    [handle] = await other.submit(output=5)
    await other.until_over([handle])
    assert other.outcomes[handle].kind == wire.OUTCOME_KIND_LENGTH


async def test_a_taken_port_is_one_clear_line(hosts: Any, start_router: Any):
    host = await hosts()
    router = await start_router(host.address)
    with pytest.raises(SystemExit, match="ROUTER__GRPC_ADDRESS"):
        await run(router.settings, asyncio.Event())


async def test_an_impatient_stream_does_not_wait_for_a_host_that_is_gone():
    async with asyncio.timeout(60), HostStream(f"127.0.0.1:{free_port()}", "llm") as stream:
        with pytest.raises(FailedError, match="no engine host answers"):
            await stream.open(timeout_s=100.0, is_patient=False)
