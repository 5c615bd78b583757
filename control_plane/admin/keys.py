"""REST of admin keys, without the bootstrap key of the settings."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from control_plane.access.keys import ADMIN_KEY_PREFIX, NewKey
from control_plane.access.roles import Action, Role
from control_plane.access.tables import admin_keys
from control_plane.fields import AdminBody, OptionalId, Text
from control_plane.http.keys import KeyKind
from sluice.ids import new_id, new_secret


class AdminKeyChange(AdminBody):
    """The changeable fields of an admin key. The role of a key never changes."""

    name: Text = ""
    expires_at_unix_ms: Annotated[int, Field(ge=0, le=2**53)] = 0
    is_disabled: bool = False


class AdminKeyBody(AdminKeyChange):
    """A key for the admin REST. Only a key of a reader or publisher belongs to a tenant."""

    role: Annotated[Role, Field(strict=False)]
    tenant_id: OptionalId = ""

    @model_validator(mode="after")
    def _has_its_tenant(self) -> Self:
        if bool(self.tenant_id) != self.role.has_tenant:
            raise ValueError("readers and publishers need a tenant_id; the other roles have none")
        return self


def _new_key() -> NewKey:
    return NewKey(new_id("adminkey"), new_secret(ADMIN_KEY_PREFIX))


ADMIN_KEYS = KeyKind(
    name="admin-keys",
    table=admin_keys,
    fields=("name", "role", "tenant_id", "expires_at_unix_ms", "is_disabled"),
    body=AdminKeyBody,
    change=AdminKeyChange,
    new_key=_new_key,
    read=Action.READ_PLATFORM,
    write=Action.WRITE_ACCESS,
)
