"""Explanations over real gRPC, and `sluice explain` in front of them."""

import asyncio
import json

import grpc
import grpc.aio
import pytest
from aiohttp import web
from typer.testing import CliRunner

from cli.app import app
from sluice.hashing import cache_root, chained_hashes
from sluice.process import free_port
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.contract.conftest import CELL, ROUTER
from tests.links import trusted_channel

PROMPT = [n % 400 for n in range(320)]
ROOT = cache_root("base", "", b"salt")


@pytest.fixture
async def explain():
    """Ask a router."""
    channels: list[grpc.aio.Channel] = []

    async def ask(router, **what) -> wire.Explanation:
        channel = trusted_channel(router.settings.grpc_address)
        channels.append(channel)
        return await RouterServiceStub(channel).Explain(wire.ExplainRequest(**what), timeout=60)

    yield ask
    for channel in channels:
        await channel.close()


async def submit(gateway, *, request_id: str, output: int, prompt=PROMPT) -> int:
    gateway.handles += 1
    message = wire.Submit(
        handle=gateway.handles,
        request_id=request_id,
        cell_id=CELL,
        tenant_id="tenant-a",
        prompt=prompt,
        output_tokens_max=output,
        ignore_eos=True,
        cache_root=ROOT,
        block_hashes=chained_hashes(prompt, ROOT),
    )
    await gateway.call.write(wire.ConnectRequest(submits=[message]))
    return gateway.handles


async def test_requests_that_run_wait_or_might_come_are_explained(
    hosts, start_router, connect, explain
):
    host = await hosts(sequences_max=1, speed=0.05)
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    running = await submit(gateway, request_id="runs", output=3000)
    await submit(gateway, request_id="waits", output=10)
    await gateway.until(lambda: running in gateway.tokens)
    runs = await explain(router, request_id="runs")
    assert (runs.state, runs.chosen, runs.router_id) == ("running", "replica-0", ROUTER)
    waits = await explain(router, request_id="waits")
    assert (waits.state, waits.chosen) == ("queued", "")
    assert [candidate.excluded_by for candidate in waits.candidates] == ["sequences"]
    hashes = chained_hashes(PROMPT, ROOT)
    might = await explain(
        router, submit=wire.Submit(cell_id=CELL, prompt=PROMPT, block_hashes=hashes)
    )
    assert (might.state, might.candidates[0].cached_tokens) == ("admitted", 319)
    assert (await explain(router, request_id="nobody's")).state == "unknown"
    assert gateway.handles == 2
    assert not gateway.outcomes


async def test_a_new_router_knows_the_engines_caches_at_once(hosts, start_router, connect, explain):
    host = await hosts()
    older = await start_router(host.address)
    gateway = await connect(older.settings.grpc_address)
    await gateway.until_ready()
    handle = await submit(gateway, request_id="first", output=5)
    await gateway.until_over([handle])
    older.stop.set()
    await older.task
    router = await start_router(host.address)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready()
    question = wire.Submit(
        cell_id=CELL, prompt=PROMPT, block_hashes=chained_hashes(PROMPT, ROOT), output_tokens_max=5
    )
    async with asyncio.timeout(60):  # the engine's list comes with its first frame
        while not (answer := await explain(router, submit=question)).candidates[0].cached_tokens:
            await gateway.call.read()
    assert answer.candidates[0].cached_tokens == 319


async def test_questions_without_sense_are_refused(hosts, start_router, explain):
    router = await start_router((await hosts()).address)
    for what in ({}, {"submit": wire.Submit(cell_id=CELL, prompt=[1], block_hashes=b"x" * 16)}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await explain(router, **what)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    empty = await explain(router, submit=wire.Submit(cell_id=CELL))
    assert empty.state in {"admitted", "rejected"}


async def test_decisions_of_the_sample_reach_the_gateway_and_the_log(
    hosts, start_router, connect, capsys
):
    first, second = await hosts(), await hosts()
    router = await start_router(first.address, second.address, decision_sample=1)
    gateway = await connect(router.settings.grpc_address)
    await gateway.until_ready(2)
    handle = await submit(gateway, request_id="sampled", output=5)
    await gateway.until_over([handle])
    [placed] = gateway.placed[handle]
    decision = placed.decision
    assert (decision.request_id, decision.chosen) == ("sampled", placed.replica_id)
    assert decision.candidates[0].replica_id == placed.replica_id
    assert {candidate.replica_id for candidate in decision.candidates} == {"replica-0", "replica-1"}
    assert "request_id=sampled" in capsys.readouterr().err.replace("\x1b[0m", "").replace("'", "")


@pytest.fixture
async def control_plane(monkeypatch):
    """Stands in for the admin REST; `cells` is what it knows of."""
    data: dict[str, dict] = {
        "/v1/models/m": {"id": "m", "pool_id": "pool", "adapter_digest": ""},
        "/v1/releases/m@1": {"id": "m@1", "pool_id": "pool", "adapter_digest": ""},
        "/v1/aliases/best": {"id": "best", "target": "m"},
        "/v1/aliases/first": {"id": "first", "target": "m@1"},
        "/v1/tenants/t": {"id": "t", "tier_id": "gold", "weight": 3},
        "/v1/tiers/gold": {
            "priority": 5,
            "ttft_deadline_ms": 7000,
            "is_preemptible": False,
            "reserved_percent": 10.0,
        },
    }
    cells: list[dict] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/cells":
            return web.json_response({"data": cells, "has_more": False})
        found = data.get(request.path)
        return web.json_response(found or {}, status=200 if found else 404)

    server = web.Application()
    server.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(server)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    monkeypatch.setenv("SLUICE_ADMIN_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "key")
    yield cells
    await runner.cleanup()


def a_cell(address: str, cell_id: str = CELL, pool_id: str = "pool") -> dict:
    return {"id": cell_id, "pool_id": pool_id, "router_id": ROUTER, "router_address": address}


async def sluice(*words: str):
    """Run the command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", *words])


async def test_the_command_shows_the_routers_explanations(
    hosts, start_router, connect, control_plane, tmp_path
):
    first, second = await hosts(speed=0.05), await hosts(speed=0.05)
    router = await start_router(first.address, second.address)
    address = router.settings.grpc_address
    control_plane += [a_cell(address), a_cell("", "cell-without-owner")]
    gateway = await connect(address)
    await gateway.until_ready(2)
    before = await submit(gateway, request_id="before", output=2)
    await gateway.until(lambda: before in gateway.outcomes)
    home = gateway.placed[before][0].replica_id  # with the prompt in its cache, and idle

    file = tmp_path / "ids.json"
    file.write_text(json.dumps(PROMPT))
    words = ("--model", "m", "--tokens-file", str(file), "--cache-root", ROOT.hex(), "--json")
    shown = await sluice(*words, "--tenant", "t")
    assert shown.exit_code == 0, shown.output
    [answer] = json.loads(shown.stdout)
    assert (answer["state"], answer["chosen"]) == ("admitted", home)
    assert 29_000 < answer["deadline_left_ms"] <= 30_000
    cached = {entry["replica_id"]: entry["cached_tokens"] for entry in answer["candidates"]}
    assert cached[home] == 319
    assert sorted(cached.values()) == [0, 319]

    handle = await submit(gateway, request_id="runs", output=3000)
    await gateway.until(lambda: handle in gateway.tokens)
    chosen = gateway.placed[handle][0].replica_id

    shown = await sluice("runs")
    assert shown.exit_code == 0, shown.output
    assert f"runs: running in cell {CELL}, router {ROUTER}" in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[-1] for row in rows if row and row[0] == chosen] == ["chosen"]

    shown = await sluice("--model", "m", "--prompt", "x" * 4000, "--session", "s")
    assert shown.exit_code == 0, shown.output
    assert "hypothetical: admitted" in shown.stdout
    for name in ("best", "first", "m@1"):
        shown = await sluice("--model", name, "--prompt-tokens", "5")
        assert "hypothetical: admitted" in shown.stdout, name
    shown = await sluice("--model", "m", "--prompt-tokens", "100000")
    assert "rejected (context_length_exceeded)" in shown.stdout


async def test_the_command_names_the_fault(hosts, start_router, control_plane):
    shown = await sluice("gone")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "no router owns a cell" in shown.stderr
    router = await start_router((await hosts()).address)
    silent = f"127.0.0.1:{free_port()}"
    control_plane += [a_cell(router.settings.grpc_address), a_cell(silent, "other", "elsewhere")]
    shown = await sluice("gone")
    assert shown.exit_code == 1
    assert "no router knows request gone; it may have ended" in shown.stderr
    assert f"the router at {silent} does not answer" in shown.stderr
    shown = await sluice("--model", "nothing", "--prompt-tokens", "5")
    assert "there is no model nothing" in shown.stderr
    shown = await sluice("--model", "m", "--prompt-tokens", "5", "--tenant", "nobody")
    assert "there is no tenant nobody" in shown.stderr
    shown = await sluice("--model", "m", "--prompt-tokens", "5", "--cell", "other")
    assert "no router owns cell other of pool pool" in shown.stderr
