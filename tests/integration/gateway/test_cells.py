"""Several routers: answers go on with another one, never with one that is gone, and without a seam."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from sluice.hashing import chained_hashes
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan, ScriptedRouter, serve

pytestmark = pytest.mark.real

STOP = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)


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


def continuing(world, first: int | None = None):
    """Go on where a submission stands; with `first`, stop sending after so many tokens."""

    def plan(submit: wire.Submit) -> Plan:
        ids, start = world.ids(world.text), submit.resumed_tokens
        assert list(submit.prompt[len(submit.prompt) - start :]) == ids[:start]
        assert submit.block_hashes == chained_hashes(submit.prompt, submit.cache_root)
        if first is None:
            return Plan([[token] for token in ids[start:]], STOP)
        return Plan([[token] for token in ids[start : start + first]], None)

    return plan


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
        p.routers["one"].plan = continuing(p.world, first=5)
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
        p.routers["one"].plan = continuing(p.world, first=7)
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
