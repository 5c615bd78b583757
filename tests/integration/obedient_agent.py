"""An agent that does at once what it is told, without any engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio

from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1 import control_pb2 as wire
from tests.links import trusted_channel

GIB = 1 << 30


class ObedientAgent:
    """An agent whose engines are ready at once, and end at once when they drain."""

    def __init__(self, call, node_id: str, engine: str, accelerators: int) -> None:
        self._call, self._node_id = call, node_id
        facts = [agent.Accelerator(index=n, memory_bytes=80 * GIB) for n in range(accelerators)]
        self.facts = agent.NodeFacts(
            cpu_count=2, memory_bytes=8 * GIB, engines=[engine], accelerator_facts=facts
        )
        self.desired = agent.SyncResponse()
        self.boots = False  # whether new engines stay in their boot
        self._ready: set[str] = set()
        self.lifted: set[str] = set()

    async def obey(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._report()
            while isinstance(response := await self._call.read(), agent.SyncResponse):
                self.desired = response
                self.lifted.update(response.lifted_cordons)
                for fact in self.facts.accelerator_facts:
                    if fact.cordon.id in self.lifted:
                        fact.ClearField("cordon")
                await self._report()

    async def finish_boots(self) -> None:
        """Let all engines be ready, and report it."""
        self.boots = False
        await self._report()

    def _state(self, replica: agent.DesiredReplica) -> wire.ReplicaState:
        if self.boots and replica.replica_id not in self._ready:
            return wire.REPLICA_STATE_STARTING
        self._ready.add(replica.replica_id)
        return wire.REPLICA_STATE_SLEEPING if replica.sleeps else wire.REPLICA_STATE_READY

    async def _report(self) -> None:
        ready = [
            agent.ObservedReplica(
                replica_id=r.replica_id, state=self._state(r), grpc_address="127.0.0.1:9"
            )
            for r in self.desired.replicas
            if not r.is_draining
        ]
        broken = any(fact.HasField("cordon") for fact in self.facts.accelerator_facts)
        message = agent.SyncRequest(
            node_id=self._node_id, replicas=ready, facts=self.facts, is_cordoned=broken
        )
        await self._call.write(message)


@asynccontextmanager
async def node(
    plane, node_id: str, engine: str, accelerators: int = 0, cordon: str = ""
) -> AsyncIterator[ObedientAgent]:
    async with trusted_channel(plane.grpc_address) as channel:
        call = AgentServiceStub(channel).Sync()
        found = ObedientAgent(call, node_id, engine, accelerators)
        if cordon:
            found.facts.accelerator_facts[0].cordon.CopyFrom(agent.Cordon(id=cordon, reason="XID"))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(found.obey())
            yield found
            running.cancel()
        call.cancel()
