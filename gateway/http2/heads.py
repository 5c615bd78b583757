"""Converts heads of requests and answers between HTTP/2 fields and aiohttp's messages. Pure.

The validation follows RFC 9113, 8.2 and 8.3. The validation of `h2` is off, because one malformed
request would end the connection and all other requests on the connection.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from aiohttp import HttpVersion
from aiohttp.http_parser import RawRequestMessage
from hpack import HeaderTuple, NeverIndexedHeaderTuple
from multidict import CIMultiDict, CIMultiDictProxy, istr
from yarl import URL

from gateway.server.errors import HttpError
from gateway.server.malformed import (
    FIELD_BYTES_MAX,
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    LINE_BYTES_MAX,
)

HTTP_2 = HttpVersion(2, 0)

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_TARGET = re.compile(rb"/[\x21-\x7e]*|\*")
_BAD_VALUE = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]$")
_CACHED_NAME_BYTES = 64
_PER_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path"})
# Fields with few distinct values. Only these fields enter the client's header table (HPACK).
_INDEXED = frozenset({"content-type", "server", "cache-control", "x-accel-buffering"})


def request_message(fields: Iterable[tuple[bytes, bytes]], *, has_body: bool) -> RawRequestMessage:
    """Return the message of a request, or raise HttpError for a malformed or overlong head."""
    pseudo: dict[bytes, bytes] = {}
    headers: CIMultiDict[str] = CIMultiDict()
    count = size = 0
    for name, value in fields:
        count += 1
        size += len(name) + len(value) + 4
        if name[:1] == b":":
            if headers or name in pseudo or name not in _PSEUDO:
                raise _broken("its pseudo-header fields")
            pseudo[name] = value
            continue
        if len(name) > FIELD_BYTES_MAX or len(value) > FIELD_BYTES_MAX:
            raise HttpError(431, f"A header field is longer than {FIELD_BYTES_MAX} bytes.")
        if _BAD_VALUE.search(value):
            raise _broken("the value of a header field")
        headers.add(_field_name(name), value.decode("utf-8", "surrogateescape"))
    if count > FIELDS_MAX:
        raise HttpError(431, f"The request has more than {FIELDS_MAX} header fields.")
    if size > HEAD_BYTES_MAX + LINE_BYTES_MAX:
        raise HttpError(431, f"The request's head is longer than {HEAD_BYTES_MAX} bytes.")
    if headers.get("te", "trailers").lower() != "trailers":
        raise _broken("the header 'TE'")
    return _message(pseudo, headers, has_body=has_body)


def _message(
    pseudo: Mapping[bytes, bytes], headers: CIMultiDict[str], *, has_body: bool
) -> RawRequestMessage:
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if len(path) > LINE_BYTES_MAX:
        raise HttpError(414, f"The request line is longer than {LINE_BYTES_MAX} bytes.")
    if not _METHOD.fullmatch(method):
        raise _broken("its method")
    if method == b"CONNECT":
        raise HttpError(400, "CONNECT is not served here.")
    if not _TARGET.fullmatch(path) or b":scheme" not in pseudo:
        raise _broken("its target")
    if (authority := pseudo.get(b":authority")) is not None:
        if _BAD_VALUE.search(authority):
            raise _broken("its authority")
        headers["Host"] = authority.decode("utf-8", "surrogateescape")
    elif "Host" not in headers:
        raise HttpError(400, "The header 'Host' is missing.")
    if not has_body and headers.get("Content-Length", "0").strip("0"):
        raise _broken("its length")
    target = path.decode("ascii")
    return RawRequestMessage(
        method=method.decode("ascii"),
        path=target,
        version=HTTP_2,
        headers=CIMultiDictProxy(headers),
        raw_headers=(),
        should_close=False,
        compression=None,
        upgrade=False,
        chunked=False,
        url=_url(target),
    )


def response_fields(status: int, fields: Iterable[tuple[str, str]]) -> list[HeaderTuple]:
    """Return the fields of an answer, or raise ValueError if a value has a control character."""
    made = [HeaderTuple(b":status", str(status).encode())]
    for name, value in fields:
        lowered = name.lower()
        if lowered in _PER_CONNECTION:
            continue
        if "\n" in value or "\r" in value or "\0" in value:
            raise ValueError("a header holds a control character")
        form = HeaderTuple if lowered in _INDEXED else NeverIndexedHeaderTuple
        made.append(form(lowered.encode(), value.encode()))
    return made


def _url(target: str) -> URL:
    path, _, fragment = target.partition("#")
    path, _, query = path.partition("?")
    return URL.build(path=path, query_string=query, fragment=fragment, encoded=True)


def _field_name(name: bytes) -> istr:
    return _known_name(name) if len(name) <= _CACHED_NAME_BYTES else _read_name(name)


def _read_name(name: bytes) -> istr:
    if not _NAME.fullmatch(name):
        raise _broken("the name of a header field")
    text = name.decode("ascii")
    if text in _PER_CONNECTION:
        raise _broken(f"the header '{text}', which HTTP/2 does not have")
    return istr(text)


_known_name = lru_cache(maxsize=512)(_read_name)


def _broken(part: str) -> HttpError:
    return HttpError(400, f"The request is not valid HTTP/2: {part} is broken.")
