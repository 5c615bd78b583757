"""An agent that comes back takes its healthy engines over, and only those; their routers notice nothing."""

import asyncio
import json
import os
import signal

import pytest

from sluice.procfs import group_processes
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

pytestmark = pytest.mark.real

READY, DRAINING = control.REPLICA_STATE_READY, control.REPLICA_STATE_DRAINING
STOPPED = control.REPLICA_STATE_STOPPED
SLOW = {"engine_options": {"speed": "0.2"}}


def record_another_process(node) -> None:
    """Make the record look as if the process id had been used again since."""
    file = node.directory / "state" / "replicas" / "r-1" / "run.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "start_ticks": record["start_ticks"] - 1}))


async def test_a_killed_agent_finds_its_engine_again_and_traffic_goes_on(
    node, start_traffic
) -> None:
    node.control.want(node.replica(**SLOW))
    first = await node.start_agent()
    (before,) = await node.control.until_ready("r-1")
    engines = set(node.engines())
    assert len(engines) == 2
    traffic = await start_traffic(before.grpc_address, tokens=1000)  # 10 s
    await node.kill_agent(first)
    node.control.stop()
    node.control.history.clear()

    second = await node.start_agent()  # without a control plane
    try:
        await node.until_ready()
        assert "agent_adoptions_total 1.0" in (await node.get("/metrics")).text
        node.control.start()
        (after,) = await node.control.until_ready("r-1")
        assert (after.pid, after.grpc_address) == (before.pid, before.grpc_address)
        states = {r.state for _, request in node.control.history for r in request.replicas}
        assert states == {READY}, "whoever asks the control plane sees no gap"
        assert set(node.engines()) == engines
        assert len(node.shared_memory()) == 1

        node.control.want(node.replica(is_draining=True, **SLOW))
        await node.control.until(lambda found: found["r-1"].state in (DRAINING, STOPPED))
        assert await traffic.end() == engine.FINISH_REASON_LENGTH, "a drain cuts nothing"
        assert len(traffic.tokens) == 1000
        await node.control.until(lambda found: found["r-1"].state == STOPPED)
        await node.until_engines([])
        assert node.shared_memory() == []
    finally:
        await second.stop()
    assert (second.status, node.engines()) == (0, [])


async def test_leftovers_that_are_dead_frozen_or_not_wanted_are_replaced(
    node, start_traffic
) -> None:
    node.control.want(node.replica())
    async with node.running_agent(on_stop="leave"):
        (replica,) = await node.control.until_ready("r-1")
    assert set(node.engines()) == set(group_processes(replica.pid)) != set()

    async with node.running_agent(on_stop="leave"):
        (kept,) = await node.control.until_ready("r-1")
        assert kept.pid == replica.pid
        os.kill(kept.pid, signal.SIGKILL)
        (replica,) = await node.control.until_ready("r-1", restarts=1)
        assert set(node.engines()) == set(group_processes(replica.pid))

    os.kill(node.stub_of(replica), signal.SIGSTOP)
    async with node.running_agent(on_stop="leave"):
        (replica,) = await node.control.until_ready("r-1", restarts=2)
        assert set(node.engines()) == set(group_processes(replica.pid))

    record_another_process(node)
    async with node.running_agent(on_stop="leave"):
        (anew,) = await node.control.until_ready("r-1")
        assert set(node.engines()) == set(group_processes(anew.pid))
        assert anew.pid != replica.pid

    await start_traffic(anew.grpc_address, tokens=2000)
    node.control.want(node.replica(**SLOW))
    async with node.running_agent():
        found = await node.control.until(
            lambda found: found["r-1"].state == READY and found["r-1"].pid != anew.pid
        )
        assert set(node.engines()) == set(group_processes(found["r-1"].pid))
        assert len(node.shared_memory()) == 1
    assert (node.engines(), node.shared_memory()) == ([], [])


async def test_an_engine_that_freezes_while_it_starts_is_replaced_and_one_that_starts_is_kept(
    node,
) -> None:
    node.control.want(node.replica())
    process = await node.start_agent(start_stall_s=3)
    try:
        frozen: set[int] = set()
        while len(frozen) != 2:  # a helper of the start comes and goes
            before = set(node.engines())
            await asyncio.sleep(0.05)
            frozen = before & set(node.engines())
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        await node.until(lambda: not frozen & set(node.engines()))
        (failed,) = [e for e in node.events("replica_changed") if e["phase"] == "stopping"]
        assert "frozen while starting" in failed["message"]

        await node.until(lambda: len(node.engines()) == 2)
        starting = set(node.engines())
        await node.kill_agent(process)
        process = await node.start_agent()
        (replica,) = await node.control.until_ready("r-1", restarts=1)
        assert replica.pid in starting
    finally:
        await process.stop()
    assert (process.status, node.engines(), node.shared_memory()) == (0, [], [])
