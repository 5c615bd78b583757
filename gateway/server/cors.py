"""Answers cross-origin requests of pages in browsers (CORS, in the Fetch standard).

aiohttp-cors requires aiohttp's router, which `routes` replaces, so aiohttp-cors cannot be used.
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
        """Allow these origins, each as `https://host` or `*` for any.

        An empty list disables CORS.
        """
        self._origins = frozenset(origins)

    def headers(self, request_headers: CIMultiDictProxy[str]) -> Mapping[str, str]:
        """Return the headers of an answer to a browser, or none for other clients."""
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
        """Return the answer to a browser's preflight, or None if its page may not call the API."""
        if request.method != hdrs.METH_OPTIONS or not self._origins:
            return None
        if hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        # All requested headers are allowed, because each release of the SDKs sends further headers.
        # The API is protected by keys, not by this list.
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
