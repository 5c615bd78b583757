"""An approved call is made once, whoever sends its approval again."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.gateway.tool_site import BERN, PATH, WEATHER, Tools, ToolWorld

pytestmark = pytest.mark.real


async def _asked(t: ToolWorld, number: int) -> list[dict[str, Any]]:
    """Register a tool whose calls need a yes, let the model call it; return all items until then."""
    url = t.w.feed.objects.server_tools[0].url
    if not number:
        objects = t.w.feed.objects
        del objects.server_tools[0]
        await t.register(id="asked", name="weather", url=url, approval="always")
    t.says(BERN)
    first = await t.whole(tools=[WEATHER])
    assert first["output"][-1]["type"] == "mcp_approval_request"
    yes = {"type": "mcp_approval_response", "approve": True}
    return [
        {"role": "user", "content": "hello"},
        *first["output"],
        yes | {"approval_request_id": first["output"][-1]["id"]},
    ]


async def test_an_approved_call_is_made_once(tools: Tools) -> None:
    async with tools() as t:
        agreed = await _asked(t, 0)
        t.http.barrier = asyncio.Barrier(2)
        t.says("I see.")
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(t.whole(input=agreed, tools=[WEATHER]))
            await t.until(lambda: len(t.http.calls) == 1)
            status, error = await t.refused(input=agreed, tools=[WEATHER])
            assert (status, error["param"]) == (409, "input")
            await t.http.barrier.wait()
        called = first.result()["output"][0]
        assert json.loads(called["output"])["sky"] == "sunny"
        again = (await t.whole(input=agreed, tools=[WEATHER]))["output"][0]
        assert (again["output"], again["error"]) == (called["output"], None)
        # An id that a client made up names no other call.
        other = [
            it | {"arguments": '{"city": "Rome"}'} if "arguments" in it else it for it in agreed
        ]
        t.http.barrier = None
        rome = (await t.whole(input=other, tools=[WEATHER]))["output"][0]
        assert json.loads(rome["output"])["city"] == "Rome"
        assert len(t.http.calls) == 2


async def test_a_call_of_unknown_outcome_is_not_made_again(tools: Tools) -> None:
    async with tools() as t:
        agreed = await _asked(t, 0)
        t.http.barrier = asyncio.Barrier(2)
        t.says("I see.")
        async with t.w.http() as http:
            body = {"model": "tiny", "input": agreed, "tools": [WEATHER], "store": False}
            async with asyncio.TaskGroup() as tasks:
                leaving = tasks.create_task(http.post(PATH, json=body))
                await t.until(lambda: len(t.http.calls) == 1)
                leaving.cancel()

        async def again() -> dict[str, Any] | None:
            async with t.w.http() as http:
                answer = await http.post(PATH, json=body)
            return None if answer.status_code == 409 else answer.json()

        found = None
        while found is None:  # until the gateway knows that the client has left
            found = await again()
        assert "is unknown" in found["output"][0]["error"]
        assert len(t.http.calls) == 1
        # With one that may be repeated there is no doubt.
        t.http.barrier = None
        t.w.feed.objects.server_tools[-1].is_idempotent = True
        t.w.feed.replace(t.w.feed.objects)
        known = lambda: t.w.gateway.watcher.state.server_tools["asked"]  # noqa: E731
        await t.until(lambda: known().is_idempotent)
        agreed = await _asked(t, 1)
        t.says("I see.")
        assert (await t.whole(input=agreed, tools=[WEATHER]))["output"][0]["error"] is None
        assert len(t.http.calls) == 2


async def test_without_valkey_no_approved_call_is_made(tools: Tools) -> None:
    async with tools() as t:
        agreed = await _asked(t, 0)
        await t.w.valkey.stop()
        await t.until(lambda: not t.w.gateway.stateful.responses.is_hot)
        status, error = await t.refused(input=agreed, tools=[WEATHER])
        assert (status, error["code"]) == (503, "unavailable")
        assert not t.http.calls
