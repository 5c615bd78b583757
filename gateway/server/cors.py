"""Answers cross-origin requests of pages in browsers (CORS, in the Fetch standard).

aiohttp-cors is not used, because it needs aiohttp's router, which the gateway replaces (`routes`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from aiohttp import hdrs, web
from multidict import CIMultiDictProxy

ANY = "*"
_NONE: Mapping[str, str] = MappingProxyType({})
_METHODS = "GET, POST, OPTIONS"
_SHOWN_HEADERS = (
    "x-request-id, traceresponse, retry-after, x-sluice-model, x-sluice-release,"
    " x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests,"
    " x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_KEPT_S = 600
_HEADERS_CHARACTERS_MAX = 4096


class Cors:
    """The origins that may call the API."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        """Allow these origins, each as `https://host` or `*` for any; an empty list is CORS off."""
        self._origins = frozenset(origins)

    def headers(self, request_headers: CIMultiDictProxy[str]) -> Mapping[str, str]:
        """Return the headers of an answer to a browser; none for other clients."""
        if not self._origins:
            return _NONE
        origin = request_headers.get(hdrs.ORIGIN)
        if origin is None or not (ANY in self._origins or origin in self._origins):
            return {hdrs.VARY: "Origin"}
        return {
            hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: ANY if ANY in self._origins else origin,
            hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: _SHOWN_HEADERS,
            hdrs.VARY: "Origin",
        }

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser's preflight; None if its page may not call the API."""
        if request.method != hdrs.METH_OPTIONS or not self._origins:
            return None
        if hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        # SDKs send headers of their own, more with each release; a key is what protects the API.
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")[
            :_HEADERS_CHARACTERS_MAX
        ]
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked,
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_KEPT_S),
            },
        )
