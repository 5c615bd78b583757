"""Public keys that may sign artifacts of one tenant, or of all tenants."""

from typing import Annotated

from pydantic import AfterValidator
from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.artifacts.signatures import checked_public_key
from control_plane.artifacts.tables import signing_keys
from control_plane.fields import AdminBody, OptionalId
from control_plane.http.resources import Resource


class SigningKeyBody(AdminBody):
    """A public key. Without a tenant, its signatures are accepted for all tenants.

    Only admins register keys, because a publisher could otherwise sign its own artifacts.
    """

    public_key: Annotated[str, AfterValidator(checked_public_key)]
    owner_tenant_id: OptionalId = ""
    is_disabled: bool = False


SIGNING_KEYS = Resource(
    path="signing-keys",
    table=signing_keys,
    shown=("id", *SigningKeyBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_ACCESS,
    owner=signing_keys.c.owner_tenant_id,
    body=SigningKeyBody,
)


async def keys_for(connection: AsyncConnection, tenant_id: str | None) -> dict[str, str]:
    """Return the accepted public keys by id. A tenant of None means public artifacts."""
    owner = signing_keys.c.owner_tenant_id
    query = select(signing_keys.c.id, signing_keys.c.public_key).where(
        signing_keys.c.is_disabled.is_(False), or_(owner.is_(None), owner == tenant_id)
    )
    return {row.id: row.public_key for row in await connection.execute(query)}
