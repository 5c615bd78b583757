"""Responses as the official SDK and plain HTTP clients see them."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.endpoints.response_answers import ResponseObject
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from tests.integration.gateway.test_accounts import let_it_reason
from tests.support.response_shapes import events_of
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

PATH = "/v1/responses"
FUNCTION: Any = {
    "type": "function",
    "name": "get",
    "description": "Get it",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALLING = 'I call.<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
ITEMS: Any = [{"type": "message", "role": "user", "content": "hello"}]
STOP = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)
LOST = wire.Outcome(kind=wire.OUTCOME_KIND_LOST, code="replica_lost")


class Point(BaseModel):
    x: int


async def both(w: Any, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a whole answer, and the events of the same as a stream; both of the right shape."""
    async with w.http() as http:
        asked = {"model": "tiny", "input": "hello", **body}
        whole = await http.post(PATH, json=asked)
        assert whole.status_code == 200, whole.text
        ResponseObject.model_validate(whole.json())
        stream = await http.post(PATH, json=asked | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        return whole.json(), events_of(stream.text)


def unnamed(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what two answers to one request do not share."""
    own = {"id": "", "created_at": 0, "completed_at": bool(response["completed_at"])}
    output = [item | {"id": "", "call_id": ""} for item in response["output"]]
    return response | own | {"output": output}


async def test_a_stream_and_a_whole_response_say_the_same(world: Any) -> None:
    async with world() as w:
        for extra in (
            {},
            {"input": ITEMS, "instructions": "be brief", "metadata": {"a": "b"}},
            {"max_output_tokens": 5},
            {"temperature": 0.25, "top_p": 0.5, "service_tier": "flex", "top_logprobs": 0},
        ):
            whole, events = await both(w, **extra)
            assert unnamed(events[-1]["response"]) == unnamed(whole)
            text = whole["output"][0]["content"][0]["text"]
            assert text == w.text if "max_output_tokens" not in extra else w.text.startswith(text)
            prompt = len(w.router.submits[-1].prompt)
            assert whole["usage"]["input_tokens"] == prompt
            assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 3}
        assert whole["temperature"] == 0.25
        assert whole["service_tier"] == "flex"
        assert not whole["store"]
        prompt = w.tokenizer.decode(list(w.router.submits[2].prompt), skip_special_tokens=False)
        assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello")


async def test_the_official_sdk(world: Any) -> None:
    async with world() as w, w.sdk() as sdk:
        answer = await sdk.responses.create(model="tiny", input="hello")
        assert answer.output_text == w.text
        assert answer.usage.output_tokens == len(w.ids(w.text)) + 1
        async with sdk.responses.stream(model="tiny", input=ITEMS) as stream:
            names = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert names[-1] == "response.completed"
        assert final.output_text == w.text
        w.text = '{"x": 5}'
        parsed = await sdk.responses.parse(model="tiny", input="hello", text_format=Point)
        assert parsed.output_parsed == Point(x=5)
        grammar = w.router.submits[-1].sampling.grammar
        assert grammar.kind == engine.Grammar.KIND_JSON_SCHEMA


@pytest.mark.parametrize("step", [1, 1000])
async def test_calls_of_functions_go_round(world: Any, step: int) -> None:
    async with world() as w, w.sdk() as sdk:
        w.text = CALLING
        ids = w.ids(CALLING)
        steps = [ids[i : i + step] for i in range(0, len(ids), step)]
        w.router.plan = lambda _: Plan(steps, STOP)
        whole, events = await both(w, tools=[FUNCTION])
        assert unnamed(events[-1]["response"]) == unnamed(whole)
        message, call = whole["output"]
        assert message["content"][0]["text"] == "I call."
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            *("function_call", "get"),
            {"a": 1},
        )
        w.router.plan = w.default_plan
        w.text = "It is 7."
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        again = await sdk.responses.create(
            model="tiny", input=[*ITEMS, message, call, result], tools=[FUNCTION]
        )
        assert again.output_text == "It is 7."
        by_chat = await sdk.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": "hello"},
                {
                    "role": "assistant",
                    "content": "I call.",
                    "tool_calls": [
                        {
                            "id": call["call_id"],
                            "type": "function",
                            "function": {"name": "get", "arguments": call["arguments"]},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": call["call_id"], "content": "7"},
            ],
            tools=[
                {"type": "function", "function": {k: FUNCTION[k] for k in FUNCTION if k != "type"}}
            ],
        )
        assert by_chat.choices[0].message.content == "It is 7."
        assert w.router.submits[-1].prompt == w.router.submits[-2].prompt


async def test_the_reasoning_of_a_model_is_an_item(
    world: Any, tmp_path: Any, eventually: Any
) -> None:
    async with world() as w, w.sdk() as sdk:
        refused = await _refused(sdk, reasoning={"effort": "high"})
        assert (refused.code, refused.param) == ("unsupported_parameter", "reasoning.effort")
        let_it_reason(w, tmp_path)
        await eventually(lambda: w.gateway.watcher.state.models["tiny"].base_digest != w.digest)
        ids = w.ids("<think>\nwhy not\n</think>so be it")
        for size in (1, 100):
            w.router.plan = lambda _, size=size: Plan(
                [ids[i : i + size] for i in range(0, len(ids), size)]
            )
            whole, events = await both(w, reasoning={"effort": "high"})
            assert unnamed(events[-1]["response"]) == unnamed(whole)
            assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
            assert whole["output"][0]["content"][0]["text"] == "why not\n"
            assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def _refused(sdk: openai.AsyncOpenAI, **extra: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.responses.create(**({"model": "tiny", "input": "hello"} | extra))
    return caught.value


async def test_refusals_have_the_form_of_the_api(world: Any) -> None:
    async with world() as w, w.sdk() as sdk:
        long = await _refused(sdk, input="hello " * 400)
        assert (long.code, long.param) == ("context_length_exceeded", "input")
        assert "messages" not in long.message
        assert (await _refused(sdk, model="none")).code == "model_not_found"
        async with w.sdk("sk-limited") as limited:
            codes = [
                (await _refused(limited, input="x", max_output_tokens=1_000)).code for _ in "ab"
            ]
        assert codes == ["context_length_exceeded"] * 2
        assert not w.router.submits
        outcome = wire.Outcome(
            kind=wire.OUTCOME_KIND_FAILED, code="invalid_request", message="no", param="grammar"
        )
        w.router.plan = lambda _: Plan([[]], outcome)
        error = await _refused(sdk, text={"format": {"type": "json_object"}})
        assert (error.status_code, error.param) == (400, "text.format")


async def test_limits_and_losses_have_the_form_of_every_api(world: Any) -> None:
    async with world() as w, w.sdk("sk-limited") as limited, w.sdk() as sdk:
        answers = [await limited.responses.create(model="tiny", input="x") for _ in range(5)]
        assert len({answer.id for answer in answers}) == 5
        assert (await _refused(limited, input="x")).code == "rate_limit_requests"
        ids, told = w.ids(w.text), []

        def lossy(submit: wire.Submit) -> Plan:
            told.append(submit.resumed_tokens)
            left = [[token] for token in ids[submit.resumed_tokens :]]
            return Plan(left[:4], LOST) if len(told) < 2 else Plan(left, STOP)

        w.router.plan = lossy
        async with sdk.responses.stream(model="tiny", input="x") as stream:
            [_ async for _ in stream]
            assert (await stream.get_final_response()).output_text == w.text
        assert told == [0, 4]


async def test_a_loss_that_cannot_be_healed_is_told_in_the_stream(world: Any) -> None:
    async with world() as w, w.http() as http:
        ids = w.ids(w.text)
        w.router.plan = lambda submit: Plan([ids[submit.resumed_tokens :][:4]], LOST)
        body = {"model": "tiny", "input": "x", "stream": True}
        events = events_of((await http.post(PATH, json=body)).text)
        response = events[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"]["code"] == "replica_lost"
        (item,) = response["output"]
        assert item["status"] == "incomplete"
        assert w.text.startswith(item["content"][0]["text"])
