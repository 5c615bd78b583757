"""W3C Trace Context (level 1): reading, passing on, and the derivation of span ids.

A request's own span id is part of its unique id, and the ids of the spans below follow from it by
arithmetic. So every process that knows the request can name its spans: the gateway when it submits,
telemetry when it makes spans of an event, repeatedly if necessary.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

# A later version may have more fields; ids of zeros only are no ids.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.{0,128})?"
)
_SAMPLED = 1
_UID = re.compile(r"[0-9a-f]{16}(?!0{16})[0-9a-f]{16}")
# Level 1: only the name of a tenant, before an @, may begin with a digit.
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_VISIBLE = r"\x21-\x2b\x2d-\x3c\x3e-\x7e"  # but for comma and equals sign
_MEMBER = re.compile(rf"({_KEY})=[ {_VISIBLE}]{{0,255}}[{_VISIBLE}]")
_MEMBERS_MAX = 32
_HEADER_MAX = 8192  # longer ones are not looked at
STATE_MAX = 512  # characters of a tracestate that are passed on
_LONG_MEMBER = 128  # these go first where there is too much
_SPAN_AT, _FLAGS_AT = 36, 52  # in a traceparent of ours
_ANSWER_SHIFT = 16  # attempts are numbered below it
STAGE_SHIFT = 48  # of the numbers of spans below an attempt


class Upstream(NamedTuple):
    """The caller's trace context.

    Attributes:
        trace_id: 32 hex digits; empty: there is no valid context, and a trace begins here.
        span_id: Span of the caller, 16 hex digits.
        is_sampled: Whether the caller samples this trace, or the gateway does where the trace
            begins.
        state: `tracestate`, at most `STATE_MAX` characters.
    """

    trace_id: str = ""
    span_id: str = ""
    is_sampled: bool = False
    state: str = ""


NONE = Upstream()


def read(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> Upstream:
    """Return the context of a request's headers; the empty one when it is not valid."""
    found = _TRACEPARENT.fullmatch(traceparents[0]) if len(traceparents) == 1 else None
    if found is None:
        return NONE
    version, trace_id, span_id, flags, more = found.groups()
    if version == "00" and more is not None:
        return NONE
    state = bounded_state(tracestates) if tracestates else ""
    return Upstream(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def bounded_state(headers: Sequence[str]) -> str:
    """Return a valid `tracestate` of at most `STATE_MAX` characters; empty when it is not valid."""
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
    """Return whether a traceparent of the platform is sampled; false without one."""
    return traceparent[-2:] == "01"


def traceparent(trace_id: str, span_id: str, *, sampled: bool) -> str:
    """Return the header of a span."""
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"


def request_span_id(uid: str) -> str:
    """Return the span id of a request: the second half of its unique id of 32 hex digits."""
    if _UID.fullmatch(uid):
        return uid[16:]
    return hashlib.blake2b(uid.encode(), digest_size=8).hexdigest()


def child_span_id(span_id: str, number: int) -> str:
    """Return the id of a span below another one; different for different numbers."""
    return f"{int(span_id, 16) ^ number or 1:016x}"


def attempt_number(part: int, number: int) -> int:
    """Return the number of an attempt among the spans of its request; 1 is the gateway's part."""
    return (part + 1) << _ANSWER_SHIFT | (number & 0xFFFF)


def attempt_traceparent(of_request: str, part: int, number: int) -> str:
    """Return the traceparent of an attempt for its router, from the request's own."""
    return _below(of_request, attempt_number(part, number))


def later_attempt(of_attempt: str, number: int, by: int) -> str:
    """Return the traceparent of a later attempt, from that of an earlier one."""
    return _below(of_attempt, attempt_number(0, number) ^ attempt_number(0, number + by))


def _below(of: str, number: int) -> str:
    child = child_span_id(of[_SPAN_AT:_FLAGS_AT], number)
    return of[:_SPAN_AT] + child + of[_FLAGS_AT:]
