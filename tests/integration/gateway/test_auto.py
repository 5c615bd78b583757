"""`model: auto` through a real gateway: the choice, its headers, stand-ins, what is refused."""

import json
from pathlib import Path

import pytest

from gateway.app import running_gateway
from sluice.auto.features import SCHEME
from sluice.errors import ErrorCode
from sluice.process import free_port
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import Plan

from .conftest import KEY, OTHER_KEY
from .test_absence import with_another_model

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9})
DIALECTS = [
    CHAT,
    ("/v1/completions", {"prompt": "What is the capital of France?", "max_tokens": 9}),
    ("/v1/responses", {"input": "What is the capital of France?", "store": False}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
]
SMALL = control.AutoModel(
    model="tiny", prompt_price=0.1, cached_price=0.1, output_price=0.4, quality=0.6
)
LARGE = control.AutoModel(
    model="spare", prompt_price=1, cached_price=0.1, output_price=4, quality=0.9
)


async def with_policy(w, eventually, **fields: object) -> None:
    """Let the first tenant ask for `auto`, of two models with pools of their own."""
    if "spare" not in w.gateway.watcher.state.models:
        await with_another_model(w, eventually)
    objects = w.feed.objects
    del objects.auto_policies[:]
    given = {"candidates": [SMALL, LARGE], "scheme": SCHEME, **fields}
    objects.auto_policies.append(control.AutoPolicy(id="one", **given))
    w.feed.replace(objects)
    told = objects.auto_policies[0]
    await eventually(lambda: w.gateway.watcher.state.auto_policies.get("one") == told)


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_every_dialect_gets_the_cheapest_and_is_told_why(
    world, eventually, path: str, body: dict[str, object]
) -> None:
    async with world() as w, w.http() as http:
        await with_policy(w, eventually)
        small = await http.post(path, json={"model": "auto", **body})
        assert small.status_code == 200, small.text
        assert (small.headers["x-sluice-model"], small.json()["model"]) == ("tiny", "tiny")
        assert small.headers["x-sluice-auto"].startswith("cheapest; cost=")
        assert small.headers["x-sluice-auto-alternatives"].startswith("spare; cost=")
        await with_policy(w, eventually, miss_price=1.0)
        large = await http.post(path, json={"model": "auto", "stream": True, **body})
        assert large.headers["x-sluice-model"] == "spare"
        assert {it.cell_id for it in w.router.submits} == {"cell", "other"}


async def test_auto_is_a_name_like_any_other_without_a_policy(world, eventually) -> None:
    path, body = CHAT
    async with world() as w:
        await with_policy(w, eventually)
        async with w.http(OTHER_KEY) as http:
            answer = await http.post(path, json={"model": "auto", **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_auto_is_listed_for_tenants_with_a_policy(world, eventually) -> None:
    async with world() as w, w.http() as http, w.http(OTHER_KEY) as others:
        await with_policy(w, eventually)
        await eventually(lambda: w.gateway.dispatcher.serves("second"))
        listed = (await http.get("/v1/models")).json()["data"]
        names = [it["id"] for it in listed if it["kind"] == "chat"]
        assert names[-1] == "auto"
        assert names.count("auto") == 1
        auto = (await http.get("/v1/models/auto")).json()
        assert auto["id"] == auto["stands_for"] == "auto"
        of = {it["id"]: it for it in listed}
        both = [of["tiny"], of["spare"]]
        assert auto["context_window"] == max(it["context_window"] for it in both)
        ready = sum(it["capacity"]["replicas_ready"] for it in both)
        assert auto["capacity"]["replicas_ready"] == ready > 0
        assert auto["readiness"] == "ready"
        assert "auto" not in [it["id"] for it in (await others.get("/v1/models")).json()["data"]]
        assert (await others.get("/v1/models/auto")).status_code == 404


async def test_no_model_under_the_ceiling_is_a_400_and_none_served_a_503(world, eventually) -> None:
    path, body = CHAT
    async with world() as w, w.http(KEY) as http:
        await with_policy(w, eventually, price_max=1e-9)
        dear = await http.post(path, json={"model": "auto", **body})
        assert (dear.status_code, dear.json()["error"]["param"]) == (400, "model")
        assert "ceiling" in dear.json()["error"]["message"]
        await with_policy(w, eventually)
        for cell in w.router.cells:
            cell.replicas_ready = 0
        await eventually(lambda: not w.gateway.dispatcher.serves("second"))
        await eventually(lambda: not w.gateway.dispatcher.serves("pool"))
        down = await http.post(path, json={"model": "auto", **body})
        assert (down.status_code, down.json()["error"]["code"]) == (503, "no_capacity")
        assert "retry-after" in down.headers
        assert not w.router.submits


async def test_the_next_best_stands_in_for_a_model_that_refuses(world, eventually) -> None:
    path, body = CHAT
    refusal = wire.Outcome(
        kind=wire.OUTCOME_KIND_REJECTED, code=ErrorCode.QUEUE_FULL, message="full"
    )
    async with world() as w, w.http() as http:
        await with_policy(w, eventually)
        w.router.plan = lambda s: w.default_plan(s) if s.cell_id == "other" else Plan([], refusal)
        answer = await http.post(path, json={"model": "auto", **body})
        assert (answer.status_code, answer.headers["x-sluice-model"]) == (200, "spare")
        assert answer.headers["x-sluice-auto"].startswith("stand_in; ")
        assert answer.headers["x-sluice-auto-alternatives"].startswith("tiny; ")


async def test_sessions_that_do_not_queue_leave_a_saturated_pool(world, eventually) -> None:
    path, body = CHAT
    async with world() as w, w.http() as http:
        await with_policy(w, eventually, queue_priority_min=1000)
        w.router.cells[0].queued = 11
        links = w.gateway.links
        await eventually(lambda: [it.queued for it in links.views("pool")] == [11])
        answer = await http.post(path, json={"model": "auto", **body})
        assert answer.headers["x-sluice-model"] == "spare"
        assert answer.headers["x-sluice-auto"].startswith("saturated; ")


async def test_a_conversation_stays_where_its_prefix_is_cached(
    world, eventually, tmp_path: Path
) -> None:
    """The other model becomes a little cheaper for the turn, and not by as much as its prefill."""
    path, _ = CHAT
    talk = [{"role": "user", "content": "Tell me of Paris and of its bridges. " * 8}]
    async with world() as w, w.http() as http:
        await with_policy(w, eventually, miss_price=1.0)
        first = await http.post(path, json={"model": "auto", "messages": talk, "max_tokens": 5})
        assert first.headers["x-sluice-model"] == "spare"
        talk += [
            {"role": "assistant", "content": "It has 37 bridges."},
            {"role": "user", "content": "And how many towers?"},
        ]
        # A miss is so cheap now that a new conversation goes to the small model ...
        cheap = SMALL.__class__()
        cheap.CopyFrom(SMALL)
        cheap.prompt_price = cheap.cached_price = 1.0
        await with_policy(w, eventually, candidates=[cheap, LARGE], miss_price=0.0)
        other = [{"role": "user", "content": "Tell me of Rome and of its bridges. " * 8}]
        new = await http.post(path, json={"model": "auto", "messages": other, "max_tokens": 5})
        assert new.headers["x-sluice-model"] == "tiny"
        # ... but this one's prefix costs a tenth where it is.
        second = await http.post(path, json={"model": "auto", "messages": talk, "max_tokens": 5})
        assert second.headers["x-sluice-model"] == "spare"
        # A gateway that has not seen it recognizes it; without Valkey it is a new one there.
        port = free_port()
        changes = {"instance_id": "two", "http_address": f"127.0.0.1:{port}", "state_dir": tmp_path}
        body = {"model": "auto", "messages": talk, "max_tokens": 5}
        async with running_gateway(w.settings.model_copy(update=changes)) as gateway:
            await eventually(lambda: gateway.stateful.responses.is_hot)
            await eventually(lambda: not gateway.not_ready_because())
            url = f"http://127.0.0.1:{port}{path}"
            third = await http.post(url, json=body)
            assert third.headers["x-sluice-model"] == "spare"
            await w.valkey.stop()
            await eventually(lambda: not gateway.stateful.responses.is_hot)
            body["messages"] = [{"role": "user", "content": "Tell me of Oslo."}, *talk[1:]]
            fourth = await http.post(url, json=body)
            assert fourth.headers["x-sluice-model"] == "tiny"


async def test_a_key_gets_the_models_that_it_may_use_alone(world, eventually) -> None:
    path, body = CHAT
    async with world() as w, w.http(KEY) as http:
        await with_policy(w, eventually)
        objects = w.feed.objects
        key = next(it for it in objects.keys if it.tenant_id == "one")
        key.models.append("spare")
        w.feed.replace(objects)
        await eventually(lambda: w.gateway.watcher.state.keys[key.id].models == ["spare"])
        answer = await http.post(path, json={"model": "auto", **body})
        assert answer.headers["x-sluice-model"] == "spare"
        del key.models[:]
        key.models.append("nothing")
        w.feed.replace(objects)
        await eventually(lambda: w.gateway.watcher.state.keys[key.id].models == ["nothing"])
        answer = await http.post(path, json={"model": "auto", **body})
        assert answer.status_code == 404, json.dumps(answer.json())
