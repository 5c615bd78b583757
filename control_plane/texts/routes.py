"""REST of text policies and of redacted texts. The audit log records each read and each erasure."""

from aiohttp import web

from control_plane.access.roles import Action
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.bodies import path_id
from control_plane.http.resources import Resource, ResourceRoutes
from control_plane.http.routes import AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes, require
from control_plane.percent import ShareField
from control_plane.tables import text_policies
from control_plane.telemetry_client import FeedDownError
from control_plane.texts.model import TextPolicyBody
from control_plane.texts.store import TextStore
from sluice.errors import ErrorCode, PlatformError, RejectedError

_KIND = "texts"
POLICIES = Resource(
    path="text-policies",
    table=text_policies,
    shown=("id", *TextPolicyBody.model_fields),
    read=Action.READ_TEXT_POLICIES,
    write=Action.WRITE_TENANTS,
    owner=text_policies.c.id,
    body=TextPolicyBody,
    shares=(ShareField("share"),),
    hidden=("words",),
)
_ROW = {
    "type": "object",
    "properties": {
        **dict.fromkeys(
            ("event_id", "request_id", "tenant_id", "model", "endpoint", "outcome"), describe.TEXT
        ),
        **dict.fromkeys(("received_at", "expires_at", "prompt", "answers"), describe.TEXT),
        **dict.fromkeys(("is_prompt_cut", "is_answer_cut"), describe.BOOLEAN),
        "redactions": describe.OBJECT,
    },
}
_FOUND = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "array", "items": _ROW}},
}


class TextRoutes:
    """The request handlers of text policies and of stored texts."""

    def __init__(self, database: Database, store: TextStore) -> None:
        self._database = database
        self._writes = Writes(database)
        self._store = store

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        of_tenant = "/v1/tenants/{tenant_id:[^/]+}/texts"
        one = of_tenant + "/{request_id:[^/]+}"
        told = describe.operation
        get = told(
            "Read the kept text of a request, redacted; the audit notes the reader", answer=_FOUND
        )
        delete = told("Erase all texts of a tenant")
        return [
            *ResourceRoutes(self._database, POLICIES).routes(),
            AdminRoute("GET", one, self.get, Action.SEE_TEXTS, _KIND, get, is_noted=True),
            AdminRoute("DELETE", of_tenant, self.delete, Action.WRITE_TENANTS, _KIND, delete),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """Return the stored texts of a request, after an audit row about the reader was written."""
        tenant_id, request_id = path_id(request, "tenant_id"), request.match_info["request_id"]
        require(request, tenant_id)
        try:
            rows = await self._store.find(tenant_id, request_id)
        except FeedDownError as error:
            raise _away(error) from error
        object_id = f"{tenant_id}/{request_id}"
        if not rows:
            message = f"there is no text of {object_id}: its tenant has not opted in, it is not in"
            message += " the share that is kept, it is on its way, or its time is over"
            raise PlatformError(ErrorCode.NOT_FOUND, message)

        async def work(write: Write) -> WriteReply:
            write.record("read", object_id, None, None, owners=[tenant_id])
            return WriteReply({"data": rows}, object_id, is_secret=True)

        return await self._writes.run(request, work)

    async def delete(self, request: web.Request) -> web.Response:
        """Erase all texts of a tenant (204). The request can be repeated.

        The audit row is written first, so that no erasure lacks an audit row. A failed erasure has
        a second audit row.
        """
        tenant_id = path_id(request, "tenant_id")
        require(request, tenant_id)

        async def work(write: Write) -> WriteReply:
            write.record("erase", tenant_id, None, None, owners=[tenant_id])
            return WriteReply(None, tenant_id, 204)

        answer = await self._writes.run(request, work)
        try:
            # The erasure also runs if the answer is the stored answer of an idempotency key,
            # because the earlier erasure may have failed.
            await self._store.erase(tenant_id)
        except FeedDownError as error:
            failure = _away(error)
            await self._writes.refused(request, failure)
            raise failure from error
        return answer


def _away(error: FeedDownError) -> RejectedError:
    return RejectedError(ErrorCode.UNAVAILABLE, str(error), retry_after_s=2.0)
