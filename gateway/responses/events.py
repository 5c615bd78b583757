"""The events of a response's stream, with constant ids and increasing numbers. Pure.

Items are written sequentially (reasoning, text, function calls). Each item is closed before the
next item is opened. All text deltas of a message share the bytes before the sequence number
(`head`) and the bytes after the text (`tail`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import orjson

from gateway.bodies.response_items import CompactionItem
from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.responses.delta_sizes import FORMAT, sizes_of
from gateway.responses.document import (
    ResponseFrame,
    call_item,
    compaction_item,
    ended_as,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from gateway.text.detokenizer import json_fragment
from gateway.text.sse import DONE
from sluice.errors import PlatformError

_FIRST_EVENTS = 2  # Number of the events `created` and `in_progress`.
_COMPACTION_EVENTS = 2  # Number of the events `added` and `done` of a compaction item.
_TAIL = b'"}\n\n'
EVENT_NUMBER = re.compile(rb'^data: [^\n]*?"sequence_number":(\d+)', re.MULTILINE)


class _OpenMessage:
    """A message of the assistant that is still being written.

    Attributes:
        head: Bytes of a text delta before its number and text.
        pieces: The text of each delta so far, escaped for a JSON string.
    """

    __slots__ = ("_at", "_id", "_logprobs", "_told", "head", "pieces")

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._logprobs, self._told = item_id, b"", list[tuple[int, int]]()
        self.pieces: list[bytes] = []
        self._at = b'"item_id":"%b","output_index":%d,"content_index":0' % (item_id.encode(), index)
        self.head = b"%b,%b" % (_event_head("response.output_text.delta"), self._at) + (
            b',"logprobs":[],"sequence_number":'
        )

    def opening(self) -> list[tuple[str, bytes]]:
        return [
            ("response.output_item.added", b'"item":%b' % message_item(self._id, "in_progress")),
            ("response.content_part.added", b'%b,"part":%b' % (self._at, text_part())),
        ]

    def logprobs_delta(self, fragment: bytes, told: Sequence[object]) -> tuple[str, bytes]:
        """Add text as JSON and its log probabilities, and return the event."""
        logprobs = orjson.dumps(told)[1:-1]
        if told:
            self._told.append((len(self.pieces), len(told)))
        self.pieces.append(fragment)
        self._logprobs += b"," + logprobs if self._logprobs and logprobs else logprobs
        fields = b'%b,"logprobs":[%b],"delta":"%b"' % (self._at, logprobs, fragment)
        return "response.output_text.delta", fields

    def closing(self) -> list[tuple[str, bytes]]:
        text = b"".join(self.pieces)
        done = b'%b,"text":"%b","logprobs":[%b]' % (self._at, text, self._logprobs)
        part = text_part(text, self._logprobs)
        return [
            ("response.output_text.done", done),
            ("response.content_part.done", b'%b,"part":%b' % (self._at, part)),
        ]

    def item(self, status: str) -> bytes:
        part = text_part(b"".join(self.pieces), self._logprobs)
        return message_item(self._id, status, part)

    def sizes(self) -> bytes:
        return sizes_of([*map(len, self.pieces)], self._told)


class _OpenReasoning:
    """A reasoning item that is still being written."""

    __slots__ = ("_at", "_id", "_sizes", "_text")

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._text, self._sizes = item_id, bytearray(), list[int]()
        self._at = b'"item_id":"%b","output_index":%d,"content_index":0' % (item_id.encode(), index)

    def opening(self) -> list[tuple[str, bytes]]:
        return [
            ("response.output_item.added", b'"item":%b' % reasoning_item(self._id, "in_progress")),
            ("response.content_part.added", b'%b,"part":%b' % (self._at, reasoning_part())),
        ]

    def delta(self, text: str) -> tuple[str, bytes]:
        fragment = json_fragment(text)
        self._text += fragment
        self._sizes.append(len(fragment))
        return "response.reasoning_text.delta", b'%b,"delta":"%b"' % (self._at, fragment)

    def closing(self) -> list[tuple[str, bytes]]:
        part = reasoning_part(bytes(self._text))
        return [
            ("response.reasoning_text.done", b'%b,"text":"%b"' % (self._at, self._text)),
            ("response.content_part.done", b'%b,"part":%b' % (self._at, part)),
        ]

    def item(self, status: str) -> bytes:
        return reasoning_item(self._id, status, reasoning_part(bytes(self._text)))

    def sizes(self) -> bytes:
        return sizes_of(self._sizes)


class OpenCall:
    """A function call that is still being written.

    Attributes:
        item_id: Id of the call's output item.
        number: Index of the call among the calls of the answer.
    """

    __slots__ = ("_arguments", "_at", "_call_id", "_name", "item_id", "number")

    def __init__(self, item_id: str, index: int, first: CallDelta) -> None:
        """Open a call, whose item has the position `index` in the output."""
        self.item_id, self._call_id, self._name = item_id, first.call_id, first.name
        self._arguments: list[str] = []
        self._at = b'"item_id":"%b","output_index":%d' % (item_id.encode(), index)
        self.number = first.index

    @property
    def arguments(self) -> str:
        """The arguments received so far, as JSON text."""
        return "".join(self._arguments)

    def opening(self) -> list[tuple[str, bytes]]:
        """Return the events that open the call."""
        item = call_item(self.item_id, "in_progress", self._call_id, self._name)
        return [("response.output_item.added", b'"item":%b' % item)]

    def delta(self, arguments: str) -> tuple[str, bytes]:
        """Add further arguments, and return the event."""
        self._arguments.append(arguments)
        fields = b'%b,"delta":"%b"' % (self._at, json_fragment(arguments))
        return "response.function_call_arguments.delta", fields

    def closing(self) -> list[tuple[str, bytes]]:
        """Return the events that close the call."""
        arguments = json_fragment(self.arguments)
        fields = b'%b,"name":"%b","arguments":"%b"' % (
            self._at,
            json_fragment(self._name),
            arguments,
        )
        return [("response.function_call_arguments.done", fields)]

    def item(self, status: str) -> bytes:
        """Return the call's item, as JSON."""
        return call_item(self.item_id, status, self._call_id, self._name, self.arguments)

    def sizes(self) -> bytes:
        """Return the sizes of the deltas, as `sizes_of` does."""
        return sizes_of([*map(len, self._arguments)])


class ResponseEvents:
    """Writes all events of one stream, whose response has a single choice.

    Attributes:
        open_text: Pieces of the open message so far, escaped for a JSON string. It is None while no
            message is open, and then a text delta needs further events.
        tail: Bytes of a text delta after its text.
    """

    __slots__ = (
        *("_compaction", "_frame", "_items", "_number", "_open", "_reason", "_sizes"),
        "_will_be_stored",
        "open_text",
    )

    tail = _TAIL

    def __init__(
        self,
        frame: ResponseFrame,
        *,
        will_be_stored: bool = False,
        compaction: CompactionItem | None = None,
    ) -> None:
        """`compaction` becomes the first output item, unless it is None."""
        self._frame, self._will_be_stored = frame, will_be_stored
        self._number = _FIRST_EVENTS + (0 if compaction is None else _COMPACTION_EVENTS)
        self._compaction = compaction
        self._items = [] if compaction is None else [compaction_item(compaction)]
        self._open: _OpenMessage | _OpenReasoning | OpenCall | None = None
        self.open_text: list[bytes] | None = None
        self._reason, self._sizes = "", FORMAT

    # --- the interface that `StreamedGeneration` uses ----------------------------------------

    @property
    def head(self) -> bytes:
        """Bytes of a text delta before its number and text, empty while no message is open."""
        return self._open.head if isinstance(self._open, _OpenMessage) else b""

    def begin_message(self) -> bytes:
        """Return the events before the first text of a message."""
        events = self._closed("completed")
        index = len(self._items)
        return events + self._opened(_OpenMessage(self._frame.item_id("msg", index), index))

    def numbered(self, fragment: bytes) -> bytes:
        """Add text to the open message, and return the part of its event between `head` and `tail`.

        The text is already escaped for a JSON string.
        """
        text, number = self.open_text, self._number
        assert text is not None, "begin_message comes first"
        text.append(fragment)
        self._number = number + 1
        return b'%d,"delta":"%b' % (number, fragment)

    def first(self) -> bytes:
        """Return the events that begin the stream."""
        response = b'"response":' + self.under_way()
        events = [
            written_event("response.created", 0, response),
            written_event("response.in_progress", 1, response),
        ]
        if (item := self._compaction) is not None:
            begun, done = compaction_item(item, "in_progress"), compaction_item(item)
            form = b'"item":%b,"output_index":0'
            events.append(written_event("response.output_item.added", 2, form % begun))
            events.append(written_event("response.output_item.done", 3, form % done))
        return b"".join(events)

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None = None) -> bytes:
        """Return the events of a delta, which may have text, reasoning and function calls."""
        events = b""
        if delta.reasoning:
            events += self._reasoning(delta.reasoning)
        calls = delta.calls
        while calls and isinstance(self._open, OpenCall) and calls[0].index == self._open.number:
            events += self._call(calls[0])
            calls = calls[1:]
        if delta.content or logprobs is not None:
            events += self._text(delta.content, logprobs)
        for call in calls:
            events += self._call(call)
        return events

    def finish(self, reason: str) -> bytes:
        """Return the events that close all open items."""
        self._reason = reason
        if self._open is None and len(self._items) == (self._compaction is not None):
            return self.begin_message() + self.finish(reason)
        return self._closed(ended_as(reason)[0])

    # --- the end ----------------------------------------------------------------------------

    @property
    def deltas(self) -> bytes:
        """Sizes of all deltas so far, or empty if the events cannot be repeated by their sizes.

        Only a response that will be stored has sizes.
        """
        if not self._will_be_stored:
            return b""
        return self._sizes if self._open is None else self._sizes + self._open.sizes()

    def so_far(self) -> tuple[bytes, bytes, int]:
        """Return what `retold` needs to repeat all events so far.

        Returns:
            The response with the output so far as JSON, `deltas`, and the number of events.
        """
        written = self._frame.written("in_progress", self._snapshot(), is_stored=True)
        return written, self.deltas, self._number

    def under_way(self) -> bytes:
        """Return the response as JSON, without output, in the status `in_progress`."""
        return self._frame.written("in_progress", is_stored=self._will_be_stored)

    def response(
        self, usage: Mapping[str, object], ended_unix_s: int, *, is_stored: bool = False
    ) -> bytes:
        """Return the ended response as JSON, with all its output."""
        status, details = ended_as(self._reason)
        return self._frame.written(
            status,
            self._items,
            is_stored=is_stored,
            usage=usage,
            completed_unix_s=None if details else ended_unix_s,
            incomplete=details,
        )

    def last(self, response: bytes) -> bytes:
        """Return the event that ends a complete response."""
        status, _ = ended_as(self._reason)
        return self._event(f"response.{status}", b'"response":' + response) + DONE

    def failed(self, error: PlatformError, *, is_stored: bool = False) -> bytes:
        """Return the failed response as JSON, with the output so far."""
        told = {"code": str(error.code), "message": error.message}
        return self._frame.written("failed", self._snapshot(), is_stored=is_stored, error=told)

    def cancelled(self) -> bytes:
        """Return the cancelled response as JSON, with the output so far. The response is stored."""
        return self._frame.written("cancelled", self._snapshot(), is_stored=True)

    def cut(self, status: str, response: bytes) -> bytes:
        """Return the final event of a response that failed or was cancelled."""
        return cut_at(self._number, status, response)

    def _snapshot(self) -> list[bytes]:
        items = [*self._items]
        if self._open is not None:
            items.append(self._open.item("incomplete"))
        return items

    # --- items ------------------------------------------------------------------------------

    def _reasoning(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, _OpenReasoning):
            events = self._closed("completed")
            index = len(self._items)
            events += self._opened(_OpenReasoning(self._frame.item_id("rs", index), index))
        assert isinstance(self._open, _OpenReasoning), "it was just opened"
        return events + self._event(*self._open.delta(text))

    def _text(self, text: str, logprobs: dict[str, object] | None) -> bytes:
        events = self.begin_message() if self.open_text is None else b""
        assert isinstance(self._open, _OpenMessage), "it was just opened"
        told = () if logprobs is None else cast("Sequence[object]", logprobs["content"])
        return events + self._event(*self._open.logprobs_delta(json_fragment(text), told))

    def _call(self, call: CallDelta) -> bytes:
        events = b""
        if not isinstance(self._open, OpenCall) or self._open.number != call.index:
            events = self._closed("completed")
            index = len(self._items)
            events += self._opened(self._new_call(index, call))
        assert isinstance(self._open, OpenCall), "it was just opened"
        if not call.arguments:
            return events
        return events + self._event(*self._open.delta(call.arguments))

    def _new_call(self, index: int, call: CallDelta) -> OpenCall:
        """Return a new call, with the item id of its position in the output."""
        return OpenCall(self._frame.item_id("fc", index), index, call)

    def _opened(self, item: _OpenMessage | _OpenReasoning | OpenCall) -> bytes:
        self._open = item
        self.open_text = item.pieces if isinstance(item, _OpenMessage) else None
        events = item.opening()
        at = b',"output_index":%d' % len(self._items)
        name, fields = events[0]
        events[0] = (name, fields + at)
        return b"".join([self._event(*event) for event in events])

    def _closed(self, status: str) -> bytes:
        item, self._open, self.open_text = self._open, None, None
        if item is None:
            return b""
        written = item.item(status)
        if self._will_be_stored:
            self._sizes += item.sizes()
        done = b'"item":%b,"output_index":%d' % (written, len(self._items))
        self._items.append(written)
        events = [*item.closing(), ("response.output_item.done", done)]
        return b"".join([self._event(*event) for event in events])

    def _event(self, name: str, fields: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return written_event(name, number, fields)


def _event_head(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b"' % (name.encode(), name.encode())


def cut_at(number: int, status: str, response: bytes) -> bytes:
    """Return the final event of a response that failed or was cancelled."""
    return written_event(f"response.{status}", number, b'"response":' + response) + DONE


def written_event(name: str, number: int, fields: bytes) -> bytes:
    """Return an event. The `fields` are the event's JSON without its type and number."""
    return b'%b,"sequence_number":%d,%b}\n\n' % (_event_head(name), number, fields)
