"""REST of the policies of `auto`."""

from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.auto.model import BODY_BYTES_MAX, AutoPolicyBody
from control_plane.http.resources import Resource, Values
from control_plane.models.names import unknown_names
from control_plane.tables import auto_policies
from sluice.errors import BadRequestError, ErrorCode


async def _check(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse names that the tenant may not use, and fill in missing prices of cached tokens."""
    named = {it["model"] for it in values["candidates"]}
    if missing := await unknown_names(connection, named, key):
        message = (
            f"candidates: there is no model, release or alias {missing[0]} that tenant {key} may"
            " use"
        )
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="candidates")
    for candidate in values["candidates"]:
        if candidate["cached_price"] is None:
            candidate["cached_price"] = candidate["prompt_price"]


AUTO_POLICIES = Resource(
    path="auto-policies",
    table=auto_policies,
    shown=("id", *AutoPolicyBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_TENANTS,
    owner=auto_policies.c.id,
    body=AutoPolicyBody,
    before_write=_check,
    hidden=("cells",),
    body_bytes_max=BODY_BYTES_MAX,
)
