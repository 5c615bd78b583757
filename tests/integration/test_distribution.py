"""Artifacts get from the store to nodes and from node to node, whatever dies on the way."""

import asyncio
import os
import signal
import stat
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from control_plane.distribution.tickets import Tickets
from replica.agent.artifacts import fetcher
from sluice import shared_secret
from sluice.manifests import CHUNK_BYTES
from sluice.process import ChildProcess, ProcessSpec, free_port
from tests.integration.distribution_site import (
    CHUNKS,
    connect,
    options,
    publish,
    running_node,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
DEADLINE_S = 100.0


async def test_nodes_get_an_artifact_from_one_another(
    control_plane, database_url, tmp_path, eventually, monkeypatch
) -> None:
    for name in ("_AWAY_S", "_LOST_S", "_UNORDERED_S"):
        monkeypatch.setattr(fetcher, name, DEADLINE_S)  # a busy control plane is waited for
    store = tmp_path / "store"
    manifest = await publish(database_url, store, tmp_path / "source")
    size = sum(manifest.chunks().values())
    async with AsyncExitStack() as stack:

        async def start(name: str):
            found = options(tmp_path / name, control_plane.grpc_address, store)
            return await stack.enter_async_context(running_node(found))

        async def has_it(node) -> None:
            async with asyncio.timeout(DEADLINE_S):
                await node.artifacts.ensure(manifest.digest, needed=True)
            assert node.is_whole(manifest)

        first = await start("first")
        await has_it(first)
        assert first.bytes_from == {"peer": 0, "store": size}

        others = [await start("second"), await start("third")]
        await asyncio.gather(*(has_it(node) for node in others))
        of_peers = sum(node.bytes_from["peer"] for node in others)
        of_store = sum(node.bytes_from["store"] for node in others)
        assert of_peers > of_store, (of_peers, of_store)

        connection = await connect(database_url)
        query = "SELECT count(*) FROM node_artifacts WHERE digest = $1"

        async def are_noted() -> bool:
            return await connection.fetchval(query, manifest.digest) == 3

        await eventually(are_noted, "it is written down which nodes have it", DEADLINE_S)
        await connection.close()

        # One spoils what it serves, and the store is gone: the others are enough.
        spoiled = first.directory / manifest.digest / "weights.bin"
        spoiled.write_bytes(bytes(spoiled.stat().st_size))
        store.rename(tmp_path / "away")
        last = await start("last")
        await has_it(last)
        assert last.bytes_from["store"] == 0
        metrics = (await control_plane.admin.get("/metrics")).text
        assert 'distribution_failures_total{source="peer",trouble="corrupt"}' in metrics


async def test_a_killed_node_goes_on_where_it_was(
    control_plane, database_url, tmp_path, eventually
) -> None:
    store, root = tmp_path / "store", tmp_path / "node"
    manifest = await publish(database_url, store, tmp_path / "source")
    rate = CHUNK_BYTES / 2  # slow enough to be killed half-way
    spec = ProcessSpec(
        name="node",
        command=[
            *(sys.executable, "-m", "tests.integration.distribution_site"),
            *(str(root), control_plane.grpc_address, str(store), str(rate), manifest.digest),
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **shared_secret.environment(),
        },
        log_file=tmp_path / "node.log",
        ready=lambda: True,
    )
    journal = root / ".partial" / manifest.digest / "journal"

    def noted() -> int:
        return (journal.stat().st_size - 32) // 8 if journal.exists() else 0

    child = await ChildProcess.start(spec)
    try:
        await eventually(lambda: noted() >= 2, "some chunks are there", DEADLINE_S)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
    finally:
        await child.stop()
    had = noted()
    assert 2 <= had < CHUNKS, "it was killed too late"
    async with running_node(options(root, control_plane.grpc_address, store)) as node:
        async with asyncio.timeout(DEADLINE_S):
            await node.artifacts.ensure(manifest.digest, needed=True)
        assert node.is_whole(manifest)
        assert node.bytes_from["store"] <= (CHUNKS - had) * CHUNK_BYTES
        assert not journal.parent.exists()


async def test_artifacts_come_while_the_control_plane_is_killed_and_away(
    control_plane, database_url, tmp_path, eventually
) -> None:
    store = tmp_path / "store"
    manifest = await publish(database_url, store, tmp_path / "source")
    rate = 4 * CHUNK_BYTES
    found = [
        options(tmp_path / name, control_plane.grpc_address, store, rate) for name in ("a", "b")
    ]
    async with running_node(found[0]) as one, running_node(found[1]) as other:
        again: ChildProcess | None = None
        try:
            async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as tasks:
                for node in (one, other):
                    tasks.create_task(node.artifacts.ensure(manifest.digest, needed=True))
                await eventually(
                    lambda: all(any(node.bytes_from.values()) for node in (one, other)),
                    "both have begun",
                    DEADLINE_S,
                )
                os.kill(control_plane.child.pid, signal.SIGKILL)
                await control_plane.child.wait()
                again = await ChildProcess.start(control_plane.spec)
            assert one.is_whole(manifest)
            assert other.is_whole(manifest)
            query = "SELECT count(*) FROM node_artifacts"
            connection = await connect(database_url)

            async def are_noted() -> bool:
                return await connection.fetchval(query) == 2

            await eventually(are_noted, "the next control plane knows who has it", DEADLINE_S)
            await connection.close()
        finally:
            if again is not None:
                await again.stop()
        # It made way, and is needed again while nobody plans: the manifest is still here.
        (one.directory / manifest.digest).rename(tmp_path / "gone")
        before = one.bytes_from["store"]
        async with asyncio.timeout(2 * DEADLINE_S):
            await one.artifacts.ensure(manifest.digest, needed=True)
        assert one.is_whole(manifest)
        assert one.bytes_from["store"] > before


async def test_peers_want_tickets_also_while_the_control_plane_is_away(
    control_plane, database_url, tmp_path, eventually
) -> None:
    store, address = tmp_path / "store", f"127.0.0.1:{free_port()}"
    manifest = await publish(database_url, store, tmp_path / "source")
    found = options(tmp_path / "node", control_plane.grpc_address, store, peer_address=address)
    connection = await connect(database_url)
    url = f"http://{address}/v1/artifacts/{manifest.digest}/chunks/0"

    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:

        async def status(shown: str) -> int:
            try:
                answer = await client.get(url, headers={"Authorization": f"Bearer {shown}"})
            except httpx.TransportError:
                return 0  # it does not listen yet, or has just ended
            return answer.status_code

        async with running_node(found) as node:
            async with asyncio.timeout(DEADLINE_S):
                await node.artifacts.ensure(manifest.digest, needed=True)
            await eventually(found.keys_file.exists, "its keys are on the disk", DEADLINE_S)
            secret = await connection.fetchval("SELECT secret FROM fleet_secrets")
            tickets, other = Tickets(secret), Tickets(bytes(32))
            good = tickets.write(manifest.digest, "node", "me", time.time())

            async def listens() -> bool:
                return await status(good) == 200

            await eventually(listens, "peers are served", DEADLINE_S)
            assert await status("none") == 403
            assert await status(other.write(manifest.digest, "node", "me", time.time())) == 403
            assert await status(tickets.write(manifest.digest, "else", "me", time.time())) == 403
            assert await status(tickets.write("0" * 64, "node", "me", time.time())) == 403
        assert stat.S_IMODE(found.keys_file.stat().st_mode) == 0o600
        await connection.close()

        os.kill(control_plane.child.pid, signal.SIGKILL)
        await control_plane.child.wait()
        async with running_node(found):
            fresh = tickets.write(manifest.digest, "node", "me", time.time())

            async def is_served() -> bool:
                return await status(fresh) == 200

            await eventually(is_served, "the node serves as before", DEADLINE_S)
            assert await status("none") == 403
