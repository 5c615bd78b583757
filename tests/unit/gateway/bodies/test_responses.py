"""Responses: every parameter is honoured or refused by name; items become the turns of a chat."""

import json
from typing import Any

import pytest

from gateway.bodies.parsing import parse as parsed
from gateway.bodies.responses import ResponseRequest, echo_of
from gateway.responses.context import ResponseContext
from gateway.responses.task import ResponseTask, response_task
from sluice.errors import BadRequestError, ErrorCode

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"}
OTHER_CALL = CALL | {"call_id": "2"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "42"}
OTHER_RESULT = {
    "type": "function_call_output",
    "call_id": "2",
    "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "3"}],
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "well", "annotations": [], "logprobs": []}],
    "phase": "commentary",
}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "status": "completed",
    "summary": [{"type": "summary_text", "text": "short"}],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}


def parse(**fields: Any) -> ResponseRequest:
    body = {"model": "m", "input": "hi"} | fields
    return parsed(ResponseRequest, json.dumps(body).encode())


def task(**fields: Any) -> ResponseTask:
    wanted = parse(**fields)
    return response_task(wanted, "", context=ResponseContext((), wanted.items))


def refused(**fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        task(**fields)
    return caught.value


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"input": [USER]},
        {"store": True, "truncation": "disabled", "background": True, "conversation": None},
        {
            "previous_response_id": None,
            "context_management": [],
            "prompt": None,
            "moderation": None,
        },
        {"image": None, "access_programs": None, "prompt_cache_retention": "in_memory"},
        {"prompt_cache_options": {"mode": "implicit"}},
        {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
        {"reasoning": {"effort": "low", "summary": "auto", "generate_summary": None}},
        {"reasoning": {"context": "auto", "mode": "standard"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": SCHEMA}},
        {"tools": [FUNCTION | {"strict": None, "description": None}], "max_tool_calls": 3},
        {"tools": [], "tool_choice": "none"},
        {"seed": 1, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
        {"session_id": "s", "priority": -1, "deadline_ms": 5, "chat_template_kwargs": {"a": True}},
    ],
)
def test_valid_fields_are_accepted(extra: dict[str, Any]) -> None:
    task(**extra)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"image": {}}, "image"),
        ({"access_programs": {}}, "access_programs"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"input": [USER | {"content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]"),
        ({"input": [USER | {"content": [{"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0]"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(extra: dict[str, Any], param: str) -> None:
    error = refused(**extra)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [USER | {"role": "tool"}]}, "input[0].role"),
        ({"input": [USER | {"content": [{"type": "output_text", "text": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [USER, CALL]}, "input[1].call_id"),
        ({"input": [CALL, USER, RESULT]}, "input[0].call_id"),
        ({"input": [CALL, OTHER_CALL, RESULT, USER]}, "input[1].call_id"),
        ({"input": [CALL, OTHER_CALL, RESULT, SAID, OTHER_RESULT]}, "input[1].call_id"),
        ({"input": [CALL, RESULT, RESULT]}, "input[2].call_id"),
        ({"input": [CALL, CALL, RESULT]}, "input[1].call_id"),
        ({"input": [CALL, RESULT, CALL, RESULT]}, "input[2].call_id"),
        ({"input": [CALL | {"call_id": ""}]}, "input[0].call_id"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [FUNCTION | {"parameters": {"a": "x" * 70_000}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"text": {"format": SCHEMA | {"schema": {"a": "x" * 70_000}}}}, "text.format.schema"),
        ({"stream_options": {}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"messages": [USER]}, "messages"),
    ],
)  # fmt: skip
def test_invalid_bodies_are_refused(extra: dict[str, Any], param: str) -> None:
    error = refused(**extra)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, param)


def shown(**fields: Any) -> list[dict[str, Any]]:
    """Return what the model is shown, without what is not there."""
    told = [it.model_dump(exclude_none=True) for it in task(**fields).shown_messages]
    for message in told:
        for call in message.get("tool_calls", ()):
            call.pop("type", None)
    return told


def test_a_text_is_a_user_message_and_instructions_come_first() -> None:
    assert shown(instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_reasoning_text_and_calls_of_the_assistant_are_one_turn() -> None:
    function = {"name": "f", "arguments": "{}"}
    assert shown(input=[USER, THOUGHT, SAID, CALL, OTHER_CALL, OTHER_RESULT, RESULT]) == [
        USER,
        {
            "role": "assistant",
            "content": "well",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "function": function}, {"id": "2", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "tool", "content": "43", "tool_call_id": "2"},
    ]


def test_rounds_of_calls_are_turns_of_their_own() -> None:
    roles = [it["role"] for it in shown(input=[USER, CALL, RESULT, OTHER_CALL, OTHER_RESULT, SAID])]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_two_answers_one_after_the_other_stay_two() -> None:
    assert [it["role"] for it in shown(input=[SAID, SAID, THOUGHT, CALL, RESULT])] == [
        *("assistant", "assistant", "assistant", "tool")
    ]


def test_a_refusal_is_an_assistant_message() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert shown(input=[USER, refusal])[-1] == {"role": "assistant", "content": "no"}


def test_the_fields_of_a_chat() -> None:
    made = task(
        max_output_tokens=7,
        top_logprobs=2,
        text={"format": SCHEMA, "verbosity": "low"},
        reasoning={"effort": "high"},
        tools=[FUNCTION],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}],
        },
        parallel_tool_calls=False,
        service_tier="flex",
    )
    assert made.output_tokens_max == 7
    assert made.alternatives == 2
    assert made.guide is not None
    assert made.guide_param == "text.format"
    assert made.template_options == {
        "reasoning_effort": "high",
        "enable_thinking": True,
        "verbosity": "low",
    }
    assert made.must_call
    assert [tool.function.name for tool in made.callable_tools] == ["f"]
    assert not made.is_parallel
    assert made.served_tier == "flex"
    assert task(include=["message.output_text.logprobs"]).alternatives == 0
    assert task().alternatives is None


def test_the_answer_repeats_the_request() -> None:
    choice = {"type": "function", "name": "f"}
    told = echo_of(
        parse(
            instructions="be brief",
            tools=[FUNCTION],
            tool_choice=choice,
            text={"format": SCHEMA},
            metadata={"a": "b"},
            top_logprobs=2,
        )
    )
    assert told["instructions"] == "be brief"
    assert told["tools"] == [FUNCTION | {"description": None, "strict": None}]
    assert told["tool_choice"] == choice
    assert told["text"] == {"format": SCHEMA | {"description": None}}
    assert told["metadata"] == {"a": "b"}
    assert told["top_logprobs"] == 2
