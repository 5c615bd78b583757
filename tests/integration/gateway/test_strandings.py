"""A pool without replicas: who has another model to ask does not wait out the whole deadline."""

import asyncio
import time

import httpx
import pytest

from gateway.endpoints import strandings
from gateway.testing import Plan
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire

pytestmark = pytest.mark.real

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LATE = 20.0  # what a request waits at least for that is not let go


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strandings, "PATIENCE_S", 1.0)


async def without_replicas(w, eventually, **fallbacks: str) -> None:
    """Take all replicas of the models' pool, and give the model `spare` a pool that has one."""
    w.router.cells.append(wire.CellState(cell_id="other", replicas_ready=1))
    objects = w.feed.objects
    address = objects.cells[0].router_address
    objects.pools.append(control.Pool(id="second", base_digest=w.digest))
    objects.cells.append(
        control.Cell(id="other", pool_id="second", router_id="scripted", router_address=address)
    )
    objects.models.append(control.Model(id="spare", base_digest=w.digest, pool_id="second"))
    next(it for it in objects.tenants if it.id == "one").fallbacks.update(fallbacks)
    w.feed.replace(objects)
    w.router.cells[0].replicas_ready = 0
    w.router.plan = lambda s: (
        w.default_plan(s)
        if s.cell_id == "other" or w.router.cells[0].replicas_ready
        else Plan([], None)
    )
    links = w.gateway.links
    await eventually(lambda: links.serves("second") and not links.serves("pool"))
    await eventually(lambda: "spare" in w.gateway.watcher.state.models)


def body(is_stream: bool = False, **more: object) -> dict[str, object]:
    return {"model": "tiny", "messages": HELLO, "stream": is_stream, **more}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("answers", [1, 2])
async def test_another_model_answers_for_a_pool_without_replicas(
    world, eventually, is_stream: bool, answers: int
) -> None:
    async with world() as w, w.http() as http:
        await without_replicas(w, eventually, tiny="spare")
        began_s = time.monotonic()
        for _ in range(2):
            response = await http.post(CHAT, json=body(is_stream, n=answers))
            assert (response.status_code, response.headers["x-sluice-model"]) == (200, "spare")
        assert time.monotonic() - began_s < LATE
        cells = [submit.cell_id for submit in w.router.submits]
        assert cells[1:] == ["other"] * 2 * answers, "the second one need not wait at all"
        assert len(w.router.cancelled) == 1
        assert w.gateway.links.in_flight == 0


async def test_a_replica_that_comes_back_soon_is_waited_for(world, eventually) -> None:
    async with world() as w, w.http() as http:
        await without_replicas(w, eventually, tiny="spare")
        w.router.plan = lambda s: Plan([[]] * 100 + [[it] for it in w.ids(w.text)])
        w.router.cells[0].replicas_ready = 1
        await eventually(lambda: w.gateway.links.serves("pool"))
        w.router.cells[0].replicas_ready = 0
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(http.post(CHAT, json=body()))
            await asyncio.sleep(0.3)
            w.router.cells[0].replicas_ready = 1
        assert answer.result().headers["x-sluice-model"] == "tiny"


@pytest.mark.parametrize(
    "why", ["nobody stands in", "it is down as well", "its context is too small"]
)
async def test_who_has_nobody_to_go_to_waits(world, eventually, why: str) -> None:
    async with world() as w, w.http() as http:
        fallbacks = {} if why == "nobody stands in" else {"tiny": "spare"}
        await without_replicas(w, eventually, **fallbacks)
        if why == "it is down as well":
            w.router.cells[1].replicas_ready = 0
            await eventually(lambda: not w.gateway.links.serves("second"))
        if why == "its context is too small":
            objects = w.feed.objects
            objects.models[-1].base_digest = w.digest
            next(it for it in objects.tiers if it.id == "free").model_limits["spare"].CopyFrom(
                control.Limits(context_tokens_max=2)
            )
            w.feed.replace(objects)
            await eventually(lambda: w.gateway.watcher.state.tiers["free"].model_limits)
        with pytest.raises(httpx.ReadTimeout):
            await http.post(CHAT, json=body(), timeout=3.0)
        assert [it.cell_id for it in w.router.submits] == ["cell"]


async def test_signs_of_life_keep_a_request_with_its_model(world, eventually) -> None:
    """The client has the name of the model by then."""
    async with world(keep_alive_s=0.2) as w, w.http() as http:
        await without_replicas(w, eventually, tiny="spare")
        w.router.cells[0].replicas_ready = 1
        await eventually(lambda: w.gateway.links.serves("pool"))
        w.router.plan = lambda _: Plan([], None)
        w.router.cells[0].replicas_ready = 0
        await eventually(lambda: not w.gateway.links.serves("pool"))
        async with http.stream("POST", CHAT, json=body(is_stream=True)) as response:
            assert response.headers["x-sluice-model"] == "tiny"
            lines = response.aiter_lines()
            until_s = time.monotonic() + 2.0
            while time.monotonic() < until_s:
                assert not (await anext(lines)).startswith('data: {"error'), "it goes on waiting"
        assert [it.cell_id for it in w.router.submits] == ["cell"]
