"""Two real routers with a cell each of one pool: a tenant of both cells counts once."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from router.app import run
from router.pool_reports import PoolReports, unpacked
from router.settings import Settings
from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.contract.conftest import Gateway
from tests.contract.test_router import get
from tests.links import trusted_channel

NAMES = ("one", "two")
QUEUED = 50
WARM_UP = 6  # narrow requests that end in each cell before any is counted
COUNTED = 24  # narrow requests that end in one of the cells while they are counted


def settings_of(name: str, folder: Path) -> Settings:
    return Settings(
        instance_id=name,
        grpc_address=f"127.0.0.1:{free_port()}",
        http_address=f"127.0.0.1:{free_port()}",
        control_address=f"127.0.0.1:{free_port()}",
        state_dir=folder / name,
    )


def write_fleet(made: dict[str, Settings], hosts: dict[str, str], pools: dict[str, str]) -> None:
    """Write the snapshot that both routers start from: their control plane is away."""
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
    for settings in made.values():
        path = settings.state_dir / "router-snapshot.bin"
        write_snapshot(iter([snapshot.SerializeToString()]), path)


@asynccontextmanager
async def task_of(settings: Settings) -> AsyncIterator[None]:
    """Run a router in this process."""
    stop = asyncio.Event()
    task = asyncio.get_running_loop().create_task(run(settings, stop))
    try:
        async with asyncio.timeout(60), trusted_channel(settings.grpc_address) as channel:
            await channel.channel_ready()
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


@asynccontextmanager
async def process_of(settings: Settings) -> AsyncIterator[None]:
    """Run a router in a process of its own."""
    host, _, port = settings.grpc_address.rpartition(":")
    spec = ProcessSpec(
        name=f"router-{settings.instance_id}",
        command=[sys.executable, "-m", "router"],
        env={
            "PATH": "/usr/bin:/bin",
            **shared_secret.environment(),
            "ROUTER__INSTANCE_ID": settings.instance_id,
            "ROUTER__GRPC_ADDRESS": settings.grpc_address,
            "ROUTER__HTTP_ADDRESS": settings.http_address,
            "ROUTER__CONTROL_ADDRESS": settings.control_address,
            "ROUTER__STATE_DIR": str(settings.state_dir),
        },
        log_file=settings.state_dir / "router.log",
        ready=lambda: port_answers(host, int(port)),
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(120)
        yield
    finally:
        await child.stop()


@pytest.fixture
async def start_pair(tmp_path: Path):
    """Start both routers from the same snapshot, each with a replica."""
    async with AsyncExitStack() as stack:

        async def start(
            hosts: dict[str, str], pools: dict[str, str], running=task_of
        ) -> dict[str, Settings]:
            made = {name: settings_of(name, tmp_path) for name in NAMES}
            write_fleet(made, hosts, pools)
            for settings in made.values():
                await stack.enter_async_context(running(settings))
            return made

        yield start


def ended(gateways: dict[str, Gateway], asked: dict[tuple[str, str], list[int]]) -> Counter:
    """How many requests of each tenant have ended in each cell."""
    return Counter(
        {
            (tenant, name): sum(one in gateways[name].outcomes for one in handles)
            for (tenant, name), handles in asked.items()
        }
    )


async def served(start_pair, hosts, pools: dict[str, str], running=task_of) -> Counter:
    """Requests that end while all three tenants wait, by tenant and cell.

    Counted from the time when the routers have heard of each other until the first cell has served
    enough: a cell without narrow requests would give all it has to the wide tenant.
    """
    servers = {name: await hosts(speed=1.0, sequences_max=2) for name in NAMES}
    addresses = {name: server.address for name, server in servers.items()}
    made = await start_pair(addresses, pools, running)
    gateways: dict[str, Gateway] = {}
    for name, settings in made.items():
        gateway = gateways[name] = Gateway(settings.grpc_address)
        assert (await gateway.hello()).router_id == name
        cell = f"cell-{name}"
        await gateway.until(lambda g=gateway, c=cell: c in g.cells and g.cells[c].replicas_ready)
    asked: dict[tuple[str, str], list[int]] = {}
    for name in NAMES:
        words = {"cell_id": f"cell-{name}", "count": QUEUED, "output": 200, "deadline_ms": 600_000}
        for tenant in ("wide", "narrow"):
            tenant_id = tenant if tenant == "wide" else f"narrow-{name}"
            asked[tenant, name] = await gateways[name].submit(tenant_id=tenant_id, **words)

    async def read_until(enough, of: Iterable[str]) -> Counter:
        """Read all gateways until `enough` is said of these cells; return what has ended."""

        def is_over() -> bool:
            now = ended(gateways, asked)
            return enough(now["narrow", name] for name in of)

        async with asyncio.TaskGroup() as tasks:
            for gateway in gateways.values():
                tasks.create_task(gateway.until(is_over, timeout_s=300))
        return ended(gateways, asked)

    before = await read_until(lambda counts: min(counts) >= WARM_UP, NAMES)
    most = max(before["narrow", name] for name in NAMES)
    after = await read_until(lambda counts: max(counts) >= min(QUEUED - 2, most + COUNTED), NAMES)
    for gateway in gateways.values():
        await gateway.close()
    return after - before


def fair_share(counts: Counter) -> float:
    """The wide tenant's share of all that ended, if the cells share as the slower one allows.

    A cell that stalls serves less than a tenant's third: all of it is then its narrow tenant's, and
    the wide one has half of the other cell.
    """
    by_cell = [counts["wide", name] + counts["narrow", name] for name in NAMES]
    return max(sum(by_cell) / 3, max(by_cell) / 2) / sum(by_cell)


def wide_share(counts: Counter) -> float:
    return sum(counts["wide", name] for name in NAMES) / counts.total()


async def test_a_tenant_with_two_cells_of_a_pool_counts_once(start_pair, hosts):
    # Within 5 % in virtual time (tests/unit/router/test_pool_service.py); here two requests of a
    # cell run at a time, and processes stall.
    counts = await served(start_pair, hosts, {"one": "pool", "two": "pool"}, process_of)
    assert wide_share(counts) == pytest.approx(fair_share(counts), abs=0.06), counts


async def test_cells_of_different_pools_do_not_share_a_count(start_pair, hosts):
    counts = await served(start_pair, hosts, {"one": "pool", "two": "other"})
    assert wide_share(counts) == pytest.approx(0.5, abs=0.06), counts


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
