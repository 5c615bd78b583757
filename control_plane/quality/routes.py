"""REST of golden prompts, answers of replicas, and quarantines."""

import asyncio
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from aiohttp import web
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import (
    Resource,
    ResourceRoutes,
    Values,
    fetch,
    first,
    page,
    page_of,
    shown,
)
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.quality import repository
from control_plane.quality.bodies import GoldenPromptBody, ReleaseBody
from control_plane.quality.results import RESULT_FIELDS, results
from control_plane.quality.tables import golden_prompts, quarantines
from control_plane.tables import models, pools
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.ids import new_id

PROMPTS_MAX = 16  # largest number of prompts per model
# largest number of prompts for all models of a tenant, and for all models without an owner
PROMPTS_OF_OWNER_MAX = 256
_RESULTS_MAX = 5000  # largest number of answers that are read for one page

_OWNER = (
    select(models.c.owner_tenant_id)
    .where(models.c.id == golden_prompts.c.model_id)
    .correlate(golden_prompts)
    .scalar_subquery()
)
PROMPTS = Resource(
    path="golden-prompts",
    table=golden_prompts,
    shown=("id", "model_id", *GoldenPromptBody.model_fields),
    read=Action.READ_TENANT,
    write=Action.WRITE_MODELS,
    owner=_OWNER,
    is_removable=True,
    filters=("model_id",),
)
_RESULT_TYPES = {
    **dict.fromkeys(("asked_at_unix_ms", "deviations"), describe.INTEGER),
    "token_ids": describe.INTEGERS,
    "logprobs": {"type": "array", "items": describe.nullable(describe.NUMBER)},
    "differs_in": describe.nullable(describe.TEXT),
    "right": describe.nullable(describe.INTEGERS),
    "source": describe.nullable(describe.TEXT),
}
_QUARANTINE = tuple(quarantines.c.keys())


class QualityRoutes:
    """The request handlers of golden prompts, answers and quarantines.

    Their routes precede the routes of models, because names of models may contain slashes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        of_model = "/v1/models/{model_id:.+}/golden-prompts"
        prompt = describe.shown(PROMPTS.shown, GoldenPromptBody)
        types = columns(quarantines) | {"is_serving_again": describe.BOOLEAN}
        quarantine = describe.shown(_QUARANTINE, types=types)
        lifted = describe.shown((*_QUARANTINE, "is_serving_again"), types=types)
        add = describe.operation(
            "Create a golden prompt, sent to every replica of a model regularly",
            answer=prompt,
            status=201,
            body=GoldenPromptBody,
        )
        release = describe.operation(
            "Lift a quarantine: a false alarm", answer=lifted, body=ReleaseBody
        )
        forget = describe.operation(
            "Forget the answers of a pool's replicas: the next answers count as right",
            answer=describe.shown(("id",)),
        )
        listed = describe.listing("List a model's golden prompts", prompt)
        told = describe.listing(
            "Compare the last answers of replicas",
            describe.shown(RESULT_FIELDS, types=_RESULT_TYPES),
            ("pool_id",),
        )
        all_ = describe.listing("List quarantines, the newest first", quarantine)
        one = describe.operation("Show a quarantine and its evidence", answer=quarantine)
        kinds = ("golden-prompts", "golden-results", "quarantines", "golden-answers")
        return [
            AdminRoute("POST", of_model, self.add, Action.WRITE_MODELS, kinds[0], add),
            AdminRoute("GET", of_model, self.of_model, Action.READ_TENANT, kinds[0], listed),
            *ResourceRoutes(self._database, PROMPTS).routes(),
            AdminRoute(
                "GET", "/v1/golden-results", self.results, Action.READ_PLATFORM, kinds[1], told
            ),
            AdminRoute("GET", "/v1/quarantines", self.list, Action.READ_PLATFORM, kinds[2], all_),
            AdminRoute(
                "GET", "/v1/quarantines/{id}", self.show, Action.READ_PLATFORM, kinds[2], one
            ),
            AdminRoute(
                "POST",
                "/v1/quarantines/{id}/release",
                self.release,
                Action.WRITE_FLEET,
                kinds[2],
                release,
            ),
            AdminRoute(
                "POST",
                "/v1/pools/{id}/forget-answers",
                self.forget,
                Action.WRITE_FLEET,
                kinds[3],
                forget,
            ),
        ]

    async def add(self, request: web.Request) -> web.Response:
        """Add a golden prompt to a model (201)."""
        model_id = path_id(request, "model_id")
        given = (await read_body(request, GoldenPromptBody)).model_dump()
        if len(given["expected_token_ids"]) > given["output_tokens_max"]:
            message = "expected_token_ids: more than output_tokens_max; send fewer"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="expected_token_ids")

        async def work(write: Write) -> WriteReply:
            connection = write.connection
            query = select(models).where(models.c.id == model_id).with_for_update(key_share=True)
            model = await first(connection, query)
            owner = None if model is None else model["owner_tenant_id"]
            if model is None or not write.actor.may(Action.READ_TENANT, owner):
                raise PlatformError(ErrorCode.NOT_FOUND, f"there is no models/{model_id}")
            write.require(owner)
            own = golden_prompts.c.model_id == model_id
            count = select(func.count()).select_from(golden_prompts).where(own)
            if (await connection.scalar(count) or 0) >= PROMPTS_MAX:
                message = f"model {model_id} has {PROMPTS_MAX} golden prompts: delete one first"
                raise PlatformError(ErrorCode.CONFLICT, message)
            if await repository.prompts_of_owner(connection, owner) >= PROMPTS_OF_OWNER_MAX:
                whose = f"tenant {owner}" if owner else "the platform"
                message = (
                    f"{whose} has {PROMPTS_OF_OWNER_MAX} golden prompts: delete some of its other "
                    "models' first (sluice golden list, sluice golden remove)"
                )
                raise PlatformError(ErrorCode.CONFLICT, message)
            row = {"id": new_id("golden"), "model_id": model_id} | given
            await connection.execute(insert(golden_prompts).values(row))
            after = PROMPTS.show(row)
            write.record("create", row["id"], None, after, owners=[owner])
            return WriteReply(after, row["id"], 201)

        return await self._writes.run(request, work)

    async def of_model(self, request: web.Request) -> web.Response:
        """Return the golden prompts of a model."""
        model_id = path_id(request, "model_id")
        from_model = select(models).where(models.c.id == model_id)
        found = await fetch(self._database, from_model)
        owner = found[0]["owner_tenant_id"] if found else None
        if not found or not _may_read(request, owner):
            raise PlatformError(ErrorCode.NOT_FOUND, f"there is no models/{model_id}")
        query = PROMPTS.select().where(golden_prompts.c.model_id == model_id)
        return await page(self._database, query, PROMPTS.key, request, PROMPTS.show)

    async def results(self, request: web.Request) -> web.Response:
        """Return the latest answers of replicas, with their verdicts."""
        limit, after = page_of(request)
        pool_id = request.query.get("pool_id", "").replace("\0", "")
        rows = await self._database.run(
            lambda connection: repository.last_answers(connection, pool_id, _RESULTS_MAX)
        )
        found = await asyncio.to_thread(results, *rows)
        found = sorted((one for one in found if one["id"] > after), key=itemgetter("id"))
        body = {"data": found[:limit], "has_more": len(found) > limit}
        return await asyncio.to_thread(shown, request, body)

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of quarantines, the newest first."""
        query, key = select(quarantines), quarantines.c.id
        return await page(self._database, query, key, request, _show, newest_first=True)

    async def show(self, request: web.Request) -> web.Response:
        """Return a quarantine."""
        key = path_id(request, "id")
        found = await fetch(self._database, select(quarantines).where(quarantines.c.id == key))
        if not found:
            raise PlatformError(ErrorCode.NOT_FOUND, f"there is no quarantines/{key}")
        return shown(request, _show(found[0]))

    async def release(self, request: web.Request) -> web.Response:
        """Lift a quarantine. Its replica serves again if the replica still exists."""
        key = path_id(request, "id")
        body = await read_body(request, ReleaseBody)

        async def work(write: Write) -> WriteReply:
            table = quarantines
            query = select(table).where(table.c.id == key).with_for_update()
            row = await first(write.connection, query)
            if row is None:
                raise PlatformError(ErrorCode.NOT_FOUND, f"there is no quarantines/{key}")
            before = _show(row)
            write.check(before)
            if row["released_at"] is not None:
                message = f"quarantine {key} was released by {row['released_by']} already"
                raise PlatformError(ErrorCode.CONFLICT, message)
            values = {"released_at": func.now(), "released_by": write.actor.id}
            changed = update(table).where(table.c.id == key).values(**values).returning(table)
            after = (await write.connection.execute(changed)).mappings().one()
            is_back = await repository.take_back(write.connection, row["replica_id"])
            told = _show({str(name): value for name, value in after.items()})
            told |= {"is_serving_again": is_back}
            write.record("release", key, before, told | {"why": body.reason}, owners=[None])
            return WriteReply(told, key)

        return await self._writes.run(request, work)

    async def forget(self, request: web.Request) -> web.Response:
        """Delete the stored answers of a pool."""
        key = path_id(request, "id")

        async def work(write: Write) -> WriteReply:
            query = select(pools.c.id).where(pools.c.id == key)
            if await write.connection.scalar(query) is None:
                raise PlatformError(ErrorCode.NOT_FOUND, f"there is no pools/{key}")
            await repository.forget_answers(write.connection, key)
            write.record("forget-answers", key, None, {"id": key}, owners=[None])
            return WriteReply({"id": key}, key)

        return await self._writes.run(request, work)


def _may_read(request: web.Request, owner: str | None) -> bool:
    return request[ACTOR].may(Action.READ_TENANT, owner)


def _show(row: Mapping[str, Any]) -> Values:
    return {
        name: value.isoformat() if hasattr(value, "isoformat") else value
        for name, value in row.items()
    }
