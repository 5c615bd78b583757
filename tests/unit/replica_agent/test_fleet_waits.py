"""Tests that a replica waits while its base is fetched, and reports the progress."""

import asyncio

from replica.agent.fleet import NodeReplicas
from replica.agent.replica_state import EnginePatience
from replica.agent.triton import LaunchError
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.control.v1 import control_pb2 as control

BASE, OTHER = "aa" * 32, "bb" * 32


class Launcher:
    """A launcher that starts no process, and records the requested starts."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.was_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def prepare(self, replica_id, spec):
        self.prepared.append(spec.base_digest)
        self._loop.call_soon_threadsafe(self.was_asked.set)
        raise LaunchError("this launcher starts nothing")

    def forget(self, replica_id) -> None:
        pass


class Observer:
    def failed(self) -> None:
        pass


def desired(*replicas: tuple[str, str]) -> agent.SyncResponse:
    wishes = [
        agent.DesiredReplica(replica_id=name, base_digest=base, engine="sim")
        for name, base in replicas
    ]
    return agent.SyncResponse(replicas=wishes)


async def sound(_: str) -> str:
    return ""


async def prober(*_) -> int:
    return 0


async def test_replicas_wait_for_their_base() -> None:
    launcher, why, changes = Launcher(), {BASE: "fetching base: 1 of 3 chunks"}, []
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        fleet = NodeReplicas(
            group,
            launcher,
            prober,
            EnginePatience(),
            on_change=lambda: changes.append(1),
            observer=Observer(),
            why_cordoned=lambda _: "",
            problem_of=sound,
            why_waiting=lambda base: why.get(base, ""),
        )
        fleet.apply(desired(("one", BASE)))
        (seen,) = fleet.observed()
        assert seen.state == control.REPLICA_STATE_STARTING
        assert seen.message == "fetching base: 1 of 3 chunks"
        assert not fleet.is_ready
        assert not fleet.runners

        why[BASE] = "fetching base: 2 of 3 chunks"
        changes.clear()
        fleet.refresh()
        assert fleet.observed()[0].message == "fetching base: 2 of 3 chunks"
        assert changes

        why.clear()
        fleet.refresh()
        await launcher.was_asked.wait()
        assert launcher.prepared[0] == BASE
        assert not fleet.waiting

        # The new base is missing too, and the old engine must not run in place of the new one.
        why[OTHER] = "fetching base: not begun"
        fleet.apply(desired(("one", OTHER)))
        assert [seen.message for seen in fleet.observed()] == ["fetching base: not begun"]
        assert fleet.runners["one"].wanted is None
        fleet.apply(desired())
        assert not fleet.observed()
        await fleet.stop()
