"""Chat completions: every parameter is honoured or refused by name."""

import json
from collections.abc import Sequence

import pytest

from gateway.bodies.chat import ChatRequest, parse_chat_request
from gateway.bodies.messages import Tool
from sluice.errors import BadRequestError, ErrorCode

GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
NAMED = {"type": "function", "function": {"name": "g"}}
CUSTOM = {"type": "custom", "custom": {"name": "g", "input": "x"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}
PART = {"type": "text", "text": "x"}
REFUSED = {"type": "refusal", "refusal": "no"}


def parse(**extra: object) -> ChatRequest:
    return parse_chat_request(json.dumps(GOOD | extra).encode())


def refused(**extra: object) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse(**extra)
    return caught.value


def test_the_smallest_request() -> None:
    request = parse()
    assert request.model == "m"
    assert not request.stops
    assert request.choices == 1
    assert request.output_tokens_max is None
    assert request.alternatives is None
    assert request.served_tier is None
    assert request.guide is None
    assert not request.include_usage
    assert not request.must_call
    assert request.is_parallel
    assert request.template_options == {}


@pytest.mark.parametrize(
    "extra",
    [
        {"n": None, "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto"},
        {"store": True, "verbosity": "low", "skip_special_tokens": True, "stop_token_ids": []},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"store": False, "modalities": ["text"], "verbosity": "medium", "functions": []},
        {"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "in_memory"},
        {"prompt_cache_options": {}},
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"messages": [{"role": "user", "content": "x", "tool_calls": None}, CALLING, RESULT, RESULT]},
        {"messages": [{"role": "assistant", "content": None, "refusal": "never"}]},
        {"messages": [{"role": "assistant", "content": None, "refusal": None}]},  # a call cut short
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        {"messages": [{"role": "assistant", "content": None, "reasoning_content": "r"}]},
        {"messages": [{"role": "assistant", "reasoning_content": "r"}]},
        {"messages": [{"role": "assistant", "content": []}]},
        {"messages": [CALLING | {"content": []}, RESULT]},
        {"audio": None, "prediction": None, "web_search_options": None, "moderation": None},
        {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "prompt_cache_key": "k"},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"temperature": 2, "top_p": 0, "top_k": -1, "seed": -1},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                        # As the official SDK has them once it has assembled a stream.
                        {"id": "2", "index": 1, "function": {"name": "f", "parsed_arguments": {}}},
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "42"},
                {"role": "tool", "tool_call_id": "2", "content": "43"},
            ]
        },
    ],
)  # fmt: skip
def test_valid_fields_are_accepted(extra: dict[str, object]) -> None:
    parse(**extra)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "x"}, "chat_template"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"prompt_cache_options": {"ttl": "24h"}}, "prompt_cache_options"),
        ({"n": 9}, "n"),
        ({"n": 128}, "n"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": CUSTOM}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CUSTOM]}}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", **CUSTOM}]}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "audio": {"id": "a"}}]},
            "messages[0].audio",
        ),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(extra: dict[str, object], param: str) -> None:
    error = refused(**extra)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)
    assert f"'{param}'" in error.message


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"made_up": 1}, "made_up"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [CALLING, RESULT | {"tool_call_id": None}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "refusal": None, "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [CALLING, RESULT | {"content": []}]}, "messages[1].content"),
        ({"messages": [RESULT]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x"}, RESULT]}, "messages[1].role"),
        ({"messages": [CALLING, {"role": "user", "content": "x"}, RESULT]}, "messages[2].role"),
        ({"messages": [CALLING, RESULT, RESULT | {"tool_call_id": "2"}]}, "messages[2].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "text": "x", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [PART, REFUSED]}]}, "messages[0].content[1]"),
        ({"messages": [CALLING, RESULT | {"content": [REFUSED]}]}, "messages[1].content[0]"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"n": 129}, "n"),
        ({"tools": [{"type": "robot", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS[:1], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)  # fmt: skip
def test_invalid_bodies_are_refused(extra: dict[str, object], param: str) -> None:
    error = refused(**extra)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, param)
    assert param in error.message


def test_an_unserved_tool_choice_names_the_served_ones() -> None:
    message = refused(tools=TOOLS, tool_choice=CUSTOM).message
    assert "'custom'" in message
    assert "'function'" in message
    assert "'auto'" not in message


def test_logprobs() -> None:
    assert parse(logprobs=True).alternatives == 0
    assert parse(logprobs=True, top_logprobs=20).alternatives == 20
    assert parse(logprobs=False, top_logprobs=0).alternatives is None


def test_the_bound_on_the_answer_has_two_names() -> None:
    assert parse(max_tokens=3).output_tokens_max == 3
    assert parse(max_completion_tokens=4).output_tokens_max == 4
    assert parse(max_tokens=4, max_completion_tokens=4).output_tokens_max == 4


def names(tools: Sequence[Tool]) -> list[str]:
    return [tool.function.name for tool in tools]


ALLOWED_G = {"mode": "auto", "tools": [NAMED]}


@pytest.mark.parametrize(
    ("choice", "shown", "callable_", "must_call", "is_parallel"),
    [
        (None, "fg", "fg", False, True),
        ("auto", "fg", "fg", False, True),
        ("none", "", "", False, True),
        ("required", "fg", "fg", True, True),
        (NAMED, "fg", "g", True, False),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED_G}, "g", "g", False, True),
        (
            {"type": "allowed_tools", "allowed_tools": ALLOWED_G | {"mode": "required"}},
            "g", "g", True, True,
        ),
    ],
)  # fmt: skip
def test_tool_choice(
    choice: object, shown: str, callable_: str, must_call: bool, is_parallel: bool
) -> None:
    request = parse(tools=TOOLS, tool_choice=choice)
    assert names(request.shown_tools) == list(shown)
    assert names(request.callable_tools) == list(callable_)
    assert request.must_call == must_call
    assert request.is_parallel == is_parallel


def test_parallel_tool_calls() -> None:
    assert not parse(tools=TOOLS, parallel_tool_calls=False).is_parallel
    assert parse(tools=TOOLS, parallel_tool_calls=True).is_parallel


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_a_format_goes_with_tools(choice: str) -> None:
    request = parse(tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"})
    assert request.guide is not None


def test_strict_tools() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    assert [tool.function.strict for tool in parse(tools=[strict]).shown_tools] == [True]


def test_a_tools_schema_is_bounded() -> None:
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    error = refused(tools=[tool])
    assert error.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("effort", "is_thinking"), [("none", False), ("minimal", True), ("high", True)]
)
def test_reasoning_effort_is_given_to_the_template(effort: str, is_thinking: bool) -> None:
    options = parse(reasoning_effort=effort).template_options
    assert options == {"reasoning_effort": effort, "enable_thinking": is_thinking}


def test_the_text_of_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assistant = {"role": "assistant", "content": [REFUSED]}
    request = parse(
        messages=[
            {"role": "user", "content": parts},
            assistant,
            {"role": "assistant", "content": None, "refusal": "never"},
            {"role": "assistant", "content": [], "refusal": "never"},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": []},
            CALLING,
        ]
    )
    texts = [message.text() for message in request.messages]
    assert texts == ["ab", "no", "never", "never", "", "", ""]


def test_results_are_shown_in_the_order_of_the_calls_that_they_answer() -> None:
    calling = {"role": "assistant", "tool_calls": [CALL | {"id": name} for name in "abc"]}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "cab"]
    request = parse(messages=[calling, *results, *GOOD["messages"], calling, *results[:2]])
    texts = [message.text() for message in request.shown_messages]
    assert texts == ["", "a", "b", "c", "hi", "", "a", "c"]


@pytest.mark.parametrize(
    ("calls", "results", "shown"),
    [
        ("aa", "a1 a2 a3", "a1 a2 a3"),
        ("wtw", "w1 t w2", "w1 t w2"),
        ("wtw", "w1 w2 t w3", "w1 t w2 w3"),
        ("ab-", "x b a y", "a b x y"),
        ("--a", "x a y", "x y a"),
        ("a-", "a1 - a2", "a1 a2 -"),
    ],
)
def test_results_of_calls_with_one_id_or_none_are_taken_in_turn(
    calls: str, results: str, shown: str
) -> None:
    made = [
        CALL | {"id": name} if name != "-" else {"function": CALL["function"]} for name in calls
    ]
    told = [{"role": "tool", "tool_call_id": it[0], "content": it} for it in results.split()]
    request = parse(messages=[{"role": "assistant", "tool_calls": made}, *told])
    assert " ".join(message.text() for message in request.shown_messages[1:]) == shown


REGISTERED = {"type": "function", "server": True, "function": {"name": "h"}}
SERVER = {"type": "mcp", "server_label": "docs", "require_approval": "never"}


def test_tools_of_the_server_stand_beside_functions() -> None:
    request = parse(tools=[TOOLS[0], REGISTERED, SERVER], max_tool_calls=3)
    assert request.has_server_tools
    assert [it.function.name for it in request.functions_told] == ["f"]
    assert dict(request.server_functions) == {"tools[1].function": "h"}
    assert list(request.servers) == ["tools[2]"]
    plain = parse(tools=[TOOLS[0] | {"server": False}])
    assert not plain.has_server_tools
    assert plain.functions_told[0].model_dump(exclude_none=True) == TOOLS[0] | {}
    # The names of a server's tools are not known yet.
    parse(tools=[SERVER], tool_choice=NAMED)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [REGISTERED], "n": 2}, "n"),
        ({"tools": [SERVER, SERVER]}, "tools"),
        ({"tools": [REGISTERED | {"function": {"name": "h", "parameters": {}}}]},
         "tools[0].function.parameters"),
        ({"tools": [REGISTERED | {"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [SERVER | {"server_label": "a b"}]}, "tools[0].server_label"),
        ({"tools": [TOOLS[0] | {"server": "yes"}]}, "tools[0].server"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"context_management": [{"type": "other"}]}, "context_management[0].type"),
    ],
)  # fmt: skip
def test_tools_of_the_server_are_refused_by_name(extra: dict[str, object], param: str) -> None:
    assert refused(**extra).param == param


def test_only_an_answer_has_a_compaction() -> None:
    compaction = {"type": "compaction", "encrypted_content": "x"}
    user = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "hello", "compaction": compaction}
    assert parse(messages=[answer, user]).messages[0].compaction is not None
    for message in (user, {"role": "system", "content": "x"}):
        error = refused(messages=[answer, message | {"compaction": compaction}])
        assert error.param == "messages[1].compaction"
