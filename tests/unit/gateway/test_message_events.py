"""Whatever a model does, a message's stream opens and closes its blocks, and adds up to them."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.document import blocks_of
from gateway.anthropic.events import MessageEvents
from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.text.answer import ChoiceText
from gateway.text.detokenizer import json_fragment
from sluice.errors import ErrorCode, PlatformError
from tests.support.anthropic_stream import events_of, message_of

USAGE = {"input_tokens": 1, "output_tokens": 2}
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("content"), TEXTS),
        st.tuples(st.just("plain"), TEXTS),
        st.tuples(st.just("reasoning"), TEXTS),
        st.tuples(st.just("call"), st.just('{"a": 1}')),
    ),
    max_size=8,
)


def new_events() -> MessageEvents:
    return MessageEvents("msg_1", "tiny", 5)


def told(steps: list[tuple[str, str]]) -> tuple[bytes, ChoiceText]:
    """Return a stream of these pieces, and the whole answer of the same."""
    events, answer, stream, calls = new_events(), ChoiceText(), [], 0
    stream.append(events.first())
    for kind, text in steps:
        if kind == "call":
            delta = AnswerDelta(calls=(CallDelta(calls, "", f"call_{calls}", "f"),))
            pieces = [delta, AnswerDelta(calls=(CallDelta(calls, text),))]
            calls += 1
        else:
            pieces = [AnswerDelta(reasoning=text) if kind == "reasoning" else AnswerDelta(text)]
        for piece in pieces:
            answer.add(piece)
            if kind == "plain":  # as the hot path sends text
                stream.append(b"" if events.is_in_text else events.begin_text())
                stream.append(events.head + json_fragment(text) + events.tail)
            else:
                stream.append(events.delta(piece))
    stream += [events.finish("tool_calls" if calls else "stop"), events.last(USAGE, 0)]
    return b"".join(stream), answer


@given(STEPS)
def test_any_answer_is_blocks_that_open_and_close(steps: list[tuple[str, str]]) -> None:
    stream, answer = told(steps)
    message = message_of(events_of(stream.decode()))
    texts = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    thoughts = [it["thinking"] for it in message["content"] if it["type"] == "thinking"]
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (texts, "".join(thoughts)) == (answer.content, answer.reasoning)
    assert calls == [block for block in blocks_of(answer) if block["type"] == "tool_use"]
    assert message["content"], "a message has a block"
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
    assert message["usage"] == USAGE


def test_a_stop_sequence_and_a_length_are_told() -> None:
    for reason, stop, expected in (
        ("stop", "END", "stop_sequence"),
        ("length", "", "max_tokens"),
    ):
        events = new_events()
        stream = events.first() + events.finish(reason)
        events.stop_sequence = stop
        stream += events.last(USAGE, 0)
        message = message_of(events_of(stream.decode()))
        assert (message["stop_reason"], message["stop_sequence"]) == (expected, stop or None)


def test_a_failure_is_the_last_event() -> None:
    failure = new_events().failure(PlatformError(ErrorCode.INTERNAL, "gone"))
    name, _, data = failure.decode().partition("\ndata: ")
    assert name == "event: error"
    error: dict[str, Any] = json.loads(data)
    assert error["type"] == "error"
    assert (error["error"]["type"], error["error"]["message"]) == ("api_error", "gone")
