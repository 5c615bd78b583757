"""The HTTP application with the admin REST, health and metrics."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

from aiohttp import web
from aiohttp.hdrs import METH_ANY
from aiohttp.typedefs import Handler

from control_plane.database import Database
from control_plane.http.access import Identities, guard
from control_plane.http.bodies import BODY_BYTES_MAX
from control_plane.http.problems import problems
from control_plane.http.routes import REQUEST_ID, AdminRoute
from sluice.ids import new_id

_SHUTDOWN_S = 5.0
CONSOLE = "/console"
GUARDED = (
    "/v1/",
    "/console/data/",
    "/console/v1/",
)  # prefixes of paths that need a key or a session
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def make_application(
    routes: Iterable[AdminRoute],
    database: Database,
    bootstrap_sha256: str,
    count: Callable[[str, int], None],
) -> web.Application:
    """Return the web application with all routes and middlewares.

    Args:
        routes: All routes.
        database: Database of admin keys and of the audit log.
        bootstrap_sha256: SHA-256 (hex) of the bootstrap admin key.
        count: Called with the route pattern and the status of every answer.
    """

    @web.middleware
    async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-request-id", "")
        request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else new_id("req")
        answer = await handler(request)
        answer.headers["x-request-id"] = request[REQUEST_ID]
        resource = request.match_info.route.resource
        count(resource.canonical if resource is not None else "none", answer.status)
        return answer

    identities = Identities(database, bootstrap_sha256)
    declared: dict[web.AbstractRoute, AdminRoute] = {}
    application = web.Application(
        middlewares=[named, problems, guard(database, identities, declared)],
        client_max_size=BODY_BYTES_MAX,
    )
    # The console's cookie is limited to paths below the console, so the admin REST also has paths
    # there.
    below = [replace(it, path=f"{CONSOLE}{it.path}") for it in routes if it.path.startswith("/v1/")]
    # Routes with more literal text precede others, because a model's name may contain slashes and
    # would match the rest of a longer path.
    ordered = sorted((*routes, *below), key=lambda route: (-len(route.words), route.path))
    for path, group in groupby(ordered, key=lambda route: route.path):
        allowed: set[str] = set()
        for route in group:
            is_guarded = route.path.startswith(GUARDED)
            assert is_guarded == (route.action is not None), (
                f"{route.path}: guarded paths need an action, and others have none"
            )
            (made,) = application.add_routes([web.route(route.method, path, route.handler)])
            declared[made] = route
            allowed.add(route.method)
            if route.method == "GET" and made.resource is not None:
                # aiohttp answers HEAD for every GET route.
                declared |= {other: route for other in made.resource if other.method == "HEAD"}
                allowed.add("HEAD")
        # Other methods are refused here, because a shorter path would otherwise match the rest as
        # an id.
        application.router.add_route(METH_ANY, path, _refusal(allowed))
    return application


def _refusal(allowed: Iterable[str]) -> Handler:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise web.HTTPMethodNotAllowed(request.method, sorted(allowed))

    return refuse


def make_runner(application: web.Application) -> web.AppRunner:
    """Return the runner of the application, for the control plane and for tests."""
    return web.AppRunner(
        application, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
