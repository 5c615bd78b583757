"""A request whose memory is freed early: an answer may take an hour, and needs little of it."""

from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import ERROR

# The oldest version is told of itself; the request keeps its own.
_FORGOTTEN: dict[bool, RawRequestMessage] = {
    True: ERROR,
    False: ERROR._replace(should_close=False),
}


class _DropsParser(Protocol):
    """The part of a connection that a request uses."""

    def drop_parser(self) -> None: ...


class HttpRequest(web.Request):
    """A request; the names with an underscore are aiohttp's, see `protocol`."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what was noted under a key; the base raises and catches for what was not."""
        return self._state.get(key, default)

    def forget(self) -> None:
        """Drop headers and body, which were read; notes on the request stay.

        Together with the reader of the body they take 2 kB, even of the smallest request.
        """
        self._message = _FORGOTTEN[self._message.should_close]
        self._headers = self._message.headers
        self._rel_url = self._message.url
        self._cache.clear()  # of all that was looked up
        if self._payload.is_eof():
            self._payload = EMPTY_PAYLOAD
            cast("_DropsParser", self._protocol).drop_parser()

    def end(self) -> None:
        """Drop the connection's task, which has answered.

        After a hang-up the cancelled task keeps its frames, this request and so itself: the whole
        answer would stay in memory until the garbage collector runs.
        """
        self._task = None  # pyright: ignore[reportAttributeAccessIssue] - aiohttp does the same
