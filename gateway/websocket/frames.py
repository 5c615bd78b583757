"""Converts the events of a response's stream to WebSocket frames. Pure.

An event consists of a line with its name, a line with JSON that repeats the name, and an empty
line. A frame has only the JSON. Comments and the end mark of the stream are dropped.
"""

from struct import Struct

import orjson

from sluice.errors import PlatformError

_EVENT_END, _DATA = b"\n\n", b"data: "
_TEXT = 0x81  # a complete text message, without a mask, as servers send it
_CLOSE, _CLOSE_FORM = 0x88, Struct("!BBH").pack
_SHORT_MAX, _MEDIUM_MAX = 125, 0xFFFF
_MEDIUM, _LONG = Struct("!BBH").pack, Struct("!BBQ").pack


def text_frame(payload: bytes) -> bytes:
    """Return a text message as one frame."""
    size = len(payload)
    if size <= _SHORT_MAX:
        return b"%c%c%b" % (_TEXT, size, payload)
    if size <= _MEDIUM_MAX:
        return _MEDIUM(_TEXT, 126, size) + payload
    return _LONG(_TEXT, 127, size) + payload


def close_frame(code: int) -> bytes:
    """Return the close frame, after which nothing may be sent."""
    return _CLOSE_FORM(_CLOSE, 2, code)


def frames_of(events: bytes, opening: bytes) -> bytes:
    """Return complete events as frames.

    Args:
        events: Bytes of server-sent events.
        opening: Start of each frame's JSON, which is `{` and the fields that all frames share.
    """
    if events.find(_EVENT_END) == len(events) - 2:  # a single event, the usual case
        return _frame(events[:-2], opening)
    return b"".join([_frame(event, opening) for event in events.split(_EVENT_END)])


def _frame(event: bytes, opening: bytes) -> bytes:
    at = event.find(_DATA) + len(_DATA)
    if at < len(_DATA) or event[at : at + 1] != b"{":
        return b""
    return text_frame(opening + event[at + 1 :])


def payload_opening(head: bytes, opening: bytes) -> bytes:
    """Return the start of a frame's JSON, which replaces the start `head` of an event."""
    return opening + head[head.index(_DATA) + len(_DATA) + 1 :]


def opening_of(stream_id: str | None) -> bytes:
    """Return the start of the JSON of a stream's frames. An unnamed stream has the id None."""
    if stream_id is None:
        return b"{"
    return b'{"stream_id":%b,' % orjson.dumps(stream_id)


def error_frame(
    error: PlatformError, opening: bytes, *, code: str = "", request_id: str = ""
) -> bytes:
    """Return the frame that reports a refused request, in the form that OpenAI's SDKs expect.

    Args:
        error: Reason of the refusal.
        opening: Beginning of the JSON, as for `frames_of`.
        code: Code that replaces the error's own code unless empty.
        request_id: Id of the request, or empty if there is none.
    """
    headers = {"x-request-id": request_id} if request_id else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    told = {
        "type": "error",
        "status": error.status,
        "error": {
            "type": error.code.policy.kind,
            "code": code or error.code,
            "message": error.message,
            "param": error.param,
            "headers": headers,
        },
    }
    return text_frame(opening + orjson.dumps(told)[1:])
