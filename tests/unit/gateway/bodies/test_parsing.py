"""Hostile bodies: whatever is sent, a request or one clear 400, after bounded work."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.bases.assets import SamplingDefaults
from gateway.bodies.chat import parse_chat_request
from gateway.bodies.completions import parse_completion_request
from gateway.bodies.embeddings import parse_embedding_request
from gateway.bodies.generation import GenerationFields
from gateway.bodies.parsing import BODY_BYTES_MAX, COMMAS_MAX, PARTS_MAX, Body, check_values
from gateway.bodies.tokenize import parse_detokenize_request, parse_tokenize_request
from sluice.errors import BadRequestError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
GOOD: dict[Callable[[bytes], Body], dict[str, Any]] = {
    parse_chat_request: CHAT,
    parse_completion_request: {"model": "m", "prompt": "x"},
    parse_embedding_request: {"model": "m", "input": "x"},
    parse_tokenize_request: {"model": "m", "prompt": "x"},
    parse_detokenize_request: {"model": "m", "tokens": [1]},
}
DEFAULTS = SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)
HEAD, TAIL = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stop":', b"}"
all_endpoints = pytest.mark.parametrize("parse", GOOD, ids=lambda parse: parse.__name__)


def refusal(body: bytes, parse: Callable[[bytes], Body] = parse_chat_request) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse(body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000
    assert len(caught.value.param or "") < 1000
    return caught.value


@all_endpoints
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"null",
        b"1e999",
        b"\xff",
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": 1' + b"0" * 5000 + b"}",
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"model": "m"} {"model": "m"}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_bodies_that_are_no_json_objects(parse: Callable[[bytes], Body], body: bytes) -> None:
    refusal(body, parse)


@all_endpoints
def test_the_smallest_bodies(parse: Callable[[bytes], Body]) -> None:
    parse(json.dumps(GOOD[parse]).encode())


@all_endpoints
def test_an_unknown_field(parse: Callable[[bytes], Body]) -> None:
    error = refusal(json.dumps(GOOD[parse] | {"made_up": 1}).encode(), parse)
    assert error.param == "made_up"


def test_of_equal_keys_the_last_counts() -> None:
    assert parse_chat_request(HEAD + b'"a","stop":"b"}').stops == ["b"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (HEAD + b'"a","seed":123456789012345678901234567890}', "seed"),
        (HEAD + b'"a","temperature":1e308}', "temperature"),
        (HEAD + b'"a","temperature":-0.0001}', "temperature"),
        (HEAD + b'"a","n":1e1}', "n"),
        (HEAD + b'{"' + b"k" * 5000 + b'":1}}', "stop"),
        (b'{"' + b"k" * 5000 + b'":1,' + HEAD[1:] + b'"a"}', "k" * 100),
    ],
)
def test_extreme_values(body: bytes, param: str) -> None:
    assert refusal(body).param == param


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}


def test_a_unions_member_is_not_taken_for_a_field() -> None:
    schema = {"name": "n", "schema": {}, "json_schema": 1}
    form = {"type": "json_schema", "json_schema": schema}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    assert refusal(json.dumps(body).encode()).param == "response_format.json_schema.json_schema"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "'temperature': it must be less than or equal to 2"),
        ({"max_tokens": 10**30}, "'max_tokens': integers have at most"),
        ({"stop": ["a"] * 9}, "'stop': it must have at most 4 items, not 9"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images are not served here"),
    ],
)
def test_an_error_names_the_right_form(fields: dict[str, object], words: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    assert words in refusal(json.dumps(body).encode()).message


def test_fields_that_other_servers_read_do_nothing_in_parts_and_tools() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "x", **mark}
    tool = {"type": "function", "function": {"name": "f"}, **mark}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}], "tools": [tool]}
    parsed = parse_chat_request(json.dumps(body).encode())
    assert parsed.messages[0].text() == "x"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
shapes = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["text", "function", "json_schema", "json_object", "allowed_tools"]
        ),
        "role": st.sampled_from(["user", "assistant", "tool"]),
        **dict.fromkeys(["content", "text", "function", "name", "json_schema", "schema"], values),
    },
)
fields = st.sampled_from(
    sorted({name for parse in GOOD for name in parse.__annotations__["return"].model_fields})
)


@all_endpoints
@settings(max_examples=50)
@given(data=st.data())
def test_any_object_is_taken_or_refused_as_a_client_error(
    parse: Callable[[bytes], Body], data: st.DataObject
) -> None:
    anything = values | shapes | st.lists(shapes, max_size=2)
    extra = data.draw(st.dictionaries(fields | st.text(max_size=5), anything, max_size=4))
    body = json.dumps(GOOD[parse] | extra).encode()
    try:
        request = parse(body)
    except BadRequestError as error:
        assert error.status == 400
        assert "Error" not in error.message
    else:
        if isinstance(request, GenerationFields):
            told = request.sampling(DEFAULTS)
            assert 0 < told.top_p <= 1
            assert len(told.bias_token) == len(told.logit_bias)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    refusal(body)


@pytest.mark.parametrize(
    "extra",
    [
        {"messages": [{"role": "user", "content": [1] * 300_000}]},
        {"messages": [{"role": "user", "content": "", "tool_calls": [1] * 300_000}]},
        {"messages": [1] * 300_000},
        {"stop": [1] * 300_000},
        {"choice": [1] * 300_000},
        {"tools": [1] * 300_000},
        {"tools": [{"type": "function", "function": dict.fromkeys(map(str, range(9_000)), 1)}]},
        {"metadata": dict.fromkeys(map(str, range(9_000)), 1)},
        {"logit_bias": dict.fromkeys(map(str, range(9_000)), "x")},
        {"stream_options": dict.fromkeys(map(str, range(9_000)), 1)},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_the_number_of_mistakes_in_a_body_does_not_matter(extra: dict[str, Any]) -> None:
    error = refusal(json.dumps(CHAT | extra).encode())
    found = error.__context__
    assert isinstance(found, ValidationError)
    assert found.error_count() <= 4
    assert error.param is not None
    assert error.param.split("[")[0].split(".")[0] in extra


def test_an_object_with_thousands_of_fields() -> None:
    assert refusal(json.dumps(dict.fromkeys(map(str, range(9_000)), 1)).encode()).param is None


def filled(unit: bytes) -> bytes:
    room = BODY_BYTES_MAX - len(HEAD) - len(TAIL) - 4
    return HEAD + b"[" + unit * (room // len(unit)) + b"1]" + TAIL


@pytest.mark.parametrize("unit", [b"1,", b"[],", b"{},", b'"a",', b"[" * 900 + b"]" * 900 + b","])
def test_millions_of_values_are_refused_before_they_are_parsed(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(body: bytes) -> object:
        raise AssertionError(f"{len(body)} bytes were parsed")

    monkeypatch.setattr(orjson, "loads", never)
    assert "Send several smaller requests" in refusal(filled(unit)).message


def text_body(text: str) -> bytes:
    return json.dumps(CHAT | {"messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize("unit", ["a, b, c", '",', '\\",[', "\\", "\\\\", '"', "[{,", "\n", "你,"])
def test_commas_inside_a_text_do_not_count(unit: str) -> None:
    text = unit * (3 * COMMAS_MAX // len(unit))
    assert parse_chat_request(text_body(text)).messages[0].content == text


def test_as_many_values_as_are_allowed() -> None:
    check_values(b"[" + b"1," * COMMAS_MAX + b"1]")
    check_values(b"[" + b"[]," * (PARTS_MAX - 1) + b"1]")
    for body in (b"[" + b"1," * (COMMAS_MAX + 1) + b"1]", b"[" * (PARTS_MAX + 1)):
        with pytest.raises(BadRequestError):
            check_values(body)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(["\\", '"', ",", "[", "a", "\\\\", "\n"]), max_size=30),
    st.integers(0, 7),
)
def test_slices_never_tear_an_escape(characters: list[str], shift: int) -> None:
    """A text that is cut anywhere counts as it does when it is not cut."""
    padding = "\\" * shift + "x" * ((512 << 10) - 60)
    text = padding + "".join(characters) + '",[{' * (PARTS_MAX + 9)
    assert parse_chat_request(text_body(text)).messages[0].content == text
