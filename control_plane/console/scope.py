"""The tenant to which a query of the console is restricted."""

from aiohttp import web

from control_plane.access.roles import Action, Reach
from control_plane.http.routes import ACTOR
from sluice.errors import ErrorCode, PlatformError


def own_tenant(request: web.Request) -> str:
    """Return the tenant to which a query is restricted, or an empty text for all tenants.

    Raises:
        PlatformError: 404 if the caller belongs to one tenant and names another tenant.
    """
    actor, wanted = request[ACTOR], request.query.get("tenant", "")
    if actor.reach(Action.READ_USAGE) is Reach.ALL:
        return wanted.replace("\0", "")
    if wanted and wanted != actor.tenant_id:
        raise PlatformError(ErrorCode.NOT_FOUND, f"there is no tenants/{wanted[:128]}")
    return actor.tenant_id
