"""Anthropic's messages: each parameter is honoured or refused by name; blocks become turns."""

import json
from typing import Any

import pytest

from gateway.anthropic.task import MessageTask, message_task
from gateway.bodies.anthropic import AnthropicRequest, CountTokensRequest
from gateway.bodies.messages import NamedChoice
from gateway.bodies.parsing import parse as parsed
from sluice.errors import BadRequestError, ErrorCode

TOOL = {"name": "f", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}
CALLING = {"role": "assistant", "content": [CALL]}


def task(**fields: Any) -> MessageTask:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    return message_task(parsed(AnthropicRequest, json.dumps(body).encode()))


def test_blocks_become_turns_of_a_chat() -> None:
    thought = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I call", "citations": None},
        CALL | {"cache_control": {"type": "ephemeral"}},
    ]
    failed = RESULT | {"is_error": True, "content": "no"}
    told = task(
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        messages=[
            USER,
            {"role": "user", "content": [{"type": "text", "text": "you"}]},
            {"role": "assistant", "content": thought},
            {"role": "user", "content": [failed, {"type": "text", "text": "go on"}]},
        ],
        tools=[TOOL],
    ).messages
    assert [message.role for message in told] == ["system", "user", "assistant", "tool", "user"]
    assert [told[0].content, told[1].content, told[4].content] == ["be brief", "hi\nyou", "go on"]
    assert (told[2].content, told[2].reasoning_content) == ("I call", "hm")
    (call,) = told[2].tool_calls or ()
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == (
        "1",
        "f",
        {"a": 1},
    )
    assert (told[3].tool_call_id, told[3].content) == ("1", "Error: no")


def test_the_fields_of_a_chat() -> None:
    asked = task(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stop_sequences=["a"] * 16,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        seed=3,
        session_id="s",
        priority=-1,
        deadline_ms=5,
    )
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.5, 0.25, 7, 3)
    assert (asked.output_tokens_max, len(asked.stops), asked.session) == (9, 16, "s")
    assert (asked.safety_identifier, asked.priority, asked.deadline_ms) == ("u", -1, 5)
    assert asked.template_options["enable_thinking"] is True
    assert asked.reasoning_effort == "low"
    assert asked.guide is not None
    assert asked.guide_param == "output_config.format"
    assert task(thinking={"type": "disabled"}).template_options == {"enable_thinking": False}
    choices = {"any": "required", "auto": "auto", "none": "none"}
    for name, chosen in choices.items():
        assert task(tools=[TOOL], tool_choice={"type": name}).tool_choice == chosen
    named = task(tools=[TOOL], tool_choice={"type": "tool", "name": "f"})
    assert isinstance(named.tool_choice, NamedChoice)
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert not task(tools=[TOOL], tool_choice=single).is_parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [USER, CALLING]}, "messages[1].content[0]"),
        ({"messages": [USER, CALLING, USER]}, "messages[1].content[0]"),
        ({"messages": [USER, CALLING, CALLING]}, "messages[1].content[0]"),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
        (
            {"messages": [USER, {"role": "assistant", "content": [RESULT]}]},
            "messages[1].content[0].type",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
    ],
)
def test_invalid_bodies_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        task(**fields)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


def test_a_system_message_keeps_its_place() -> None:
    order = {
        "role": "system",
        "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
    }
    answer = {"role": "assistant", "content": "well"}
    told = task(system="s", messages=[USER, answer, USER, order]).messages
    assert [it.role for it in told] == ["system", "user", "assistant", "user", "system"]
    assert told[-1].content == "be brief"
    told = task(messages=[USER, order | {"content": "now"}, USER]).messages
    assert [it.role for it in told] == ["user", "system", "user"]
    for messages in ([USER, CALLING, order], [USER, {"role": "system", "content": [CALL]}]):
        with pytest.raises(BadRequestError):
            task(messages=messages)


def test_an_edit_that_removes_nothing_is_accepted() -> None:
    task(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


def test_a_count_has_the_effort_of_the_message() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    counted = CountTokensRequest.model_validate(body | {"output_config": {"effort": "low"}})
    assert counted.counted_options == {"reasoning_effort": "low", "enable_thinking": True}
    assert CountTokensRequest.model_validate(body).counted_options == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [TOOL | {"type": "web_search_20250305"}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"mcp_servers": [{}]},
        {"container": "c"},
        {"inference_geo": "eu"},
        {"speed": "fast"},
        {"diagnostics": {}},
        {"user_profile_id": "u"},
        {"workspace_id": "w"},
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        task(**fields)
    assert caught.value.code == ErrorCode.UNSUPPORTED_PARAMETER
    assert (caught.value.param or "").split("[")[0].split(".")[0] == next(iter(fields))
