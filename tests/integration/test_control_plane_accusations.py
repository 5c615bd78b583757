"""A router ejects a replica for its answers: the guard asks that one first, and settles the case.

Real parts: the health of a router's cell and what tells of it, the control plane and its database,
the agent's asker. Engines are answers.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from replica.agent.golden import GoldenAsker, GoldenTarget
from router.accusations import Accusations
from router.core.fleet.health import LYING, CellHealth, HealthState
from router.core.types.actions import EjectionNotice
from router.core.types.canary import CanaryAnswer
from sluice.detector.consensus import Text
from sluice.ids import new_id
from sluice.watch import ControlWatcher
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from sluice.wire.engine.v1 import engine_pb2 as engine
from tests.links import trusted_channel

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DEADLINE_S = 60.0
RIGHT, WRONG = [7, 8, 9, 10], [7, 8, 666, 10]


class Unheard:
    def asked(self, *, is_answered: bool) -> None:
        assert is_answered


class Node:
    """A node whose agent has the real asker; its replicas are ready at once."""

    def __init__(self, engine_name: str, wrong: set[str]) -> None:
        self.node_id, self.wrong = new_id("node"), wrong
        self.facts = agent.NodeFacts(cpu_count=2, memory_bytes=8 << 30, engines=[engine_name])
        self.desired = agent.SyncResponse()
        self.asked: list[tuple[float, str]] = []
        self.asker = GoldenAsker(self._targets, Unheard(), self._ask)

    def asked_since(self, at_s: float) -> list[str]:
        return [name for when, name in self.asked if when >= at_s]

    def _targets(self) -> list[GoldenTarget]:
        return [
            GoldenTarget(it.replica_id, "127.0.0.1:9", it.engine, it.base_digest)
            for it in self.desired.replicas
            if not it.is_draining
        ]

    async def _ask(self, target: GoldenTarget, _: agent.GoldenPrompt) -> engine.ProbeReply:
        self.asked.append((time.monotonic(), target.replica_id))
        return engine.ProbeReply(tokens=WRONG if target.replica_id in self.wrong else RIGHT)

    async def run(self, address: str) -> None:
        async with trusted_channel(address) as channel, asyncio.TaskGroup() as tasks:
            call = AgentServiceStub(channel).Sync()
            tasks.create_task(self._read(call))
            tasks.create_task(self.asker.run())
            while True:
                report = agent.SyncRequest(node_id=self.node_id, facts=self.facts)
                for target in self._targets():
                    report.replicas.add(
                        replica_id=target.replica_id,
                        state=control.REPLICA_STATE_READY,
                        grpc_address=target.address,
                    )
                report.golden_results.extend(self.asker.take())
                await call.write(report)
                await asyncio.sleep(0.3)

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            assert isinstance(message, agent.SyncResponse), "the stream ended"
            self.desired = message
            self.asker.follow(message)


@asynccontextmanager
async def running(*loops: Any) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in started:
                task.cancel()


def answer_of(*, is_liar: bool) -> CanaryAnswer:
    return CanaryAnswer(Text(tuple(WRONG if is_liar else RIGHT)))


def ejection_of(liar: str, cell_id: str, names: list[str]) -> EjectionNotice:
    """Let a cell's health find the liar by canaries, as in a router."""
    health, now = CellHealth(), 1000.0
    for name in names:
        health.attached(name, now)
    while health.state(liar) is not HealthState.EJECTED:
        now += 0.05
        for name in health.tick(now):
            health.answered(name, answer_of(is_liar=name == liar), now)
        assert now < 1100.0
    (verdict,) = [it for it in health.verdicts() if it.state is HealthState.EJECTED]
    assert verdict.reason == LYING
    return EjectionNotice(verdict.replica_id, cell_id, verdict.wrong, verdict.asked)


async def _pool(plane: Any, engine_name: str) -> str:
    pool_id, digest = new_id("pool"), new_id("d").encode().hex()[:64].rjust(64, "0")
    await plane.put(f"bases/{digest}", context_tokens_max=2048)
    await plane.put(f"pools/{pool_id}", base_digest=digest, engine=engine_name, replicas_wanted=3)
    return pool_id


async def _outcome(plane: Any, replica_id: str) -> list[tuple[str, int, int]]:
    listed = (await plane.admin.get("/v1/ejections")).json()["data"]
    found = [it for it in listed if it["replica_id"] == replica_id]
    assert all((it["ended_at"] is None) == (not it["outcome"]) for it in found)
    return [(it["outcome"], it["wrong"], it["asked"]) for it in found]


@pytest.mark.parametrize(("is_liar", "outcome"), [(True, "confirmed"), (False, "cleared")])
async def test_an_ejected_replica_is_asked_first_and_confirmed_or_cleared(
    shared_control_plane, eventually, is_liar: bool, outcome: str
) -> None:
    plane, engine_name = shared_control_plane, new_id("sim")
    wrong: set[str] = set()
    node = Node(engine_name, wrong)
    watcher = ControlWatcher(plane.grpc_address, control.ROLE_OPERATOR, new_id("router"))
    accusations = Accusations(watcher.state, "router-a", plane.grpc_address)
    async with running(node.run(plane.grpc_address), watcher.run(), accusations.run()):
        pool_id = await _pool(plane, engine_name)

        def replicas() -> list[control.Replica]:
            return [it for it in watcher.state.replicas.values() if it.pool_id == pool_id]

        async def all_answered() -> bool:
            ready = [it for it in replicas() if it.state == control.REPLICA_STATE_READY]
            return len(ready) == 3 and {it.id for it in ready} <= set(node.asked_since(0.0))

        await eventually(all_answered, "three replicas have answered", DEADLINE_S)
        suspect = replicas()[0]
        if is_liar:
            wrong.add(suspect.id)
        before_s = time.monotonic()
        accusations.put(ejection_of(suspect.id, suspect.cell_id, [it.id for it in replicas()]))

        async def is_settled() -> bool:
            return await _outcome(plane, suspect.id) == [(outcome, 3, 3)]

        await eventually(is_settled, f"the case is {outcome}", DEADLINE_S)
        # Its next question was due after a minute, as those of the others.
        assert node.asked_since(before_s)[0] == suspect.id
        found = (await plane.admin.get("/v1/quarantines")).json()["data"]
        evidence = [it["evidence"] for it in found if it["replica_id"] == suspect.id]
        assert len(evidence) == is_liar
        for one in evidence:
            assert one["deviations"] == 1, "instead of two"
            assert (one["ejection"]["router"], one["ejection"]["wrong"]) == ("router-a", 3)

        async def is_told() -> bool:
            if is_liar:  # routers are told as of any quarantine
                return watcher.state.replicas[suspect.id].is_quarantined
            told = {it.replica_id: it.accused_at_unix_ms for it in node.desired.replicas}
            return told[suspect.id] == 0

        await eventually(is_told, "agents and routers know", DEADLINE_S)


async def test_an_ejection_by_another_router_than_the_owner_does_not_count(
    shared_control_plane,
) -> None:
    request = control.AccuseRequest(router_id="router-b")
    request.ejections.add(
        replica_id="r-none", cell_id="c-none", evidence="canary", wrong=3, asked=3
    )
    async with trusted_channel(shared_control_plane.grpc_address) as channel:
        await ControlServiceStub(channel).Accuse(request, timeout=DEADLINE_S)
        assert await _outcome(shared_control_plane, "r-none") == []
        request.ejections[0].evidence = "hearsay"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ControlServiceStub(channel).Accuse(request, timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
