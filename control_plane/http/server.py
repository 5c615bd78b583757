"""The HTTP side: admin REST, health and metrics in one application."""

from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler

from control_plane.http.access import require_admin
from control_plane.http.bodies import BODY_BYTES_MAX
from control_plane.http.problems import problems

_SHUTDOWN_S = 5.0


def make_application(
    routes: Iterable[web.RouteDef],
    admin_key_sha256: str,
    count: Callable[[str, int], None],
) -> web.Application:
    """Return the application; `count` is told (route pattern, status) of every answer."""

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        resource = request.match_info.route.resource
        count(resource.canonical if resource is not None else "none", answer.status)
        return answer

    application = web.Application(
        middlewares=[counted, problems, require_admin(admin_key_sha256)],
        client_max_size=BODY_BYTES_MAX,
    )
    application.add_routes(routes)
    return application


def make_runner(application: web.Application) -> web.AppRunner:
    """Return the one kind of runner, for production and tests."""
    return web.AppRunner(
        application, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
