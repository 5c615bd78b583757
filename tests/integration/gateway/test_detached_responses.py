"""Streams whose client leaves: taken up at any gateway, or ended after the grace."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from gateway.responses.background import DETACHED_MAX
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import KEY
from tests.integration.gateway.test_background_responses import (
    ENDLESS,
    PATH,
    STREAM,
    loose_events,
    until_ended,
)
from tests.integration.gateway.test_response_store import second_gateway
from tests.support.response_shapes import events_of
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

BODY = {"model": "tiny", "input": "hello", "stream": True}


async def left_stream(
    http: httpx.AsyncClient, deltas: int, **changes: object
) -> list[dict[str, Any]]:
    """Return the events that a client received before it closed its connection."""
    events: list[dict[str, Any]] = []
    async with http.stream("POST", PATH, json=BODY | changes) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
            if [it["type"] for it in events].count("response.output_text.delta") == deltas:
                break
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(it["delta"] for it in events if it["type"] == "response.output_text.delta")


def long_plan(w: Any) -> Plan:
    steps = [[token] for token in w.ids(w.text * 12)]
    return Plan(steps, wire.Outcome(kind=wire.OUTCOME_KIND_STOP))


@pytest.mark.parametrize("is_http2", [False, True])
async def test_a_broken_stream_is_taken_up_at_another_gateway(
    stateful: Any, tmp_path: Any, eventually: Any, is_http2: bool
) -> None:
    async with (
        stateful() as w,
        second_gateway(w, tmp_path / "two", eventually) as other,
    ):
        w.versions = {"http1": not is_http2, "http2": is_http2}
        w.router.plan = lambda _: long_plan(w)
        async with w.http() as http:
            seen = await left_stream(http, 4)
        response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            url = f"{other}/responses/{response_id}"
            rest = await client.get(url, params=STREAM | {"starting_after": last})
            whole = (await client.get(url)).json()
        events = seen + loose_events(rest.text)
        assert [it["sequence_number"] for it in events] == list(range(len(events)))
        assert whole["status"] == "completed"
        assert text_of(events) == whole["output"][0]["content"][0]["text"]
        assert events[-1]["response"] == whole
        assert not w.router.cancelled


async def test_a_stream_that_no_request_takes_up_ends_after_the_grace(
    stateful: Any, eventually: Any
) -> None:
    async with stateful(response_grace_s=0.2) as w, w.http() as http:
        w.router.plan = lambda _: ENDLESS
        async with w.http() as leaving:
            seen = await left_stream(leaving, 3)
        response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        ended = await until_ended(http, response_id)
        assert (ended["status"], ended["store"]) == ("cancelled", True)
        assert ended["output"][0]["content"][0]["text"].startswith(text_of(seen))
        await eventually(lambda: not w.gateway.stateful.background.open)
        assert not w.gateway.dispatcher.open
        params = STREAM | {"starting_after": last}
        rest = loose_events((await http.get(f"{PATH}/{response_id}", params=params)).text)
        assert rest[-1]["type"] == "response.cancelled"
        assert rest[-1]["response"] == ended
        numbers = [it["sequence_number"] for it in rest]
        assert numbers == list(range(last + 1, last + 1 + len(rest)))
        deltas = [it["type"] for it in seen + rest].count("response.output_text.delta")
        page = (await http.get("/metrics")).text
        counted = re.search(r'gateway_tokens_total\{kind="output"\} (\d+)', page)
        assert counted is not None
        assert int(counted[1]) >= deltas > 3, "the tokens of the grace count, too"


@pytest.mark.parametrize(
    ("settings", "changes"), [({"response_grace_s": 0}, {}), ({}, {"store": False})]
)
async def test_without_a_grace_or_a_store_a_stream_ends_with_its_connection(
    stateful: Any, eventually: Any, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    async with stateful(**settings) as w, w.http() as http:
        w.router.plan = lambda _: ENDLESS
        async with w.http() as leaving:
            seen = await left_stream(leaving, 3, **changes)
        await eventually(lambda: not w.gateway.dispatcher.open)
        found = await http.get(f"{PATH}/{seen[0]['response']['id']}")
        assert found.status_code == 404


async def test_a_tenant_has_few_streams_without_clients(stateful: Any, eventually: Any) -> None:
    async with stateful(response_grace_s=300, drain_s=0.1) as w:
        w.router.plan = lambda _: ENDLESS
        for _ in range(DETACHED_MAX + 2):
            async with w.http() as leaving:
                await left_stream(leaving, 1)
        await eventually(lambda: w.gateway.dispatcher.open == DETACHED_MAX)
        async with w.http() as http:
            page = (await http.get("/metrics")).text
        assert f"gateway_open_background_responses {DETACHED_MAX}.0" in page


async def test_a_gateway_that_dies_in_the_grace_leaves_a_failed_response(
    stateful: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stateful(response_grace_s=300) as w, w.http() as http:
        w.router.plan = lambda _: ENDLESS
        async with w.http() as leaving:
            seen = await left_stream(leaving, 3)
        response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        responses = w.gateway.stateful.background
        async with http.stream("GET", f"{PATH}/{response_id}", params=STREAM) as answer:
            await anext(answer.aiter_lines())  # its first events are in Valkey
        (running,) = responses._running.values()
        running.cancel()  # the gateway dies: it writes no further event
        w.gateway.dispatcher.stop_all()
        await eventually(lambda: not responses.open and not w.gateway.dispatcher.open)
        monkeypatch.setattr("gateway.responses.background._SILENT_MS", 0)
        await responses.sweep()
        ended = await until_ended(http, response_id)
        assert (ended["status"], ended["error"]["code"]) == ("failed", "unavailable")
        params = STREAM | {"starting_after": last}
        rest = loose_events((await http.get(f"{PATH}/{response_id}", params=params)).text)
        assert rest[-1]["type"] == "response.failed"
        numbers = [it["sequence_number"] for it in rest]
        assert numbers == list(range(last + 1, last + 1 + len(rest)))


async def test_an_ended_stream_is_given_again_with_its_numbers(
    stateful: Any, eventually: Any
) -> None:
    async with stateful() as w, w.http() as http:
        w.router.plan = lambda _: long_plan(w)
        sent = events_of((await http.post(PATH, json=BODY)).text)
        url = f"{PATH}/{sent[0]['response']['id']}"
        for behind in (None, 0, 9, len(sent) - 2):
            params = STREAM if behind is None else STREAM | {"starting_after": behind}
            rest = loose_events((await http.get(url, params=params)).text)
            assert rest == sent[0 if behind is None else behind + 1 :]
        await eventually(lambda: not w.gateway.stateful.responses.waiting)
        await w.valkey.stop()
        await eventually(lambda: not w.gateway.stateful.responses.is_hot)
        rest = loose_events((await http.get(url, params=STREAM | {"starting_after": 5})).text)
        assert rest == sent[6:], "PostgreSQL has the sizes, too"


async def test_a_stream_of_another_client_is_followed_to_its_end(stateful: Any) -> None:
    async with stateful() as w, w.http() as http, asyncio.TaskGroup() as tasks:
        w.router.plan = lambda _: long_plan(w)
        async with http.stream("POST", PATH, json=BODY) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            while not first.startswith("data: {"):
                first = await anext(lines)
            response_id = json.loads(first.removeprefix("data: "))["response"]["id"]
            params = STREAM | {"starting_after": 3}
            following = tasks.create_task(http.get(f"{PATH}/{response_id}", params=params))
            told = [it async for it in lines if it.startswith("data: {")]
        events = [json.loads(it.removeprefix("data: ")) for it in told]
        rest = loose_events((await following).text)
        assert rest == [it for it in events if it["sequence_number"] > 3]
