"""Anthropic's Messages API as its official SDK and plain HTTP clients see it."""

import json
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from gateway.endpoints.anthropic_answers import AnthropicErrorEnvelope, AnthropicMessageObject
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.conftest import KEY
from tests.integration.gateway.test_accounts import let_it_reason
from tests.support.anthropic_stream import events_of, message_of
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "name": "get",
    "description": "Get it",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALLING = 'I call.<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
STOP = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)
LOST = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost")


async def both(w: Any, **body: Any) -> dict[str, Any]:
    """Return a whole answer; the same as a stream says the same."""
    async with w.http() as http:
        asked = {"model": "tiny", "max_tokens": 200, "messages": HELLO, **body}
        whole = await http.post(PATH, json=asked)
        assert whole.status_code == 200, whole.text
        AnthropicMessageObject.model_validate(whole.json())
        stream = await http.post(PATH, json=asked | {"stream": True})
        streamed = message_of(events_of(stream.text))
        assert stream.headers["request-id"] == stream.headers["x-request-id"]
    assert unnamed(streamed) == unnamed(whole.json())
    return whole.json()


def unnamed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the ids that two answers do not share."""
    content = [block | ({"id": ""} if "id" in block else {}) for block in message["content"]]
    return message | {"id": "", "content": content}


async def test_a_stream_and_a_whole_answer_say_the_same(world: Any) -> None:
    async with world() as w:
        message = await both(w, system="be brief")
        assert message["content"] == [{"type": "text", "text": w.text}]
        assert message["stop_reason"] == "end_turn"
        prompt = w.router.submits[-1].prompt
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
        assert usage["cache_read_input_tokens"] == 3
        told = w.tokenizer.decode(list(prompt), skip_special_tokens=False)
        assert told.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello")
        assert (await both(w, max_tokens=3))["stop_reason"] == "max_tokens"


async def test_a_stop_sequence_is_told(world: Any) -> None:
    async with world() as w:
        stop = w.text[5:9]
        message = await both(w, stop_sequences=["no such", stop])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
        assert message["content"] == [{"type": "text", "text": w.text[: w.text.index(stop)]}]


@pytest.mark.parametrize("step", [1, 1000])
async def test_calls_go_round(world: Any, step: int) -> None:
    async with world() as w:
        w.text = CALLING
        ids = w.ids(CALLING)
        steps = [ids[i : i + step] for i in range(0, len(ids), step)]
        w.router.plan = lambda _: Plan(steps, STOP)
        message = await both(w, tools=[TOOL])
        text, call = message["content"]
        assert text == {"type": "text", "text": "I call."}
        assert (call["name"], call["input"]) == ("get", {"a": 1})
        assert message["stop_reason"] == "tool_use"
        w.router.plan = w.default_plan
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "7"}
        turns = [
            *HELLO,
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result]},
        ]
        await both(w, tools=[TOOL], messages=turns)
        told = w.tokenizer.decode(list(w.router.submits[-1].prompt), skip_special_tokens=False)
        assert "<|im_start|>tool\n7<|im_end|>" in told


async def test_the_official_sdk(world: Any) -> None:
    import anthropic  # two seconds of a processor, which others need not spend

    async with (
        world() as w,
        w.http() as http,
        anthropic.AsyncAnthropic(
            base_url=str(http.base_url).rstrip("/"), api_key=KEY, max_retries=0
        ) as sdk,
    ):
        body: Any = {"model": "tiny", "max_tokens": 200, "messages": HELLO}
        message = await sdk.messages.create(**body)
        assert message.content[0].text == w.text
        async with sdk.messages.stream(**body) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == final.content[0].text == w.text
        assert final.usage.output_tokens == message.usage.output_tokens
        models = await sdk.models.list()
        assert not models.has_more
        (card,) = [it for it in models.data if it.id == "tiny"]
        assert card == await sdk.models.retrieve("tiny")
        assert (card.type, card.display_name, card.created_at.tzinfo) == ("model", "tiny", UTC)
        count = await sdk.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL])
        with_tools = await sdk.messages.create(**body, tools=[TOOL])
        usage = with_tools.usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError) as missing:
            await sdk.messages.create(**body | {"model": "none"})
        assert missing.value.body["error"]["code"] == "model_not_found"
        with pytest.raises(anthropic.AuthenticationError):
            await sdk.with_options(api_key="sk-none").messages.create(**body)


async def test_counting_names_its_request(world: Any) -> None:
    async with world() as w, w.http() as http:
        body = {"model": "tiny", "messages": HELLO}
        answer = await http.post("/v1/messages/count_tokens", json=body)
        assert answer.status_code == 200
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_the_reasoning_of_a_model_is_a_block(
    world: Any, tmp_path: Path, eventually: Any
) -> None:
    async with world() as w:
        let_it_reason(w, tmp_path)
        await eventually(lambda: w.gateway.watcher.state.models["tiny"].base_digest != w.digest)
        ids = w.ids("<think>\nwhy not\n</think>so be it")
        for size in (1, 100):
            w.router.plan = lambda _, size=size: Plan(
                [ids[i : i + size] for i in range(0, len(ids), size)]
            )
            message = await both(w, thinking={"type": "enabled", "budget_tokens": 1024})
            thought, said = message["content"]
            assert (thought["type"], thought["thinking"]) == ("thinking", "why not\n")
            assert said == {"type": "text", "text": "so be it"}


async def test_errors_are_of_its_form(world: Any) -> None:
    async with world() as w, w.http() as http:
        body = {"model": "tiny", "max_tokens": 5, "messages": HELLO}
        for wrong, status, kind in (
            ({"max_tokens": None}, 400, "invalid_request_error"),
            ({"model": "none"}, 404, "not_found_error"),
        ):
            answer = await http.post(PATH, json=body | wrong)
            assert answer.status_code == status
            error = AnthropicErrorEnvelope.model_validate(answer.json()).error
            assert error.type == kind
        w.router.plan = lambda _: Plan([w.ids("so")], LOST)
        stream = await http.post(PATH, json=body | {"stream": True})
        last = json.loads(stream.text.strip().rpartition("data: ")[2])
        assert last["type"] == "error"
        assert "message_stop" not in stream.text
