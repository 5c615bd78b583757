"""The endpoints POST /v1/responses and POST /v1/responses/input_tokens."""

from functools import partial

import orjson
import structlog
from aiohttp import web

from gateway.bases.assets import AssetCache
from gateway.bodies.parsing import parse
from gateway.bodies.responses import InputTokensRequest, ResponseRequest
from gateway.conversations.store import ConversationStore
from gateway.directory import Directory, Principal
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.limits.limiter import Limiter
from gateway.responses.background import BackgroundKeeping, BackgroundResponses
from gateway.responses.compactor import Compactor
from gateway.responses.context import ResponseContext
from gateway.responses.counted_contexts import CountedContexts
from gateway.responses.following import Following
from gateway.responses.keeping import Keeping, Publish
from gateway.responses.local_turns import LocalKeeping, LocalTurns
from gateway.responses.store import ResponseStore, cannot_store
from gateway.responses.task import ResponseTask, response_task
from gateway.responses.tool_planning import ToolPlanning, over_summary, tool_task
from gateway.responses.tool_task import ToolResponseTask
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate
from gateway.tools.answering import Answering
from sluice.errors import BadRequestError, PlatformError
from sluice.scopes import Scope
from sluice.wire.state.v1 import state_pb2 as wire

log = structlog.get_logger(__name__)


class Responses:
    """The endpoints of one worker that create responses and count their input tokens."""

    def __init__(
        self,
        *,
        directory: Directory,
        completer: Completer,
        answering: Answering,
        tools: ToolPlanning,
        assets: AssetCache,
        limiter: Limiter,
        store: ResponseStore,
        background: BackgroundResponses,
        conversations: ConversationStore,
        contexts: CountedContexts,
        compactor: Compactor,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            directory: Keys and tenants.
            completer: Resolves the model that answers.
            answering: Answers requests, with server tools if needed.
            tools: Selects the tools that run on the server.
            assets: Assets of the bases.
            limiter: Limits of all callers.
            store: Stores responses.
            background: Runs background responses.
            conversations: Store of the tenants' conversations.
            contexts: Reads the earlier turns that a request continues.
            compactor: Summarizes conversations that have grown too long.
        """
        self._directory = directory
        self._completer, self._answering, self._tools = completer, answering, tools
        self._assets = assets
        self._limiter = limiter
        self._store = store
        self._background = background
        self._following = Following(store)
        self._conversations = conversations
        self._contexts, self._compactor = contexts, compactor

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        principal = self._authorise(request)
        wanted = await read_parsed(request, partial(parse, ResponseRequest))
        answering = self.answer(request, principal, wanted)
        del wanted  # frees the body while its answer streams
        return await answering

    async def answer(
        self,
        request: web.Request,
        principal: Principal,
        wanted: ResponseRequest,
        local: LocalTurns | None = None,
    ) -> web.StreamResponse:
        """Answer one parsed request.

        Args:
            request: The HTTP request.
            principal: The caller.
            wanted: The parsed body.
            local: Responses of the request's WebSocket that the request may continue.

        Returns:
            The HTTP response, already sent if it is a stream.
        """
        tenant_id = principal.tenant.id
        context = await self._contexts.read(principal, wanted, local)
        rounds = await self._tools.rounds(principal, wanted, context)
        response_id = self._store.new_id(tenant_id)
        keeping = self._keeping(wanted, context, response_id, tenant_id, local)
        task = response_task(
            wanted,
            response_id,
            context=context,
            session=context.session or response_id,
            keeping=keeping,
        )
        if keeping is not None and local is None and rounds is None:
            keeping.detach = self._background.detach
        if rounds is not None:
            task = tool_task(task, wanted, rounds)
        if wanted.compaction_policy is not None:
            task = await self._shortened(request, principal, wanted, context, task)
        if wanted.background:
            return await self._begin(request, principal, task)
        answering = self._answering.answer(request, principal, task)
        del wanted, context, task, rounds  # frees the body while its answer streams
        try:
            return await answering
        finally:
            if keeping is not None:
                keeping.end()

    async def _shortened(
        self,
        request: web.Request,
        principal: Principal,
        wanted: ResponseRequest,
        context: ResponseContext,
        task: ResponseTask,
    ) -> ResponseTask:
        """Return the task, with a summary in place of earlier turns if compaction is due."""
        policy, compactor = wanted.compaction_policy, self._compactor
        assert policy is not None
        if not await compactor.is_due(request, principal, policy, task):
            return task
        response_id, session = task.response_id, task.session
        made = await compactor.shortened(request, principal, wanted, context, response_id)
        if made is None:
            return task
        shorter, item = made
        anew = response_task(
            wanted, response_id, context=shorter, session=session, keeping=task.keeping
        ).model_copy(update={"compaction": item})
        if not isinstance(task, ToolResponseTask):
            return anew
        return tool_task(anew, wanted, over_summary(task.rounds, wanted.instructions, shorter))

    def _keeping(
        self,
        wanted: ResponseRequest,
        context: ResponseContext,
        response_id: str,
        tenant_id: str,
        local: LocalTurns | None,
    ) -> Keeping | None:
        """Return the storage of a response, or None if the response is not to be stored.

        Raises RejectedError if the response must be stored and no store is available.
        """
        can_keep = self._store.can_keep
        if (wanted.background or context.conversation_id) and not can_keep:
            raise cannot_store()
        items, ancestors = context.items, context.ancestors
        if wanted.store is False or not can_keep or context.is_local:
            if local is None:
                return None
            return LocalKeeping(
                self._store, response_id, tenant_id, items=items, ancestors=ancestors, turns=local
            )
        kind = BackgroundKeeping if wanted.background else Keeping
        return kind(
            self._store,
            response_id,
            tenant_id,
            items=items,
            ancestors=ancestors,
            publish=self._publisher(tenant_id, context.conversation_id),
        )

    async def _begin(
        self, request: web.Request, principal: Principal, task: ResponseTask
    ) -> web.StreamResponse:
        """Start a background response, and answer with its queued JSON or its event stream."""
        identity, is_stream = identity_of(request), bool(task.stream)
        resolved = await self._completer.resolved(principal, task, identity)
        queued, response_id = task.queued(resolved.model.id), task.response_id
        streamed = task.model_copy(update={"stream": True})
        del task  # frees the body while its answer streams
        await self._background.begin(identity, principal, streamed, queued)
        if is_stream:
            return await self._following.answer(request, principal.tenant.id, response_id, None)
        return web.Response(body=queued, content_type="application/json")

    async def count_input(self, request: web.Request) -> web.Response:
        """POST /v1/responses/input_tokens, which counts the tokens of a response's input."""
        principal = self._authorise(request)
        wanted = await read_parsed(request, partial(parse, InputTokensRequest))
        context = await self._contexts.read(principal, wanted)
        rounds = await self._tools.rounds(principal, wanted, context)
        task = response_task(wanted, "", context=context)
        if rounds is not None:
            task = tool_task(task, wanted, rounds)
        resolved = await self._completer.resolved(principal, task, identity_of(request))
        reservation = await self._limiter.reserve(
            principal, resolved.model.id, prompt_tokens=0, output_tokens_max=0, is_bounded=True
        )
        was_served = True  # tokenizing was work, even if the prompt is refused or the client leaves
        try:
            assets = await self._assets.get(resolved.model.base_digest)
            (prompt,) = await task.encoded(assets, resolved)
        except PlatformError as error:
            was_served = isinstance(error, BadRequestError)
            raise
        finally:
            self._limiter.settle(
                reservation, prompt_tokens=0, output_tokens=0, was_served=was_served
            )
        told = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
        return web.Response(
            body=orjson.dumps(told), content_type="application/json", headers=reservation.headers
        )

    def _publisher(self, tenant_id: str, conversation_id: str) -> Publish | None:
        """Return a function that adds a turn to its conversation, or None if there is none."""
        if not conversation_id:
            return None

        async def publish(turn: wire.StoredResponse) -> bool:
            items = [*orjson.loads(turn.input_items), *orjson.loads(turn.response)["output"]]
            try:
                await self._conversations.append(tenant_id, conversation_id, items, "input")
            except PlatformError as error:
                log.warning("turn_not_added", conversation_id=conversation_id, reason=str(error))
                return False
            return True

        return publish

    def _authorise(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        return principal
