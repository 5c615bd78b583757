"""A request that does not outlive its use: an answer may take an hour, and needs nothing of it."""

from typing import Protocol, cast

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
    """The connection of a request, as far as the request uses it."""

    def drop_parser(self) -> None: ...


class HttpRequest(web.Request):
    """One request; the names with an underscore are aiohttp's, see `protocol`."""

    def forget(self) -> None:
        """Let go of headers and body, which were read; what was noted in it stays.

        Together with what the body is read from they take 2 kB, of the smallest request.
        """
        self._message = _FORGOTTEN[self._message.should_close]
        self._headers = self._message.headers
        self._rel_url = self._message.url
        self._cache.clear()  # of all that was looked up
        if self._payload.is_eof():
            self._payload = EMPTY_PAYLOAD
            cast("_DropsParser", self._protocol).drop_parser()

    def end(self) -> None:
        """Let go of the connection's task, which has answered.

        One that a hang-up has cancelled keeps its frames, this request and so itself: all of the
        answer would stay until the collector comes.
        """
        self._task = None  # pyright: ignore[reportAttributeAccessIssue] - aiohttp does the same
