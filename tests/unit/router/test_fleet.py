"""Which replicas a router attaches to."""

import asyncio
from types import SimpleNamespace

from router.fleet import Fleet
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


class RecordingHub:
    """Takes the plans; nothing is ever surplus."""

    core = SimpleNamespace(is_surplus=lambda replica_id: False)

    def __init__(self) -> None:
        self.planned: set[str] = set()

    def plan(self, cells, plans) -> None:
        self.planned = {plan.replica_id for plan in plans}


async def test_only_replicas_that_speak_frames_are_attached_to() -> None:
    state, hub = ControlState(), RecordingHub()
    replicas = [
        wire.Replica(
            id=name,
            cell_id=cell,
            grpc_address="127.0.0.1:1",
            state=wire.REPLICA_STATE_READY,
            profile=profile,
        )
        for name, cell, profile in (
            ("chat", "ours", "frames"),
            ("older", "ours", ""),
            ("vectors", "ours", "embed"),
            ("foreign", "theirs", "frames"),
        )
    ]
    cells = [wire.Cell(id="ours", router_id="me"), wire.Cell(id="theirs", router_id="other")]
    snapshot = wire.Objects(cells=cells, replicas=replicas)
    assert state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=snapshot))
    async with asyncio.TaskGroup() as group:
        fleet = Fleet(hub, group, lambda target: None, router_id="me", silence_s=1.0)
        fleet.follow(state)
        assert hub.planned == fleet._attachments.keys() == {"chat", "older"}
        for _, _, task in fleet._attachments.values():
            task.cancel()
