"""Creates and starts a rollout, in the transaction of an admin's write."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.http.resources import first, lock_id
from control_plane.http.writes import Write
from control_plane.models.model import release_id
from control_plane.models.routes import MODELS
from control_plane.rollouts import effects, repository
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.repository import KeptRollout
from control_plane.rollouts.state import Start
from control_plane.tables import models, pools, releases
from sluice.engines import profile_of
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.profiles import EMBED

Values = dict[str, Any]


async def begin(
    write: Write, model_id: str, release: str, plan: Plan | None, *, is_started: bool = True
) -> KeptRollout:
    """Create a rollout of a model's release, and start the rollout if `is_started`.

    Args:
        write: Write of the request. The caller records the change in the audit log.
        model_id: Id of a model that the caller may write.
        release: Name of one of the model's releases.
        plan: Plan of the rollout. If it is None, the model's stored plan applies, or else the
            default plan.
        is_started: Whether the rollout starts at once.

    Raises:
        PlatformError: The model or the release does not exist, the model already has a rollout, or
            the model computes embeddings (422).
    """
    connection = write.connection
    model = await locked_model(write, model_id)
    canary = await repository.release_of(connection, model_id, release)
    if canary is None:
        message = f"release: model {model_id} has no release {release}; publish it first"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="release")
    if release == model["release"]:
        message = f"release: model {model_id} serves {release} already; choose another release"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="release")
    control = await repository.release_of(connection, model_id, model["release"])
    if control is None or not canary.pool_id:
        message = f"release: {model_id}@{release} has no pool that serves it; publish it again"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="release")
    await _refuse_embeddings(connection, model_id, {model["pool_id"], canary.pool_id})
    await _refuse_second(write, model_id)
    if control.pool_id != model["pool_id"]:  # control must be served by the model's pool
        control = replace(control, pool_id=model["pool_id"])
        is_control = releases.c.id == release_id(model_id, control.name)
        query = update(releases).where(is_control).values(pool_id=control.pool_id)
        await connection.execute(query)
    if plan is None:
        plan = await repository.plan_of(connection, model_id)
    kept = await repository.create(connection, control, canary, model["owner_tenant_id"], plan)
    await repository.record(connection, kept.id, "create", kept.state, write.actor.id)
    if is_started:
        now_ms = await repository.clock_ms(connection)
        kept, _ = await effects.apply(connection, kept, (Start(),), now_ms, write.actor.id)
    else:
        await effects.write(connection, kept)
    return replace(kept, version=kept.version + 1)


async def locked_model(write: Write, model_id: str) -> Values:
    """Return a model that the caller may write, locked until the transaction ends.

    Raises:
        PlatformError: 404 if the model does not exist or the caller may not read it, 403 if the
            caller may not write the model.
    """
    await write.connection.execute(lock_id(MODELS.path, model_id))
    query = select(models).where(models.c.id == model_id).with_for_update(key_share=True)
    model = await first(write.connection, query)
    if model is None or not write.actor.may(MODELS.read, model["owner_tenant_id"]):
        raise PlatformError(ErrorCode.NOT_FOUND, f"there is no models/{model_id}")
    write.require(model["owner_tenant_id"])
    return model


async def _refuse_embeddings(
    connection: AsyncConnection, model_id: str, pool_ids: Collection[str]
) -> None:
    """Refuse an embedding model, because no gate can compare the quality of vectors."""
    query = select(pools.c.id, pools.c.engine).where(pools.c.id.in_(sorted(pool_ids)))
    for pool_id, engine in (await connection.execute(query.order_by(pools.c.id))).tuples():
        if profile_of(engine) is EMBED:
            message = (
                f"model {model_id} computes embeddings (pool {pool_id}): no gate can judge them, so"
                " they cannot be rolled out in stages; promote the release at once instead"
            )
            raise PlatformError(ErrorCode.ROLLOUT_UNSUPPORTED, message, param="model_id")


async def _refuse_second(write: Write, model_id: str) -> None:
    found = await repository.live_of(write.connection, model_id)
    if found is not None:
        message = (
            f"model {model_id} has a rollout under way: {found}; abort it, or wait for its end"
        )
        raise PlatformError(ErrorCode.CONFLICT, message, param="model_id")
