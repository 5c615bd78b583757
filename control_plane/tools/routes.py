"""REST of tools that gateways call. Secrets can be written, and are never returned."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.http.resources import Resource, Values
from control_plane.tables import server_tools
from control_plane.tools.model import ServerToolBody, stored_headers
from sluice.errors import ErrorCode, PlatformError
from sluice.sealing import Sealer
from sluice.server_tools import SEALED_FOR
from sluice.shared_secret import ours


class _ServerTools(Resource):
    """The resource of tools, whose answers have the schema as JSON, and no texts of headers."""

    def show(self, row: Mapping[str, Any]) -> Values:
        """Return the JSON of a tool. The texts of its headers are empty."""
        shown = super().show(row)
        shown["parameters"] = json.loads(row["parameters"] or "{}")
        shown["secret_headers"] = dict.fromkeys(sorted(row["secret_headers"]), "")
        return shown


async def _seal(connection: AsyncConnection, key: str, values: Values) -> None:
    query = select(server_tools).where(server_tools.c.id == key)
    row = (await connection.execute(query)).mappings().first()
    await _check_name(connection, key, values)
    known = None if row is None else {str(name): value for name, value in row.items()}
    sealer = Sealer(ours(), SEALED_FOR)
    values["secret_headers"] = stored_headers(known, values, key, sealer)
    schema = values["parameters"]
    values["parameters"] = json.dumps(schema, sort_keys=True) if schema else ""


async def _check_name(connection: AsyncConnection, key: str, values: Values) -> None:
    """Raise PlatformError CONFLICT if another tool of the tenant has the same name."""
    columns = server_tools.c
    query = select(columns.id).where(
        columns.owner_tenant_id == values["owner_tenant_id"],
        columns.name == values["name"],
        columns.id != key,
    )
    other = (await connection.execute(query)).scalar()
    if other is not None:
        message = f"name: tool {other} of this tenant has it; choose another one"
        raise PlatformError(ErrorCode.CONFLICT, message, param="name")


SERVER_TOOLS = _ServerTools(
    path="tools",
    table=server_tools,
    shown=("id", *ServerToolBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_TENANTS,
    owner=server_tools.c.owner_tenant_id,
    body=ServerToolBody,
    before_write=_seal,
    filters=("owner_tenant_id",),
)
