"""Watch on a real control plane: snapshot, deltas, resuming, several control planes."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import make_url

from sluice.watch import ControlWatcher, read_snapshot
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.links import trusted_channel

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DEADLINE_S = 60.0
# As many as have a connection of the database at once. More of them wait for one, and on a busy
# machine the last ones wait longer than a write may take: they get 503, as is right.
WRITERS = 8


@asynccontextmanager
async def watching(address: str, *, role=wire.ROLE_GATEWAY, name="g0", own="", file=None):
    watcher = ControlWatcher(address, role, name, own, file)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        try:
            yield watcher
        finally:
            running.cancel()


async def test_a_snapshot_then_every_change(shared_control_plane, eventually, tmp_path) -> None:
    plane, file = shared_control_plane, tmp_path / "control.snapshot"
    await plane.put("tiers/w", rpm=1)
    async with watching(plane.grpc_address, file=file) as watcher:
        told: list[wire.WatchResponse] = []
        watcher.on_change(told.append)
        assert await watcher.wait_synced(DEADLINE_S)
        await eventually(lambda: "w" in watcher.state.tiers, "the tier is there")
        assert told[0].is_snapshot
        await plane.put("tiers/w", rpm=2)
        await plane.put("tenants/w", tier_id="w", name="W")
        key = (await plane.admin.post("/v1/tenants/w/keys")).json()
        await eventually(lambda: key["id"] in watcher.state.keys, "the key arrives")
        assert watcher.state.tiers["w"].rpm == 2
        assert len(watcher.state.tenants["w"].cache_salt) == 16
        salt = watcher.state.tenants["w"].cache_salt
        await plane.put("tenants/w", tier_id="w", name="W")  # the same again: nobody is told
        await plane.put("tenants/w", tier_id="w", name="V")
        await eventually(lambda: watcher.state.tenants["w"].name == "V", "the new name arrives")
        names = [t.name for response in told for t in response.upserts.tenants if t.id == "w"]
        assert names == ["W", "V"]
        assert watcher.state.tenants["w"].cache_salt == salt
        await plane.admin.delete("/v1/tenants/w")
        await eventually(lambda: "w" not in watcher.state.tenants, "the tenant goes")
        assert key["id"] not in watcher.state.keys, "its keys go with it, in the same delta"
        assert not any(response.is_snapshot for response in told[1:])
    assert read_snapshot(file).version == watcher.state.version, "saved when it stopped"


async def test_changes_of_many_writers_arrive_exactly(shared_control_plane, eventually) -> None:
    plane = shared_control_plane

    async def write(first: int) -> None:
        for n in range(first, 80, WRITERS):
            await plane.put(f"tenants/many{n % 20}", tier_id="many", weight=1 + n)

    async with watching(plane.grpc_address) as watcher:
        assert await watcher.wait_synced(DEADLINE_S)
        await plane.put("tiers/many")
        await asyncio.gather(*map(write, range(WRITERS)))
        wanted = {
            tenant["id"]: tenant["weight"]
            for tenant in (await plane.admin.get("/v1/tenants")).json()["data"]
        }
        await eventually(
            lambda: {t.id: t.weight for t in watcher.state.tenants.values()} == wanted,
            "the watcher has what the database has",
        )


async def test_a_known_version_is_answered_with_newer_changes(shared_control_plane) -> None:
    plane = shared_control_plane
    async with trusted_channel(plane.grpc_address) as channel:

        async def read_until(known: int, condition) -> list[wire.WatchResponse]:
            request = wire.WatchRequest(role=wire.ROLE_OPERATOR, known_version=known)
            call = ControlServiceStub(channel).Watch(request)
            found: list[wire.WatchResponse] = []
            async with asyncio.timeout(DEADLINE_S):
                while not (found and condition(found[-1])):
                    found.append(await call.read())
            call.cancel()
            return found

        def holds(rpm: int):
            return lambda response: ("k", rpm) in [(t.id, t.rpm) for t in response.upserts.tiers]

        await plane.put("tiers/k", rpm=1)
        seen = await read_until(0, holds(1))
        assert (seen[0].is_heartbeat, seen[1].is_snapshot) == (True, True)
        newest = seen[-1]
        await plane.put("tiers/k", rpm=7)
        newer = await read_until(newest.version, holds(7))
        assert not any(response.is_snapshot for response in newer)
        # Replicas of other tests may change beside it.
        assert [tier.id for tier in newer[-1].upserts.tiers] == ["k"]
        again = await read_until(newer[-1].version, lambda _: True)
        assert [response.is_heartbeat for response in again] == [True]
        for strange in (1, 2**62):  # before this database, and from the future
            greeting, answer = await read_until(strange, lambda r: not r.is_heartbeat)
            assert greeting.is_heartbeat
            assert answer.is_snapshot


async def test_a_change_at_one_control_plane_reaches_the_watchers_of_another(
    shared_control_plane, start_control_plane, eventually, tmp_path
) -> None:
    one = shared_control_plane
    url = one.spec.env["CONTROL_PLANE__DATABASE_URL"]
    async with (
        start_control_plane(url, tmp_path) as other,
        watching(other.grpc_address) as watcher,
    ):
        assert await watcher.wait_synced(DEADLINE_S)
        await one.put("tiers/far", rpm=3)
        await eventually(lambda: "far" in watcher.state.tiers, "the change arrives")
        await other.child.stop()
        await one.put("tiers/far", rpm=4)
        assert watcher.state.tiers["far"].rpm == 3, "its own control plane is gone"
        assert watcher.age_s() < DEADLINE_S


async def test_a_control_plane_that_starts_reads_all_there_is(
    postgres_server, database_url, start_control_plane, tmp_path
) -> None:
    """More rows than are turned into objects at once, and not a multiple of it."""
    database = make_url(database_url).database
    await postgres_server.execute("INSERT INTO tiers (id, rpm) VALUES ('t', 7)", database)
    await postgres_server.execute(
        "INSERT INTO tenants (id, name, tier_id, cache_salt, weight) "
        "SELECT 'n' || n, 'N' || n, 't', '\\x01', n FROM generate_series(1, 250) n",
        database,
    )
    async with (
        start_control_plane(database_url, tmp_path) as plane,
        watching(plane.grpc_address) as watcher,
    ):
        assert await watcher.wait_synced(DEADLINE_S)
        assert watcher.state.tiers["t"].rpm == 7
        found = {
            tenant.id: (tenant.name, tenant.weight) for tenant in watcher.state.tenants.values()
        }
        assert found == {f"n{n}": (f"N{n}", n) for n in range(1, 251)}
