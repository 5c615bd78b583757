"""Agents are told what changes for them, soon and once, and nothing of others."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from control_plane.fleet import agents as module
from control_plane.fleet.agents import AgentService
from control_plane.rollouts import trials
from control_plane.watch.feed import Feed
from sluice.wire.agent.v1 import agent_pb2
from sluice.wire.control.v1 import control_pb2 as wire

BASE = "ab" * 32
PATIENCE_S = 60.0


class Context:
    """One side of a stream: the test writes what is read, and reads what is written."""

    def __init__(self, node_id: str, keeps_golden: bool = False) -> None:
        self.node_id = node_id
        self.requests: asyncio.Queue = asyncio.Queue()
        first = agent_pb2.SyncRequest(node_id=node_id, keeps_golden_prompts=keeps_golden)
        self.requests.put_nowait(first)
        self.told: list[agent_pb2.SyncResponse] = []
        self.wrote = asyncio.Condition()
        self.ended_with = None

    async def read(self):
        return await self.requests.get()

    async def write(self, response) -> None:
        async with self.wrote:
            self.told.append(response)
            self.wrote.notify_all()

    async def abort(self, code, details) -> None:
        self.ended_with = code, details
        raise grpc.aio.AbortError

    async def until(self, condition) -> None:
        """Wait until the newest message fulfils a condition."""
        async with asyncio.timeout(PATIENCE_S), self.wrote:
            await self.wrote.wait_for(lambda: self.told and condition(self.told[-1]))


class Database:
    """Knows of one cordon per node that was lifted, and whose replicas never change."""

    def __init__(self) -> None:
        self.lifted: list[str] = []
        self.written = 0

    async def run(self, _):
        self.written += 1
        return list(self.lifted), []


class Golden:
    def __init__(self) -> None:
        self.prompts: list[agent_pb2.GoldenPrompt] = []
        self.taken: list[str] = []
        self.accused: dict[str, int] = {}
        self.suspected: dict[str, int] = {}

    def prompts_for(self, bases):
        return [prompt for prompt in self.prompts if prompt.base_digest in set(bases)]

    def accused_at_unix_ms(self, replica_id) -> int:
        return self.accused.get(replica_id, 0)

    def suspected_at_unix_ms(self, replica_id) -> int:
        return self.suspected.get(replica_id, 0)

    def take(self, message) -> None:
        self.taken.append(message.node_id)


class Site:
    def __init__(self) -> None:
        self.database, self.golden = Database(), Golden()
        self.feed = Feed(self.database)
        self.service = AgentService(self.database, self.feed, None, self.golden, trials)
        self.feed.is_loaded = True
        self.version = 0
        pool = wire.Pool(id="p", base_digest=BASE, engine="sim")
        self.publish(wire.Objects(pools=[pool]))

    def publish(self, upserts: wire.Objects) -> None:
        self.version += 1
        self.feed._publish(wire.WatchResponse(version=self.version, upserts=upserts))

    def place(self, number: int, node_id: str) -> None:
        replica = wire.Replica(id=f"r{number:03}", pool_id="p", node_id=node_id)
        self.publish(wire.Objects(replicas=[replica]))


@asynccontextmanager
async def streams(site: Site, *node_ids: str, keeps_golden: bool = False):
    async with asyncio.TaskGroup() as tasks:
        contexts = [Context(node_id, keeps_golden) for node_id in node_ids]
        running = [tasks.create_task(site.service.Sync(None, context)) for context in contexts]
        yield contexts
        for task in running:
            task.cancel()


@pytest.fixture(autouse=True)
def _no_repeats(monkeypatch) -> None:
    # Not by the period: turns are phases of the uptime, and one may fall into a test.
    monkeypatch.setattr(module, "repeat_at_s", lambda _, now_s: now_s + 3600.0)
    monkeypatch.setattr(module.model, "NODE_LOST_AFTER_S", 3600.0)


async def test_a_burst_is_one_message_to_the_agents_concerned() -> None:
    site = Site()
    site.place(0, "b")
    async with streams(site, "a", "b") as (a, b):
        await a.until(lambda _: True)
        await b.until(lambda told: len(told.replicas) == 1)
        for number in range(1, 101):
            site.place(number, "a")
        await a.until(lambda told: len(told.replicas) == 100)
        site.place(0, "a")
        await b.until(lambda told: not told.replicas)
        await a.until(lambda told: len(told.replicas) == 101)
    assert [len(told.replicas) for told in a.told] == [0, 100, 101]
    assert [len(told.replicas) for told in b.told] == [1, 0]
    assert a.told[-1].version == site.version


async def test_lifted_cordons_are_told_when_they_change() -> None:
    site = Site()
    site.place(0, "a")
    async with streams(site, "a", "b") as (a, b):
        await a.until(lambda _: True)
        await b.until(lambda _: True)
        site.database.lifted = ["cordon"]
        a.requests.put_nowait(agent_pb2.SyncRequest(node_id="a"))
        await a.until(lambda told: list(told.lifted_cordons) == ["cordon"])
    assert len(b.told) == 1


async def test_a_state_that_was_read_anew_is_told() -> None:
    site = Site()
    site.place(0, "a")
    async with streams(site, "a", "b") as (a, b):
        await a.until(lambda told: len(told.replicas) == 1)
        await b.until(lambda _: True)
        coming = module_state(site)
        await site.feed._start_from(coming)
        await b.until(lambda told: len(told.replicas) == 1)
        await a.until(lambda told: not told.replicas)


def module_state(site: Site):
    """Return the state with the replica on the other node."""
    state = type(site.feed.state)()
    replica = wire.Replica(id="r000", pool_id="p", node_id="b")
    objects = wire.Objects(pools=list(site.feed.state.pools.values()), replicas=[replica])
    state.apply(wire.WatchResponse(version=99, is_snapshot=True, upserts=objects))
    return state


async def test_everything_is_repeated_and_golden_prompts_come_with_it(monkeypatch) -> None:
    monkeypatch.setattr(module, "repeat_at_s", lambda _, now_s: now_s + 0.05)
    site = Site()
    site.place(0, "a")
    async with streams(site, "a") as (a,):
        await a.until(lambda _: len(a.told) >= 3)
        site.golden.prompts = [agent_pb2.GoldenPrompt(id="g", base_digest=BASE)]
        await a.until(lambda told: [prompt.id for prompt in told.golden_prompts] == ["g"])
    assert all(len(told.replicas) == 1 for told in a.told)


async def test_no_agent_reports_for_another_node() -> None:
    site = Site()
    context = Context("a")
    context.requests.put_nowait(agent_pb2.SyncRequest(node_id="victim"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AbortError):
            await site.service.Sync(None, context)
    assert context.ended_with == (grpc.StatusCode.INVALID_ARGUMENT, "a stream is of one node")
    assert site.database.written == 1, "its own report, and no other"
    assert site.golden.taken == ["a"]
    async with streams(site, "a") as (again,):
        await again.until(lambda _: True)


async def test_golden_prompts_are_told_once_to_an_agent_that_keeps_them(monkeypatch) -> None:
    monkeypatch.setattr(module, "repeat_at_s", lambda _, now_s: now_s + 0.05)
    site = Site()
    site.place(0, "a")
    site.golden.prompts = [agent_pb2.GoldenPrompt(id="g", base_digest=BASE)]
    async with streams(site, "a", keeps_golden=True) as (a,):
        await a.until(lambda _: len(a.told) >= 3)
        site.golden.prompts = [agent_pb2.GoldenPrompt(id="h", base_digest=BASE)]
        await a.until(lambda _: any(names_of(told) == ["h"] for told in a.told))
        site.golden.prompts = []
        await a.until(lambda _: [] in changes(a))
    assert changes(a) == [["g"], ["h"], []]
    assert all(not names_of(told) for told in a.told if told.golden_unchanged)
    async with streams(site, "a", keeps_golden=True) as (again,):
        await again.until(lambda _: True)
    assert not again.told[0].golden_unchanged, "a new stream knows nothing"


async def test_an_agent_that_does_not_say_it_keeps_them_is_told_all_of_them(monkeypatch) -> None:
    monkeypatch.setattr(module, "repeat_at_s", lambda _, now_s: now_s + 0.05)
    site = Site()
    site.place(0, "a")
    site.golden.prompts = [agent_pb2.GoldenPrompt(id="g", base_digest=BASE)]
    async with streams(site, "a") as (a,):
        await a.until(lambda _: len(a.told) >= 3)
    assert all(names_of(told) == ["g"] and not told.golden_unchanged for told in a.told)


def changes(context: Context) -> list[list[str]]:
    return [names_of(told) for told in context.told if not told.golden_unchanged]


def names_of(told: agent_pb2.SyncResponse) -> list[str]:
    return [prompt.id for prompt in told.golden_prompts]


async def test_a_rollout_is_tried_by_the_nodes_of_its_pool() -> None:
    site = Site()
    site.place(0, "a")
    async with streams(site, "a", "b") as (a, b):
        await a.until(lambda told: len(told.replicas) == 1)
        await b.until(lambda _: True)
        releases = [
            wire.Release(id=f"m@{name}", model_id="m", pool_id="p", adapter_digest=digest)
            for name, digest in (("1", ""), ("2", "cd" * 32))
        ]
        split = wire.Split(id="m", control="1", canary="2", rollout_id="r")
        site.publish(wire.Objects(releases=releases, splits=[split]))
        wanted = agent_pb2.Trial(rollout_id="r", pool_id="p", adapter_digest="cd" * 32)
        await a.until(lambda told: list(told.trials) == [wanted])
        split.canary = "1"
        site.publish(wire.Objects(splits=[split]))
        await a.until(lambda told: not told.trials)
    assert len(b.told) == 1
