"""A request that frees its memory early, since an answer may last an hour."""

from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import ERROR

# Empty messages that replace a request's message, by `should_close`. The request itself stores the
# HTTP version.
_FORGOTTEN: dict[bool, RawRequestMessage] = {
    True: ERROR,
    False: ERROR._replace(should_close=False),
}


class _DropsParser(Protocol):
    """The part of a connection that a request uses."""

    def drop_parser(self) -> None: ...


class HttpRequest(web.Request):
    """A request. Names with an underscore are private to aiohttp, as `protocol` explains."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, faster than the base method, which raises for absent keys."""
        return self._state.get(key, default)

    def forget(self) -> None:
        """Drop headers and body after they were read, but not the values stored on the request.

        Headers, body and the body's reader use 2 kB even for the smallest request.
        """
        self._message = _FORGOTTEN[self._message.should_close]
        self._headers = self._message.headers
        self._rel_url = self._message.url
        self._cache.clear()  # removes parsed values, for example the URL and the query
        if self._payload.is_eof():
            self._payload = EMPTY_PAYLOAD
            cast("_DropsParser", self._protocol).drop_parser()

    def end(self) -> None:
        """Drop the reference to the connection's task, which has answered the request.

        A task that was cancelled by a closed connection references its frames and so this request.
        The reference cycle would prevent the whole answer from being freed before a garbage
        collection.
        """
        self._task = None  # pyright: ignore[reportAttributeAccessIssue] - aiohttp does the same
