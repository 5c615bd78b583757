"""Adapters in host memory before their first request."""

import asyncio
from collections.abc import Iterable

from router import prefetch as prefetch_module
from router.prefetch import PROMOTED_S, Prefetch, Promotions
from sluice.errors import ErrorCode, FailedError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

A, B = "a" * 64, "b" * 64


def change(**objects: object) -> control.WatchResponse:
    return control.WatchResponse(version=1, upserts=control.Objects(**objects))


def site() -> ControlState:
    """Two cells of one pool, the first is ours."""
    state = ControlState()
    for number, router in enumerate(("me", "other")):
        state.cells[f"c{number}"] = control.Cell(id=f"c{number}", pool_id="p", router_id=router)
        state.replicas[f"r{number}"] = control.Replica(
            id=f"r{number}",
            pool_id="p",
            cell_id=f"c{number}",
            grpc_address="host:1",
            state=control.REPLICA_STATE_READY,
        )
    return state


def in_rollout(state: ControlState) -> ControlState:
    state.splits["m"] = control.Split(id="m", control="v1", canary="v2")
    for name, digest in (("v1", ""), ("v2", A)):
        state.releases[f"m@{name}"] = control.Release(
            id=f"m@{name}", pool_id="p", adapter_digest=digest
        )
    return state


class Replicas:
    """Loads what it is told, or fails."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, list[str]]] = []
        self.held: list[tuple[str, list[str]]] = []
        self.fails = False

    async def load(self, replica_id: str, digests: list[str], timeout_s: float):
        assert timeout_s > 0
        self.loads.append((replica_id, digests))
        await asyncio.sleep(0)
        if self.fails:
            raise FailedError(ErrorCode.UNAVAILABLE, "away")
        return engine.AdapterList(adapters=[engine.AdapterInfo(digest=d) for d in digests])

    def note(self, replica_id: str, digests: Iterable[str]) -> None:
        self.held.append((replica_id, list(digests)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_our_replicas_load_the_adapters_of_a_rollout_once() -> None:
    replicas, state = Replicas(), in_rollout(site())
    async with asyncio.TaskGroup() as tasks:
        prefetch = Prefetch(tasks, replicas.load, replicas.note, router_id="me")
        for _ in range(3):
            prefetch.follow(state)
            await settle()
    assert replicas.loads == replicas.held == [("r0", [A])]


async def test_a_replica_at_another_address_and_one_that_became_ready_are_told() -> None:
    replicas, state = Replicas(), in_rollout(site())
    state.replicas["r0"].state = control.REPLICA_STATE_STARTING
    async with asyncio.TaskGroup() as tasks:
        prefetch = Prefetch(tasks, replicas.load, replicas.note, router_id="me")
        prefetch.follow(state)
        assert replicas.loads == []
        for port in (1, 2):
            replica = control.Replica(
                grpc_address=f"host:{port}", state=control.REPLICA_STATE_READY
            )
            state.replicas["r0"].MergeFrom(replica)
            prefetch.follow(state)
            await settle()
    assert replicas.loads == [("r0", [A])] * 2


async def test_the_current_target_of_a_model_is_loaded_too() -> None:
    replicas, state = Replicas(), site()
    model = control.Model(id="m", pool_id="p", adapter_digest=B)
    async with asyncio.TaskGroup() as tasks:
        prefetch = Prefetch(tasks, replicas.load, replicas.note, router_id="me")
        prefetch.on_change(control.WatchResponse(is_snapshot=True, upserts={"models": [model]}))
        prefetch.follow(state)
        assert replicas.loads == []
        prefetch.on_change(change(models=[model]))
        prefetch.follow(state)
    assert replicas.loads == [("r0", [B])]


async def test_a_load_that_failed_is_tried_again_later(monkeypatch) -> None:
    monkeypatch.setattr(prefetch_module, "_RETRY_S", 3600.0)
    replicas, state = Replicas(), in_rollout(site())
    replicas.fails = True
    async with asyncio.TaskGroup() as tasks:
        prefetch = Prefetch(tasks, replicas.load, replicas.note, router_id="me")
        for _ in range(2):
            prefetch.follow(state)
            await settle()
        assert len(replicas.loads) == 1
        prefetch._orders["r0"].not_before_s = 0.0  # the pause is over
        replicas.fails = False
        prefetch.follow(state)
    assert len(replicas.loads) == 2
    assert replicas.held == [("r0", [A])]


async def test_loads_under_way_end_with_the_router() -> None:
    async def load(*_: object) -> engine.AdapterList:
        await asyncio.sleep(3600)
        return engine.AdapterList()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        prefetch = Prefetch(tasks, load, lambda *_: None, router_id="me")
        prefetch.follow(in_rollout(site()))
        await settle()
        prefetch.stop()


def test_promotions_are_forgotten_and_bounded_and_rollouts_come_first(monkeypatch) -> None:
    promotions, state = Promotions(), in_rollout(site())
    models = [
        control.Model(id=f"m{number}", pool_id="p", adapter_digest=f"{number:064x}")
        for number in range(5)
    ]
    promotions.on_change(change(models=models), 0.0)
    promotions.on_change(change(models=[control.Model(id="plain", pool_id="p")]), 0.0)
    monkeypatch.setattr(prefetch_module, "ADAPTERS_MAX", 3)
    assert promotions.urgent(state, 1.0) == {"p": {A, f"{4:064x}", f"{3:064x}"}}
    assert promotions.urgent(state, PROMOTED_S) == {"p": {A}}
    assert promotions.urgent(site(), PROMOTED_S) == {}


async def test_replicas_load_planned_adapters_after_adapters_of_rollouts() -> None:
    replicas, state = Replicas(), in_rollout(site())
    state.models["m"] = control.Model(id="m", pool_id="p", adapter_digest=B)
    asked: list[object] = []

    def plan(known: object) -> dict[str, list[str]]:
        asked.append(known)
        return {"r0": [B, A], "r1": [B]}

    async with asyncio.TaskGroup() as tasks:
        prefetch = Prefetch(tasks, replicas.load, replicas.note, plan, router_id="me")
        for _ in range(3):
            prefetch.follow(state)
            await settle()
    assert asked == [{"c0": [B]}], "it plans now and then, for our cells"
    assert replicas.loads == [("r0", [A, B])]
