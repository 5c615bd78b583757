"""Two real routers with a cell each of one pool: a tenant of both cells counts once."""

import asyncio
from pathlib import Path

import pytest

from router.app import run
from router.pool_reports import PoolReports, unpacked
from router.settings import Settings
from sluice.process import free_port
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.contract.conftest import Gateway
from tests.contract.test_router import get
from tests.links import trusted_channel

NAMES = ("one", "two")
QUEUED = 40


@pytest.fixture
async def start_pair(tmp_path: Path):
    """Start both routers from the same snapshot, their control plane away, each with a replica."""
    started: list[tuple[asyncio.Event, asyncio.Task]] = []

    async def start(hosts: dict[str, str], pools: dict[str, str]) -> dict[str, Settings]:
        made = {
            name: Settings(
                instance_id=name,
                grpc_address=f"127.0.0.1:{free_port()}",
                http_address=f"127.0.0.1:{free_port()}",
                control_address=f"127.0.0.1:{free_port()}",
                state_dir=tmp_path / name,
            )
            for name in NAMES
        }
        cells = [
            control.Cell(
                id=f"cell-{name}",
                pool_id=pools[name],
                router_id=name,
                router_address=made[name].grpc_address,
                epoch=1,
            )
            for name in NAMES
        ]
        replicas = [
            control.Replica(
                id=f"replica-{name}",
                pool_id=pools[name],
                cell_id=f"cell-{name}",
                grpc_address=address,
                triton_model="llm",
                state=control.REPLICA_STATE_READY,
            )
            for name, address in hosts.items()
        ]
        upserts = control.Objects(cells=cells, replicas=replicas)
        snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=upserts)
        for name, settings in made.items():
            write_snapshot(
                iter([snapshot.SerializeToString()]), tmp_path / name / "router-snapshot.bin"
            )
            stop = asyncio.Event()
            started.append((stop, asyncio.get_running_loop().create_task(run(settings, stop))))
            async with asyncio.timeout(60), trusted_channel(settings.grpc_address) as channel:
                await channel.channel_ready()
        return made

    yield start
    for stop, _ in started:
        stop.set()
    for _, task in started:
        await asyncio.wait_for(task, 60)


async def served_of_wide(start_pair, hosts, pools: dict[str, str]) -> float:
    """How many requests of the tenant in both cells end, for one of a tenant in one cell."""
    servers = {name: await hosts(speed=1.0, sequences_max=2) for name in NAMES}
    addresses = {name: server.address for name, server in servers.items()}
    made = await start_pair(addresses, pools)
    gateways: dict[str, Gateway] = {}
    for name, settings in made.items():
        gateway = gateways[name] = Gateway(settings.grpc_address)
        assert (await gateway.hello()).router_id == name
        cell = f"cell-{name}"
        await gateway.until(lambda g=gateway, c=cell: c in g.cells and g.cells[c].replicas_ready)
    wide: dict[str, list[int]] = {}
    narrow: dict[str, list[int]] = {}

    async def ask(name: str) -> None:
        words = {"cell_id": f"cell-{name}", "count": QUEUED, "output": 200, "deadline_ms": 600_000}
        wide[name] = await gateways[name].submit(tenant_id="wide", **words)
        narrow[name] = await gateways[name].submit(tenant_id=f"narrow-{name}", **words)
        ended = gateways[name].outcomes
        await gateways[name].until(lambda: sum(one in ended for one in narrow[name]) >= 30)

    async with asyncio.TaskGroup() as tasks:
        for name in NAMES:
            tasks.create_task(ask(name))
    ended = {
        kind: sum(one in gateways[name].outcomes for name in NAMES for one in handles[name])
        for kind, handles in (("wide", wide), ("narrow", narrow))
    }
    for gateway in gateways.values():
        await gateway.close()
    return ended["wide"] / ended["narrow"]


async def test_a_tenant_with_two_cells_of_a_pool_counts_once(start_pair, hosts):
    # Within 5 % in virtual time (tests/unit/router/test_pool_service.py); here processes stall.
    share = await served_of_wide(start_pair, hosts, {"one": "pool", "two": "pool"})
    assert share == pytest.approx(0.5, abs=0.2), "a third of each cell, and they two thirds"


async def test_cells_of_different_pools_do_not_share_a_count(start_pair, hosts):
    share = await served_of_wide(start_pair, hosts, {"one": "pool", "two": "other"})
    assert share == pytest.approx(1.0, abs=0.2)


async def test_routers_follow_each_other_and_show_the_age_of_the_word(start_pair, hosts):
    host = await hosts()
    made = await start_pair({"one": host.address}, {"one": "pool", "two": "pool"})

    def age() -> float:
        _, page = get(type("It", (), {"settings": made["two"]}), "/metrics")
        name = "router_pool_service_age_seconds "
        return next(float(line[len(name) :]) for line in page.splitlines() if line.startswith(name))

    async with asyncio.timeout(60), trusted_channel(made["one"].grpc_address) as channel:
        request = wire.FollowServiceRequest(router_id="test", pool_id="pool")
        call = RouterServiceStub(channel).FollowService(request)
        numbers = []
        for _ in range(3):
            message = await call.read()
            assert message.router_id == "one"
            (report,) = unpacked(message)
            numbers.append(report.number)
        call.cancel()
    assert numbers == sorted(numbers)
    async with asyncio.timeout(60):
        while not 0.0 < await asyncio.to_thread(age) < 2.0:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_columns_that_do_not_agree_are_refused():
    cell = wire.CellService(cell_id="c", tenant_ids=["a"], priorities=[1], since=[1])
    with pytest.raises(ValueError, match="do not agree"):
        list(unpacked(wire.FollowServiceResponse(cells=[cell])))
    cell.service.append(float("nan"))
    with pytest.raises(ValueError, match="no numbers"):
        list(unpacked(wire.FollowServiceResponse(cells=[cell])))


async def test_a_reader_that_does_not_read_is_cut():
    reports = PoolReports(None, "me")
    reader = reports.open("pool")
    for _ in range(40):
        reader.put(b"x")
    assert await reader.next() is None
    reports.close("pool", reader)
