"""Canaries over connections that are kept, against a real engine host."""

import asyncio

import psutil
import pytest

from replica.agent.model_kinds import Canaries
from replica.agent.replica_state import EngineSpec
from sluice.detector.replies import WrongAnswerError
from sluice.errors import FailedError
from tests.contract.conftest import HostServer

BASE = "sha256:" + "0" * 64
SPEC = EngineSpec("sim", BASE)
WAIT_S = 10.0


def links(server: HostServer) -> set[int]:
    """Return the local ports of our connections to a host."""
    port = int(server.address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    is_open = psutil.CONN_ESTABLISHED
    return {
        it.laddr.port for it in found if it.raddr and it.raddr.port == port and it.status == is_open
    }


async def none_left(server: HostServer) -> None:
    async with asyncio.timeout(WAIT_S):
        while links(server):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)


async def test_an_engine_is_asked_over_one_connection_as_long_as_it_answers_well(hosts) -> None:
    server, canaries = await hosts(), Canaries()
    assert await canaries(server.address, SPEC, WAIT_S) == 0
    (first,) = links(server)
    for _ in range(3):
        await canaries(server.address, SPEC, WAIT_S)
    assert links(server) == {first}

    with pytest.raises(WrongAnswerError):
        await canaries(server.address, EngineSpec("sim", "sha256:" + "1" * 64), WAIT_S)
    await none_left(server)
    await canaries(server.address, SPEC, WAIT_S)
    (second,) = links(server)
    assert second != first
    await canaries.close()
    await none_left(server)


async def test_a_frozen_engine_and_a_dead_one_fail_over_a_kept_connection_too(hosts) -> None:
    server, canaries = await hosts(), Canaries()
    await canaries(server.address, SPEC, WAIT_S)
    server.is_silent = True
    with pytest.raises(FailedError):
        await canaries(server.address, SPEC, 0.3)
    server.is_silent = False
    assert await canaries(server.address, SPEC, WAIT_S) == 0
    await server.stop()
    with pytest.raises(FailedError):
        await canaries(server.address, SPEC, 0.3)
    await canaries.close()
