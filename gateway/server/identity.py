"""The ids of one request from the gateway, the caller and W3C Trace Context (level 1)."""

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from aiohttp import web
from multidict import CIMultiDictProxy, istr

from gateway.server.cors import Cors
from gateway.server.protocol import SERVER_NAME
from sluice import tracecontext
from sluice.ids import is_request_id
from sluice.tracecontext import NONE, Upstream

_UIDS_AT_ONCE = 256
# Header names of type `istr` are compared directly, while plain strings are lowered each time.
_REQUEST_ID_NAME, _TRACEPARENT_NAME = istr("x-request-id"), istr("traceparent")
_TRACESTATE_NAME = istr("tracestate")
_LOTS = 1 << 32


def _random_uids() -> Iterator[str]:
    """Yield ids of 32 random hex digits. One system call, which costs 10 us, serves many ids."""
    while True:
        digits = os.urandom(16 * _UIDS_AT_ONCE).hex()
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_UIDS = _random_uids()


class CallerIdentity(NamedTuple):
    """The ids of one request.

    Attributes:
        uid: Gateway's id, 32 random hex digits. Other ids are derived from this id.
        request_id: Caller's `x-request-id` if it is valid, otherwise the gateway's id.
        trace_id: Trace id of 32 hex digits, either the caller's or a new one.
        traceparent: Trace context of the gateway's span, returned to the caller as `traceresponse`.
        upstream: Caller's trace context, or the sampling decision for a trace that begins here.
        cross_origin: Further headers of the answer, for a page of another origin or in the
            names of another API.
    """

    uid: str
    request_id: str
    trace_id: str
    traceparent: str
    upstream: Upstream = NONE
    cross_origin: Mapping[str, str] = MappingProxyType({})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every answer."""
        return {
            "x-request-id": self.request_id,
            "traceresponse": self.traceparent,
            "Server": SERVER_NAME,
            **self.cross_origin,
        }


_KEPT = Upstream(is_sampled=True)
_IDENTITY = web.RequestKey("identity", CallerIdentity)


def new_identity(headers: CIMultiDictProxy[str], trace_share: float = 1.0) -> CallerIdentity:
    """Return the ids of a request with these headers, and sample `trace_share` of new traces."""
    uid = next(_UIDS)
    given = headers.get(_REQUEST_ID_NAME)
    request_id = given if given and is_request_id(given) else f"req_{uid}"
    upstream = NONE
    if _TRACEPARENT_NAME in headers:
        states = headers.getall(_TRACESTATE_NAME, ())
        upstream = tracecontext.read(headers.getall(_TRACEPARENT_NAME), states)
    if not upstream.trace_id and int(uid[:8], 16) < trace_share * _LOTS:
        upstream = _KEPT
    trace_id = upstream.trace_id or uid
    # For a new uid, the span id `uid[16:]` equals the result of `tracecontext.request_span_id`.
    ours = tracecontext.traceparent(trace_id, uid[16:], sampled=upstream.is_sampled)
    return CallerIdentity(uid, request_id, trace_id, ours, upstream)


def new_uid() -> str:
    """Return 32 random hex digits."""
    return next(_UIDS)


def further_identity(first: CallerIdentity) -> CallerIdentity:
    """Return the ids of a request on behalf of another request, in the same trace."""
    uid = next(_UIDS)
    upstream = Upstream(
        first.trace_id, first.uid[16:], first.upstream.is_sampled, first.upstream.state
    )
    ours = tracecontext.traceparent(first.trace_id, uid[16:], sampled=upstream.is_sampled)
    return CallerIdentity(uid, first.request_id, first.trace_id, ours, upstream)


def set_identity(request: web.Request, trace_share: float, cors: Cors) -> CallerIdentity:
    """Set the ids of a request, and sample `trace_share` of the traces that begin here."""
    identity = new_identity(request.headers, trace_share)
    if cross_origin := cors.headers(request.headers):
        identity = identity._replace(cross_origin=cross_origin)
    request[_IDENTITY] = identity
    return identity


def identity_of_part(request: web.Request, number: int) -> CallerIdentity:
    """Return the ids of one part of a request with several parts. Each part has its own uid."""
    whole, uid = identity_of(request), next(_UIDS)
    ours = tracecontext.traceparent(whole.trace_id, uid[16:], sampled=whole.upstream.is_sampled)
    request_id = f"{whole.request_id}-{number}"
    return CallerIdentity(uid, request_id, whole.trace_id, ours, whole.upstream)


def set_request_id_header(request: web.Request, name: str) -> None:
    """Repeat the request's id in a header of this name."""
    identity = request[_IDENTITY]
    headers = {**identity.cross_origin, name: identity.request_id}
    request[_IDENTITY] = identity._replace(cross_origin=headers)


def give_identity(request: web.Request, identity: CallerIdentity) -> None:
    """Set the ids of a request that this process itself has created."""
    request[_IDENTITY] = identity


def identity_of(request: web.Request) -> CallerIdentity:
    """Return the ids that the server has set for a request."""
    return request[_IDENTITY]
