"""REST of API keys."""

from control_plane.access.keys import KEY_PREFIX, NewKey
from control_plane.access.roles import Action
from control_plane.http.keys import KeyKind
from control_plane.tables import api_keys, tenants
from control_plane.tenants.model import KeyBody
from sluice.ids import new_id, new_secret


def _new_key() -> NewKey:
    return NewKey(new_id("key"), new_secret(KEY_PREFIX))


KEYS = KeyKind(
    name="keys",
    table=api_keys,
    fields=("tenant_id", *KeyBody.model_fields),
    body=KeyBody,
    change=KeyBody,
    new_key=_new_key,
    read=Action.READ_TENANT,
    write=Action.WRITE_TENANTS,
    tenants=tenants,
)
