"""Which replicas a router attaches to."""

import asyncio
from types import SimpleNamespace

from router.attach import Stream
from router.core.types.canary import CanaryAnswer
from router.core.types.plan import ReplicaPlan, ReplicaRole
from router.fleet import ReplicaAttachments, Target
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


def open_stream(target: Target) -> Stream:
    raise AssertionError("nothing is started here")


async def probe(target: Target, timeout_s: float) -> CanaryAnswer:
    raise AssertionError("nothing is started here")


class RecordingHub:
    """Takes the plans; nothing is ever surplus."""

    core = SimpleNamespace(is_surplus=lambda replica_id: False)

    def __init__(self) -> None:
        self.planned: dict[str, ReplicaPlan] = {}
        self.siblings: set[str] = set()
        self.wakeable: set[str] = set()

    def note_wakeable(self, cells) -> None:
        self.wakeable = cells

    def plan(self, cells, plans, siblings) -> None:
        self.siblings = siblings
        self.planned = {plan.replica_id: plan for plan in plans}


async def test_only_replicas_that_speak_frames_are_attached_to() -> None:
    state, hub = ControlState(), RecordingHub()
    replicas = [
        wire.Replica(
            id=name,
            cell_id=cell,
            grpc_address="127.0.0.1:1",
            state=wire.REPLICA_STATE_READY,
            profile=profile,
            role=role,
        )
        for name, cell, profile, role in (
            ("chat", "ours", "frames", "prefill"),
            ("older", "ours", "", ""),
            ("vectors", "ours", "embed", ""),
            ("foreign", "theirs", "frames", "decode"),
        )
    ]
    cells = [
        wire.Cell(id="ours", pool_id="p", router_id="me"),
        wire.Cell(id="theirs", pool_id="p", router_id="other"),
        wire.Cell(id="alone", pool_id="q", router_id="me"),
    ]
    snapshot = wire.Objects(cells=cells, replicas=replicas)
    assert state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=snapshot))
    async with asyncio.TaskGroup() as group:
        fleet = ReplicaAttachments(hub, group, open_stream, probe, router_id="me", silence_s=1.0)
        fleet.follow(state)
        assert hub.planned.keys() == fleet._attachments.keys() == {"chat", "older"}
        assert hub.siblings == {"ours", "theirs"}
        assert hub.wakeable == {"alone"}, "a cell without any replica"
        assert hub.planned["chat"].role is ReplicaRole.PREFILL
        assert hub.planned["older"].role is ReplicaRole.BOTH
        for _, _, task in fleet._attachments.values():
            task.cancel()


async def test_a_sleeping_replica_stays_attached_and_its_cell_is_noted() -> None:
    state, hub = ControlState(), RecordingHub()
    replicas = [
        wire.Replica(id=name, cell_id=cell, grpc_address="127.0.0.1:1", state=observed)
        for name, cell, observed in (
            ("asleep", "quiet", wire.REPLICA_STATE_SLEEPING),
            ("awake", "busy", wire.REPLICA_STATE_READY),
            ("foreign", "theirs", wire.REPLICA_STATE_SLEEPING),
        )
    ]
    cells = [
        wire.Cell(id=name, pool_id="p", router_id=owner)
        for name, owner in (("quiet", "me"), ("busy", "me"), ("theirs", "other"))
    ]
    snapshot = wire.Objects(cells=cells, replicas=replicas)
    assert state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=snapshot))
    async with asyncio.TaskGroup() as group:
        fleet = ReplicaAttachments(hub, group, open_stream, probe, router_id="me", silence_s=1.0)
        fleet.follow(state)
        assert hub.wakeable == {"quiet"}
        assert fleet._attachments.keys() == {"asleep", "awake"}
        for _, _, task in fleet._attachments.values():
            task.cancel()


async def test_a_cell_is_noted_if_another_pool_of_its_model_has_a_sleeper() -> None:
    state, hub = ControlState(), RecordingHub()
    replicas = [
        wire.Replica(id="awake", cell_id="own-0", pool_id="own", state=wire.REPLICA_STATE_READY),
        wire.Replica(id="lone", cell_id="lone-0", pool_id="lone", state=wire.REPLICA_STATE_READY),
        wire.Replica(id="rest", cell_id="far-0", pool_id="far", state=wire.REPLICA_STATE_SLEEPING),
    ]
    cells = [
        wire.Cell(id=f"{pool}-0", pool_id=pool, router_id=owner)
        for pool, owner in (("own", "me"), ("lone", "me"), ("far", "other"))
    ]
    pools = [wire.ModelPool(pool_id=pool) for pool in ("own", "far")]
    shared = [wire.ModelPools(id="m", pools=pools)]
    snapshot = wire.Objects(cells=cells, replicas=replicas, model_pools=shared)
    assert state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=snapshot))
    async with asyncio.TaskGroup() as group:
        fleet = ReplicaAttachments(hub, group, open_stream, probe, router_id="me", silence_s=1.0)
        fleet.follow(state)
        assert hub.wakeable == {"own-0"}
