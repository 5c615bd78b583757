"""Whatever a model does, a response's stream is one lifecycle that adds up to its output."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.responses.document import ResponseFrame
from gateway.responses.events import ResponseEvents
from gateway.responses.retold import retold, retold_until
from sluice.errors import ErrorCode, PlatformError
from tests.support.response_shapes import events_of

ECHO: dict[str, Any] = {
    "previous_response_id": None,
    "instructions": 'say "no"\n',
    "tools": [],
    "tool_choice": "auto",
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "reasoning": {"effort": None, "summary": None},
    "max_output_tokens": None,
    "max_tool_calls": None,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "safety_identifier": None,
    "prompt_cache_key": None,
    "user": None,
}
USAGE = {
    "input_tokens": 1,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 3,
}
LOGPROB = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


def new_events(*, will_be_stored: bool = False) -> ResponseEvents:
    frame = ResponseFrame("resp_1", "ab" * 16, ECHO, model="m", created_unix_s=7)
    return ResponseEvents(frame, will_be_stored=will_be_stored)


def written(writer: ResponseEvents, delta: AnswerDelta) -> bytes:
    """Return the events of a delta, written as the stream's hot path writes them."""
    if not delta.content or delta.reasoning or delta.calls:
        return writer.delta(delta)
    opening = writer.begin_message() if writer.open_text is None else b""
    text = json.dumps(delta.content, ensure_ascii=False)[1:-1].encode()
    return opening + writer.head + writer.numbered(text) + writer.tail


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerDelta]:
    """Return deltas as parsers give them: each call is named once, in its first piece."""
    deltas: list[AnswerDelta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call", "more"]), max_size=12)):
        text = draw(TEXTS)
        if kind == "text":
            deltas.append(AnswerDelta(text))
        elif kind == "reasoning":
            deltas.append(AnswerDelta(reasoning=text))
        elif kind == "call":
            deltas.append(AnswerDelta(calls=(CallDelta(calls, "", f"call_{calls}", "f"),)))
            calls += 1
        elif deltas and deltas[-1].calls:
            deltas.append(AnswerDelta(calls=(CallDelta(calls - 1, text),)))
    return deltas


@given(answers(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_answer_is_one_lifecycle(deltas: list[AnswerDelta], reason: str) -> None:
    writer = new_events()
    parts = [writer.first()]
    parts += [written(writer, delta) for delta in deltas]
    parts.append(writer.finish(reason))
    parts.append(writer.last(writer.response(USAGE, 8)))
    events = events_of(b"".join(parts).decode())
    response = events[-1]["response"]
    said = "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    assert said == "".join(delta.content for delta in deltas)
    assert response["usage"] == USAGE
    statuses = [item["status"] for item in response["output"]]
    is_cut = reason == "length"
    assert statuses == ["completed"] * (len(statuses) - 1) + [
        "incomplete" if is_cut else "completed"
    ]
    assert response["status"] == ("incomplete" if is_cut else "completed")
    assert (response["completed_at"] is None) == is_cut
    details = {"reason": "max_output_tokens"} if is_cut else None
    assert response["incomplete_details"] == details


@given(answers(), st.sampled_from(["stop", "length"]))
def test_the_sizes_of_deltas_give_every_event_again(deltas: list[AnswerDelta], reason: str) -> None:
    writer = new_events(will_be_stored=True)
    sent = writer.first()
    for delta in deltas:
        sent += written(writer, delta)
        assert loose_events(retold_until(*writer.so_far())) == loose_events(sent)
    sent += writer.finish(reason)
    response = writer.response(USAGE, 8, is_stored=True)
    sent += writer.last(response)
    assert events_of(retold(response, writer.deltas).decode()) == events_of(sent.decode())


@pytest.mark.parametrize("size", [254, 255, 256, 5000])
def test_long_deltas_and_their_log_probabilities_are_given_again(size: int) -> None:
    writer = new_events(will_be_stored=True)
    sent = writer.first()
    told = [{"content": [LOGPROB] * count} for count in (0, 1, 300)]
    for text, logprobs in zip(("a" * size, "", '"é\n' * size), told, strict=True):
        sent += writer.delta(AnswerDelta(text), logprobs)
    sent += writer.finish("stop")
    response = writer.response(USAGE, 8, is_stored=True)
    sent += writer.last(response)
    assert events_of(retold(response, writer.deltas).decode()) == events_of(sent.decode())


def test_only_a_stored_response_has_sizes() -> None:
    for will_be_stored in (False, True):
        writer = new_events(will_be_stored=will_be_stored)
        written(writer, AnswerDelta("a"))
        open_sizes = writer.deltas
        writer.finish("stop")
        assert (bool(open_sizes), bool(writer.deltas)) == (will_be_stored, will_be_stored)


def test_sizes_of_other_events_are_refused() -> None:
    writer = new_events(will_be_stored=True)
    writer.delta(AnswerDelta("a"))
    response, deltas, number = writer.so_far()
    for wrong in ((response, b"", number), (response, deltas, number + 100)):
        with pytest.raises(ValueError, match="sizes"):
            retold_until(*wrong)


def loose_events(sent: bytes) -> list[dict[str, Any]]:
    lines = [it for it in sent.splitlines() if it.startswith(b"data: ")]
    return [json.loads(it.removeprefix(b"data: ")) for it in lines]


@given(answers())
def test_a_failure_ends_a_response_once_with_its_earlier_output(deltas: list[AnswerDelta]) -> None:
    writer = new_events()
    parts = [writer.first(), *[writer.delta(delta) for delta in deltas]]
    error = PlatformError(ErrorCode.ENGINE_FAILED, "it is gone")
    parts.append(writer.cut("failed", writer.failed(error)))
    events = events_of(b"".join(parts).decode())
    response = events[-1]["response"]
    assert response["error"] == {"code": "engine_failed", "message": "it is gone"}
    assert [item["status"] for item in response["output"]][-1:] in ([], ["incomplete"])


def test_log_probabilities_come_with_their_text_and_once_more_in_the_whole() -> None:
    writer = new_events()
    parts = [writer.first()]
    parts += [writer.delta(AnswerDelta("a"), {"content": [LOGPROB]}) for _ in range(2)]
    parts.append(writer.finish("stop"))
    parts.append(writer.last(writer.response(USAGE, 8)))
    events = events_of(b"".join(parts).decode())
    (message,) = events[-1]["response"]["output"]
    assert message["content"][0]["logprobs"] == [LOGPROB, LOGPROB]


@pytest.mark.parametrize("is_first", [True, False])
def test_text_beside_calls_of_one_step_comes_before_beginning_calls(is_first: bool) -> None:
    writer = new_events()
    parts = [writer.first()]
    begun = CallDelta(0, "{", "call_0", "f")
    if not is_first:
        parts.append(writer.delta(AnswerDelta(calls=(begun,))))
    more = (begun,) if is_first else (CallDelta(0, "}"),)
    parts.append(writer.delta(AnswerDelta("text", calls=more)))
    parts.append(writer.finish("tool_calls"))
    parts.append(writer.last(writer.response(USAGE, 8)))
    events = events_of(b"".join(parts).decode())
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == (["message", "function_call"] if is_first else ["function_call", "message"])
