"""Answers and refusals as the official SDK and plain HTTP clients see them."""

import asyncio
import json

import openai
import pytest

from gateway.dispatch.streamed import StreamedGeneration
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]


async def test_a_whole_answer(world) -> None:
    async with world() as w, w.sdk() as sdk:
        answer = await sdk.chat.completions.create(model="tiny", messages=HELLO)
        assert answer.choices[0].message.content == w.text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model == "tiny"
        assert answer.usage.completion_tokens == len(w.ids(w.text)) + 1
        assert answer.usage.prompt_tokens == len(w.router.submits[0].prompt)
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        prompt = w.tokenizer.decode(list(w.router.submits[0].prompt), skip_special_tokens=False)
        assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("step", [1, 3])
async def test_a_stream_adds_up_and_ends_as_openai_does(world, step: int) -> None:
    async with world() as w, w.sdk() as sdk:
        ids = w.ids(w.text)
        steps = [ids[i : i + step] for i in range(0, len(ids), step)]
        w.router.plan = lambda _: Plan(steps)
        stream = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        assert deltas[0].role == "assistant"
        assert "".join(d.content or "" for d in deltas) == w.text
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == len(ids)
        assert all(c.usage is None for c in chunks[:-1])
        assert len({(c.id, c.created, c.model) for c in chunks}) == 1


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
@pytest.mark.parametrize("step", [1, 3])
async def test_every_chunk_tells_the_usage_so_far_when_asked(
    world, endpoint: str, step: int
) -> None:
    prompt = {"messages": HELLO} if endpoint.startswith("chat") else {"prompt": "hello"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with world() as w, w.http() as http:
        ids = w.ids(w.text)
        steps = [ids[i : i + step] for i in range(0, len(ids), step)]
        w.router.plan = lambda _: Plan(steps)
        body = {"model": "tiny", "stream": True, "stream_options": options} | prompt
        response = await http.post(f"/v1/{endpoint}", json=body)
        events = [json.loads(e[6:]) for e in response.text.split("\n\n")[:-2]]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert len(set(counts)) > len(steps) // 2
        assert counts[-1] == len(ids)
        for event in events:
            usage = event["usage"]
            assert usage["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_a_stream_with_an_interval_says_the_same(world) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    async with world() as w, w.http() as http:
        answer = await http.post(
            "/v1/chat/completions", json=body | {"stream_options": {"interval_ms": 30}}
        )
        events = [json.loads(e[6:]) for e in answer.text.split("\n\n")[:-2]]
        content = [e["choices"][0]["delta"].get("content", "") for e in events]
        assert "".join(content) == w.text
        assert answer.text.endswith("data: [DONE]\n\n")
        refused = await http.post(
            "/v1/chat/completions", json=body | {"stream_options": {"interval_ms": 5001}}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream_options.interval_ms"


async def test_a_key_and_a_tenant_set_the_gathering_time_of_streams(
    world, eventually, monkeypatch
) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    waits: list[float] = []
    write_every = StreamedGeneration.write_every

    def noted(stream: StreamedGeneration, interval_s: float) -> None:
        waits.append(interval_s)
        write_every(stream, interval_s)

    monkeypatch.setattr(StreamedGeneration, "write_every", noted)
    async with world() as w, w.http() as http:
        objects = w.feed.objects
        objects.tenants[0].gather_ms = 50
        objects.keys[0].interval_ms = 30
        w.feed.replace(objects)
        tenants = lambda: w.gateway.watcher.state.tenants  # noqa: E731
        await eventually(lambda: tenants()["one"].gather_ms)
        for options in ({}, {"stream_options": {"interval_ms": 0}}):
            answer = await http.post("/v1/chat/completions", json=body | options)
            events = [json.loads(e[6:])["choices"][0] for e in answer.text.split("\n\n")[:-2]]
            assert "".join(e["delta"].get("content", "") for e in events) == w.text
        assert waits == [0.03, 0.0]
        function = {"name": "get", "parameters": {"type": "object"}}
        w.text = '<tool_call>\n{"name": "get", "arguments": {"a": "one two"}}\n</tool_call>'
        tools = {"tools": [{"type": "function", "function": function}]}
        answer = await http.post("/v1/chat/completions", json=body | tools)
        events = [json.loads(e[6:])["choices"][0]["delta"] for e in answer.text.split("\n\n")[:-2]]
        calls = [call["function"] for event in events for call in event.get("tool_calls", ())]
        assert "".join(call["arguments"] for call in calls) == '{"a": "one two"}'


async def test_the_paths_that_load_generators_ask_first(world) -> None:
    async with world() as w, w.http() as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/version")).json()["version"]
        assert "gateway_" in (await http.get("/metrics")).text


async def test_bytes_of_a_stream(world) -> None:
    async with world() as w, w.http() as http:
        response = await http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": True}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"].startswith("req_")
        events = response.text.split("\n\n")
        assert events[-1] == ""
        assert events[-2] == "data: [DONE]"
        for event in events[:-2]:
            assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


async def test_http_1_0_gets_the_same_stream_without_frames(world) -> None:
    async with world() as w:
        reader, writer = await w.raw({"model": "tiny", "messages": HELLO, "stream": True}, "1.0")
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head
        events = rest.decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        text = "".join(
            json.loads(e[6:])["choices"][0]["delta"].get("content", "") for e in events[:-2]
        )
        assert text == w.text


async def test_stop_strings_cut_exactly_and_cancel_upstream(world, eventually) -> None:
    async with world() as w, w.sdk() as sdk:
        ids = w.ids(w.text)
        w.router.plan = lambda _: Plan([[i] for i in ids] + [[]] * 100_000)
        for is_stream in (False, True):
            answer = await sdk.chat.completions.create(
                model="tiny", messages=HELLO, stop=["router owns", "zzz"], stream=is_stream
            )
            if is_stream:
                chunks = [chunk async for chunk in answer]
                text = "".join(c.choices[0].delta.content or "" for c in chunks)
                reason = chunks[-1].choices[0].finish_reason
            else:
                text = answer.choices[0].message.content
                reason = answer.choices[0].finish_reason
            assert (text, reason) == (w.text[: w.text.index("router owns")], "stop")
        await eventually(lambda: len(w.router.cancelled) == 2)


async def test_a_client_that_leaves_is_cancelled_upstream(world, eventually) -> None:
    async with world() as w, w.sdk() as sdk:
        w.router.plan = lambda _: Plan([[65]] * 1_000_000, None)
        stream = await sdk.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        await anext(aiter(stream))
        assert w.gateway.dispatcher.open == 1
        await stream.close()
        await eventually(lambda: w.router.cancelled)
        await eventually(lambda: w.gateway.dispatcher.open == 0)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(sdk.chat.completions.create(model="tiny", messages=HELLO))
            await eventually(lambda: len(w.router.submits) == 2)
            call.cancel()
        await eventually(lambda: len(w.router.cancelled) == 2)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_reader_that_does_not_read_is_cut(world, eventually, n: int) -> None:
    async with world() as w:
        # The kernel takes megabytes before anybody notices.
        w.router.plan = lambda _: Plan([[65, 66, 67] * 4000] * 1_000_000, None)
        body = {"model": "tiny", "messages": HELLO, "stream": True, "n": n}
        _, writer = await w.raw(body, limit=1024)
        await eventually(lambda: len(w.router.cancelled) == n)
        assert b'code="slow_reader"' in w.gateway.metrics.page()
        writer.close()


async def test_errors_have_one_shape(world) -> None:
    async with world() as w, w.http() as http:
        chat = "/v1/chat/completions"
        good = {"model": "tiny", "messages": HELLO}
        cases = [
            (http.post(chat, content=b"{"), 400, "invalid_request", None),
            (http.post(chat, content=b"[" * 100_000), 400, "invalid_request", None),
            (http.post(chat, content=b"x" * (5 << 20)), 413, "request_too_large", None),
            (http.post(chat, json={"model": "tiny"}), 400, "invalid_request", "messages"),
            (http.post(chat, json=good | {"audio": {}}), 400, "unsupported_parameter", "audio"),
            (http.post(chat, json=good | {"model": "no"}), 404, "model_not_found", "model"),
            (http.post(chat, json=good | {"max_tokens": 300}), 400, "context_length_exceeded", "messages"),
            (http.post(chat, json=good | {"model": "nowhere"}), 503, "no_capacity", None),
            (http.post(chat, headers={"authorization": "Bearer no"}), 401, "invalid_api_key", None),
            (http.post(chat, headers={"authorization": ""}), 401, "invalid_api_key", None),
            (http.post(chat, headers={"authorization": "Bearer sk-dead"}), 401, "invalid_api_key", None),
            (http.get("/v1/completions"), 405, "method_not_allowed", None),
            (http.get("/v2/nothing"), 404, "not_found", None),
        ]  # fmt: skip
        for call, status, code, param in cases:
            response = await call
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (status, code, param)
            assert error["type"]
            assert error["message"]
            assert response.headers["x-request-id"]
            assert status != 503 or int(response.headers["retry-after"]) >= 1


async def test_models_of_others_look_like_unknown_ones(world) -> None:
    async with world() as w, w.sdk() as mine, w.sdk("sk-two") as other:
        assert {m.id for m in (await mine.models.list()).data} == {"tiny", "one/own", "nowhere"}
        assert {m.id for m in (await other.models.list()).data} == {"tiny", "nowhere"}
        assert (await mine.models.retrieve("one/own")).id == "one/own"
        texts = []
        for name in ("one/own", "one/xyz"):
            with pytest.raises(openai.NotFoundError) as caught:
                await other.models.retrieve(name)
            texts.append(caught.value.message.replace(name, "X"))
        assert texts[0] == texts[1]


async def test_request_ids_and_traces_are_passed_on(world) -> None:
    async with world() as w, w.http() as http:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        response = await http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": HELLO, "session_id": "s"},
            headers={"x-request-id": "mine-1", "traceparent": trace},
        )
        assert response.headers["x-request-id"] == "mine-1"
        submit = w.router.submits[0]
        assert submit.request_id == "mine-1"
        assert submit.traceparent.split("-")[1] == trace.split("-")[1]
        assert submit.traceparent != trace
        assert submit.session_hash != 0


async def test_tool_calls_become_openai_deltas(world) -> None:
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    async with world() as w, w.sdk() as sdk:
        w.text = 'I call.<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
        answer = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, tools=tools, max_tokens=200
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I call."
        assert choice.message.tool_calls[0].function.name == "get"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}
        stream = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, tools=tools, max_tokens=200, stream=True
        )
        deltas = [chunk.choices[0] async for chunk in stream]
        assert "".join(d.delta.content or "" for d in deltas) == "I call."
        calls = [call for d in deltas for call in d.delta.tool_calls or ()]
        assert (calls[0].index, calls[0].function.name) == (0, "get")
        assert calls[0].id
        assert not any(call.id or call.function.name for call in calls[1:])
        assert json.loads("".join(call.function.arguments for call in calls)) == {"a": 1}
        assert deltas[-1].finish_reason == "tool_calls"
