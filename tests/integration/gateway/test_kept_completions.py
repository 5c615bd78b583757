"""Chat completions that are stored: listed, shown, changed and deleted."""

from typing import Any

import pytest

from tests.integration.gateway.conftest import OTHER_KEY
from tests.integration.gateway.test_responses import CALLING, STOP
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "store": True,
}
TOOL: Any = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


async def test_a_life_of_a_completion(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http, w.http(OTHER_KEY) as foreign:
        first = await sdk.chat.completions.create(**BODY, metadata={"a": "b"})
        unkept = await sdk.chat.completions.create(**BODY | {"store": False})
        shown = await sdk.chat.completions.retrieve(first.id)
        assert shown.choices == first.choices
        assert shown.usage == first.usage
        assert (await http.get(f"{PATH}/{unkept.id}")).status_code == 404
        second = (await http.post(PATH, json=BODY)).json()
        listed = await sdk.chat.completions.list()
        assert [it.id for it in listed.data] == [first.id, second["id"]]
        some = (await http.get(PATH, params={"metadata[a]": "b"})).json()
        assert [it["id"] for it in some["data"]] == [first.id]
        assert not (await http.get(PATH, params={"model": "other"})).json()["data"]
        page = (await http.get(PATH, params={"limit": 1, "order": "desc"})).json()
        assert ([it["id"] for it in page["data"]], page["has_more"]) == ([second["id"]], True)
        changed = await sdk.chat.completions.update(first.id, metadata={"c": "d"})
        assert changed.metadata == {"c": "d"}
        messages = await sdk.chat.completions.messages.list(first.id)
        assert [(it.role, it.content) for it in messages.data] == [("user", "hello")]
        for method, path, body in (
            ("GET", first.id, None),
            ("GET", f"{first.id}/messages", None),
            ("POST", first.id, {"metadata": {}}),
            ("DELETE", first.id, None),
        ):
            answer = await foreign.request(method, f"{PATH}/{path}", json=body)
            assert answer.status_code == 404, (method, path)
        assert not (await foreign.get(PATH)).json()["data"]
        deleted = await sdk.chat.completions.delete(first.id)
        assert (deleted.id, deleted.deleted) == (first.id, True)
        assert (await http.get(f"{PATH}/{first.id}")).status_code == 404
        for wrong in ({"limit": 0}, {"z": 1}, {"metadata": "x"}):
            assert (await http.get(PATH, params=wrong)).status_code == 400


async def test_a_stream_is_stored_as_it_was_told(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk:
        told, call_ids, completion_id = "", list[str](), ""
        steps = [[token] for token in w.ids(CALLING)]
        w.router.plan = lambda _: Plan(steps, STOP)
        stream = await sdk.chat.completions.create(**BODY, tools=[TOOL], stream=True)
        async for chunk in stream:
            completion_id = chunk.id
            delta = chunk.choices[0].delta
            told += delta.content or ""
            call_ids += [call.id for call in delta.tool_calls or () if call.id]
        shown = await sdk.chat.completions.retrieve(completion_id)
        (choice,) = shown.choices
        assert (choice.message.content, choice.finish_reason) == (told, "tool_calls")
        assert [call.id for call in choice.message.tool_calls or ()] == call_ids
        assert len(call_ids) == 1


async def test_without_postgresql_it_is_stored_later(stateful: Any, service: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        service.records.is_away = True
        first = await sdk.chat.completions.create(**BODY)
        assert first.choices
        assert (await http.get(f"{PATH}/{first.id}")).status_code == 503
        service.records.is_away = False
        await w.gateway.stateful.completions.keeper.settled(60)
        assert (await sdk.chat.completions.retrieve(first.id)).choices == first.choices
