"""Replicas and routers fail behind the gateway: no token is sent twice or missing, no client hangs.

The routers are scripted: one, or a pair that owns cells.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import openai
import pytest

from sluice.hashing import chained_hashes
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan, ScriptedRouter, serve

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
LOST = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost", message="gone")
STOP = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)


async def streamed(world, sdk, **options) -> tuple[str, object]:
    stream = await sdk.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks[-1].usage


def continuing(world, pieces: Iterable[int] = (), outcome: wire.Outcome | None = LOST):
    """Plans that continue the text where a submission stands.

    The first plans have so many tokens each and this outcome; the others go on to the end.
    """
    ids = world.ids(world.text)
    lengths = iter(pieces)

    def plan(submit: wire.Submit) -> Plan:
        start = submit.resumed_tokens
        assert list(submit.prompt[len(submit.prompt) - start :]) == ids[:start]
        assert submit.block_hashes == chained_hashes(submit.prompt, submit.cache_root)
        count = next(lengths, None)
        if count is None:
            return Plan([[token] for token in ids[start:]], STOP)
        return Plan([[token] for token in ids[start : start + count]], outcome)

    return plan


@pytest.mark.parametrize("pieces", [[5], [1, 7], [10, 0]])
async def test_a_lost_answer_goes_on_elsewhere_without_a_seam(world, pieces: list[int]) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = continuing(w, pieces)
        text, usage = await streamed(w, sdk)
        assert text == w.text
        assert usage.completion_tokens == len(w.ids(w.text))
        assert usage.prompt_tokens == len(w.router.submits[0].prompt)
        first, *others = w.router.submits
        for submit in others:
            assert submit.output_tokens_max == first.output_tokens_max - submit.resumed_tokens
            assert len(submit.prompt) == len(first.prompt) + submit.resumed_tokens


async def test_the_third_loss_is_told_in_band_and_without_done(world) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = continuing(w, [4, 4, 4])
        with pytest.raises(openai.APIError) as caught:
            await streamed(w, sdk)
        assert caught.value.code == "replica_lost"
        assert len(w.router.submits) == 3


async def test_a_loss_after_the_last_token_is_a_good_end(world) -> None:
    async with world() as w, w.sdk() as sdk:
        ids = w.ids(w.text)[:6]
        w.router.plan = lambda _: Plan([ids], LOST)
        _, usage = await streamed(w, sdk, max_tokens=6)
        assert usage.completion_tokens == 6
        assert len(w.router.submits) == 1


async def test_whole_answers_survive_a_loss_too(world) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = continuing(w, [5])
        answer = await sdk.chat.completions.create(model="tiny", messages=HELLO, stop="zzz")
        assert answer.choices[0].message.content == w.text


async def test_a_router_that_dies_and_returns_costs_a_pause(world, eventually) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = continuing(w)
        w.router.step_s = 0.02
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(streamed(w, sdk)) for _ in range(8)]
            await eventually(lambda: len(w.router.submits) == 8)
            await asyncio.sleep(0.1)
            w.router.break_streams()
        for call in calls:
            assert call.result()[0] == w.text
        assert len(w.router.submits) == 16


async def test_a_frozen_router_is_noticed_though_nothing_is_under_way(world, eventually) -> None:
    async with world() as w, w.sdk() as sdk:
        assert (await streamed(w, sdk))[0] == w.text
        await asyncio.sleep(3.0)  # longer than silence is borne: signs of life keep the link up
        assert w.gateway.links.up == 1
        w.router.is_frozen = True
        await eventually(lambda: w.gateway.links.up == 0)
        w.router.is_frozen = False
        assert (await streamed(w, sdk))[0] == w.text


@pytest.mark.parametrize(
    ("kind", "code", "status", "retry_after"),
    [
        (wire.OUTCOME_KIND_REJECTED, "queue_full", 503, 7),
        (wire.OUTCOME_KIND_EVICTED, "deadline_exceeded", 503, 1),
        (wire.OUTCOME_KIND_FAILED, "engine_failed", 502, None),
        (wire.OUTCOME_KIND_FAILED, "engine_refused", 400, None),
    ],
)
async def test_a_refusal_before_the_first_token_is_plain_json(
    world, kind, code: str, status: int, retry_after: int | None
) -> None:
    outcome = wire.Outcome(
        kind=kind,
        code=code,
        message="because",
        retry_after_ms=(retry_after or 0) * 1000 - 300 if retry_after == 7 else 0,
    )
    async with world() as w, w.http() as http:
        w.router.plan = lambda _: Plan([], outcome)
        for is_stream in (True, False):
            response = await http.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": HELLO, "stream": is_stream},
            )
            assert response.status_code == status
            error = response.json()["error"]
            assert (error["code"], error["message"]) == (code, "because")
            if retry_after is not None:
                assert response.headers["retry-after"] == str(retry_after)


async def test_a_request_without_tokens_is_submitted_again_when_its_router_dies(
    world, eventually
) -> None:
    async with world() as w, w.sdk() as sdk:
        plans = itertools.chain(
            [Plan([[]] * 1_000_000, None)],
            itertools.repeat(w.default_plan(wire.Submit(output_tokens_max=200))),
        )
        w.router.plan = lambda _: next(plans)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(streamed(w, sdk))
            await eventually(lambda: len(w.router.submits) == 1)
            w.router.break_streams()
        assert call.result()[0] == w.text
        assert w.router.submits[1].resumed_tokens == 0


async def test_a_stream_that_waits_for_a_router_shows_that_it_lives(world, eventually) -> None:
    async with world(keep_alive_s=0.5) as w:
        first = [Plan([[]] * 1_000_000, None)]
        w.router.plan = lambda submit: first.pop() if first else w.default_plan(submit)
        reader, writer = await w.raw({"model": "tiny", "messages": HELLO, "stream": True})
        await eventually(lambda: w.router.submits)
        cells, w.router.cells = w.router.cells, []
        w.router.break_streams()
        for _ in range(2):
            seen = await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 10)
        assert len(w.router.submits) == 1
        w.router.cells = cells
        w.router.break_streams()
        seen = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 30)
        writer.close()
        lines = [line.removeprefix(b"data: ") for line in seen.splitlines() if b'"delta"' in line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == w.text


async def test_a_stream_without_a_new_replica_yet_keeps_its_connection_alive(world) -> None:
    full = wire.Outcome(kind=wire.OUTCOME_KIND_REJECTED, code="queue_full", message="full")
    async with world(keep_alive_s=0.4) as w:
        has_room = False

        def plan(submit: wire.Submit) -> Plan:
            if not submit.resumed_tokens:
                return Plan([[it] for it in w.ids(w.text)[:3]], LOST)
            return Plan([[it] for it in w.ids(w.text)[3:]]) if has_room else Plan([], full)

        w.router.plan = plan
        reader, writer = await w.raw({"model": "tiny", "messages": HELLO, "stream": True})
        async with asyncio.timeout(60):
            for _ in range(4):
                await reader.readuntil(b": keep-alive\n\n")
            has_room = True
            await reader.readuntil(b"[DONE]")
        writer.close()


async def test_an_unknown_token_fails_one_request_not_the_link(world) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda _: Plan([[65], [999_999], [66]], None)
        with pytest.raises(openai.APIError) as caught:
            await streamed(w, sdk)
        assert caught.value.code == "engine_failed"
        w.router.plan = w.default_plan
        assert (await streamed(w, sdk))[0] == w.text


async def test_drain_finishes_running_streams_and_cuts_the_rest_with_an_event(
    world, eventually
) -> None:
    async with world(drain_s=5.0) as w, w.sdk() as sdk:
        endless = Plan([[65]] * 1_000_000, None)
        w.router.plan = lambda s: endless if s.output_tokens_max > 200 else w.default_plan(s)
        w.router.step_s = 0.005
        async with asyncio.TaskGroup() as tasks:
            short = tasks.create_task(streamed(w, sdk, max_tokens=100))
            long = tasks.create_task(outcome_of(streamed(w, sdk, max_tokens=220)))
            await eventually(lambda: len(w.router.submits) == 2)
            await w.gateway.stop()
        assert short.result()[0] == w.text
        assert long.result() == "draining"


async def outcome_of(call) -> str:
    try:
        await call
    except openai.APIError as error:
        return str(error.code)
    return "ok"


class Pair:
    """The world's own router and a second one; `assign` says who owns which cell."""

    def __init__(self, world, second: ScriptedRouter, addresses: dict[str, str]) -> None:
        self.world = world
        self.routers = {"one": world.router, "two": second}
        self.addresses = addresses

    def assign(self, **owners: str) -> None:
        """Tell the gateway whose the cells are: cell -> router."""
        objects = self.world.objects("")
        del objects.cells[:]
        for cell_id, name in owners.items():
            objects.cells.add(
                id=cell_id, pool_id="pool", router_id=name, router_address=self.addresses[name]
            )
        self.world.feed.replace(objects)

    async def ask(self, number: int) -> str:
        async with self.world.sdk() as sdk:
            stream = await sdk.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"hello {number}"}],
                stream=True,
            )
            parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        return "".join(parts)

    def submits(self, name: str) -> list[wire.Submit]:
        return self.routers[name].submits


@pytest.fixture
def pair(world, eventually):
    @asynccontextmanager
    async def start(*cells: str) -> AsyncIterator[Pair]:
        """Both routers are connected; `cells` are those that the first one owns at first."""
        async with world() as w:
            second = ScriptedRouter(continuing(w), cells=("cell", "other"), router_id="two")
            async with serve(second) as address:
                own = w.feed.objects.cells[0].router_address
                made = Pair(w, second, {"one": own, "two": address})
                w.router.plan = continuing(w)
                made.assign(cell="one", other="two")
                await eventually(lambda: w.gateway.links.up == 2)
                if cells:
                    made.assign(**dict.fromkeys(cells, "one"))
                yield made

    return start


async def test_answers_go_on_in_the_other_cell_when_a_router_dies(pair, eventually) -> None:
    async with pair() as p:
        p.routers["one"].plan = continuing(p.world, itertools.repeat(5), None)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(p.ask(number)) for number in range(24)]
            await eventually(lambda: len(p.submits("one")) + len(p.submits("two")) == 24)
            begun = len(p.submits("one"))
            assert begun > 0
            p.routers["one"].cells = []
            p.routers["one"].break_streams()
        assert {call.result() for call in calls} == {p.world.text}
        assert len(p.submits("one")) == begun
        assert len(p.submits("two")) == 24


async def test_answers_go_on_with_the_next_owner_of_their_cell(pair, eventually) -> None:
    async with pair("cell") as p:
        p.routers["one"].plan = continuing(p.world, itertools.repeat(7), None)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(p.ask(number)) for number in range(4)]
            await eventually(lambda: len(p.submits("one")) == 4)
            p.routers["one"].cells = []
            p.routers["one"].break_streams()
            p.assign(cell="two")
        assert {call.result() for call in calls} == {p.world.text}
        assert [len(p.submits(name)) for name in ("one", "two")] == [4, 4]
        assert {submit.cell_id for submit in p.submits("two")} == {"cell"}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (wire.OUTCOME_KIND_EVICTED, "unavailable"),
        (wire.OUTCOME_KIND_REJECTED, "unavailable"),
        (wire.OUTCOME_KIND_REJECTED, "draining"),
    ],
)
async def test_a_request_waiting_for_a_moving_cell_sees_no_error(
    pair, eventually, kind, code
) -> None:
    async with pair("cell") as p:
        p.routers["one"].plan = lambda _: Plan([], wire.Outcome(kind=kind, code=code))
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(p.ask(1))
            await eventually(lambda: len(p.submits("one")) == 2)  # it asks again
            p.assign(cell="two")
        assert call.result() == p.world.text
        assert len(p.submits("two")) == 1
        assert p.submits("two")[0].resumed_tokens == 0


async def test_without_another_owner_the_client_is_told_why(pair) -> None:
    async with pair("cell") as p:
        outcome = wire.Outcome(
            kind=wire.OUTCOME_KIND_REJECTED, code="draining", message="bye", retry_after_ms=500
        )
        p.routers["one"].plan = lambda _: Plan([], outcome)
        with pytest.raises(openai.InternalServerError) as caught:
            await p.ask(1)
        assert caught.value.code == "draining"
        assert caught.value.response.headers["retry-after"] == "1"


async def test_a_new_owner_is_asked_once_it_knows_that_it_is_one(pair, eventually) -> None:
    """The gateway may hear of a change before the router does."""
    async with pair("cell") as p:
        p.assign(cell="one", third="two")
        await eventually(lambda: "third" in p.world.gateway.watcher.state.cells)
        p.assign(third="two")
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(p.ask(1))
            await eventually(lambda: p.world.gateway.dispatcher.open == 1)
            assert not p.submits("two")
            p.routers["two"].cells.append(wire.CellState(cell_id="third", replicas_ready=1))
        assert call.result() == p.world.text
        assert [submit.cell_id for submit in p.submits("two")] == ["third"]


async def test_no_new_request_goes_to_a_cell_that_drains(pair, eventually) -> None:
    async with pair() as p:
        objects = p.world.objects("")
        objects.CopyFrom(p.world.feed.objects)
        objects.cells[0].is_draining = True
        p.world.feed.replace(objects)
        state = p.world.gateway.watcher.state
        await eventually(lambda: state.cells["cell"].is_draining)
        for number in range(6):
            assert await p.ask(number) == p.world.text
        assert (len(p.submits("one")), len(p.submits("two"))) == (0, 6)


async def test_a_tier_s_reserve_reaches_the_router(pair, eventually) -> None:
    async with pair() as p:
        objects = control.Objects()
        objects.CopyFrom(p.world.feed.objects)
        objects.tiers[0].reserved_permille = 300
        objects.tiers[0].is_preemptible = True
        p.world.feed.replace(objects)
        state = p.world.gateway.watcher.state
        await eventually(lambda: state.tiers["free"].is_preemptible)
        await p.ask(1)
        (submit,) = [*p.submits("one"), *p.submits("two")]
        assert (submit.tier_reserved_permille, submit.is_preemptible) == (300, True)
