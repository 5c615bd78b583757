"""REST of bases and models."""

import time

from aiohttp import web
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database
from control_plane.fields import checked_digest
from control_plane.http.resources import Resource, ResourceRoutes, Values
from control_plane.models.model import BaseBody, ModelBody
from control_plane.tables import bases, models, pools
from sluice.errors import BadRequestError, ErrorCode


async def _check_pool(connection: AsyncConnection, _: str, values: Values) -> None:
    """Refuse a model whose pool serves another base; a missing pool is found by the database."""
    query = select(pools.c.base_digest).where(pools.c.id == values["pool_id"]).with_for_update()
    served = await connection.scalar(query)
    if served not in {None, values["base_digest"]}:
        message = f"pool_id: pool {values['pool_id']} serves base {served}, not the model's"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="pool_id")


BASES = Resource(
    path="bases",
    table=bases,
    shown=("digest", *BaseBody.model_fields),
    body=BaseBody,
    id_check=checked_digest,
)
MODELS = Resource(
    path="models",
    table=models,
    shown=("id", *ModelBody.model_fields, "created_at_unix_s"),
    body=ModelBody,
    on_create=lambda: {"created_at_unix_s": int(time.time())},
    before_write=_check_pool,
    id_pattern=".+",
)


def routes(database: Database) -> list[web.RouteDef]:
    """Return the routes."""
    return [
        *ResourceRoutes(database, BASES).routes(),
        *ResourceRoutes(database, MODELS).routes(),
    ]
