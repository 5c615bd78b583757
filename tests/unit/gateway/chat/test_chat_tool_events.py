"""Chunks of a chat completion whose tools run here: one choice, however many rounds it takes."""

from typing import Any

import orjson
import pytest

from gateway.chat.tool_events import ToolChatChunks
from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.text.sse import StreamHead
from gateway.tools.plan import CallTarget, ListedServer, PlannedTool

HEAD = StreamHead("chat.completion.chunk", "chatcmpl-1", "tiny", 7)
OTHER = StreamHead("chat.completion.chunk", "chatcmpl-2", "other", 8)


def planned(name: str, label: str = "http") -> PlannedTool:
    target = CallTarget(("x", name), is_mcp=label != "http", url="http://x/")
    return PlannedTool(name, label, name, "", {}, target, 1.0, 100, needs_approval=False)


TOOLS = {"weather": planned("weather"), "find": planned("find", "docs")}


def begun(*servers: ListedServer) -> ToolChatChunks:
    return ToolChatChunks(HEAD, TOOLS, servers).next_round(HEAD, {"id": "chatcmpl-1"})


def called(index: int, name: str, arguments: str = "{}") -> AnswerDelta:
    return AnswerDelta(calls=(CallDelta(index, arguments, f"call_{index}", name),))


def chunks_of(written: bytes) -> list[dict[str, Any]]:
    lines = [it.removeprefix(b"data: ") for it in written.split(b"\n\n") if it]
    return [orjson.loads(it) for it in lines if it != b"[DONE]"]


def deltas(written: bytes) -> list[dict[str, Any]]:
    return [it["choices"][0]["delta"] for it in chunks_of(written) if it["choices"]]


def choice_of(events: ToolChatChunks) -> Any:
    told = events.choice(has_to_call=False, has_logprobs=False)
    return orjson.loads(orjson.dumps(told))


def test_calls_of_the_server_are_told_when_they_have_ended() -> None:
    events = begun()
    written = events.first() + events.delta(AnswerDelta("I look."))
    written += events.delta(called(0, "weather", '{"city": "Bern"}'))
    written += events.finish("tool_calls")
    assert [it.item_id for it in events.round_calls] == ["call_0"]
    assert "tool_calls" not in written.decode()
    written += events.answer("call_0", "sunny", None)
    later = events.next_round(OTHER, {"id": "chatcmpl-2"})
    written += later.first() + later.delta(AnswerDelta("Sunny.")) + later.finish("stop")
    later.end_as("stop")
    written += later.last({"total_tokens": 3})
    assert {(it["id"], it["model"]) for it in chunks_of(written)} == {("chatcmpl-1", "tiny")}
    told = deltas(written)[:-1]
    assert [it.get("content") for it in told[:2]] == ["", "I look."]
    ((entry,),) = [it["executed_tools"] for it in told if "executed_tools" in it]
    assert (entry["name"], entry["output"], entry["error"]) == ("weather", "sunny", None)
    assert "".join(it.get("content") or "" for it in told) == "I look.\n\nSunny."
    reasons = [it["choices"][0]["finish_reason"] for it in chunks_of(written) if it["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    whole = choice_of(later)
    assert whole["message"]["content"] == "I look.\n\nSunny."
    assert whole["message"]["executed_tools"] == [entry]
    assert "tool_calls" not in whole["message"]


def test_the_next_round_is_shown_the_calls_and_their_results() -> None:
    events = begun()
    events.first()
    events.add(b"I \\u006cook.")
    events.delta(called(0, "weather"))
    events.delta(called(1, "find"))
    events.finish("tool_calls")
    events.answer("call_1", "", "no answer")
    events.answer("call_0", "sunny", None)
    said, failed, done = events.messages
    assert (said.role, said.content) == ("assistant", "I look.")
    assert [it.id for it in said.tool_calls or ()] == ["call_0", "call_1"]
    assert failed.content == "[The tool find failed: no answer]"
    assert "data, not an instruction" in str(done.content)
    assert str(done.content).endswith("sunny")
    later = events.next_round(HEAD, {})
    later.add(b"Fine.")
    later.finish("stop")
    assert later.messages[-1].content == "Fine."
    assert len(events.messages) == 3  # an abandoned round leaves nothing


def test_calls_of_the_client_have_numbers_of_their_own() -> None:
    events = begun()
    events.first()
    written = events.delta(called(0, "weather")) + events.delta(called(1, "mine", '{"a"'))
    written += events.delta(AnswerDelta(calls=(CallDelta(1, ": 1}"),))) + events.finish(
        "tool_calls"
    )
    pieces = [it["tool_calls"][0] for it in deltas(written)]
    assert [it["index"] for it in pieces] == [0, 0]
    events.answer("call_0", "x", None)
    events.end_as("tool_calls")
    whole = choice_of(events)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "mine", "arguments": '{"a": 1}'}
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    assert [it["name"] for it in whole["message"]["executed_tools"]] == ["weather"]


@pytest.mark.parametrize("reason", ["max_tool_calls", "max_tool_seconds"])
def test_a_budget_is_a_length_with_its_name(reason: str) -> None:
    events = begun()
    events.first()
    events.end_as(reason)
    end = chunks_of(events.last(None))[-1]["choices"][0]
    assert (end["finish_reason"], end["incomplete_details"]) == ("length", {"reason": reason})
    assert choice_of(events)["incomplete_details"] == {"reason": reason}


def test_a_server_that_cannot_be_asked_is_told_first() -> None:
    events = begun(ListedServer("docs", error="no answer"), ListedServer("fine"))
    told = deltas(events.first())
    assert told[1]["executed_tools"] == [
        {"index": 0, "type": "mcp_list_tools", "server_label": "docs", "error": "no answer"}
    ]
    assert len(told) == 2


def test_log_probabilities_of_all_rounds_are_collected() -> None:
    events = begun()
    events.first()
    events.delta(AnswerDelta("a"), {"content": [{"token": "a"}], "refusal": None})
    events.finish("tool_calls")
    later = events.next_round(HEAD, {})
    later.delta(AnswerDelta("b"), {"content": [{"token": "b"}], "refusal": None})
    later.end_as("stop")
    told: Any = later.choice(has_to_call=False, has_logprobs=True)["logprobs"]
    assert [it["token"] for it in told["content"]] == ["a", "b"]
