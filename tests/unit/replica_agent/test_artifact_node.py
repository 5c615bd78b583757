"""Tests that a node with a failing part uses its other parts, and reports the failure."""

import asyncio
import socket

import pytest

from replica.agent import link as link_module
from replica.agent.artifacts import exchange as exchange_module
from replica.agent.artifacts import node as module
from replica.agent.artifacts.exchange import (
    ArtifactExchange,
    ArtifactNews,
    NodeIdentity,
    free_bytes,
)
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.node import ArtifactCache, NodeOptions, advertised
from replica.agent.artifacts.peer_keys import PeerKeys
from sluice.errors import ErrorCode, PlatformError


@pytest.mark.parametrize(
    ("bound", "told", "control", "address"),
    [
        ("127.0.0.1:7000", "", "127.0.0.1:9000", "127.0.0.1:7000"),
        ("127.0.0.1:7000", "", "localhost:9000", "127.0.0.1:7000"),
        ("127.0.0.1:7000", "", "control:9000", ""),
        ("localhost:7000", "", "10.0.0.1:9000", ""),
        ("0.0.0.0:7000", "", "10.0.0.1:9000", ""),
        ("10.0.0.7:7000", "", "10.0.0.1:9000", "10.0.0.7:7000"),
        ("node-7:7000", "", "10.0.0.1:9000", "node-7:7000"),
        ("0.0.0.0:7000", "node-7:8000", "10.0.0.1:9000", "node-7:8000"),
        ("0.0.0.0:7000", "node-7:0", "10.0.0.1:9000", "node-7:7000"),
    ],
)
def test_an_advertised_address_is_reachable(bound, told, control, address) -> None:
    assert advertised(bound, told, control) == address


def made(directory, tmp_path, peer_address: str = "127.0.0.1:0") -> ArtifactCache:
    options = NodeOptions(
        node_id="node",
        region="here",
        rack="one",
        control_address="127.0.0.1:1",
        directory=directory,
        store_url=(tmp_path / "store").as_uri(),
        keys_file=tmp_path / "keys.json",
        peer_address=peer_address,
    )
    return ArtifactCache(options, Library(directory, max_bytes=0, reserve_bytes=0))


async def test_a_folder_that_cannot_be_used_is_said_and_tried_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_RESTART_PAUSE_S", 0.1)
    (tmp_path / "artifacts").write_text("not a folder")
    node = made(tmp_path / "artifacts", tmp_path)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(node.run())
        with pytest.raises(PlatformError, match="cannot fetch artifacts") as error:
            await node.ensure("a" * 64, needed=True)
        assert error.value.code is ErrorCode.UNAVAILABLE
        (tmp_path / "artifacts").unlink()
        await node._is_up.wait()
        task.cancel()


async def test_a_taken_address_is_retried_and_no_peer_is_sent_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_RESTART_PAUSE_S", 0.1)
    told: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(ArtifactExchange, "serve_at", lambda _, address: told.put_nowait(address))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        node = made(tmp_path / "artifacts", tmp_path, address)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(node.run())
            # the control plane was asked, so it is connected
            with pytest.raises(PlatformError) as error:
                await node.ensure("a" * 64, needed=True)
            assert error.value.code is ErrorCode.UNAVAILABLE
            assert told.empty()
            taken.close()
            assert await told.get() == address
            task.cancel()


class _Fetcher:
    def connected(self, *, is_connected: bool) -> None:
        pass


async def test_an_answer_that_cannot_be_taken_ends_the_stream_and_not_the_agent(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(exchange_module, "_BACKOFF_MAX_S", 0.01)
    identity = NodeIdentity("node", "here", "one")
    exchange = ArtifactExchange(
        "127.0.0.1:1",
        identity,
        _Fetcher(),
        PeerKeys(tmp_path / "keys.json"),
        ArtifactNews(),
        tmp_path,
    )  # type: ignore[arg-type]
    sessions = 0
    are_enough = asyncio.Event()

    async def session() -> None:
        nonlocal sessions
        sessions += 1
        if sessions == 3:
            are_enough.set()

        async def half() -> None:
            raise KeyError("a fault of ours")

        raise await link_module._outcome(half())

    monkeypatch.setattr(exchange, "_session", session)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(exchange.run())
        await are_enough.wait()
        task.cancel()


def test_a_disk_that_cannot_be_asked_has_nothing_left(tmp_path) -> None:
    assert free_bytes(tmp_path) > 0
    assert free_bytes(tmp_path / "missing") == 0
