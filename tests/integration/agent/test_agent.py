"""The agent with real Triton processes: it finds out what is wrong with them, and leaves nothing."""

import asyncio
import json
import os
import signal
import time

import pytest

from replica.agent.replica_state import EngineSpec
from sluice.process import ChildProcess, port_is_free
from sluice.procfs import group_processes, marked_processes
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

pytestmark = pytest.mark.real

FAILED, DRAINING = control.REPLICA_STATE_FAILED, control.REPLICA_STATE_DRAINING
STOPPED = control.REPLICA_STATE_STOPPED
WAIT_S = 60.0


async def test_faulty_engines_are_detected_replaced_and_leave_nothing(node) -> None:
    process = await node.start_agent()
    try:
        assert (await node.get("/readyz")).status_code == 503
        node.control.want(node.replica())
        (after,) = await node.control.until_ready("r-1")
        assert (await node.get("/readyz")).status_code == 200
        assert after.message == ""

        faults = {
            "stub killed": lambda replica: os.kill(node.stub_of(replica), signal.SIGKILL),
            "stub frozen": lambda replica: os.kill(node.stub_of(replica), signal.SIGSTOP),
            "tritonserver killed": lambda replica: os.kill(replica.pid, signal.SIGKILL),
            "tritonserver frozen": lambda replica: os.kill(replica.pid, signal.SIGSTOP),
        }
        for restarts, (what, fault) in enumerate(faults.items(), start=1):
            before = after
            old = group_processes(before.pid)
            begin_s = time.monotonic()
            fault(before)
            (after,) = await node.control.until_ready("r-1", restarts=restarts)
            node.tell(what, begin_s)
            assert after.grpc_address == before.grpc_address, "routers need not learn a new address"
            assert not set(old) & set(node.engines())
            assert set(node.engines()) == set(group_processes(after.pid))
            assert len(node.shared_memory()) == 1

        metrics = (await node.get("/metrics")).text
        assert f"agent_engine_failures_total {len(faults)}.0" in metrics
        assert 'agent_replicas{state="ready"} 1.0' in metrics
        await node.control.until(lambda found: found["r-1"].memory_bytes > 10_000_000)
    finally:
        await process.stop()
    assert process.status == 0, process.log_tail(30)
    assert node.engines() == []
    assert node.shared_memory() == []
    assert marked_processes(node.marker) == []
    assert port_is_free("127.0.0.1", int(node.http.rpartition(":")[2]))


async def test_an_engine_with_hanging_steps_is_replaced_although_its_processes_live(node) -> None:
    hang = json.dumps([{"kind": "stall", "at_s": 2, "amount": 3600}])
    process = await node.start_agent()
    try:
        node.control.want(node.replica(engine_options={"faults": hang}))
        (replica,) = await node.control.until_ready("r-1")
        found = await node.control.until(lambda found: found["r-1"].restarts == 1)
        assert found["r-1"].pid != replica.pid
        stopped = [e for e in node.events("replica_changed") if e["phase"] == "stopping"]
        assert "probes missed" in str(stopped[0]["message"])
    finally:
        await process.stop()
    assert (process.status, node.engines(), node.shared_memory()) == (0, [], [])


async def test_desired_state_is_followed(node, start_traffic) -> None:
    process = await node.start_agent()
    try:
        node.control.want(node.replica("a"), node.replica("b"))
        a, b = await node.control.until_ready("a", "b")
        assert a.grpc_address != b.grpc_address
        facts = node.control.request.facts if node.control.request else agent.NodeFacts()
        assert (facts.cpu_count > 0, "sim" in facts.engines) == (True, True)

        traffic = await start_traffic(a.grpc_address, tokens=1500)  # 3 s
        node.control.want(node.replica("a", is_draining=True))
        await node.control.until(lambda found: set(found) == {"a"})
        await node.control.until(lambda found: found["a"].state == DRAINING)
        assert (await node.get("/readyz")).status_code == 200
        assert await traffic.end() == engine.FINISH_REASON_LENGTH, "a drain cuts nothing"
        await node.control.until(lambda found: found["a"].state == STOPPED)
        await node.until_engines([])
        await node.until(lambda: not (node.directory / "state" / "replicas" / "b").exists())

        node.control.want()
        await node.control.until(lambda found: not found)
        await node.until(lambda: not (node.directory / "state" / "replicas" / "a").exists())
        assert node.shared_memory() == []
    finally:
        await process.stop()
    assert process.status == 0


async def test_an_agent_that_is_stopped_while_an_engine_starts_leaves_nothing(node) -> None:
    process = await node.start_agent()
    node.control.want(node.replica("a"), node.replica("b"))
    await node.until(node.engines)
    await process.stop()
    assert (process.status, node.engines(), node.shared_memory()) == (0, [], [])


async def test_a_replica_that_cannot_start_is_reported_in_words_and_retried(node) -> None:
    process = await node.start_agent()
    try:
        node.control.want(
            node.replica("no-artifact", base_digest="f" * 64),
            node.replica("no-engine", engine="abacus"),
            node.replica("../escape"),
            node.replica("no-option", engine_options={"sped": "2"}),
        )
        found = await node.control.until(
            lambda found: len(found) == 4 and all(r.restarts > 0 for r in found.values())
        )
        found = await node.control.until(
            lambda found: all(r.state == FAILED for r in found.values())
        )
        assert "is not in" in found["no-artifact"].message
        assert "AGENT__ENGINES" in found["no-engine"].message
        assert "replica id" in found["../escape"].message
        assert "unknown engine option sped" in found["no-option"].message
        assert not (node.directory / "state" / "escape").exists()
        ready = await node.get("/readyz")
        assert (ready.status_code, "AGENT__ENGINES" in ready.text) == (503, True)
    finally:
        await process.stop()
    assert process.status == 0


async def test_a_second_agent_on_the_same_state_directory_is_refused(node) -> None:
    process = await node.start_agent()
    try:
        second = await ChildProcess.start(node.spec())
        status = await second.wait()
        await second.stop()
        assert status == 1
        assert f"process id {process.pid}" in second.log_tail()
    finally:
        await process.stop()


async def test_a_taken_http_port_is_said_in_words(node) -> None:
    taken = await asyncio.start_server(
        lambda *_: None, "127.0.0.1", int(node.http.rpartition(":")[2])
    )
    child = await ChildProcess.start(node.spec())
    status = await child.wait()
    await child.stop()
    taken.close()
    await taken.wait_closed()
    assert (status, "AGENT__HTTP_ADDRESS" in child.log_tail()) == (1, True)


async def test_preflight_is_a_command(node) -> None:
    assert await node.command("preflight") == (0, "")


async def test_launcher_keeps_its_ports_while_they_are_free(node) -> None:
    spec = EngineSpec("sim", node.digest)
    first = node.launcher.prepare("r-1", spec)
    assert node.launcher.prepare("r-1", spec).grpc_address == first.grpc_address
    taken = await asyncio.start_server(
        lambda *_: None, "127.0.0.1", int(first.grpc_address.rpartition(":")[2])
    )
    moved = node.launcher.prepare("r-1", spec)
    taken.close()
    await taken.wait_closed()
    assert moved.grpc_address != first.grpc_address
    other = node.launcher.prepare("r-2", spec)
    assert not {other.ports.grpc, other.ports.metrics} & {moved.ports.grpc, moved.ports.metrics}
    assert moved.process.env["SLUICE_ENGINE"] == "sim"
    assert "PYTHONPATH" not in moved.process.env


async def test_the_control_plane_grows_and_shrinks_a_pool(node, control_plane, eventually) -> None:
    async def listed() -> list[dict[str, object]]:
        return (await control_plane.admin.get("/v1/replicas")).json()["data"]

    async def ready_replicas(count: int) -> bool:
        replicas = await listed()
        return len(replicas) == count and all(
            replica["state"] == "ready" and replica["grpc_address"] for replica in replicas
        )

    process = await node.start_agent(control_plane.grpc_address)
    try:
        await control_plane.put(f"bases/{node.digest}", name="tiny", context_tokens_max=2048)
        pool = {"base_digest": node.digest, "engine": "sim"}
        await control_plane.put("pools/main", **pool, replicas_wanted=2)
        await eventually(lambda: ready_replicas(2), "two replicas are ready", WAIT_S)
        addresses = {replica["grpc_address"] for replica in await listed()}
        assert len(addresses) == 2

        await control_plane.put("pools/main", **pool, replicas_wanted=1)
        await eventually(lambda: ready_replicas(1), "one replica is left", WAIT_S)
        await node.until(lambda: len(node.engines()) == 2)
        (left,) = await listed()
        assert left["grpc_address"] in addresses
    finally:
        await process.stop()
    assert (process.status, node.engines(), node.shared_memory()) == (0, [], [])
