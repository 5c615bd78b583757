"""Sends HTTP requests to tools, with checked addresses, bounded time and size, and no redirects.

Addresses outside the public internet are refused, unless an operator has allowed the host and port.
"""

import asyncio
import ssl
from collections.abc import Collection
from urllib.parse import urlsplit

import aiohttp

from gateway.tools.failures import ToolCallError
from gateway.tools.http_messages import OutgoingReply, OutgoingRequest
from sluice.addresses import is_public
from sluice.checked_addresses import CheckedResolver, check_literal, refused_for

REPLY_BYTES_MAX = 4 << 20  # Maximum bytes that are read of a reply. The model receives far fewer.
_CONNECTIONS_MAX, _PER_HOST_MAX = 512, 64
_IDLE_S = 15.0
_CONNECT_S = 5.0
_PORTS = {"http": 80, "https": 443}
_NOT_OURS = "its address is not public; an operator can allow its host and port"


class Outgoing:
    """Sends the HTTP requests of one worker to tools."""

    def __init__(self, internal: Collection[str]) -> None:
        """The first request opens the first connection.

        Args:
            internal: `host:port` pairs that may have private addresses.
        """
        self._internal = frozenset(internal)
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: OutgoingRequest, timeout_s: float) -> OutgoingReply:
        """Send a request, and return the complete reply of any status.

        Raises:
            ToolCallError: The tool did not answer in time, the connection failed, or the address is
                not allowed.
        """
        try:
            self._check(request.url)
            async with asyncio.timeout(timeout_s):
                return await self._sent(request)
        except TimeoutError:
            raise ToolCallError(f"no answer within {timeout_s:.3g} s", may_repeat=True) from None
        except aiohttp.ClientConnectorDNSError as error:
            if reason := refused_for(error):
                raise ToolCallError(reason, is_fault=False) from None
            raise ToolCallError("its host name cannot be resolved", may_repeat=True) from None
        except aiohttp.InvalidURL:
            raise ToolCallError(
                "its URL is invalid, or has no scheme that is supported", is_fault=False
            ) from None
        except (aiohttp.ClientSSLError, ssl.SSLError):
            raise ToolCallError("its certificate is not trusted") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if reason := refused_for(error):
                raise ToolCallError(reason, is_fault=False) from None
            text = f"the connection failed ({type(error).__name__})"
            raise ToolCallError(text, may_repeat=True) from None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _check(self, url: str) -> None:
        """Raise ToolCallError if a URL is invalid, or AddressRefusedError if it is not allowed."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise ToolCallError(
                "its URL is invalid, or has no scheme that is supported", is_fault=False
            ) from None
        check_literal(host, port, self._refusal)

    def _refusal(self, host: str, port: int, address: str) -> str:
        may = is_public(address) or f"{host.rstrip('.').lower()}:{port}" in self._internal
        return "" if may else _NOT_OURS

    async def _sent(self, request: OutgoingRequest) -> OutgoingReply:
        async with self._opened().request(
            request.method,
            request.url,
            data=request.body,
            headers={**request.headers, "Accept-Encoding": "identity"},
            allow_redirects=False,
        ) as reply:
            if 300 <= reply.status < 400:
                text = f"status {reply.status}: it redirects, and redirects are not followed"
                raise ToolCallError(text)
            if "Content-Encoding" in reply.headers:
                raise ToolCallError("its answer is compressed, although the request allows none")
            body = await _bounded(reply)
            kind = reply.content_type.lower()
            headers = {name.lower(): value for name, value in reply.headers.items()}
            return OutgoingReply(reply.status, kind, headers, body)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=CheckedResolver(self._refusal),
                use_dns_cache=False,
                limit=_CONNECTIONS_MAX,
                limit_per_host=_PER_HOST_MAX,
                keepalive_timeout=_IDLE_S,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                headers={"User-Agent": "sluice-tools"},
            )
        return self._session


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of a reply.

    If the body is too large, the connection is closed, and ToolCallError is raised.
    """
    told = reply.content_length or 0
    body = bytearray()
    if told <= REPLY_BYTES_MAX:
        async for piece in reply.content.iter_any():
            body += piece
            if len(body) > REPLY_BYTES_MAX:
                break
        else:
            return bytes(body)
    reply.close()
    raise ToolCallError(f"its answer has more than {REPLY_BYTES_MAX >> 20} MiB")
