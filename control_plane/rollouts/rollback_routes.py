"""REST of rollbacks, which point a model at its previous release."""

from typing import Annotated, Any

from aiohttp import web
from pydantic import Field
from sqlalchemy import select, update

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.fields import AdminBody
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import first
from control_plane.http.routes import AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.models.model import ReleaseName, release_id
from control_plane.models.routes import MODELS
from control_plane.rollouts import effects, repository
from control_plane.rollouts.beginning import locked_model
from control_plane.rollouts.repository import UnreadableError, rollout_of
from control_plane.rollouts.state import ENDED, Abort
from control_plane.rollouts.tables import rollouts
from control_plane.tables import models, releases
from sluice.errors import ErrorCode, PlatformError

Values = dict[str, Any]
_KIND = "models"


class RollbackBody(AdminBody):
    """The release to serve again.

    Without a release, a live rollout is aborted. If there is no live rollout, the previous release
    is served.
    """

    release: Annotated[ReleaseName, Field(max_length=64)] = ""


class RollbackRoutes:
    """The request handler of rollbacks.

    The route precedes the routes of models, because names of models may contain slashes.
    """

    def __init__(self, database: Database) -> None:
        """Create the handler."""
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the route of the handler."""
        answer = describe.shown(("id", "release", "previous_release", "aborted_rollout_id"))
        told = describe.operation(
            "Roll back at once: abort the model's rollout, or serve the release before",
            answer=answer,
            body=RollbackBody,
        )
        path = "/v1/models/{model_id:.+}/rollback"
        return [AdminRoute("POST", path, self.roll_back, Action.WRITE_ROLLOUTS, _KIND, told)]

    async def roll_back(self, request: web.Request) -> web.Response:
        """Roll a model back to the given release, or to its previous release."""
        model_id = path_id(request, "model_id")
        wanted = (await read_body(request, RollbackBody)).release

        async def work(write: Write) -> WriteReply:
            model = await locked_model(write, model_id)
            rollout_id = "" if wanted else await _abort(write, model_id)
            after = model if rollout_id else await _stand_for(write, model, wanted)
            told = {
                "id": model_id,
                "release": after["release"],
                "previous_release": after["previous_release"],
                "aborted_rollout_id": rollout_id,
            }
            was, now = MODELS.show(model), MODELS.show(after)
            write.record("rollback", model_id, was, now, owners=[model["owner_tenant_id"]])
            return WriteReply(told, model_id)

        return await self._writes.run(request, work)


async def _abort(write: Write, model_id: str) -> str:
    """Abort the live rollout of a model, and return its id, or an empty text."""
    t = rollouts.c
    query = select(t.id).where(t.model_id == model_id, t.is_live).order_by(t.id.desc())
    rollout_id = await write.connection.scalar(query.limit(1))
    locked = None if rollout_id is None else await repository.lock(write.connection, rollout_id)
    if rollout_id is None or locked is None:
        return ""
    now_ms = await repository.clock_ms(write.connection)
    try:
        kept = rollout_of(locked)
    except UnreadableError:
        await effects.give_up(write.connection, locked, now_ms, write.actor.id)
        return rollout_id
    if kept.state.phase in ENDED:
        return ""
    await effects.apply(write.connection, kept, (Abort(),), now_ms, write.actor.id)
    return rollout_id


async def _stand_for(write: Write, model: Values, wanted: str) -> Values:
    """Point a model at a release without stages, and return the model's new row.

    Raises:
        PlatformError: The release does not exist, or no pool serves it.
    """
    connection, model_id = write.connection, model["id"]
    name = wanted or model["previous_release"]
    if not name:
        message = (
            f"model {model_id} has served {model['release']} only: name a release"
            f" (sluice models releases {model_id})"
        )
        raise PlatformError(ErrorCode.CONFLICT, message, param="release")
    query = select(releases).where(releases.c.id == release_id(model_id, name))
    release = await first(connection, query)
    if release is None:
        message = (
            f"there is no release {release_id(model_id, name)}: it was forgotten; name another"
        )
        raise PlatformError(ErrorCode.NOT_FOUND, message, param="release")
    if release["pool_id"] is None:
        message = (
            f"no pool serves the base of {release['id']} any more: roll it out"
            f" (sluice rollouts start {model_id} {name})"
        )
        raise PlatformError(ErrorCode.CONFLICT, message, param="release")
    parts = ("base_digest", "adapter_digest", "pool_id")
    values: Values = {part: release[part] for part in parts} | {"release": name}
    values["owner_tenant_id"] = model["owner_tenant_id"]
    await MODELS.before_write(connection, model_id, values)
    await connection.execute(update(models).where(models.c.id == model_id).values(**values))
    await MODELS.after_write(connection, model_id, values)
    return model | values
