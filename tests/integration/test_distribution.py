"""Artifacts get from the store to nodes and from node to node, whatever dies on the way."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from replica.agent.artifacts import fetcher
from sluice.manifests import CHUNK_BYTES
from sluice.process import ChildProcess, ProcessSpec
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
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
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
