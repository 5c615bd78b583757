"""The handlers of requests by exact path, or by a prefix whose rest is an argument. Pure.

A dict replaces aiohttp's router, because a dict is ten times faster and saves 20 us per request.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from gateway.server.errors import HttpError, body_of
from gateway.server.unknown_urls import shown_path, unknown_url
from sluice.errors import ErrorCode, PlatformError

_METHOD_MAX = 16  # maximum characters of a method that an error shows

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorForm = Callable[[PlatformError], bytes]


class MethodNotAllowedError(HttpError):
    """The path exists, but not for this method."""

    ends_connection = False

    def __init__(self, method: str, path: str, allowed: str) -> None:
        """Describe the error for `path`, with the list `allowed` of its methods."""
        text = f"{method} is not allowed for {shown_path(path)}; use {allowed}."
        super().__init__(405, text, headers={"Allow": allowed})
        self.code = ErrorCode.METHOD_NOT_ALLOWED


@dataclass(slots=True)
class GatewayRoute:
    """A path with its handlers.

    Attributes:
        name: Path or its pattern, which is a label of metrics.
        handlers: Handlers by method.
        is_open_when_full: Whether the path is answered when the worker has too many connections.
        error_form: Writes the body of an error in the form of this path's API.
    """

    name: str
    is_open_when_full: bool
    error_form: ErrorForm = body_of
    handlers: dict[str, Handler] = field(default_factory=dict[str, Handler])

    def handler(self, method: str, path: str = "") -> Handler:
        """Return a method's handler, or raise MethodNotAllowedError, which names `path`."""
        handler = self.handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted(self.handlers))
            raise MethodNotAllowedError(method[:_METHOD_MAX], path or self.name, allowed)
        return handler


class Routes:
    """All paths of a server."""

    def __init__(self) -> None:
        self._exact: dict[str, GatewayRoute] = {}
        self._prefixes: list[tuple[str, GatewayRoute]] = []

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        is_open_when_full: bool = False,
        error_form: ErrorForm = body_of,
    ) -> None:
        """Add a path. A path that ends in `/*` is a prefix, whose rest `path_rest` returns."""
        route = GatewayRoute(path, is_open_when_full, error_form)
        if path.endswith("/*"):
            known = next((it for _, it in self._prefixes if it.name == path), None)
            if known is None:
                self._prefixes.append((path[:-1], route))
            route = known or route
        else:
            route = self._exact.setdefault(path, route)
        route.handlers[method] = handler
        if method == "GET":
            route.handlers["HEAD"] = handler

    def find(self, path: str) -> GatewayRoute:
        """Return the route of a path, or raise PlatformError 404 if no route matches."""
        route = self._exact.get(path)
        if route is not None:
            return route
        for prefix, candidate in self._prefixes:
            if path.startswith(prefix) and len(path) > len(prefix):
                return candidate
        known = [*self._exact, *(f"{prefix}*" for prefix, _ in self._prefixes)]
        raise PlatformError(ErrorCode.NOT_FOUND, unknown_url(path, known))


def path_rest(request: web.Request, prefix: str) -> str:
    """Return the part after `prefix` in the decoded path of a request."""
    return request.path.removeprefix(prefix)
