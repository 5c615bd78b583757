"""Conversations that are summed up: on request, and where they have outgrown a threshold."""

from typing import Any

import orjson
import pytest

from gateway.bodies.summaries import SUMMARY_PROMPT
from gateway.endpoints.answers import ChatCompletion
from gateway.endpoints.response_answers import CompactedConversation, ResponseObject
from sluice.wire.control.v1 import control_pb2 as control
from tests.integration.gateway.conftest import OTHER_KEY
from tests.integration.gateway.test_responses import both
from tests.integration.gateway.tool_site import BERN, WEATHER, Tools, kinds
from tests.support.response_shapes import events_of

pytestmark = pytest.mark.real

COMPACT = "/v1/responses/compact"
SAID = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "my name is Ada"},
    {"role": "assistant", "content": "hello Ada"},
]
ASKED = {"role": "user", "content": "what is my name?"}
OPENING = "Summary of our conversation so far:"


def shown(w: Any) -> str:
    """The latest prompt, as text."""
    return w.tokenizer.decode(list(w.router.submits[-1].prompt), skip_special_tokens=False)


async def lengthen_context(w: Any, eventually: Any) -> None:
    objects = control.Objects()
    objects.CopyFrom(w.feed.objects)
    objects.bases[0].context_tokens_max = 4096
    w.feed.replace(objects)
    state = w.gateway.watcher.state
    await eventually(lambda: [it.context_tokens_max for it in state.bases.values()] == [4096])


async def test_a_compacted_item_stands_for_the_conversation(world: Any, eventually: Any) -> None:
    async with world() as w, w.http() as http, w.http(OTHER_KEY) as other:
        await lengthen_context(w, eventually)
        made = await http.post(COMPACT, json={"model": "tiny", "input": SAID})
        assert made.status_code == 200, made.text
        compacted = CompactedConversation.model_validate(made.json())
        assert SUMMARY_PROMPT[:20] in shown(w)
        assert compacted.usage.output_tokens > 0
        (item,) = made.json()["output"]
        assert "Ada" not in item["encrypted_content"]
        body = {"model": "tiny", "input": [item, ASKED]}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        prompt = shown(w)
        assert f"{OPENING}\n{w.text}\n\nwhat is my name?" in prompt
        assert "be brief" in prompt, "instructions stay"
        assert "hello Ada" not in prompt
        again = {"model": "tiny", "input": [*SAID, item, ASKED]}
        await http.post("/v1/responses", json=again)
        assert "hello Ada" not in shown(w), "what it stands for is not shown beside it"
        turned = item["encrypted_content"][:-6] + "AAAAA="
        for client, sealed in ((other, item["encrypted_content"]), (http, turned), (http, "x")):
            forged = {"model": "tiny", "input": [item | {"encrypted_content": sealed}, ASKED]}
            error = (await client.post("/v1/responses", json=forged)).json()["error"]
            assert error["param"] == "input[0].encrypted_content"


async def test_a_conversation_that_cannot_be_compacted_is_refused_by_name(world: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    async with world() as w, w.http() as http:
        for body, param in (
            ({"input": SAID}, "model"),
            ({"model": "tiny"}, "input"),
            ({"model": "tiny", "input": SAID, "stream": True}, "stream"),
            ({"model": "tiny", "input": [*SAID, ASKED, call]}, "input[4].call_id"),
        ):
            error = (await http.post(COMPACT, json=body)).json()["error"]
            assert error["param"] == param
        assert not w.router.submits


async def test_a_long_conversation_is_summed_up_in_the_stream(
    stateful: Any, eventually: Any
) -> None:
    async with stateful() as w, w.http() as http:
        await lengthen_context(w, eventually)
        plain, _ = await both(w, input="hi")
        threshold = plain["usage"]["input_tokens"]
        policy = [{"type": "compaction", "compact_threshold": threshold}]
        short, _ = await both(w, input="hi", context_management=policy)
        assert [it["type"] for it in short["output"]] == ["message"]
        asked = len(w.router.submits)
        whole, events = await both(w, input=[*SAID, ASKED], context_management=policy)
        for response in (whole, events[-1]["response"]):
            assert [it["type"] for it in response["output"]] == ["compaction", "message"]
        assert OPENING in shown(w)
        assert "what is my name?" in shown(w), "the last turn stays as it is"
        assert "hello Ada" not in shown(w)
        assert len(w.router.submits) == asked + 4, "each a summary and an answer"
        next_turn = {"model": "tiny", "input": "and now?", "previous_response_id": whole["id"]}
        assert (await http.post("/v1/responses", json=next_turn)).json()["store"]
        prompt = shown(w)
        assert prompt.count(OPENING) == 1
        assert "hello Ada" not in prompt
        assert prompt.index("be brief") < prompt.index(OPENING)
        assert prompt.index(OPENING) < prompt.index("what is my name?") < prompt.index("and now?")
        path = f"/v1/responses/{whole['id']}"
        ResponseObject.model_validate((await http.get(path)).json())
        told = events_of((await http.get(path, params={"stream": "true"})).text)
        assert told[-1]["response"] == whole


async def test_a_summary_comes_before_the_rounds(
    tools: Tools,
) -> None:
    said = [("user", "my name is Ada"), ("assistant", "hello Ada"), ("user", "weather in Bern?")]
    body: dict[str, Any] = {
        "input": [{"role": role, "content": text} for role, text in said],
        "tools": [WEATHER],
        "context_management": [{"type": "compaction", "compact_threshold": 1}],
    }
    async with tools() as t:
        t.says("Ada said hello", BERN, "it is sunny")
        whole = await t.whole(**body)
        assert kinds(whole["output"]) == ["compaction", "mcp_call", "message"]
        assert len(t.w.router.submits) == 3
        for number in (1, 2):
            assert "hello Ada" not in t.prompt(number)
            assert t.prompt(number).count("Ada said hello\n\nweather in Bern?") == 1
        assert '"sky":"sunny"' in t.prompt(2), "the result of the call"
        t.says("Ada said hello", BERN, "it is sunny")
        told = (await t.stream(**body))[-1]["response"]
        assert kinds(told["output"]) == ["compaction", "mcp_call", "message"]
        ids = [it["id"] for it in told["output"]]
        assert [it[-2:] for it in ids] == ["00", "01", "02"]


async def chat(http: Any, messages: list[Any], **body: Any) -> Any:
    asked = {"model": "tiny", "messages": messages, **body}
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer if body.get("stream") else answer.json()


async def test_a_long_chat_is_summed_up_and_goes_on_with_its_compaction(
    stateful: Any, eventually: Any
) -> None:
    async with stateful() as w, w.http() as http, w.http(OTHER_KEY) as other:
        await lengthen_context(w, eventually)
        policy = [{"type": "compaction", "compact_threshold": 12}]
        short = await chat(http, [ASKED], context_management=policy)
        assert "compaction" not in short["choices"][0]["message"], "there is one turn"
        asked = len(w.router.submits)
        whole = await chat(http, [*SAID, ASKED], context_management=policy, store=True)
        ChatCompletion.model_validate(whole)
        said = whole["choices"][0]["message"]
        assert len(w.router.submits) == asked + 2, "a summary and an answer"
        assert f"{OPENING}\n{w.text}\n\nwhat is my name?" in shown(w)
        assert "hello Ada" not in shown(w)
        stored = (await http.get(f"/v1/chat/completions/{whole['id']}/messages")).json()["data"]
        assert [it["content"] for it in stored] == [it["content"] for it in [*SAID, ASKED]]
        # The next turn sends the answer back, with or without what it stands for.
        go_on = {"role": "user", "content": "and now?"}
        for before in ([*SAID, ASKED], SAID[:1]):
            await chat(http, [*before, said, go_on])
            prompt = shown(w)
            assert "hello Ada" not in prompt
            assert prompt.index("be brief") < prompt.index(OPENING)
            assert (
                prompt.index(OPENING) < prompt.index("what is my name?") < prompt.index("and now?")
            )
        foreign = {"model": "tiny", "messages": [said, go_on]}
        error = (await other.post("/v1/chat/completions", json=foreign)).json()["error"]
        assert error["param"] == "messages[0].compaction.encrypted_content"
        misplaced = {"model": "tiny", "messages": [go_on | {"compaction": said["compaction"]}]}
        error = (await http.post("/v1/chat/completions", json=misplaced)).json()["error"]
        assert error["param"] == "messages[0].compaction"
        streamed = await chat(http, [*SAID, ASKED], context_management=policy, stream=True)
        first = orjson.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))
        assert first["choices"][0]["delta"]["compaction"]["type"] == "compaction"


async def test_the_summary_of_a_chat_comes_before_its_rounds(tools: Tools) -> None:
    async with tools() as t, t.w.http() as http:
        t.says("Ada said hello", BERN, "it is sunny")
        named = {"type": "function", "server": True, "function": {"name": "weather"}}
        policy = [{"type": "compaction", "compact_threshold": 1}]
        asked = [*SAID, {"role": "user", "content": "weather in Bern?"}]
        whole = await chat(http, asked, tools=[named], context_management=policy)
        message = whole["choices"][0]["message"]
        assert [it["name"] for it in message["executed_tools"]] == ["weather"]
        assert message["compaction"]["type"] == "compaction"
        assert len(t.w.router.submits) == 3
        for number in (1, 2):
            assert "hello Ada" not in t.prompt(number)
            assert t.prompt(number).count("Ada said hello\n\nweather in Bern?") == 1
