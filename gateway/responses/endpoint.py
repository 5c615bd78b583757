"""POST /v1/responses, and /v1/responses/input_tokens."""

from functools import partial

import orjson
from aiohttp import web
from pydantic import TypeAdapter

from gateway.bases.assets import AssetCache
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import parse
from gateway.bodies.response_items import InputItem, InputItems
from gateway.bodies.responses import InputTokensRequest, ResponseRequest
from gateway.directory import Directory, Principal
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.limits.limiter import Limiter
from gateway.responses.keeping import Keeping
from gateway.responses.store import ResponseStore
from gateway.responses.task import response_task
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate
from sluice.scopes import Scope
from sluice.wire.state.v1 import state_pb2 as wire

TURNS_MAX = 1000  # of a chain
_PREVIOUS = "previous_response_id"
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)


class Responses:
    """The Responses API of one worker, as far as models answer."""

    def __init__(
        self,
        *,
        directory: Directory,
        completer: Completer,
        assets: AssetCache,
        limiter: Limiter,
        store: ResponseStore,
    ) -> None:
        """Compose.

        Args:
            directory: Knows who calls.
            completer: Answers.
            assets: Of the bases.
            limiter: Of all callers.
            store: Keeps responses.
        """
        self._directory = directory
        self._completer = completer
        self._assets = assets
        self._limiter = limiter
        self._store = store

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        principal = self._admitted(request)
        wanted = await read_parsed(request, partial(parse, ResponseRequest))
        chain = await self._chain(principal, wanted)
        tenant_id = principal.tenant.id
        response_id = self._store.new_id(tenant_id)
        keeping: Keeping | None = None
        if wanted.store is not False and self._store.can_keep:
            keeping = Keeping(
                self._store,
                response_id,
                tenant_id,
                items=[*wanted.items],
                ancestors=[turn.id for turn in chain],
            )
        task = response_task(
            wanted,
            response_id,
            before=[item for turn in chain for item in _items_of(turn)],
            session=chain[0].id if chain else response_id,
            keeping=keeping,
        )
        answering = self._completer.answer(request, principal, task)
        del wanted, chain, task  # a stream keeps nothing of its body
        try:
            return await answering
        finally:
            if keeping is not None:
                keeping.end()

    async def count_input(self, request: web.Request) -> web.Response:
        """POST /v1/responses/input_tokens: what a response would be charged for its input."""
        principal = self._admitted(request)
        wanted = await read_parsed(request, partial(parse, InputTokensRequest))
        chain = await self._chain(principal, wanted)
        before = [item for turn in chain for item in _items_of(turn)]
        task = response_task(wanted, "", before=before)
        session, request_id = task.session, identity_of(request).request_id
        resolved = self._directory.resolve(principal, task.model, session, request_id)
        reservation = await self._limiter.reserve(
            principal, resolved.model.id, prompt_tokens=0, output_tokens_max=0, is_bounded=True
        )
        was_served = False
        try:
            assets = await self._assets.get(resolved.model.base_digest)
            (prompt,) = await task.encoded(assets, resolved)
            was_served = True
        finally:
            self._limiter.settle(
                reservation, prompt_tokens=0, output_tokens=0, was_served=was_served
            )
        told = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
        return web.Response(
            body=orjson.dumps(told), content_type="application/json", headers=reservation.headers
        )

    def _admitted(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal

    async def _chain(
        self, principal: Principal, wanted: ResponseRequest | InputTokensRequest
    ) -> list[wire.StoredResponse]:
        """Return the turns that a request continues, oldest first."""
        if wanted.previous_response_id is None:
            return []
        tenant_id, previous = principal.tenant.id, wanted.previous_response_id
        chain = await self._store.chain(tenant_id, previous, _PREVIOUS)
        if len(chain) >= TURNS_MAX:
            raise bad_value(_PREVIOUS, f"a chain has at most {TURNS_MAX} turns; begin another one")
        return chain


def _items_of(turn: wire.StoredResponse) -> list[InputItem]:
    """Return what a turn has brought, and what was answered."""
    output = orjson.loads(turn.response)["output"]
    return [
        *_ITEMS.validate_json(turn.input_items),
        *_ITEMS.validate_python(output),
    ]
