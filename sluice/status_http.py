"""Serves /healthz, /readyz and /metrics for services without another HTTP server.

The server is built on asyncio streams, so that the images of these services need no HTTP framework.
It supports GET and HEAD, with one request per connection, and bounds the size, duration and number
of requests. With mutual TLS, /metrics requires a certificate of a permitted role. Health checks
need no certificate, because kubelets have none.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus

from sluice.addresses import host_and_port
from sluice.certificates import refusal_of, server_tls
from sluice.identity import Service

_REQUEST_BYTES_MAX = 8192
_TIMEOUT_S = 5.0
_CONNECTIONS_MAX = 64
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OWN_PATHS = (b"/healthz", b"/readyz", b"/metrics")


async def _no_page(_path: str) -> bytes | None:
    return None


@asynccontextmanager
async def status_server(
    address: str,
    *,
    is_ready: Callable[[], bool],
    metrics: Callable[[], bytes],
    why_not_ready: Callable[[], str] = lambda: "not ready",
    page: Callable[[str], Awaitable[bytes | None]] = _no_page,
) -> AsyncGenerator[int]:
    """Serve at `address` (host:port, where port 0 means any free port) while the context lasts.

    Args:
        address: Address to listen on.
        is_ready: Returns whether the service accepts traffic. If not, /readyz answers 503.
        metrics: Returns the metrics in Prometheus' text format.
        why_not_ready: Text of the 503 of /readyz, for operators.
        page: Returns further metrics by their path, or None for an unknown path. OSError means that
            the metrics are not available now.

    Yields:
        The port.

    Raises:
        OSError: The address is in use.
    """
    open_connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            if open_connections <= _CONNECTIONS_MAX:
                async with asyncio.timeout(_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    refusal = partial(refusal_of, writer.transport, Service.METRICS)
                    other = await _other_page(head, page, refusal)
                    answer = other or _respond(head, is_ready, metrics, why_not_ready, refusal)
                    writer.write(answer)
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that disconnects early, or a client without HTTP
        finally:
            open_connections -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    host, port = host_and_port(address)
    server = await asyncio.start_server(
        handle,
        host,
        port,
        limit=_REQUEST_BYTES_MAX,
        ssl=server_tls(is_required=False),
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _other_page(
    head: bytes, page: Callable[[str], Awaitable[bytes | None]], refusal: Callable[[], str]
) -> bytes | None:
    """Return the answer of `page`, or None if the path is not one of its paths."""
    method, path = _request_line(head)
    if method != b"GET" or path in _OWN_PATHS or not path.endswith(b"/metrics"):
        return None
    if why := refusal():
        return _answer(HTTPStatus.FORBIDDEN, f"{why}\n".encode())
    try:
        found = await page(path.decode(errors="replace"))
    except OSError as error:
        return _answer(HTTPStatus.BAD_GATEWAY, f"it does not answer: {error}\n".encode())
    return None if found is None else _answer(HTTPStatus.OK, found)


def _request_line(head: bytes) -> tuple[bytes, bytes]:
    """Return the method and the path of a request."""
    method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
    return method, rest.partition(b" ")[0].partition(b"?")[0]


def _respond(
    head: bytes,
    is_ready: Callable[[], bool],
    metrics: Callable[[], bytes],
    why_not_ready: Callable[[], str],
    refusal: Callable[[], str],
) -> bytes:
    method, path = _request_line(head)
    status, body = HTTPStatus.OK, b"ok\n"
    if method not in (b"GET", b"HEAD"):
        status, body = HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n"
    elif path == b"/readyz" and not is_ready():
        status, body = HTTPStatus.SERVICE_UNAVAILABLE, f"{why_not_ready()}\n".encode()
    elif path == b"/metrics" and (why := refusal()):
        status, body = HTTPStatus.FORBIDDEN, f"{why}\n".encode()
    elif path == b"/metrics":
        body = metrics()
    elif path not in _OWN_PATHS:
        status, body = HTTPStatus.NOT_FOUND, b"try /healthz, /readyz or /metrics\n"
    return _answer(status, body, is_head=method == b"HEAD")


def _answer(status: HTTPStatus, body: bytes, *, is_head: bool = False) -> bytes:
    header = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {_TEXT}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return header.encode() + (b"" if is_head else body)
