"""A broken accelerator takes its replicas out of service, in order, until an operator says else."""

import asyncio
import threading

import pytest

from replica.agent.hardware import GpuReading, HardwareState, Readings, Xid, judge
from replica.agent.hardware_watch import CordonFile
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

pytestmark = pytest.mark.real

READY, DRAINING = control.REPLICA_STATE_READY, control.REPLICA_STATE_DRAINING
STOPPED = control.REPLICA_STATE_STOPPED
WAIT_S = 60.0
GPUS = (
    GpuReading(0, "GPU-a", "H100", 80 << 30, 5 << 30, 41, 123.0),
    GpuReading(1, "GPU-b", "H100", 80 << 30),
)


class ScriptedHardware:
    """Two healthy GPUs that report whatever errors a test adds, and a driver that may break."""

    def __init__(self) -> None:
        self.is_broken = False
        self._news = threading.Condition()
        self._xids: list[Xid] = []
        self._was_read = False

    def report(self, xid: Xid) -> None:
        with self._news:
            self._xids.append(xid)
            self._news.notify()

    def read(self, wait_s: float) -> Readings:
        with self._news:
            if self._was_read and not self._xids:
                self._news.wait(wait_s)
            self._was_read = True
            if self.is_broken:
                raise RuntimeError("a bug in reading GPUs")
            xids, self._xids = tuple(self._xids), []
        return Readings(GPUS, xids)


async def test_an_agent_that_fails_leaves_its_engines_to_the_next(node) -> None:
    hardware = ScriptedHardware()
    node.control.want(node.replica())
    agent = node.agent(lambda: hardware)
    first = asyncio.get_running_loop().create_task(agent.run(asyncio.Event()))
    (replica,) = await node.control.until_ready("r-1")
    hardware.is_broken = True
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(first, WAIT_S)
    assert failure.group_contains(RuntimeError, match="a bug in reading GPUs")
    assert replica.pid in node.engines()

    async with node.running_agent():
        (again,) = await node.control.until_ready("r-1")
    assert again.pid == replica.pid
    assert (node.engines(), node.shared_memory()) == ([], [])


async def test_an_xid_drains_the_replicas_of_its_gpu_and_lifting_it_brings_them_back(
    node, start_traffic
) -> None:
    hardware = ScriptedHardware()
    node.control.want(
        node.replica("on-a", accelerators=[0]),
        node.replica("on-b", accelerators=[1]),
    )
    async with node.running_agent(lambda: hardware):
        on_a, on_b = await node.control.until_ready("on-a", "on-b")
        await node.control.until(lambda _: node.control.request.facts.accelerator_facts)
        request = node.control.request
        assert (request.is_cordoned, request.cordon_reason) == (False, "")
        (first, _) = request.facts.accelerator_facts
        assert (first.name, first.temperature_c, first.power_w) == ("H100", 41, 123.0)

        traffic = await start_traffic(on_a.grpc_address, tokens=1000)  # 2 s
        hardware.report(Xid("GPU-a", 79))
        await node.control.until(lambda found: found["on-a"].state == DRAINING)
        assert await traffic.end() == engine.FINISH_REASON_LENGTH, "a cordon cuts nothing"
        found = await node.control.until(lambda found: found["on-a"].state == STOPPED)
        assert found["on-a"].message == "cordoned: GPU 0: XID 79: the GPU has fallen off the bus"
        assert (found["on-b"].state, found["on-b"].pid) == (READY, on_b.pid)
        request = node.control.request
        assert (request.is_cordoned, "XID 79" in request.cordon_reason) == (True, True)
        assert 'agent_xids_total{xid="79"} 1.0' in (await node.get("/metrics")).text

        cordon = request.facts.accelerator_facts[0].cordon
        assert not request.facts.accelerator_facts[1].HasField("cordon")
        node.control.want(
            node.replica("on-a", accelerators=[0]),
            node.replica("on-b", accelerators=[1]),
            lifted_cordons=[cordon.id],
        )
        await node.control.until_ready("on-a", "on-b")
        assert not node.control.request.is_cordoned
    assert (node.engines(), node.shared_memory()) == ([], [])


async def test_an_operator_lifts_cordons_on_the_node(node) -> None:
    """The command needs no agent, and no GPU."""
    (node.directory / "state").mkdir()
    file = CordonFile(node.directory / "state")
    file.save(judge(HardwareState(), Readings(GPUS, (Xid("GPU-a", 79),)), 1.0))
    assert (await node.command("uncordon")) == (0, "XID 79: the GPU has fallen off the bus\n")
    assert (await node.command("uncordon")) == (0, "no accelerator is cordoned\n")
    assert file.load().cordons == {}
