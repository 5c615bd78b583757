"""REST of a model's rollout plan, which applies to rollouts that are created without a plan."""

from typing import Any

from aiohttp import web
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.resources import first, shown
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.rollouts import plan as plans
from control_plane.rollouts import repository
from control_plane.rollouts.beginning import locked_model
from control_plane.rollouts.bodies import PlanChange
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.tables import rollout_plans
from control_plane.tables import models
from sluice.errors import ErrorCode, PlatformError

Values = dict[str, Any]
_KIND = "rollout-plans"


class PlanRoutes:
    """The request handlers of plans.

    Their routes precede the routes of models, because names of models may contain slashes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        path, write = "/v1/models/{model_id:.+}/rollout-plan", Action.WRITE_ROLLOUTS
        row = describe.shown(("model_id", "plan", "is_default"))
        row["properties"] |= {"plan": {"type": "object"}, "is_default": {"type": "boolean"}}
        get = describe.operation("Show the plan of a model's rollouts", answer=row)
        put = describe.operation("Set the plan of a model's rollouts", answer=row, body=PlanChange)
        remove = describe.operation("Return a model's rollouts to the default plan")
        return [
            AdminRoute("GET", path, self.get, Action.READ_TENANT, _KIND, get),
            AdminRoute("PUT", path, self.put, write, _KIND, put),
            AdminRoute("DELETE", path, self.delete, write, _KIND, remove),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """Return the plan in effect for a model."""
        model_id = path_id(request, "model_id")
        actor = request[ACTOR]

        async def work(connection: AsyncConnection) -> Values:
            query = select(models.c.owner_tenant_id).where(models.c.id == model_id)
            model = await first(connection, query)
            if model is None or not actor.may(Action.READ_TENANT, model["owner_tenant_id"]):
                raise PlatformError(ErrorCode.NOT_FOUND, f"there is no models/{model_id}")
            return await _shown(connection, model_id)

        return shown(request, await self._database.run(work))

    async def put(self, request: web.Request) -> web.Response:
        """Set the plan for rollouts that begin from now on."""
        model_id = path_id(request, "model_id")
        plan = (await read_body(request, PlanChange)).wanted

        async def work(write: Write) -> WriteReply:
            model = await locked_model(write, model_id)
            before = await _shown(write.connection, model_id)
            write.check(before)
            values = {"plan": plan.model_dump(mode="json")}
            made = insert(rollout_plans).values(id=model_id, **values)
            await write.connection.execute(
                made.on_conflict_do_update(index_elements=["id"], set_=values)
            )
            after = await _shown(write.connection, model_id)
            write.record("replace", model_id, before, after, owners=[model["owner_tenant_id"]])
            return WriteReply(after, model_id)

        return await self._writes.run(request, work)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete the plan of a model, so that the default plan applies (204)."""
        model_id = path_id(request, "model_id")

        async def work(write: Write) -> WriteReply:
            model = await locked_model(write, model_id)
            before = await _shown(write.connection, model_id)
            if before["is_default"]:
                message = f"model {model_id} has no plan of its own"
                raise PlatformError(ErrorCode.NOT_FOUND, message)
            write.check(before)
            query = delete(rollout_plans).where(rollout_plans.c.id == model_id)
            await write.connection.execute(query)
            write.record("delete", model_id, before, None, owners=[model["owner_tenant_id"]])
            return WriteReply(None, model_id, 204)

        return await self._writes.run(request, work)


async def _shown(connection: AsyncConnection, model_id: str) -> Values:
    own = await repository.stored_plan(connection, model_id)
    plan = plans.shown(Plan().model_dump(mode="json") if own is None else own)
    return {"model_id": model_id, "plan": plan, "is_default": own is None}
