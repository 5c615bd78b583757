"""The names of one request: ours, the caller's, and those of W3C Trace Context (level 1)."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from aiohttp import web
from multidict import CIMultiDictProxy, istr

from gateway.server.protocol import SERVER_NAME

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# A later version may have more fields; ids of zeros only are no ids.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.{0,128})?"
)


_UIDS_AT_ONCE = 256
# Names that are compared as they are: any other string is lowered first, at each look.
_REQUEST_ID_NAME, _TRACEPARENT_NAME = istr("x-request-id"), istr("traceparent")


def _random_uids() -> Iterator[str]:
    """Yield 32 random hex digits each; asking the system for each by itself would cost 10 us."""
    while True:
        digits = os.urandom(16 * _UIDS_AT_ONCE).hex()
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_UIDS = _random_uids()


class Identity(NamedTuple):
    """The names of one request.

    Attributes:
        uid: Ours, 32 random hex digits; other ids are made of it.
        request_id: The caller's `x-request-id` when it is sane, else ours.
        trace_id: 32 hex digits, the caller's or new.
        traceparent: W3C trace context to pass on, and to tell the caller as `traceresponse`.
    """

    uid: str
    request_id: str
    trace_id: str
    traceparent: str

    @property
    def headers(self) -> dict[str, str]:
        """What every answer says."""
        return {
            "x-request-id": self.request_id,
            "traceresponse": self.traceparent,
            "Server": SERVER_NAME,
        }


_IDENTITY = web.RequestKey("identity", Identity)


def new_identity(headers: CIMultiDictProxy[str]) -> Identity:
    """Return the names of a request with these headers."""
    uid = next(_UIDS)
    given = headers.get(_REQUEST_ID_NAME)
    request_id = given if given and _REQUEST_ID.fullmatch(given) else f"req_{uid}"
    trace_id, flags = uid, "01"
    parent = headers.get(_TRACEPARENT_NAME)
    if parent is not None and (context := _TRACEPARENT.fullmatch(parent)) is not None:
        version, trace, sampled, more = context.groups()
        if version != "00" or more is None:
            trace_id, flags = trace, sampled
    return Identity(uid, request_id, trace_id, f"00-{trace_id}-{uid[16:]}-{flags}")


def set_identity(request: web.Request) -> Identity:
    """Name a request."""
    identity = request[_IDENTITY] = new_identity(request.headers)
    return identity


def identity_of(request: web.Request) -> Identity:
    """Return the names that the server has given to a request."""
    return request[_IDENTITY]
