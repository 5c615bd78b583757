"""Tests which golden prompt an agent sends to which replica, when, and the reports."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.agent.golden import (
    DEADLINE_S,
    OUTPUT_TOKENS_MAX,
    RESULTS_MAX,
    GoldenAsker,
    GoldenSchedule,
    GoldenTarget,
    probe_engine,
)
from sluice.errors import ErrorCode, FailedError
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.engine.v1 import engine_pb2 as engine

BASE = "ab" * 32


def prompt(name: str, *, every_s: int = 60, base: str = BASE) -> agent.GoldenPrompt:
    return agent.GoldenPrompt(
        id=name, base_digest=base, token_ids=[1, 2], output_tokens_max=4, every_s=every_s
    )


def target(name: str, base: str = BASE) -> GoldenTarget:
    return GoldenTarget(name, "127.0.0.1:1", "sim", base)


def ask_all(
    schedule: GoldenSchedule, targets: list[GoldenTarget], until_s: float, start_s: float = 1000.0
) -> list[tuple[float, str, str]]:
    """Advance in steps of 0.25 s, and return (time, replica, prompt) of all golden requests."""
    found: list[tuple[float, str, str]] = []
    for tick in range(int(until_s * 4)):
        now_s = start_s + tick / 4
        for one in targets:
            chosen = schedule.next(one, now_s)
            if chosen is not None:
                schedule.asked(one.replica_id, chosen.id, now_s)
                found.append((now_s, one.replica_id, chosen.id))
    return found


@settings(max_examples=25)
@given(every_s=st.integers(2, 120), replicas=st.integers(1, 8), prompts=st.integers(1, 3))
def test_every_replica_is_asked_everything_at_its_interval(every_s, replicas, prompts) -> None:
    schedule = GoldenSchedule()
    schedule.want([prompt(f"p{n}", every_s=every_s) for n in range(prompts)])
    asked = ask_all(schedule, [target(f"r{n}") for n in range(replicas)], 5 * every_s + 10)
    counts = Counter((replica, name) for _, replica, name in asked)
    assert len(counts) == replicas * prompts
    if every_s >= 2 * prompts:  # otherwise the pause between two requests limits their number
        assert all(4 <= count <= 7 + 10 // every_s for count in counts.values())
    for one in {replica for _, replica, _ in asked}:
        times = [at_s for at_s, replica, _ in asked if replica == one]
        assert all(b - a >= 1.0 for a, b in pairwise(times))


def test_a_pool_is_not_asked_at_one_moment() -> None:
    schedule = GoldenSchedule()
    schedule.want([prompt("p")])
    asked = ask_all(schedule, [target(f"r{n}") for n in range(40)], 200)
    assert max(Counter(at_s for at_s, _, _ in asked).values()) <= 10
    assert all(at_s <= 1005 for at_s, _, _ in asked[:40]), "new ones soon"


def test_a_shorter_interval_counts_at_once_and_other_bases_are_left_alone() -> None:
    schedule = GoldenSchedule()
    schedule.want([prompt("p"), prompt("other", base="cd" * 32)])
    one = target("r")
    assert len(ask_all(schedule, [one], 20)) == 1
    schedule.want([prompt("p", every_s=5)])
    assert 3 <= len(ask_all(schedule, [one], 20, start_s=1020)) <= 6
    schedule.want([])
    schedule.forget(["r"])
    assert ask_all(schedule, [one], 20, start_s=1040) == []


def test_an_accused_replica_gets_the_platforms_prompts_at_once_and_once():
    schedule = GoldenSchedule()
    schedule.want([prompt("default-1/b"), prompt("default-2/b"), prompt("a-tenants/b")])
    targets = [target("r"), target("other")]
    ask_all(schedule, targets, 20)
    schedule.accuse("r", 1020.0)
    asked = ask_all(schedule, targets, 10, start_s=1020)
    assert sorted((replica, name) for _, replica, name in asked) == [
        ("r", "default-1/b"),
        ("r", "default-2/b"),
    ]
    assert [at_s for at_s, _, _ in asked] == [1020.0, 1021.0]


def test_an_accusation_is_heard_once(monkeypatch):
    heard: list[str] = []
    monkeypatch.setattr(GoldenSchedule, "accuse", lambda _, name, _now: heard.append(name))
    asker = GoldenAsker(list, Counted())
    for at_unix_ms in (0, 5, 5, 6, 0):
        desired = agent.SyncResponse()
        desired.replicas.add(replica_id="r", accused_at_unix_ms=at_unix_ms)
        asker.follow(desired)
    assert heard == ["r", "r"]


class Counted:
    def __init__(self, enough: int = 0) -> None:
        self.answers: list[bool] = []
        self.enough, self.are_enough = enough, asyncio.Event()

    def asked(self, *, is_answered: bool) -> None:
        self.answers.append(is_answered)
        if len(self.answers) > self.enough:
            self.are_enough.set()


async def test_answers_and_failures_are_reported_once() -> None:
    asked: list[str] = []

    async def ask(one: GoldenTarget, _: agent.GoldenPrompt) -> engine.ProbeReply:
        asked.append(one.replica_id)
        if one.replica_id == "bad":
            raise FailedError(ErrorCode.ADAPTER_NOT_FOUND, "no such adapter")
        if one.replica_id == "slow":
            await asyncio.sleep(3600)
        return engine.ProbeReply(tokens=[7, 8], logprobs=[-0.5, -0.25])

    counted = Counted()
    asker = GoldenAsker(lambda: [target("good"), target("bad"), target("slow")], counted, ask)
    asker.follow(agent.SyncResponse(golden_prompts=[prompt("p", every_s=1)]))
    results: list[agent.GoldenResult] = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(asker.run())
        while not ({r.replica_id for r in results} >= {"good", "bad"} and "slow" in asked):
            await asyncio.sleep(0.05)
            results += asker.take()
        running.cancel()
    good = next(r for r in results if r.replica_id == "good")
    bad = next(r for r in results if r.replica_id == "bad")
    assert (list(good.token_ids), list(good.logprobs)) == ([7, 8], [-0.5, -0.25])
    assert good.prompt_id == "p"
    assert good.asked_at_unix_ms > 0
    assert (list(bad.token_ids), bad.error) == ([], "no such adapter")
    assert asked.count("slow") == 1, "one question at a time"
    assert set(counted.answers) == {True, False}
    assert asker.take() == []


async def test_prompts_that_have_not_changed_are_kept_and_others_replaced() -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()

    async def ask(_: GoldenTarget, one: agent.GoldenPrompt) -> engine.ProbeReply:
        asked.put_nowait(one.id)
        return engine.ProbeReply(tokens=[7])

    asker = GoldenAsker(lambda: [target("r")], Counted(), ask)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(asker.run())
        asker.follow(agent.SyncResponse(golden_prompts=[prompt("p", every_s=1)]))
        asker.follow(agent.SyncResponse(golden_unchanged=True))
        while await asked.get() != "p":
            pass
        asker.follow(agent.SyncResponse(golden_prompts=[prompt("q", every_s=1)]))
        while await asked.get() != "q":
            pass
        running.cancel()


async def test_untaken_results_are_bounded() -> None:
    async def ask(_: GoldenTarget, __: agent.GoldenPrompt) -> engine.ProbeReply:
        return engine.ProbeReply(tokens=[7])

    targets = [target(f"r{n}") for n in range(RESULTS_MAX + 50)]
    counted = Counted(len(targets))
    asker = GoldenAsker(lambda: targets, counted, ask)
    asker.follow(agent.SyncResponse(golden_prompts=[prompt("p", every_s=1)]))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(asker.run())
        await counted.are_enough.wait()
        running.cancel()
    assert len(asker.take()) == RESULTS_MAX


async def test_an_engine_is_asked_for_little_and_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bytes]] = []

    async def probe(*positional: object, **named: object) -> engine.ProbeReply:
        seen.append((positional[3], named["cache_root"]))  # pyright: ignore[reportArgumentType]
        return engine.ProbeReply(tokens=[1], engine="sim", base_digest=BASE)

    monkeypatch.setattr("replica.agent.golden.probe", probe)
    wanted = prompt("p")
    wanted.output_tokens_max = 1_000_000
    for _ in range(2):
        await probe_engine(target("r"), wanted)
    assert {count for count, _ in seen} == {OUTPUT_TOKENS_MAX}
    assert len({root for _, root in seen}) == 2
    with pytest.raises(FailedError, match="runs sim"):
        await probe_engine(target("r", "cd" * 32), wanted)


async def test_an_engine_is_told_until_when_an_asking_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[engine.HostRequest] = []

    async def ask(_: str, __: str, request: engine.HostRequest, **___: float) -> engine.HostFrame:
        seen.append(request)
        return engine.HostFrame(probe=engine.ProbeReply(engine="sim", base_digest=BASE))

    monkeypatch.setattr("sluice.kserve.call_host", ask)
    await probe_engine(target("r"), prompt("p"))
    assert seen[0].probe.timeout_ms == DEADLINE_S * 1000


def test_the_platforms_prompts_are_not_crowded_out() -> None:
    schedule = GoldenSchedule()
    schedule.want([prompt("default/1"), *(prompt(f"t{n}", every_s=1) for n in range(60))])
    asked = ask_all(schedule, [target("r")], 600)
    times = [at_s for at_s, _, name in asked if name == "default/1"]
    assert max(b - a for a, b in pairwise(times)) <= 70
    others = Counter(name for _, _, name in asked if name != "default/1")
    assert len(others) == 60
    assert max(others.values()) - min(others.values()) <= 3, "the rest take turns"


def test_a_prompt_that_takes_turns_is_not_asked_more_often_for_that() -> None:
    schedule = GoldenSchedule()
    asked: list[tuple[float, str, str]] = []
    for turn in range(20):
        schedule.want([prompt("p", every_s=3600)] if turn % 2 else [])
        schedule.forget(["r"])
        asked += ask_all(schedule, [target("r")], 50, start_s=1000.0 + 50 * turn)
    assert len(asked) == 1


def test_the_memory_of_a_schedule_is_bounded() -> None:
    schedule = GoldenSchedule()
    for turn in range(200):
        schedule.want([prompt(f"{turn}-{n}") for n in range(100)])
        schedule.next(target("r"), 1000.0 + turn)
        schedule.forget(["r"])
    assert len(schedule._asked_s) <= 16_384
