"""Writes the events of a message's stream. Pure.

Each content block is closed before the next block opens. All text deltas of a block have the same
bytes before their text (`head`) and after it (`tail`).
"""

from collections.abc import Mapping

import orjson

from gateway.anthropic.document import message, stop_reason
from gateway.anthropic.errors import anthropic_body
from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.text.detokenizer import json_fragment
from sluice.errors import PlatformError

_TAIL = b'"}}\n\n'
_TEXT, _THINKING = "text", "thinking"


class MessageEvents:
    """Writes all events of one stream, which has a single message.

    Attributes:
        head: Bytes of a text delta before its text, or empty while no text block is open.
        tail: Bytes of a text delta after its text.
        stop_sequence: Stop sequence that ended the answer, or empty if no sequence has.
    """

    __slots__ = (
        *("_call", "_id", "_model", "_next", "_open", "_prompt_tokens", "_reason"),
        *("head", "stop_sequence"),
    )

    tail = _TAIL

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        """Start before the first event.

        Args:
            message_id: Id of the message.
            model: Name of the model that answers.
            prompt_tokens: Tokens of the prompt, sent with the first event. The number of cached
                tokens is only sent at the end.
        """
        self._id, self._model, self._prompt_tokens = message_id, model, prompt_tokens
        self._next = 0  # index of the next block
        self._open = ""  # kind of the open block, or empty if none is open
        self._call = -1  # index of the open call, or -1 if none is open
        self._reason = ""
        self.head = b""
        self.stop_sequence = ""

    @property
    def is_in_text(self) -> bool:
        """Whether a text block is open, so that a text delta needs no other event before it."""
        return self._open == _TEXT

    def begin_text(self) -> bytes:
        """Return the events before the first text of a new block."""
        return self._opened(_TEXT, {"type": "text", "text": ""})

    def first(self) -> bytes:
        """Return the event that begins the stream."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        begun = message(self._id, self._model, [], stopped=None, stop_sequence="", usage=usage)
        return _event("message_start", b'"message":' + begun)

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None = None) -> bytes:
        """Return the events of a delta, which may have reasoning, text and tool calls."""
        del logprobs  # the API has no log probabilities
        events = b""
        if delta.reasoning:
            if self._open != _THINKING:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._opened(_THINKING, block)
            events += self._piece("thinking_delta", "thinking", delta.reasoning)
        calls = delta.calls
        while calls and calls[0].index == self._call:
            events += self._called(calls[0])
            calls = calls[1:]
        if delta.content:
            events += b"" if self.is_in_text else self.begin_text()
            events += self._piece("text_delta", "text", delta.content)
        for call in calls:
            events += self._called(call)
        return events

    def finish(self, reason: str) -> bytes:
        """Return the events that close the open block. An empty message receives a text block."""
        self._reason = reason
        begun = b"" if self._next else self.begin_text()
        return begun + self._closed()

    def last(self, usage: Mapping[str, object], ended_unix_s: int) -> bytes:
        """Return the events that end a complete message."""
        del ended_unix_s  # the API does not report the time
        stopped = stop_reason(self._reason, self.stop_sequence)
        delta = {"stop_reason": stopped, "stop_sequence": self.stop_sequence or None}
        fields = b'"delta":%b,"usage":%b' % (orjson.dumps(delta), orjson.dumps(dict(usage)))
        return _event("message_delta", fields) + _event("message_stop", b"")

    def failure(self, error: PlatformError) -> bytes:
        """Return the event that ends a failed message."""
        return b"event: error\ndata: " + anthropic_body(error) + b"\n\n"

    def _called(self, call: CallDelta) -> bytes:
        events = b""
        if call.index != self._call:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            events = self._opened("tool_use", block)
            self._call = call.index
        if call.arguments:
            events += self._piece("input_json_delta", "partial_json", call.arguments)
        return events

    def _piece(self, kind: str, field: str, text: str) -> bytes:
        fields = b'"index":%d,"delta":{"type":"%b","%b":"%b"}'
        piece = kind.encode(), field.encode(), json_fragment(text)
        return _event("content_block_delta", fields % (self._next - 1, *piece))

    def _opened(self, kind: str, block: Mapping[str, object]) -> bytes:
        closed = self._closed()
        index, self._open, self._next = self._next, kind, self._next + 1
        if kind == _TEXT:
            self.head = b'%b,"index":%d,"delta":{"type":"text_delta","text":"' % (
                _opening("content_block_delta"),
                index,
            )
        fields = b'"index":%d,"content_block":%b' % (index, orjson.dumps(dict(block)))
        return closed + _event("content_block_start", fields)

    def _closed(self) -> bytes:
        if not self._open:
            return b""
        self._open, self._call, self.head = "", -1, b""
        return _event("content_block_stop", b'"index":%d' % (self._next - 1))


def _opening(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b"' % (name.encode(), name.encode())


def _event(name: str, fields: bytes) -> bytes:
    return b"%b%b%b}\n\n" % (_opening(name), b"," if fields else b"", fields)
