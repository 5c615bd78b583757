"""What a router tells of its ejections, while the control plane answers and while it is away."""

import asyncio

import grpc
import grpc.aio
import pytest

from router import accusations
from router.accusations import Accusations
from router.core.types.actions import EjectionNotice
from sim.loop import run
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control

CELL = "cell-1"


class Plane:
    """Takes what is told, unless it is away."""

    def __init__(self) -> None:
        self.error: grpc.StatusCode | None = None
        self.calls = 0
        self.heard: list[control.Ejection] = []

    async def tell(self, request: control.AccuseRequest) -> None:
        self.calls += 1
        if self.error is not None:
            raise grpc.aio.AioRpcError(self.error, grpc.aio.Metadata(), grpc.aio.Metadata())
        assert request.router_id == "router-1"
        self.heard += request.ejections


def notice(name: str = "replica-1", cell_id: str = CELL, wrong: int = 3) -> EjectionNotice:
    return EjectionNotice(name, cell_id, wrong, 3)


def told(plane: Plane, script) -> None:
    """Run `script(accusations)` under virtual time, beside the loop that tells."""
    state = ControlState()
    state.cells[CELL] = control.Cell(id=CELL, epoch=7)
    own = Accusations(state, "router-1", "", plane.tell)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(own.run())
            await script(own)
            telling.cancel()

    run(scenario())


def test_an_ejection_is_told_once_with_its_evidence():
    plane = Plane()

    async def script(own: Accusations) -> None:
        own.put(notice())
        own.put(notice("replica-2", cell_id="not-ours"))
        await asyncio.sleep(60)

    told(plane, script)
    (one,) = plane.heard
    assert (one.replica_id, one.cell_id, one.epoch) == ("replica-1", CELL, 7)
    assert (one.evidence, one.wrong, one.asked) == ("canary", 3, 3)
    assert one.ejected_at_unix_ms > 0
    assert plane.calls == 1


def test_unsent_accusations_are_sent_later_the_newest_of_each_replica():
    plane = Plane()
    plane.error = grpc.StatusCode.UNAVAILABLE

    async def script(own: Accusations) -> None:
        own.put(notice(wrong=2))
        await asyncio.sleep(60)
        own.put(notice(wrong=3))
        own.put(notice("replica-2"))
        assert plane.heard == []
        plane.error = None
        await asyncio.sleep(5)

    told(plane, script)
    assert [(it.replica_id, it.wrong) for it in plane.heard] == [("replica-1", 3), ("replica-2", 3)]
    assert plane.calls <= 60


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT])
def test_a_control_plane_that_refuses_is_told_no_more(code: grpc.StatusCode):
    plane = Plane()
    plane.error = code

    async def script(own: Accusations) -> None:
        own.put(notice())
        await asyncio.sleep(60)

    told(plane, script)
    assert plane.calls == 1


def test_waiting_accusations_are_bounded(monkeypatch: pytest.MonkeyPatch):
    plane = Plane()
    monkeypatch.setattr(accusations, "KEPT_MAX", 100)

    async def script(own: Accusations) -> None:
        for number in range(150):
            own.put(notice(f"replica-{number}"))
        await asyncio.sleep(60)

    told(plane, script)
    assert [it.replica_id for it in plane.heard] == [f"replica-{n}" for n in range(50, 150)]
    assert plane.calls == 2, "64 at most in a message"
