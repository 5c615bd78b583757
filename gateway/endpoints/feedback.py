"""POST /v1/feedback, which accepts the judgement of an answer by its tenant.

The gateway stores no answers, so it cannot check the id. A judgement is an event with the caller's
tenant, and counts only for requests of that tenant. An id of another tenant's request is accepted
without effect.
"""

import time
from collections.abc import Callable
from functools import partial

import orjson
from aiohttp import web

from gateway.bodies.feedback import FeedbackRequest
from gateway.bodies.parsing import parse
from gateway.directory import Directory
from gateway.endpoints.reading import read_parsed
from gateway.limits.limiter import Limiter
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate
from sluice.wire.telemetry.v1.telemetry_pb2 import AnswerFeedback, RequestEvent

_SCHEMA_VERSION = 4  # the version of the schema of `RequestEvent` that judgements have


class FeedbackIntake:
    """The endpoint `/v1/feedback` of one worker."""

    def __init__(
        self,
        directory: Directory,
        limiter: Limiter,
        emit: Callable[[bytes], None],
        gateway_id: str,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            directory: Keys and tenants.
            limiter: Counts a judgement as a request.
            emit: Queues one event per judgement and never blocks.
            gateway_id: Id of this worker.
        """
        self._directory = directory
        self._limiter = limiter
        self._emit = emit
        self._gateway_id = gateway_id

    async def take(self, request: web.Request) -> web.Response:
        """POST /v1/feedback, whose response is the same for existing and unknown answers."""
        principal = authenticate(self._directory, request)
        wanted = await read_parsed(request, partial(parse, FeedbackRequest))
        reservation = await self._limiter.count(principal, "")
        self._limiter.settle(reservation, prompt_tokens=0, output_tokens=0, was_served=True)
        identity = identity_of(request)
        event = RequestEvent(
            schema_version=_SCHEMA_VERSION,
            event_id=f"fbk_{identity.uid}",
            received_at_unix_ms=time.time_ns() // 1_000_000,
            tenant_id=principal.tenant.id,
            key_id=principal.key.id,
            gateway_id=self._gateway_id,
            feedback=AnswerFeedback(answer=wanted.answer, good=wanted.good),
        )
        self._emit(event.SerializeToString())
        body = orjson.dumps({"object": "feedback", "id": wanted.id, "rating": wanted.rating})
        return web.Response(
            body=body,
            content_type="application/json",
            headers=identity.headers | dict(reservation.headers),
        )
