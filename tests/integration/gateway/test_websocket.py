"""Responses over a WebSocket, as the official SDK and bare clients see them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType

from gateway.websocket import session
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import KEY, OTHER_KEY
from tests.integration.gateway.test_responses import both, unnamed
from tests.support.response_shapes import ENDS, checked_events
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

HELLO: dict[str, Any] = {"type": "response.create", "model": "tiny", "input": "hello"}
STORED_NOWHERE = HELLO | {"store": False}


class Socket:
    """A client of one socket."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws

    async def ask(self, **fields: Any) -> None:
        await self.ws.send_json(HELLO | fields)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            return json.loads(await self.ws.receive_str())

    async def events(self) -> list[dict[str, Any]]:
        """All events of the next response, or the error in its place."""
        events = [await self.next()]
        while events[-1]["type"] not in (*ENDS, "error"):
            events.append(await self.next())
        return events

    async def answer(self, **fields: Any) -> dict[str, Any]:
        await self.ask(**fields)
        return (await self.events())[-1]

    async def closed(self) -> int:
        """The code that the server closes with."""
        async with asyncio.timeout(60):
            while (message := await self.ws.receive()).type in (WSMsgType.TEXT, WSMsgType.PING):
                pass
        return int(self.ws.close_code or 0) if message.type is not WSMsgType.CLOSE else message.data


@asynccontextmanager
async def socket(w: Any, key: str = KEY) -> AsyncGenerator[Socket]:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.ws_connect(f"{w.base_url}/v1/responses", max_msg_size=0) as ws,
    ):
        yield Socket(ws)


async def test_a_socket_has_the_events_of_a_stream(world: Any) -> None:
    async with world() as w, socket(w) as s:
        whole, streamed = await both(w)
        await s.ask(stream_id="a")
        events = [event | {"stream_id": event.pop("stream_id")} for event in await s.events()]
        assert {event.pop("stream_id") for event in events} == {"a"}
        checked_events(events)
        assert [event["type"] for event in events] == [event["type"] for event in streamed]
        assert unnamed(events[-1]["response"]) == unnamed(whole)
        assert w.router.submits[-1].prompt == w.router.submits[0].prompt


async def test_the_official_sdk_speaks_it(world: Any) -> None:
    async with world() as w, w.sdk() as sdk, sdk.responses.connect() as connection:
        await connection.response.create(model="tiny", input="hello", store=False)
        async for event in connection:
            assert event.type != "error", event
            if event.type == "response.completed":
                assert event.response.output_text == w.text
                first = event.response
                break
        await connection.response.create(
            model="tiny", input="more", store=False, previous_response_id=first.id
        )
        async for event in connection:
            if event.type == "response.completed":
                break
        assert len(w.router.submits[1].prompt) > len(w.router.submits[0].prompt)
        await connection.response.create(model="none", input="x")
        async for event in connection:
            assert event.type == "error"
            assert (event.status, event.error.code) == (404, "model_not_found")
            break


async def test_turns_of_one_stream_follow_each_other_and_streams_run_beside(world: Any) -> None:
    async with world() as w, socket(w) as s:
        for number in range(3):
            await s.ask(stream_id="a", metadata={"n": str(number)})
        await s.ask(stream_id="b")
        await s.ask()
        seen: dict[str | None, list[dict[str, Any]]] = {}
        order: list[str | None] = []
        while sum(e["type"] in ENDS for es in seen.values() for e in es) < 5:
            event = await s.next()
            order.append(event.get("stream_id"))
            seen.setdefault(event.pop("stream_id", None), []).append(event)
        for stream_id in ("b", None):
            checked_events(seen[stream_id])
        ends = [n for n, event in enumerate(seen["a"]) if event["type"] in ENDS]
        starts = [0, *(end + 1 for end in ends[:-1])]
        turns = [seen["a"][a : b + 1] for a, b in zip(starts, ends, strict=True)]
        for number, turn in enumerate(turns):
            checked_events(turn)
            assert turn[-1]["response"]["metadata"] == {"n": str(number)}
        first_end = order.index("a") + ends[0]
        assert {"b", None} <= set(order[:first_end]), "others do not wait for it"


async def test_an_unstored_response_is_continued_over_its_own_socket(stateful: Any) -> None:
    async with stateful() as w, socket(w) as s, socket(w) as other:
        first = (await s.answer(store=False))["response"]
        assert first["store"] is False
        again = await s.answer(store=False, input="more", previous_response_id=first["id"])
        asked = list(w.router.submits[-1].prompt)
        third = await s.answer(input="and", previous_response_id=again["response"]["id"])
        assert list(w.router.submits[-1].prompt)[: len(asked) - 3] == asked[: len(asked) - 3]
        assert third["response"]["store"] is False, "what it continues is stored nowhere"
        error = await other.answer(previous_response_id=first["id"])
        assert (error["status"], error["error"]["param"]) == (404, "previous_response_id")
        assert error["error"]["code"] == "previous_response_not_found"
        async with w.http() as http:
            assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 404


async def test_a_failed_turn_forgets_the_response_that_it_continued(stateful: Any) -> None:
    result = [{"type": "function_call_output", "call_id": "none", "output": "x"}]
    async with stateful() as w, socket(w) as s:
        first = (await s.answer(store=False))["response"]["id"]
        error = await s.answer(store=False, input=result, previous_response_id=first)
        assert (error["status"], error["error"]["param"]) == (400, "input[0].call_id")
        error = await s.answer(store=False, previous_response_id=first)
        assert error["error"]["code"] == "previous_response_not_found"
        assert (await s.answer(store=False))["type"] == "response.completed"
        again = (await s.answer(store=False))["response"]["id"]
        w.router.plan = lambda _: Plan([[1]], wire.Outcome(kind=wire.OUTCOME_KIND_LOST))
        assert (await s.answer(store=False, previous_response_id=again))["type"] in (
            "response.failed",
            "error",
        )
        w.router.plan = w.default_plan
        error = await s.answer(store=False, previous_response_id=again)
        assert error["error"]["code"] == "previous_response_not_found"


async def test_a_stored_response_is_continued_over_any_socket(stateful: Any) -> None:
    async with stateful() as w:
        async with socket(w) as s:
            first = (await s.answer())["response"]
            assert first["store"]
            local = (await s.answer(store=False, previous_response_id=first["id"]))["response"]
            assert not local["store"]
            both_before = await s.answer(input="x", previous_response_id=local["id"])
            assert not both_before["response"]["store"]
            assert len(w.router.submits[-1].prompt) > len(w.router.submits[-2].prompt)
        async with socket(w) as s:
            assert (await s.answer(previous_response_id=first["id"]))["response"]["store"]
        async with socket(w, OTHER_KEY) as s:
            error = await s.answer(previous_response_id=first["id"])
            assert error["error"]["code"] == "previous_response_not_found"


async def test_garbage_is_refused_and_the_socket_goes_on(world: Any) -> None:
    async with world() as w, socket(w) as s:
        for message, param in (
            ("{", None),
            ("[]", None),
            ('{"type": "response.cancel", "stream_id": "a"}', "type"),
            (json.dumps(HELLO | {"inputs": 1, "stream_id": "a"}), "inputs"),
        ):
            await s.ws.send_str(message)
            error = await s.next()
            assert (error["type"], error["status"], error["error"]["param"]) == (
                "error",
                400,
                param,
            )
            assert error.get("stream_id") == ("a" if "stream_id" in message else None)
            assert error["error"]["headers"]["x-request-id"]
        await s.ws.send_bytes(b"{}")
        assert "as text" in (await s.next())["error"]["message"]
        assert (await s.answer())["type"] == "response.completed"
        page = w.gateway.metrics.page().decode().splitlines()
        (refused, answered) = (
            [line for line in page if '"/v1/responses"' in line and word in line]
            for word in ('code="invalid_request"', 'code="stop"')
        )
        assert [line.split()[-1] for line in (*refused, *answered)] == ["5.0", "1.0"]
        assert "gateway_open_sockets 1.0" in page


async def test_an_oversized_message_is_refused_or_ends_the_socket(world: Any) -> None:
    async with world() as w:
        w.router.plan = lambda _: Plan([[1]] * 10_000)
        async with socket(w) as s:

            async def flood() -> None:
                message = json.dumps(HELLO | {"stream_id": "a"})
                for _ in range(10_000):
                    await s.ws.send_str(message)

            refused = 0
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(flood())
                while refused < 10_000 - 1 - 128:
                    event = await s.next()
                    if event["type"] == "error":
                        assert event["error"]["code"] == "rate_limit_concurrency"
                        refused += 1
            assert len(w.router.submits) == 1
        async with socket(w) as s:
            await s.ws.send_str("x" * ((4 << 20) + 8192))
            assert (await s.next())["error"]["code"] == "request_too_large"
            assert await s.closed() == 1009
        async with socket(w) as s:
            s.ws._writer.transport.write(b"\xff\xff garbage that is no frame")
            assert await s.closed() == 1002
        w.router.plan = w.default_plan
        async with socket(w) as s:  # half a frame, and then nothing
            s.ws._writer.transport.write(b"\x81\xfe\x10\x00abcdhalf")
        async with socket(w) as s:
            assert (await s.answer())["type"] == "response.completed"


async def test_keys_and_limits_hold_as_over_http(world: Any) -> None:
    async with world() as w:
        async with w.http() as http:
            assert (await http.get("/v1/responses")).status_code == 426
        for key in ("sk-dead", "sk-none"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                async with socket(w, key):
                    pass
            assert caught.value.status == 401
        async with socket(w, "sk-limited") as s:
            answers = [await s.answer() for _ in range(6)]
            assert [it["type"] for it in answers] == ["response.completed"] * 5 + ["error"]
            error = answers[-1]["error"]
            assert (answers[-1]["status"], error["code"]) == (429, "rate_limit_requests")
            assert int(error["headers"]["retry-after"]) >= 1


async def test_a_client_that_leaves_frees_its_places(world: Any, eventually: Any) -> None:
    async with world() as w:
        w.router.plan = lambda _: Plan([[1]] * 10_000)
        async with socket(w) as s:
            for number in range(3):
                await s.ask(stream_id=str(number))
            while len(w.router.submits) < 3:
                await s.next()
        await eventually(lambda: len(w.router.cancelled) == 3)
        await eventually(lambda: not w.gateway.stateful.sockets.open)


async def test_a_deploy_ends_sockets_when_their_responses_have(world: Any, eventually: Any) -> None:
    async with world() as w, socket(w) as idle, socket(w) as s:
        w.router.plan = lambda _: Plan([[token] for token in w.ids(w.text)] * 20)
        await s.ask(stream_id="a")
        await s.ask(stream_id="a", metadata={"n": "waits"})
        await eventually(lambda: w.router.submits)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(w.gateway.stop())
            assert await idle.closed() == 1012
            events = await s.events()
            assert events[-1]["type"] == "response.incomplete"
            error = await s.next()
            assert (error["error"]["code"], error["stream_id"]) == ("draining", "a")
            assert await s.closed() == 1012
        assert len(w.router.submits) == 1


async def test_a_socket_ends_after_its_hour(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "SOCKET_S", 0.5)
    async with world() as w, socket(w) as s:
        w.router.plan = lambda _: Plan([[token] for token in w.ids(w.text)] * 50)
        await s.ask()
        events = []
        while not events or events[-1]["type"] not in ENDS:
            events.append(await s.next())
        errors = [event for event in events if event["type"] == "error"]
        assert [it["error"]["code"] for it in errors] == ["websocket_connection_limit_reached"]
        assert events[-1]["type"] == "response.incomplete"
        assert await s.closed() == 1001
