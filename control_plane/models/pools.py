"""REST of the pools of a model that several pools serve."""

from typing import Annotated

from pydantic import Field, field_validator
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.fields import AdminBody, Id
from control_plane.http.resources import Resource, Values
from control_plane.tables import model_pools, models, pools
from sluice.engines import profile_of
from sluice.errors import BadRequestError, ErrorCode
from sluice.profiles import FRAMES

POOLS_MAX = 8  # largest number of pools per model
_FACTOR_MAX = 1000.0

Factor = Annotated[float, Field(ge=1 / _FACTOR_MAX, le=_FACTOR_MAX, allow_inf_nan=False)]


class ModelPoolBody(AdminBody):
    """A pool of the model.

    While no pool has a queue, requests are distributed by `weight`. `price` is the price of a
    request, relative to the other pools. `is_other_base` permits a pool of another base, which must
    be another quantisation of the model's base. Requests of models with an adapter are not sent to
    this pool.
    """

    pool_id: Id
    weight: Factor = 1.0
    price: Factor = 1.0
    is_other_base: bool = False


class ModelPoolsBody(AdminBody):
    """The pools that serve a model, which include the model's own pool.

    A release whose pool is not in the list stays in its pool.
    """

    pools: Annotated[list[ModelPoolBody], Field(min_length=2, max_length=POOLS_MAX)]

    @field_validator("pools")
    @classmethod
    def _named_once(cls, value: list[ModelPoolBody]) -> list[ModelPoolBody]:
        if len({it.pool_id for it in value}) < len(value):
            raise ValueError("a pool is named twice: name each once")
        return value


async def _check_pools(connection: AsyncConnection, key: str, values: Values) -> None:
    """Refuse pools that cannot serve the model. A missing model is detected by the database."""
    query = select(models.c.pool_id, models.c.base_digest).where(models.c.id == key)
    model = (await connection.execute(query.with_for_update(read=True))).first()
    if model is None:
        return
    names = [it["pool_id"] for it in values["pools"]]
    if model.pool_id not in names:
        raise _refused(f"the model's own pool {model.pool_id} is not among them: add it")
    query = select(pools.c.id, pools.c.base_digest, pools.c.engine).where(pools.c.id.in_(names))
    found = {row.id: row for row in await connection.execute(query.with_for_update(read=True))}
    for entry in values["pools"]:
        name = entry["pool_id"]
        if name not in found:
            raise _refused(f"there is no pool {name}")
        if profile_of(found[name].engine) is not FRAMES:
            raise _refused(f"pool {name} makes embeddings: only pools that generate text share")
        base = found[name].base_digest
        if base != model.base_digest and not entry["is_other_base"]:
            raise _refused(
                f"pool {name} serves base {base}, not the model's: set is_other_base if that is"
                " another quantisation of it"
            )


def _refused(reason: str) -> BadRequestError:
    return BadRequestError(ErrorCode.INVALID_REQUEST, f"pools: {reason}", param="pools")


_OWNER = (
    select(models.c.owner_tenant_id)
    .where(models.c.id == model_pools.c.id)
    .correlate(model_pools)
    .scalar_subquery()
)
MODEL_POOLS = Resource(
    path="model-pools",
    table=model_pools,
    shown=("id", *ModelPoolsBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_FLEET,  # operators decide on capacity, even for a tenant's model
    owner=_OWNER,
    body=ModelPoolsBody,
    before_write=_check_pools,
    id_pattern=".+",
)
