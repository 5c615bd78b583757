"""W3C Trace Context (level 1), with parsed and forwarded headers and derived span ids.

The span id of a request is part of the request's unique id. The ids of its child spans are computed
from that span id. So every process that has a request can compute the ids of its spans. The gateway
does so when it submits the request, and telemetry when it builds spans from an event.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

# A later version may have more fields. Ids that consist of zeros are invalid.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.{0,128})?"
)
_SAMPLED = 1
_UID = re.compile(r"[0-9a-f]{16}(?!0{16})[0-9a-f]{16}")
# In level 1, a key may begin with a digit only if it has the form tenant@system.
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_VISIBLE = r"\x21-\x2b\x2d-\x3c\x3e-\x7e"  # printable ASCII without comma and equals sign
_MEMBER = re.compile(rf"({_KEY})=[ {_VISIBLE}]{{0,255}}[{_VISIBLE}]")
_MEMBERS_MAX = 32
_HEADER_MAX = 8192  # longest header in characters, above which a header is ignored
STATE_MAX = 512  # most characters of a tracestate that are forwarded
_LONG_MEMBER = 128  # members above this length are dropped first from a tracestate that is too long
_SPAN_AT, _FLAGS_AT = 36, 52  # offsets of the span id and the flags in the platform's traceparents
_ANSWER_SHIFT = 16  # bits for an attempt's number, below the bits for the answer's number
STAGE_SHIFT = 48  # bit offset of the numbers of an attempt's child spans


class Upstream(NamedTuple):
    """The caller's trace context.

    Attributes:
        trace_id: Trace id, 32 hex digits, or empty without a valid context, so that a new trace
            begins.
        span_id: Span id of the caller, 16 hex digits.
        is_sampled: Whether the trace is sampled, as decided where the trace begins.
        state: `tracestate`, at most `STATE_MAX` characters.
    """

    trace_id: str = ""
    span_id: str = ""
    is_sampled: bool = False
    state: str = ""


NONE = Upstream()


def read(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> Upstream:
    """Return the trace context in a request's headers. Invalid headers lead to an empty context."""
    found = _TRACEPARENT.fullmatch(traceparents[0]) if len(traceparents) == 1 else None
    if found is None:
        return NONE
    version, trace_id, span_id, flags, more = found.groups()
    if version == "00" and more is not None:
        return NONE
    state = bounded_state(tracestates) if tracestates else ""
    return Upstream(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def bounded_state(headers: Sequence[str]) -> str:
    """Return a `tracestate` shortened to `STATE_MAX` characters, or empty if it is invalid."""
    text = ",".join(headers)
    if len(text) > _HEADER_MAX:
        return ""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    keys: set[str] = set()
    for member in members:
        found = _MEMBER.fullmatch(member)
        if found is None or found[1] in keys:
            return ""
        keys.add(found[1])
    if len(members) > _MEMBERS_MAX:
        return ""
    if _size(members) > STATE_MAX:
        members = [member for member in members if len(member) <= _LONG_MEMBER]
    while _size(members) > STATE_MAX:
        members.pop()
    return ",".join(members)


def _size(members: Sequence[str]) -> int:
    return sum(map(len, members)) + max(0, len(members) - 1)


def is_sampled(traceparent: str) -> bool:
    """Return whether a traceparent of the platform is sampled, false for an empty text."""
    return traceparent[-2:] == "01"


def traceparent(trace_id: str, span_id: str, *, sampled: bool) -> str:
    """Return the `traceparent` header of a span."""
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"


def request_span_id(uid: str) -> str:
    """Return the span id of a request, the second half of its unique id of 32 hex digits."""
    if _UID.fullmatch(uid):
        return uid[16:]
    return hashlib.blake2b(uid.encode(), digest_size=8).hexdigest()


def child_span_id(span_id: str, number: int) -> str:
    """Return the id of a child span, which is different for each number."""
    return f"{int(span_id, 16) ^ number or 1:016x}"


def attempt_number(part: int, number: int) -> int:
    """Return the number of an attempt among its request's spans, where 1 is the gateway's span."""
    return (part + 1) << _ANSWER_SHIFT | (number & 0xFFFF)


def attempt_traceparent(of_request: str, part: int, number: int) -> str:
    """Return the traceparent of an attempt, for the router, from the request's traceparent."""
    return _below(of_request, attempt_number(part, number))


def later_attempt(of_attempt: str, number: int, by: int) -> str:
    """Return the traceparent of a later attempt, from the traceparent of an earlier attempt."""
    return _below(of_attempt, attempt_number(0, number) ^ attempt_number(0, number + by))


def _below(of: str, number: int) -> str:
    child = child_span_id(of[_SPAN_AT:_FLAGS_AT], number)
    return of[:_SPAN_AT] + child + of[_FLAGS_AT:]
