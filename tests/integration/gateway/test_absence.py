"""A pool without replicas: who has another model to ask does not wait out the whole deadline."""

import asyncio

import pytest

from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
NOBODY = wire.Outcome(
    kind=wire.OUTCOME_KIND_EVICTED, code="no_capacity", message="no replica was ready for 3.0 s"
)


async def with_another_model(w, eventually, **fallbacks: str) -> None:
    """Give the model `spare` a pool of its own, which has a replica."""
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
    await eventually(lambda: w.gateway.dispatcher.serves("second"))
    await eventually(lambda: "spare" in w.gateway.watcher.state.models)


def body(is_stream: bool = False, **more: object) -> dict[str, object]:
    return {"model": "tiny", "messages": HELLO, "stream": is_stream, **more}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("answers", [1, 2])
async def test_a_request_that_another_model_may_answer_says_so(
    world, eventually, is_stream: bool, answers: int
) -> None:
    async with world() as w, w.http() as http:
        await with_another_model(w, eventually, tiny="spare")
        w.router.plan = lambda s: w.default_plan(s) if s.cell_id == "other" else Plan([], NOBODY)
        response = await http.post(CHAT, json=body(is_stream, n=answers))
        assert (response.status_code, response.headers["x-sluice-model"]) == (200, "spare")
        told = [(it.cell_id, it.absence_ms) for it in w.router.submits]
        assert told == [("cell", 3000)] + [("other", 0)] * answers, "nobody stands in for it"


@pytest.mark.parametrize(
    "why",
    ["nobody stands in", "it is down as well", "its context is too small", "it has the same pool"],
)
async def test_a_request_without_a_fallback_model_waits(world, eventually, why: str) -> None:
    async with world() as w, w.http() as http:
        fallbacks = {} if why == "nobody stands in" else {"tiny": "spare"}
        await with_another_model(w, eventually, **fallbacks)
        if why == "it is down as well":
            w.router.cells[1].replicas_ready = 0
            await eventually(lambda: not w.gateway.dispatcher.serves("second"))
        if why == "it has the same pool":
            objects = w.feed.objects
            objects.models[-1].pool_id = "pool"
            w.feed.replace(objects)
            await eventually(lambda: w.gateway.watcher.state.models["spare"].pool_id == "pool")
        if why == "its context is too small":
            objects = w.feed.objects
            next(it for it in objects.tiers if it.id == "free").model_limits["spare"].CopyFrom(
                control.Limits(context_tokens_max=2)
            )
            w.feed.replace(objects)
            await eventually(lambda: w.gateway.watcher.state.tiers["free"].model_limits)
        assert (await http.post(CHAT, json=body())).status_code == 200
        assert [it.absence_ms for it in w.router.submits] == [0]


async def test_signs_of_life_keep_a_request_with_its_model(world, eventually) -> None:
    """The client has the name of the model by then."""
    async with world(keep_alive_s=0.2) as w, w.http() as http:
        await with_another_model(w, eventually, tiny="spare")
        w.router.plan = lambda s: (
            Plan([[]] * 100, NOBODY) if len(w.router.submits) == 1 else w.default_plan(s)
        )
        async with (
            asyncio.timeout(60),
            http.stream("POST", CHAT, json=body(is_stream=True)) as response,
        ):
            assert response.headers["x-sluice-model"] == "tiny"
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        told = [(it.cell_id, it.absence_ms) for it in w.router.submits]
        assert told == [("cell", 3000), ("cell", 0)]
