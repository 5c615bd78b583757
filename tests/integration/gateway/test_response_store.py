"""Responses that are continued, shown and deleted: on real Valkey, and PostgreSQL behind its service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.app import running_gateway
from gateway.endpoints.response_answers import ResponseObject
from gateway.responses.hot_store import key_of
from gateway.responses.store import ResponseStore
from sluice.process import ChildProcess, free_port
from tests.integration.gateway.conftest import KEY, LIMITED_KEY, OTHER_KEY, Service
from tests.integration.gateway.test_responses import CALLING, FUNCTION, STOP
from tests.support.response_shapes import events_of
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

PATH = "/v1/responses"
ROUTES = [
    ("GET", "{id}", None),
    ("DELETE", "{id}", None),
    ("GET", "{id}/input_items", None),
    ("GET", "{id}?stream=true", None),
    ("POST", "{id}/cancel", None),
    ("POST", "", {"previous_response_id": "{id}"}),
    ("POST", "input_tokens", {"previous_response_id": "{id}"}),
    ("POST", "compact", {"previous_response_id": "{id}"}),
]


def prompt_of(w: Any, index: int = -1) -> str:
    return w.tokenizer.decode(list(w.router.submits[index].prompt), skip_special_tokens=False)


async def created(sdk: openai.AsyncOpenAI, **body: Any) -> Any:
    return await sdk.responses.create(**({"model": "tiny", "input": "hello"} | body))


async def until_status(http: httpx.AsyncClient, response_id: str, status: int) -> httpx.Response:
    """Ask for a response until the answer has a status; return it."""
    async with asyncio.timeout(60):
        while True:
            found = await http.get(f"{PATH}/{response_id}")
            if found.status_code == status:
                return found
            await asyncio.sleep(0.02)


@asynccontextmanager
async def second_gateway(w: Any, home: Path, eventually: Any) -> AsyncIterator[str]:
    port = free_port()
    changes = {"instance_id": "two", "http_address": f"127.0.0.1:{port}", "state_dir": home}
    async with running_gateway(w.settings.model_copy(update=changes)) as gateway:
        await eventually(
            lambda: not gateway.not_ready_because() and gateway.stateful.responses.can_keep
        )
        yield f"http://127.0.0.1:{port}/v1"


async def test_a_chain_equals_a_chat_of_its_turns(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk:
        w.text = "Well."
        first = await created(sdk, instructions="be brief")
        assert first.store
        second = await created(sdk, input="and then?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        third = await created(sdk, input="so?", previous_response_id=second.id, instructions="now")
        assert third.status == "completed"
        await sdk.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": "now"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "Well."},
                {"role": "user", "content": "and then?"},
                {"role": "assistant", "content": "Well."},
                {"role": "user", "content": "so?"},
            ],
        )
        assert w.router.submits[-1].prompt == w.router.submits[-2].prompt
        assert len({submit.session_hash for submit in w.router.submits[:3]}) == 1
        assert "be brief" not in prompt_of(w, 1)
        counted = await sdk.responses.input_tokens.count(
            model="tiny", input="so?", previous_response_id=second.id, instructions="now"
        )
        assert counted.input_tokens == third.usage.input_tokens
        shown = await sdk.responses.retrieve(second.id)
        assert shown == second
        items = await sdk.responses.input_items.list(second.id)
        assert [item.content[0].text for item in items.data] == ["and then?"]


async def test_a_call_is_answered_in_the_next_turn(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        steps = [[token] for token in w.ids(CALLING)]
        w.router.plan = lambda _: Plan(steps, STOP)
        stream = await http.post(
            PATH, json={"model": "tiny", "input": "x", "tools": [FUNCTION], "stream": True}
        )
        first = events_of(stream.text)[-1]["response"]
        assert first["store"]
        w.router.plan = w.default_plan
        with pytest.raises(openai.BadRequestError) as caught:
            await created(sdk, previous_response_id=first["id"])
        assert caught.value.param == "input"
        call_id = first["output"][1]["call_id"]
        assert call_id in caught.value.message
        result: Any = {"type": "function_call_output", "call_id": call_id, "output": "7"}
        with pytest.raises(openai.BadRequestError) as caught:
            await created(sdk, input=[result])
        assert caught.value.param == "input[0].call_id"
        again = await created(sdk, input=[result], previous_response_id=first["id"])
        assert again.output_text == w.text
        assert "I call.<|im_end|>" in prompt_of(w)
        assert "7<|im_end|>" in prompt_of(w)


async def test_a_stored_response_can_be_continued_at_once_at_any_gateway(
    stateful: Any, service: Service, tmp_path: Path, eventually: Any
) -> None:
    async with stateful() as w, w.sdk() as sdk:
        w.text = "Well."
        async with (
            second_gateway(w, tmp_path / "two", eventually) as other_url,
            openai.AsyncOpenAI(base_url=other_url, api_key=KEY, max_retries=0) as other,
        ):
            last = None
            for turn in range(6):
                here = (sdk, other)[turn % 2]
                more = {} if last is None else {"previous_response_id": last.id}
                async with here.responses.stream(model="tiny", input=f"turn {turn}", **more) as st:
                    _ = [event async for event in st]
                    last = await st.get_final_response()
                assert last.store
            assert prompt_of(w).count("Well.") == 5
            await eventually(lambda: service.kept >= 6)
            await eventually(lambda: not w.gateway.stateful.responses.waiting)
        await w.valkey.stop()  # what it had is gone: PostgreSQL has all
        again = await created(sdk, input="more", previous_response_id=last.id)
        assert prompt_of(w).count("Well.") == 6
        assert again.store, "PostgreSQL alone keeps it, in time"


async def test_no_other_tenant_reads_continues_or_deletes_a_response(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http(OTHER_KEY) as foreign:
        mine = await created(sdk)
        forged = mine.id[:-1] + ("0" if mine.id[-1] != "0" else "1")
        submits = len(w.router.submits)
        texts = set()
        for method, path, body in ROUTES:
            for response_id in (mine.id, forged, "resp_123"):
                url = f"{PATH}/{path}".rstrip("/").replace("{id}", response_id)
                content = None
                if body is not None:
                    content = {"model": "tiny", "input": "x", "previous_response_id": response_id}
                answer = await foreign.request(method, url, json=content)
                assert answer.status_code == 404, (method, path, answer.text)
                message = answer.json()["error"]["message"]
                texts.add(message.replace(response_id, "ID"))
        assert len(texts) == 1, "what is another's is told as what is missing"
        assert len(w.router.submits) == submits
        assert (await sdk.responses.retrieve(mine.id)).id == mine.id


async def test_deleted_is_gone(
    stateful: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.responses.store._ONLY_HOT_MS", 0)  # PostgreSQL has all
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        first = await created(sdk)
        second = await created(sdk, previous_response_id=first.id)
        await eventually(lambda: not w.gateway.stateful.responses.waiting)
        deleted = await http.delete(f"{PATH}/{first.id}")
        assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
        for _ in "ab":
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await created(sdk, previous_response_id=second.id)
            assert caught.value.param == "previous_response_id"
            await w.valkey.stop()  # nor has PostgreSQL kept it
        assert (await http.delete(f"{PATH}/{first.id}")).status_code == 404


async def test_a_response_without_store_says_so(
    stateful: Any, service: Service, eventually: Any
) -> None:
    async with stateful() as w, w.sdk() as sdk:
        kept = await created(sdk)
        unkept = await created(sdk, store=False)
        assert not unkept.store
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(unkept.id)
        await eventually(lambda: not w.gateway.stateful.responses.waiting)
        service.is_away = True
        await eventually(lambda: not w.gateway.stateful.responses.can_keep)
        answer = await created(sdk, previous_response_id=kept.id)
        assert not answer.store, "PostgreSQL is away: told, and continued from Valkey"
        await w.valkey.stop()
        await eventually(lambda: not w.gateway.valkey.is_connected)
        with pytest.raises(openai.InternalServerError) as caught:
            await created(sdk, previous_response_id=kept.id)
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert (await created(sdk)).status == "completed"
        service.is_away = False
        await eventually(lambda: w.gateway.stateful.responses.can_keep)
        assert (await sdk.responses.retrieve(kept.id)).id == kept.id


async def test_one_that_is_under_way_is_a_conflict(stateful: Any, eventually: Any) -> None:
    async with stateful(response_grace_s=0) as w, w.sdk() as sdk, w.http() as http:
        w.router.plan = lambda _: Plan([[65]] * 1_000_000, None)
        stream = await created(sdk, stream=True)
        first = await anext(aiter(stream))
        response_id = first.response.id
        found = (await until_status(http, response_id, 200)).json()
        ResponseObject.model_validate(found)
        assert (found["status"], found["store"]) == ("in_progress", True)
        body = {"model": "tiny", "input": "x", "previous_response_id": response_id}
        conflict = await http.post(PATH, json=body)
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict")
        assert response_id in conflict.json()["error"]["message"]
        assert (await http.delete(f"{PATH}/{response_id}")).status_code == 409
        await stream.close()
        await until_status(http, response_id, 404)


@asynccontextmanager
async def valkey_again(w: Any, eventually: Any) -> AsyncIterator[None]:
    """Start Valkey anew, without its data, at the port of the former one."""
    await w.valkey.stop()
    await eventually(lambda: not w.gateway.stateful.responses.is_hot)
    again = await ChildProcess.start(w.valkey.spec)
    try:
        await eventually(lambda: w.gateway.stateful.responses.is_hot)
        yield
    finally:
        await again.stop()


async def test_waiting_responses_of_a_killed_gateway_survive_valkey_too(
    stateful: Any, service: Service, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway is killed, then Valkey, and PostgreSQL is away all the time."""
    monkeypatch.setattr("gateway.responses.store._SILENT_MS", 0)
    async with stateful() as w, w.sdk() as sdk:
        store = w.gateway.stateful.responses
        with monkeypatch.context() as killed:
            killed.setattr(store._durable, "offer", lambda stored: None)  # it dies before
            answer = await created(sdk)
            assert answer.store
            service.is_away = True
        await eventually(lambda: store.waiting)
        async with valkey_again(w, eventually):
            assert (await sdk.responses.retrieve(answer.id)).id == answer.id
            service.is_away = False
            await eventually(lambda: service.kept == 1 and not store.waiting)


async def test_a_valkey_without_its_data_gets_waiting_responses_again(
    stateful: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valkey is killed, then the gateway, before PostgreSQL has the response."""
    async with stateful() as w, w.sdk() as sdk:
        store = w.gateway.stateful.responses
        monkeypatch.setattr("gateway.responses.durable._GATHER_S", 3600.0)
        answer = await created(sdk)
        assert answer.store
        assert store.waiting == 1

        async with valkey_again(w, eventually):
            async with asyncio.timeout(60):
                while not (await store._hot.find([answer.id]))[0].is_stored:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            store._durable._forget(answer.id)  # the gateway is killed
            assert (await sdk.responses.retrieve(answer.id)).id == answer.id


async def test_marks_of_many_responses_under_way_are_all_renewed(stateful: Any) -> None:
    async with stateful() as w:
        store = w.gateway.stateful.responses
        ids = [f"resp_{number}" for number in range(600)]
        keys = [key_of(it) for it in ids]
        await store._hot.run(
            b"for _, key in ipairs(KEYS) do redis.call('SET', key, '+{}', 'PX', 20000) end",
            keys,
            (),
        )
        store._under_way.update(ids)
        await store._renew_marks()
        told = b"local left = {} for at, key in ipairs(KEYS) do"
        told += b" left[at] = redis.call('PTTL', key) end return left"
        assert min(await store._hot.run(told, keys, ())) > 20_000


async def test_a_young_response_is_not_reported_as_missing_without_valkey(
    stateful: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stateful() as w, w.sdk() as sdk:
        store = w.gateway.stateful.responses
        monkeypatch.setattr(store._durable, "offer", lambda stored: None)  # another gateway's
        answer = await created(sdk)
        assert answer.store
        await w.valkey.stop()
        await eventually(lambda: not store.is_hot)
        for attempt in (
            sdk.responses.retrieve(answer.id),
            sdk.responses.input_items.list(answer.id),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await attempt
            assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        with pytest.raises(openai.InternalServerError):
            await created(sdk, previous_response_id=answer.id)
        monkeypatch.setattr("gateway.responses.store._ONLY_HOT_MS", 0)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(answer.id)


async def test_a_response_that_is_too_large_is_not_stored_and_says_so(
    stateful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stateful() as w, w.sdk() as sdk:
        monkeypatch.setattr("gateway.responses.store.RECORD_BYTES_MAX", 4096)
        large = await created(sdk, metadata={str(it): "a" * 512 for it in range(9)})
        assert (large.status, large.store) == ("completed", False)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(large.id)
        assert (await created(sdk)).store


async def test_a_chain_beyond_the_largest_number_of_turns_is_refused(
    stateful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.responses.context.TURNS_MAX", 2)
    async with stateful() as w, w.sdk() as sdk:
        first = await created(sdk)
        second = await created(sdk, previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await created(sdk, previous_response_id=second.id)
        assert caught.value.param == "previous_response_id"


async def test_the_phase_of_a_message_is_stored_and_shown(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        said: Any = {"role": "assistant", "content": "I look.", "phase": "commentary"}
        items: Any = [{"role": "user", "content": "hello"}, said, {"role": "user", "content": "?"}]
        answer = await created(sdk, input=items)
        shown = (await http.get(f"{PATH}/{answer.id}/input_items", params={"order": "asc"})).json()
        assert [it.get("phase") for it in shown["data"]] == [None, "commentary", None]
        with pytest.raises(openai.BadRequestError) as caught:
            await created(sdk, input=[said | {"phase": "other"}])
        assert caught.value.param == "input[0].phase"


async def test_the_sdk_names_included_parts_of_answers(stateful: Any) -> None:
    async with stateful() as w, w.sdk() as sdk, w.http() as http:
        made = await created(sdk, include=["message.output_text.logprobs"])
        for names in (["message.output_text.logprobs"], ["reasoning.encrypted_content"]):
            shown = await sdk.responses.retrieve(made.id, include=names)
            assert shown == made
            assert shown.output[0].content[0].logprobs
            items = await sdk.responses.input_items.list(made.id, include=names)
            assert len(items.data) == 1
        for path in (made.id, f"{made.id}/input_items"):
            for name in ("include", "include[]"):
                wanted = {name: "file_search_call.results"}
                refused = await http.get(f"{PATH}/{path}", params=wanted)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")
        hidden = {"stream": "true", "include_obfuscation": "true"}
        refused = await http.get(f"{PATH}/{made.id}", params=hidden)
        assert refused.json()["error"]["param"] == "include_obfuscation"


async def test_pages_of_input_items(stateful: Any) -> None:
    async with stateful() as w, w.http() as http:
        items = [{"role": "user", "content": f"item {number}"} for number in range(5)]
        answer = (await http.post(PATH, json={"model": "tiny", "input": items})).json()
        url = f"{PATH}/{answer['id']}/input_items"
        page = (await http.get(url, params={"limit": 2, "order": "asc"})).json()
        assert [it["content"][0]["text"] for it in page["data"]] == ["item 0", "item 1"]
        assert (page["object"], page["has_more"]) == ("list", True)
        assert all(it["id"] and it["status"] == "completed" for it in page["data"])
        rest = (await http.get(url, params={"after": page["last_id"], "order": "asc"})).json()
        assert [it["content"][0]["text"] for it in rest["data"]] == ["item 2", "item 3", "item 4"]
        assert not rest["has_more"]
        newest = (await http.get(url)).json()
        assert newest["data"][0]["content"][0]["text"] == "item 4"
        for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"z": "1"}):
            assert (await http.get(url, params=wrong)).status_code == 400
        for path in ("", f"{answer['id']}/output"):
            assert (await http.get(f"{PATH}/{path}")).status_code in (404, 405)


async def test_routes_need_a_key(stateful: Any) -> None:
    async with stateful() as w, httpx.AsyncClient(base_url=w.base_url) as http:
        for method, path, body in ROUTES:
            assert (
                await http.request(method, f"{PATH}/{path}".rstrip("/"), json=body)
            ).status_code == 401


async def test_turns_are_read_for_callers_within_their_limits_only(
    stateful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, chain = list[str](), ResponseStore.chain

    async def noted(store: ResponseStore, tenant_id: str, response_id: str, *more: Any) -> Any:
        read.append(response_id)
        return await chain(store, tenant_id, response_id, *more)

    monkeypatch.setattr(ResponseStore, "chain", noted)
    async with stateful() as w, w.http(LIMITED_KEY) as http:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 1}
        first = (await http.post(PATH, json=body)).json()
        again = await http.post(PATH, json=body | {"previous_response_id": first["id"]})
        assert again.headers["x-ratelimit-remaining-requests"] == "3", "it was counted once"
        paths = [PATH, f"{PATH}/input_tokens", f"{PATH}/compact"] * 3
        refused = body | {"previous_response_id": first["id"][:-4] + "0000"}
        del refused["max_output_tokens"]
        codes = [(await http.post(it, json=refused)).status_code for it in paths]
        assert codes[:3] == [404] * 3
        assert codes[4:] == [429] * 5, "refusals were free"
        assert len(read) == 1 + codes.count(404)
