"""Responses that nobody waits for: made, followed, cancelled, and taken over from a dead gateway."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from gateway.endpoints.response_answers import ResponseObject
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import KEY, LIMITED_KEY, OTHER_KEY
from tests.integration.gateway.test_response_store import second_gateway
from tests.support.response_shapes import events_of
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "hello", "background": True}
STREAM = {"stream": "true"}
ENDLESS = Plan([[65]] * 1_000_000, None)


async def until_status(http: httpx.AsyncClient, response_id: str, status: str) -> None:
    async with asyncio.timeout(60):
        while True:
            if (await http.get(f"{PATH}/{response_id}")).json()["status"] == status:
                return
            await asyncio.sleep(0.05)


async def until_ended(http: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found = await http.get(f"{PATH}/{response_id}")
            assert found.status_code == 200, found.text
            if found.json()["status"] not in ("queued", "in_progress"):
                return found.json()
            await asyncio.sleep(0.05)


async def test_it_is_queued_at_once_and_found_when_it_has_ended(stateful: Any) -> None:
    async with stateful() as w, w.http() as http, w.sdk() as sdk:
        queued = (await http.post(PATH, json=BODY)).json()
        ResponseObject.model_validate(queued)
        assert (queued["status"], queued["background"], queued["store"]) == ("queued", True, True)
        ended = await until_ended(http, queued["id"])
        ResponseObject.model_validate(ended)
        assert (ended["status"], ended["background"], ended["store"]) == ("completed", True, True)
        assert ended["output"][0]["content"][0]["text"] == w.text
        assert ended["usage"]["output_tokens"] > 0
        again = await sdk.responses.create(
            model="tiny", input="and?", previous_response_id=queued["id"]
        )
        assert again.output_text == w.text


async def test_its_stream_is_taken_up_where_the_reader_stopped(
    stateful: Any, tmp_path: Any, eventually: Any
) -> None:
    async with (
        stateful() as w,
        w.http() as http,
        second_gateway(w, tmp_path / "two", eventually) as other,
    ):
        whole = await http.post(PATH, json=BODY | {"stream": True})
        events = events_of(whole.text)
        response_id = events[0]["response"]["id"]
        assert events[-1]["response"] == (await http.get(f"{PATH}/{response_id}")).json()
        for client_url in (w.base_url + "/v1", other):
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(headers=headers, timeout=60) as client:
                for behind in (0, 5, len(events) - 2):
                    url = f"{client_url}/responses/{response_id}"
                    rest = await client.get(url, params=STREAM | {"starting_after": behind})
                    numbers = [e["sequence_number"] for e in loose_events(rest.text)]
                    assert numbers == list(range(behind + 1, len(events)))
                    assert rest.text.endswith("data: [DONE]\n\n")


def loose_events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_client_that_leaves_does_not_end_a_background_response(
    stateful: Any, eventually: Any
) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        steps = [[token] for token in w.ids(w.text * 5)]
        w.router.plan = lambda _: Plan(steps, wire.Outcome(kind=wire.OUTCOME_KIND_STOP))
        async with await sdk.responses.create(**BODY, stream=True) as stream:
            first = await anext(aiter(stream))
        ended = await until_ended(http, first.response.id)
        assert ended["status"] == "completed"
        resumed = await sdk.responses.retrieve(first.response.id, stream=True, starting_after=1)
        assert [event async for event in resumed][-1].response.id == first.response.id


async def test_it_is_cancelled_from_any_gateway(
    stateful: Any, tmp_path: Any, eventually: Any
) -> None:
    async with (
        stateful() as w,
        w.http() as http,
        second_gateway(w, tmp_path / "two", eventually) as other_url,
        openai.AsyncOpenAI(base_url=other_url, api_key=KEY, max_retries=0) as other,
    ):
        w.router.plan = lambda _: ENDLESS
        queued = (await http.post(PATH, json=BODY)).json()
        url = f"{PATH}/{queued['id']}"
        async with asyncio.TaskGroup() as tasks:
            follower = tasks.create_task(http.get(url, params=STREAM))
            await until_status(http, queued["id"], "in_progress")
            assert (await http.delete(url)).status_code == 409
            cancelled = await other.responses.cancel(queued["id"])
        assert (cancelled.status, cancelled.id) == ("cancelled", queued["id"])
        assert cancelled.output
        assert (await other.responses.cancel(queued["id"])).status == "cancelled"
        last = loose_events(follower.result().text)[-1]
        assert last["type"] == "response.cancelled"
        await eventually(lambda: not w.gateway.dispatcher.open)
        assert (await http.get(f"{PATH}/{queued['id']}")).json()["status"] == "cancelled"
        assert (await http.delete(f"{PATH}/{queued['id']}")).status_code == 200


async def test_only_background_responses_can_be_cancelled_and_followed(stateful: Any) -> None:
    async with stateful() as w, w.http() as http, w.http(OTHER_KEY) as foreign:
        plain = (await http.post(PATH, json=BODY | {"background": False})).json()
        refused = await http.post(f"{PATH}/{plain['id']}/cancel")
        assert refused.status_code == 400
        assert "background" in refused.json()["error"]["message"]
        texts = set()
        for response_id in (plain["id"], "resp_123"):
            for answer in (
                await foreign.post(f"{PATH}/{response_id}/cancel"),
                await foreign.get(f"{PATH}/{response_id}", params=STREAM),
            ):
                assert answer.status_code == 404
                texts.add(answer.json()["error"]["message"].replace(response_id, "ID"))
        assert len(texts) == 1
        told = await http.get(f"{PATH}/{plain['id']}", params=STREAM)
        assert events_of(told.text)[-1]["response"] == plain, "an ended one is told anew"
        for wrong in (
            {"starting_after": "1"},
            {"stream": "x"},
            STREAM | {"starting_after": "-1"},
            STREAM | {"starting_after": "1"},
            {"z": "1"},
        ):
            assert (await http.get(f"{PATH}/{plain['id']}", params=wrong)).status_code == 400
        for wrong in ({"store": False}, {"background": "yes"}):
            assert (await http.post(PATH, json=BODY | wrong)).status_code == 400
        assert (await http.post(f"{PATH}/{plain['id']}/other")).status_code == 404


async def test_a_failed_response_is_stored_as_failed(stateful: Any) -> None:
    async with stateful() as w, w.http() as http:
        code = wire.OUTCOME_KIND_REJECTED
        w.router.plan = lambda _: Plan([], wire.Outcome(kind=code, code="queue_full"))
        queued = (await http.post(PATH, json=BODY | {"deadline_ms": 200})).json()
        ended = await until_ended(http, queued["id"])
        ResponseObject.model_validate(ended)
        assert (ended["status"], ended["output"]) == ("failed", [])
        assert ended["error"]["code"]
        told = loose_events((await http.get(f"{PATH}/{queued['id']}", params=STREAM)).text)
        assert [event["type"] for event in told] == ["response.created", "response.failed"]
        missing = await http.post(PATH, json=BODY | {"model": "none"})
        assert missing.status_code == 404


async def test_limits_hold(stateful: Any) -> None:
    async with stateful() as w, w.http(LIMITED_KEY) as http:
        small = BODY | {"max_output_tokens": 4}
        ids = [(await http.post(PATH, json=small)).json()["id"] for _ in range(7)]
        ended = [await until_ended(http, it) for it in ids]
        codes = [it["error"]["code"] for it in ended if it["status"] == "failed"]
        assert set(codes) == {"rate_limit_requests"}
        assert len(codes) == 2


async def test_a_dead_gateways_response_fails_and_says_so(
    stateful: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stateful() as w, w.http() as http:
        w.router.plan = lambda _: ENDLESS
        queued = (await http.post(PATH, json=BODY)).json()
        await until_status(http, queued["id"], "in_progress")
        background = w.gateway.stateful.background
        (running,) = background._running.values()
        monkeypatch.setattr(background, "_end", lambda *_, **__: asyncio.sleep(0))
        running.cancel()  # the gateway dies: nothing more is told of it
        await eventually(lambda: not background.open)
        monkeypatch.setattr("gateway.responses.background._SILENT_MS", 0)
        await background.sweep()
        ended = await until_ended(http, queued["id"])
        assert (ended["status"], ended["error"]["code"]) == ("failed", "unavailable")
        told = loose_events((await http.get(f"{PATH}/{queued['id']}", params=STREAM)).text)
        assert told[-1]["type"] == "response.failed"
        assert [it["sequence_number"] for it in told] == list(range(len(told)))


async def test_without_valkey_none_is_begun(stateful: Any, eventually: Any) -> None:
    async with stateful() as w, w.http() as http:
        await w.valkey.stop()
        await eventually(lambda: not w.gateway.valkey.is_connected)
        refused = await http.post(PATH, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
