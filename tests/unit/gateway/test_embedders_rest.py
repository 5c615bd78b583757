"""The checks of embedding replicas rest while no replica needs one."""

import asyncio

import pytest

from gateway.embedding import embedders
from gateway.embedding.embedders import Embedders
from sluice.errors import FailedError
from sluice.profiles import EMBED
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control


def state_with(*names: str) -> ControlState:
    state = ControlState()
    for name in names:
        state.replicas[name] = control.Replica(
            id=name,
            pool_id="pool",
            profile=EMBED.name,
            grpc_address="127.0.0.1:9",
            state=control.REPLICA_STATE_READY,
        )
    return state


async def test_checks_run_only_while_a_replica_may_need_one(monkeypatch) -> None:
    monkeypatch.setattr(embedders, "NAP_S", 0.001)
    state = state_with("one")
    checked = Embedders(state)
    checked.update()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(checked.run())
        await asyncio.sleep(0)
        assert not checked._has_looks.is_set()
        with pytest.raises(FailedError):  # no server listens there
            await checked._embed_one("pool", [1], asyncio.get_running_loop().time() + 60)
        assert checked._has_looks.is_set(), "the ejected replica is probed until it answers"
        del state.replicas["one"]
        checked.update()
        while checked._has_looks.is_set():  # noqa: ASYNC110 - it has no event for its end
            await asyncio.sleep(0.001)
        assert not checked._leaving
        running.cancel()
