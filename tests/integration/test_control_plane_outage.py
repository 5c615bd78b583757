"""PostgreSQL killed, frozen and back; the control plane killed and back."""

import asyncio
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cli.stack import postgres
from control_plane.migrate import migrate
from sluice.process import ChildProcess, kill_group
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = pytest.mark.real

DEADLINE_S = 60.0


@pytest_asyncio.fixture
async def own_postgres():
    """A server that the test may kill: (start, database URL).

    It writes a change down before it says so: one that does not would forget the last ones when it
    is killed, and give their versions to others.
    """
    home = Path(tempfile.mkdtemp(prefix="sluice-test-", dir="/tmp"))
    home.chmod(0o711)
    await postgres.prepare_postgres(home, fsync=False)
    spec = postgres.postgres_spec(home, 5432, log_file=home / "log")
    started: list[ChildProcess] = []

    async def start() -> ChildProcess:
        started.append(await ChildProcess.start(spec))
        await started[-1].wait_ready(DEADLINE_S)
        return started[-1]

    try:
        yield start, postgres.database_url(home, 5432)
    finally:
        for child in started:
            await child.stop()
        shutil.rmtree(home)


@asynccontextmanager
async def watching(address: str, role=wire.ROLE_GATEWAY, name="g0", own="", file=None):
    watcher = ControlWatcher(address, role, name, own, file)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        try:
            yield watcher
        finally:
            running.cancel()


async def _is_refused(plane) -> bool:
    answer = await plane.admin.put("/v1/tiers/t", json={"rpm": 2})
    if answer.status_code in {200, 201}:
        return False
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "2"
    return True


async def _is_written(plane, rpm: int) -> bool:
    """Write unless the database is not quite back: what comes too early is told to come again."""
    answer = await plane.admin.put("/v1/tiers/t", json={"rpm": rpm})
    assert answer.status_code in {200, 503}, answer.text
    return answer.status_code == 200


async def _is_ready_without_database(plane) -> bool:
    ready = await plane.admin.get("/readyz")
    assert ready.status_code == 200
    return ready.json()["database"] == "down"


async def test_watch_outlives_postgres_and_everything_resumes(
    own_postgres, start_control_plane, eventually, tmp_path
) -> None:
    start, url = own_postgres
    server = await start()
    await migrate(url)
    async with start_control_plane(url, tmp_path) as plane:
        await plane.put("tiers/t", rpm=1)
        async with watching(
            plane.grpc_address, wire.ROLE_ROUTER, "r1", "127.0.0.1:7001"
        ) as watcher:
            await eventually(lambda: "t" in watcher.state.tiers, "the tier arrives")

            kill_group(server.pid)
            await server.stop()
            assert await _is_refused(plane)
            async with watching(plane.grpc_address, name="late") as late:
                assert await late.wait_synced(DEADLINE_S), "served from memory"
                assert late.state.tiers["t"].rpm == 1
            await eventually(lambda: _is_ready_without_database(plane), "it says what is away")
            # Where the machine stalls, a watch may break, and another one begins.
            await eventually(lambda: watcher.is_connected, "the watch goes on")

            server = await start()
            await eventually(lambda: _is_written(plane, 3), "writes are taken again")
            await eventually(lambda: watcher.state.tiers["t"].rpm == 3, "the change arrives")

            family = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
            for process in family:
                process.suspend()
            try:
                assert await _is_refused(plane), "frozen is as good as gone"
                assert (await plane.admin.get("/healthz")).status_code == 200
            finally:
                for process in family:
                    process.resume()
            await eventually(lambda: _is_written(plane, 4), "writes are taken again")
            await eventually(lambda: watcher.state.tiers["t"].rpm == 4, "the change arrives")
            await eventually(lambda: watcher.is_connected, "the watch goes on")


async def test_the_control_plane_killed_and_back(
    own_postgres, start_control_plane, eventually, tmp_path
) -> None:
    start, url = own_postgres
    await start()
    await migrate(url)
    file = tmp_path / "control.snapshot"
    async with start_control_plane(url, tmp_path) as plane:
        digest = "ab" * 32
        await plane.put(f"bases/{digest}", context_tokens_max=1)
        await plane.put("pools/p", base_digest=digest, engine="sim", replicas_wanted=0)
        async with watching(
            plane.grpc_address, wire.ROLE_ROUTER, "r1", "127.0.0.1:7001", file
        ) as watcher:
            await eventually(
                lambda: watcher.state.cells.get("p-0", wire.Cell()).router_id == "r1", "r1 owns it"
            )
            cell = watcher.state.cells["p-0"]
            kill_group(plane.child.pid)
            await plane.child.stop()
            await eventually(lambda: not watcher.is_connected, "the loss is seen")
            assert watcher.state.cells["p-0"] == cell

            child = await ChildProcess.start(plane.spec)
            try:
                await child.wait_ready(60)
                await eventually(lambda: watcher.is_connected, "found again")
                await plane.put("tiers/new")
                await eventually(lambda: "new" in watcher.state.tiers, "changes arrive")
                # Long enough for a control plane that forgot the router to give its cell away.
                await asyncio.sleep(5)
                assert watcher.state.cells["p-0"] == cell, "same owner, same epoch"
            finally:
                await child.stop()
                assert child.status == 0
    loaded = ControlWatcher("127.0.0.1:1", wire.ROLE_ROUTER, "r1", "", file)
    assert loaded.load_from_disk()
    assert loaded.state.cells["p-0"] == cell
