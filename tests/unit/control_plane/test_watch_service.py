"""Serving one watcher: catching up, falling behind, not reading at all."""

import asyncio

import grpc.aio
import pytest

from control_plane.database import Database
from control_plane.fleet.presence import Presence
from control_plane.metrics import ControlPlaneMetrics
from control_plane.watch import service as watch_service
from control_plane.watch.feed import Feed
from control_plane.watch.history import History
from control_plane.watch.service import WatchService
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


class Reader:
    """The other side of a stream: takes messages while it is allowed to."""

    def __init__(self) -> None:
        self.state = ControlState()
        self.taken: list[wire.WatchResponse] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.took_four = asyncio.Event()
        self.aborted: grpc.StatusCode | None = None

    async def write(self, payload: bytes) -> None:
        await self.may_read.wait()
        self.taken.append(wire.WatchResponse.FromString(payload))
        self.state.apply(self.taken[-1])
        if len(self.taken) == 4:
            self.took_four.set()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.aborted = code
        raise grpc.aio.AbortError(details)


async def _feed(*, deltas_max: int = 100) -> Feed:
    feed = Feed(Database("postgresql+asyncpg://nobody@/none?host=/nowhere"))
    feed.history = History(deltas_max=deltas_max)
    state = ControlState()
    state.version = 10
    await feed._start_from(state)
    return feed


def _change(feed: Feed, version: int) -> None:
    tier = wire.Tier(id=f"t{version % 7}", rpm=version)
    feed._publish(wire.WatchResponse(version=version, upserts=wire.Objects(tiers=[tier])))


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def _confirm(
    gateway_id: str, version: int, oldest_open_ms: int, missing_bases: frozenset[str]
) -> None:
    pass


async def _report(message: wire.ReportDemandRequest) -> int:
    return 1000 if message.cells else 0


async def _accuse(message: wire.AccuseRequest) -> None:
    pass


def _service(feed: Feed) -> tuple[WatchService, ControlPlaneMetrics, Presence]:
    metrics, presence = ControlPlaneMetrics(), Presence(lambda: None)
    return (
        WatchService(
            *(feed, presence.present, presence.leave, metrics.count_watcher),
            *(_confirm, _report, _accuse),
        ),
        metrics,
        presence,
    )


async def test_a_watcher_gets_a_snapshot_and_then_each_change() -> None:
    feed = await _feed()
    service, metrics, presence = _service(feed)
    reader = Reader()
    request = wire.WatchRequest(role=wire.ROLE_ROUTER, instance_id="r", address="a:1")
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(service.watch(request, reader))
        await _settle()
        assert [(m.is_heartbeat, m.is_snapshot) for m in reader.taken] == [
            (True, False),
            (False, True),
            (True, False),
        ]
        assert presence.here() == {"r": "a:1"}
        assert b'control_plane_watchers_count{role="router"} 1.0' in metrics.render(feed)
        for version in range(11, 20):
            _change(feed, version)
            await _settle()
        assert [m.version for m in reader.taken[3:]] == list(range(11, 20))
        assert reader.state.tiers == feed.state.tiers
        watching.cancel()
    assert presence.here() == {}
    assert b'control_plane_watchers_count{role="router"} 0.0' in metrics.render(feed)


async def test_a_watcher_that_takes_parts_gets_them_and_another_one_message() -> None:
    feed = await _feed()
    service, _, _ = _service(feed)
    tiers = [wire.Tier(id=str(number)) for number in range(2001)]
    tenants = [wire.Tenant(id="t")]
    objects = wire.Objects(tiers=tiers, tenants=tenants)
    feed._publish(wire.WatchResponse(version=11, upserts=objects))
    new, old = Reader(), Reader()
    async with asyncio.TaskGroup() as tasks:
        for reader, takes_parts in ((new, True), (old, False)):
            request = wire.WatchRequest(takes_parts=takes_parts)
            tasks.create_task(service.watch(request, reader), name="watch")
        await _settle()
        for task in asyncio.all_tasks():
            if task.get_name() == "watch":
                task.cancel()
    assert [(m.version, m.is_part, m.is_snapshot) for m in new.taken[1:]] == [
        *[(0, True, False)] * 3,
        (11, False, True),
        (11, False, False),
    ]
    assert [m.is_snapshot for m in old.taken[1:]] == [True, False]
    assert old.state.tiers == feed.state.tiers
    assert old.state.tenants == feed.state.tenants
    assert old.state.version == 11


async def test_new_watchers_share_a_snapshot_until_the_way_from_it_is_long() -> None:
    feed = await _feed()
    objects = wire.Objects(tiers=[wire.Tier(id=str(number), rpm=1) for number in range(100)])
    feed._publish(wire.WatchResponse(version=11, upserts=objects))
    first = await feed.snapshot()
    _change(feed, 12)
    assert await feed.snapshot() is first
    for version in range(13, 50):
        _change(feed, version)
    assert (await feed.snapshot()).version == 49
    other = ControlState()
    other.version = 49  # a restored database: the same version, another state
    await feed._start_from(other)
    assert len((await feed.snapshot()).parts) == 1


async def test_a_watcher_behind_gets_many_changes_in_one_message() -> None:
    feed = await _feed()
    service, _, _ = _service(feed)
    for version in range(11, 30):
        _change(feed, version)
    feed._publish(wire.WatchResponse(version=30, removals=wire.Removals(tiers=["t1", "t2"])))
    _change(feed, 36)  # t1 again
    reader = Reader()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(service.watch(wire.WatchRequest(known_version=10), reader))
        await _settle()
        watching.cancel()
    assert [m.version for m in reader.taken] == [0, 29, 36, 36], "the greeting does not confirm 10"
    assert reader.state.tiers == feed.state.tiers
    assert "t2" not in reader.state.tiers


async def test_a_watcher_that_reads_a_snapshot_drop_by_drop_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part is taken in time, all of them are not: it would hold an old snapshot for ever."""
    monkeypatch.setattr(watch_service, "_SNAPSHOT_TIMEOUT_S", 0.05)
    feed = await _feed()
    tiers = [wire.Tier(id=str(number)) for number in range(200_001)]
    feed._publish(wire.WatchResponse(version=11, upserts=wire.Objects(tiers=tiers)))
    service, _, _ = _service(feed)

    class Dropwise(Reader):
        async def write(self, payload: bytes) -> None:
            await asyncio.sleep(0.01)
            await super().write(payload)

    reader = Dropwise()
    with pytest.raises(grpc.aio.AbortError):
        await service.watch(wire.WatchRequest(takes_parts=True), reader)
    assert reader.aborted is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(reader.taken) < 50


async def test_a_slow_watcher_falls_off_the_history_and_starts_from_a_snapshot() -> None:
    feed = await _feed(deltas_max=3)
    service, _, _ = _service(feed)
    reader = Reader()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(service.watch(wire.WatchRequest(), reader))
        await _settle()
        reader.may_read.clear()
        for version in range(11, 30):
            _change(feed, version)
            await _settle()
        reader.may_read.set()
        await _settle()
        # The delta it was stuck on, then a snapshot instead of the other eighteen.
        assert [(m.version, m.is_snapshot) for m in reader.taken[3:]] == [(11, False), (29, True)]
        assert reader.state.tiers == feed.state.tiers
        watching.cancel()


async def test_a_watcher_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_service, "_WRITE_TIMEOUT_S", 0.01)
    service, _, presence = _service(await _feed())
    reader = Reader()
    reader.may_read.clear()
    request = wire.WatchRequest(role=wire.ROLE_ROUTER, instance_id="r", address="a:1")
    with pytest.raises(grpc.aio.AbortError):
        await service.watch(request, reader)
    assert reader.aborted is grpc.StatusCode.DEADLINE_EXCEEDED
    assert presence.here() == {}


async def test_an_idle_watcher_hears_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_service, "_HEARTBEAT_S", 0.001)
    service, _, _ = _service(await _feed())
    reader = Reader()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(service.watch(wire.WatchRequest(known_version=10), reader))
        await reader.took_four.wait()
        watching.cancel()
    assert all(message.is_heartbeat for message in reader.taken)


async def test_without_a_state_no_watcher_is_served() -> None:
    feed = Feed(Database("postgresql+asyncpg://nobody@/none?host=/nowhere"))
    service, _, _ = _service(feed)
    reader = Reader()
    with pytest.raises(grpc.aio.AbortError):
        await service.watch(wire.WatchRequest(), reader)
    assert reader.aborted is grpc.StatusCode.UNAVAILABLE


async def test_the_names_of_the_metrics() -> None:
    metrics = ControlPlaneMetrics()
    metrics.count_request("/v1/tiers/{id}", 200)
    metrics.count_watcher("router", 1)
    names = {
        line.split()[2]: line.split()[3]
        for line in metrics.render(await _feed()).decode().splitlines()
        if line.startswith("# TYPE") and "_created" not in line
    }
    wanted = {
        "control_plane_rollouts_count": "gauge",
        "control_plane_rollbacks_total": "counter",
        "control_plane_rollout_evidence_age_seconds": "gauge",
        "control_plane_watchers_count": "gauge",
        "control_plane_requests_total": "counter",
        "control_plane_objects_count": "gauge",
        "control_plane_state_version": "gauge",
        "control_plane_database_up": "gauge",
        "control_plane_refresh_seconds": "gauge",
    }
    assert wanted.items() <= names.items()
