"""Conversations: items that are kept in one, and responses that belong to one."""

from typing import Any

import openai
import pytest

from gateway.endpoints.response_answers import ConversationObject, ResponseObject
from tests.integration.gateway.conftest import OTHER_KEY
from tests.integration.gateway.test_background_responses import until_ended
from tests.integration.gateway.test_response_store import prompt_of

pytestmark = pytest.mark.real

PATH = "/v1/conversations"


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def texts(items: Any) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def test_a_life_of_a_conversation(stateful: Any) -> None:
    async with stateful() as w, w.http() as http:
        body = {"items": [said("one"), said("two", "assistant")], "metadata": {"a": "b"}}
        made = (await http.post(PATH, json=body)).json()
        ConversationObject.model_validate(made)
        assert made["metadata"] == {"a": "b"}
        url = f"{PATH}/{made['id']}"
        assert (await http.get(url)).json() == made
        changed = (await http.post(url, json={"metadata": {"c": "d"}})).json()
        assert changed == made | {"metadata": {"c": "d"}}
        added = (await http.post(f"{url}/items", json={"items": [said("three")]})).json()
        assert texts(added["data"]) == ["three"]
        listed = (await http.get(f"{url}/items", params={"order": "asc"})).json()
        assert texts(listed["data"]) == ["one", "two", "three"]
        page = (await http.get(f"{url}/items", params={"limit": 2})).json()
        assert (texts(page["data"]), page["has_more"]) == (["three", "two"], True)
        rest = (await http.get(f"{url}/items", params={"after": page["last_id"]})).json()
        assert (texts(rest["data"]), rest["has_more"]) == (["one"], False)
        item = listed["data"][1]
        assert (await http.get(f"{url}/items/{item['id']}")).json() == item
        assert (await http.delete(f"{url}/items/{item['id']}")).json() == changed
        assert (await http.get(f"{url}/items/{item['id']}")).status_code == 404
        gone = (await http.delete(url)).json()
        assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        for path in (url, f"{url}/items", f"{url}/items/{item['id']}"):
            assert (await http.get(path)).status_code == 404


async def test_a_response_belongs_to_one(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        w.text = "Well."
        conversation = await sdk.conversations.create(items=[said("My name is Ada.")])
        first = await sdk.responses.create(
            model="tiny", input="hello", conversation=conversation.id
        )
        assert first.conversation.id == conversation.id
        ResponseObject.model_validate((await http.get(f"/v1/responses/{first.id}")).json())
        stream = await sdk.responses.create(
            model="tiny", input="and?", conversation={"id": conversation.id}, stream=True
        )
        assert [event async for event in stream][-1].response.store
        body = {"model": "tiny", "input": "so?", "conversation": conversation.id}
        queued = (await http.post("/v1/responses", json=body | {"background": True})).json()
        assert (await until_ended(http, queued["id"]))["status"] == "completed"
        await sdk.responses.create(model="tiny", input="end", conversation=conversation.id)
        items = await sdk.conversations.items.list(conversation.id, order="asc")
        said_in_all = [item.content[0].text async for item in items]
        turns = ["hello", "Well.", "and?", "Well.", "so?", "Well.", "end", "Well."]
        assert said_in_all == ["My name is Ada.", *turns]
        prompt = prompt_of(w)
        assert [prompt.count(text) for text in ("Ada", "and?", "so?", "Well.")] == [1, 1, 1, 3]
        sessions = {submit.session_hash for submit in w.router.submits}
        assert len(sessions) == 1
        await sdk.conversations.delete(conversation.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.responses.create(model="tiny", input="x", conversation=conversation.id)
        assert caught.value.param in ("conversation", None)


async def test_parameters_that_contradict_each_other_are_refused(stateful: Any) -> None:
    async with stateful() as w, w.http() as http:
        made = (await http.post(PATH, json={})).json()
        body = {"model": "tiny", "input": "x", "conversation": made["id"]}
        first = (await http.post("/v1/responses", json=body)).json()
        for wrong, param in (
            ({"previous_response_id": first["id"]}, "conversation"),
            ({"store": False}, "store"),
            ({"conversation": {"id": made["id"], "z": 1}}, "conversation.z"),
        ):
            refused = await http.post("/v1/responses", json=body | wrong)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == param
        bare = {"model": "tiny", "input": "x", "previous_response_id": first["id"]}
        refused = await http.post("/v1/responses", json=bare)
        assert refused.status_code == 400
        assert made["id"] in refused.json()["error"]["message"]
        url = f"{PATH}/{made['id']}"
        for path, sent in (
            (url, {}),
            (f"{url}/items", {"items": []}),
            (f"{url}/items", {"items": [said("x")] * 21}),
            (f"{url}/items", {"items": [{"type": "item_reference", "id": "x"}]}),
            (PATH, {"metadata": {"a": 1}}),
        ):
            assert (await http.post(path, json=sent)).status_code == 400, (path, sent)
        for path in (f"{url}/things", f"{url}/items/a/b"):
            assert (await http.get(path)).status_code == 404
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        await http.post(f"{url}/items", json={"items": [call]})
        refused = await http.post("/v1/responses", json=body)
        assert refused.status_code == 400
        assert "No tool output found" in refused.json()["error"]["message"]


async def test_items_are_referred_to(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http, w.http(OTHER_KEY) as foreign:
        w.text = "Well."
        first = await sdk.responses.create(model="tiny", input="hello")
        asked = (await sdk.responses.input_items.list(first.id)).data[0].id
        ids = [asked, first.output[0].id]
        items = [{"type": "item_reference", "id": it} for it in ids] + [said("and?")]
        second = await http.post("/v1/responses", json={"model": "tiny", "input": items})
        assert second.status_code == 200, second.text
        assert [prompt_of(w).count(text) for text in ("hello", "Well.", "and?")] == [1, 1, 1]
        kept = await sdk.responses.input_items.list(second.json()["id"], order="asc")
        assert [item.content[0].text for item in kept.data] == ["hello", "Well.", "and?"]
        for client, wrong in ((foreign, ids[0]), (http, "msg_1"), (http, ids[0][:-2] + "77")):
            body = {"model": "tiny", "input": [{"type": "item_reference", "id": wrong}]}
            missing = await client.post("/v1/responses", json=body)
            assert missing.status_code == 404
            assert missing.json()["error"]["param"] == "input[0].id"


async def test_no_other_tenant_sees_a_conversation(stateful: Any) -> None:
    async with stateful() as w, w.http() as http, w.http(OTHER_KEY) as foreign:
        made = (await http.post(PATH, json={"items": [said("mine")]})).json()
        item = (await http.get(f"{PATH}/{made['id']}/items")).json()["data"][0]
        told = set()
        for conversation_id in (made["id"], made["id"][:-1] + "0", "conv_1"):
            url = f"{PATH}/{conversation_id}"
            for answer in (
                await foreign.get(url),
                await foreign.post(url, json={"metadata": {}}),
                await foreign.delete(url),
                await foreign.get(f"{url}/items"),
                await foreign.post(f"{url}/items", json={"items": [said("x")]}),
                await foreign.get(f"{url}/items/{item['id']}"),
                await foreign.delete(f"{url}/items/{item['id']}"),
                await foreign.post(
                    "/v1/responses",
                    json={"model": "tiny", "input": "x", "conversation": conversation_id},
                ),
            ):
                assert answer.status_code == 404, answer.text
                told.add(answer.json()["error"]["message"].replace(conversation_id, "ID"))
        assert len(told) == 1
        assert not w.router.submits
        assert (await http.get(f"{PATH}/{made['id']}")).json() == made


async def test_without_postgresql_it_is_told(stateful: Any, service: Any) -> None:
    async with stateful() as w, w.http() as http:
        made = (await http.post(PATH, json={})).json()
        service.records.is_away = True
        body = {"model": "tiny", "input": "x", "conversation": made["id"]}
        for answer in (
            await http.get(f"{PATH}/{made['id']}"),
            await http.post(PATH, json={}),
            await http.post("/v1/responses", json=body),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert (await http.post("/v1/responses", json=body | {"conversation": None})).is_success
