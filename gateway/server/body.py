"""Reads bodies of requests within bounds of size, time and memory, and unpacks them.

aiohttp's own decompression is off, because it would buffer megabytes of a compression bomb before
the gateway could refuse the request.
"""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Protocol, cast, runtime_checkable

from aiohttp import HttpVersion11, hdrs, web

from gateway.bodies.parsing import BODY_BYTES_MAX
from gateway.server.errors import HttpError
from sluice.errors import BadRequestError, ErrorCode, RejectedError

# Maximum duration in seconds of a body without bytes. Each `BYTES_PER_S_MIN` received bytes add one
# second. So a client may upload 4 MiB in 138 s, and only a few bytes in ten.
GRACE_S = 10.0
BYTES_PER_S_MIN = 32 << 10

_WINDOW_BITS = {
    "gzip": 16 + zlib.MAX_WBITS,
    "x-gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}
_LENGTH_DIGITS_MAX = 32
# Compressed bytes up to which a body is unpacked on the event loop. The content then has at most
# 0.5 MB, which needs a millisecond.
_UNPACK_INLINE_BYTES = 512


class BodyBudget:
    """The bytes of unfinished bodies, which are bounded for each worker."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` bounds the unfinished bodies of the worker together."""
        self._bytes_max = bytes_max
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Add bytes, or raise RejectedError 503 if the worker would exceed its bound."""
        if self.held_bytes + count > self._bytes_max:
            text = "The server receives too many large requests; try again shortly."
            raise RejectedError(ErrorCode.OVERLOADED, text, retry_after_s=1.0)
        self.held_bytes += count

    def release(self, count: int) -> None:
        """Subtract bytes whose body was read or dropped."""
        self.held_bytes -= count


class _HasBudget(Protocol):
    """The part of a connection that `read_body` uses."""

    @property
    def body_budget(self) -> BodyBudget: ...


@runtime_checkable
class ContinueWriter(Protocol):
    """A writer whose version of HTTP has its own form of `100 Continue`."""

    def say_continue(self) -> None:
        """Send `100 Continue`, so that the client sends the body."""
        ...


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, decompressed.

    Raises:
        BadRequestError: The body is larger than 4 MiB (413), too slow (408) or broken (400). Its
            length may also be unreadable, or its transfer coding may not be chunked (400). Its
            content encoding may be unsupported (415).
        RejectedError: The worker has too many bytes of unfinished bodies (503).
    """
    headers = request.headers
    length = content_length(headers)
    if length is None:
        raise HttpError(400, "The header 'Content-Length' has too many digits.")
    if length > BODY_BYTES_MAX:
        raise _too_large()
    if not length and headers.get(hdrs.TRANSFER_ENCODING, "chunked").strip().lower() != "chunked":
        raise HttpError(400, "The header 'Transfer-Encoding' may only be 'chunked'.")
    if hdrs.EXPECT in headers:
        await _answer_expectation(request)
    content = request.content
    try:
        body = content.read_nowait() if content.is_eof() else await _read_rest(request)
    except web.RequestPayloadError:
        raise HttpError(400, "The request body is broken: its framing is not valid HTTP.") from None
    encoding = headers.get(hdrs.CONTENT_ENCODING)
    if encoding is None or encoding.lower() == "identity":
        return body
    return await _unpacked(body, encoding.strip().lower())


def content_length(headers: Mapping[str, str]) -> int | None:
    """Return the declared length of the body, 0 if none is declared.

    Returns:
        None if the length has too many digits. The parser accepts any number of leading zeros, but
        Python's `int` only some thousand digits.
    """
    text = headers.get(hdrs.CONTENT_LENGTH, "0")
    return int(text) if len(text) <= _LENGTH_DIGITS_MAX else None


async def _read_rest(request: web.Request) -> bytes:
    budget = cast("_HasBudget", request.protocol).body_budget
    loop = asyncio.get_running_loop()
    began_at_s = loop.time()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout_at(began_at_s + GRACE_S) as limit:
            while part := await request.content.readany():
                if size + len(part) > BODY_BYTES_MAX:
                    raise _too_large()
                budget.take(len(part))
                size += len(part)
                parts.append(part)
                limit.reschedule(began_at_s + GRACE_S + size / BYTES_PER_S_MIN)
    except TimeoutError:
        text = (
            f"The request body came too slowly: {size} bytes in {loop.time() - began_at_s:.0f} s."
        )
        raise HttpError(408, text) from None
    finally:
        budget.release(size)
    return b"".join(parts)


async def _answer_expectation(request: web.Request) -> None:
    """Send `100 Continue` for an accepted request with `Expect: 100-continue`."""
    if request.headers["Expect"].lower() != "100-continue":
        raise HttpError(417, "The header 'Expect' may only be '100-continue'.")
    if request.version < HttpVersion11 or request.content.is_eof():
        return
    if isinstance(request.writer, ContinueWriter):
        request.writer.say_continue()
        return
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun


async def _unpacked(body: bytes, encoding: str) -> bytes:
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        text = (
            f"The content encoding {encoding[:40]!r} is not supported; use gzip, deflate or none."
        )
        raise HttpError(415, text, headers={"Accept-Encoding": "gzip, deflate"})
    if len(body) <= _UNPACK_INLINE_BYTES:
        return unpack(body, bits)
    return await asyncio.to_thread(unpack, body, bits)


def unpack(body: bytes, window_bits: int) -> bytes:
    """Return the content of one zlib stream, of which at most 4 MiB are decompressed."""
    unpacker = zlib.decompressobj(window_bits)
    try:
        content = unpacker.decompress(body, BODY_BYTES_MAX + 1)
    except zlib.error:
        raise HttpError(400, "The request body is not in its content encoding.") from None
    if len(content) > BODY_BYTES_MAX:
        raise _too_large()
    if not unpacker.eof or unpacker.unused_data:
        raise HttpError(400, "The request body is not one complete stream of its encoding.")
    return content


def _too_large() -> BadRequestError:
    text = "The request body is larger than the 4 MiB that this server takes."
    return BadRequestError(ErrorCode.REQUEST_TOO_LARGE, text)
