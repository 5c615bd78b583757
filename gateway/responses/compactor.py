"""Shortens conversations by summaries of their earlier turns.

A model writes the summary, and an encrypted item with the summary replaces the turns. The summary
is a separate request of the same caller, with its own limits, usage and trace. Its prompt begins
with the unchanged conversation, so most of the prompt is in the engines' prefix caches.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from gateway.bases.assets import AssetCache
from gateway.bodies.compaction import Compacted, expanded, is_instruction, last_turn
from gateway.bodies.messages import Message
from gateway.bodies.parsing import parse
from gateway.bodies.response_items import CompactionItem, InputItem, messages_of
from gateway.bodies.responses import CompactRequest, ResponseRequest, ServiceTier
from gateway.bodies.summaries import SUMMARY_PROMPT, CompactionPolicy
from gateway.directory import Directory, Principal
from gateway.endpoints.chat_task import ChatTask
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.limits.limiter import Limiter
from gateway.responses.compaction_seal import CompactionSeals
from gateway.responses.context import ResponseContext
from gateway.responses.counted_contexts import CountedContexts
from gateway.responses.document import compaction_item
from gateway.responses.store import ResponseStore
from gateway.server.identity import identity_of, identity_of_part
from gateway.server.in_process import BodySink, in_process_request
from gateway.server.middleware import authenticate, give_principal
from sluice.errors import BadRequestError, ErrorCode
from sluice.response_ids import created_unix_ms, item_stem
from sluice.scopes import Scope

PATH = "/v1/responses/compact"
_SUMMARY_TOKENS = 1024
_ROOM_PARTS = 4  # a summary may use at most a quarter of the model's context


class SummaryTask(ChatTask):
    """A chat request whose answer is the summary of a conversation."""

    endpoint = PATH


class ModelSummary(NamedTuple):
    """A summary in the model's words, and the usage of the model."""

    text: str
    usage: dict[str, Any]


class ConversationSummary(NamedTuple):
    """A compaction item, its summary text, and the usage of the model that wrote the summary."""

    item: CompactionItem
    text: str
    usage: dict[str, Any]


class Compactor:
    """Summarizes conversations and creates compaction items, for one worker."""

    def __init__(
        self, completer: Completer, assets: AssetCache, limiter: Limiter, seals: CompactionSeals
    ) -> None:
        """`seals` encrypts the compaction items."""
        self._completer, self._assets, self._limiter = completer, assets, limiter
        self._seals = seals

    async def is_due(
        self,
        request: web.Request,
        principal: Principal,
        policy: CompactionPolicy,
        task: ChatTask,
    ) -> bool:
        """Return whether a prompt exceeds the token threshold of a compaction policy.

        Tokenizing the prompt is work, so the caller's limits count one request until it has ended.
        Raises LimitExceededError if a limit has no room for one more request.
        """
        resolved = await self._completer.resolved(principal, task, identity_of(request))
        threshold = policy.compact_threshold or resolved.context_tokens_max * 3 // 4
        if not threshold:
            return False
        counted = await self._limiter.count(principal, resolved.model.id)
        goes_on = False
        try:
            assets = await self._assets.get(resolved.model.base_digest)
            (prompt,) = await task.model_copy(update={"truncation": None}).encoded(assets, resolved)
            goes_on = True
        except BadRequestError as error:
            if error.code is not ErrorCode.CONTEXT_LENGTH_EXCEEDED:
                raise
            goes_on = True
            return True
        finally:
            self._limiter.settle(counted, prompt_tokens=0, output_tokens=0, was_served=not goes_on)
        return len(prompt.ids) > threshold

    async def shortened(
        self,
        request: web.Request,
        principal: Principal,
        wanted: ResponseRequest,
        context: ResponseContext,
        response_id: str,
    ) -> tuple[ResponseContext, CompactionItem] | None:
        """Return a context that begins with a summary, and the compaction item of the summary.

        Returns None if the context has only one turn, which is never summarized. Raises
        PlatformError if the summary failed.
        """
        policy, items = wanted.compaction_policy, context.all_shown
        assert policy is not None, "it is due"
        start = last_turn(items)
        said = [it for it in items[:start] if not is_instruction(it)]
        if not said:
            return None
        kept = [it for it in items[start:] if not is_instruction(it)]
        summary = await self._summed_up(
            request,
            principal,
            model=policy.model or wanted.model,
            items=items[:start],
            instructions=wanted.instructions,
            session=context.session,
            kept=kept,
            item_id=f"cmp_{item_stem(response_id)}00",
            service_tier=wanted.service_tier,
        )
        opened = Compacted(summary.text, kept)
        shown = expanded([*items, summary.item], lambda _, __: opened)
        return replace(context, shown=(shown, ())), summary.item

    async def summed_up_whole(
        self,
        request: web.Request,
        principal: Principal,
        wanted: CompactRequest,
        context: ResponseContext,
        response_id: str,
    ) -> ConversationSummary:
        """Return an item that replaces the whole conversation.

        Raises PlatformError if the summary failed.
        """
        items = context.all_shown
        return await self._summed_up(
            request,
            principal,
            model=wanted.model,
            items=items,
            instructions=wanted.instructions,
            session=context.session,
            kept=[it for it in items if is_instruction(it)],
            item_id=f"cmp_{item_stem(response_id)}00",
            service_tier=wanted.service_tier,
        )

    async def _summed_up(
        self,
        request: web.Request,
        principal: Principal,
        *,
        model: str,
        items: Sequence[InputItem],
        instructions: str | None,
        session: str,
        kept: Sequence[InputItem],
        item_id: str,
        service_tier: ServiceTier | None,
    ) -> ConversationSummary:
        messages = messages_of(items)
        if instructions is not None:
            messages.insert(0, Message.model_construct(role="system", content=instructions))
        made = await self.summary_of(
            request,
            principal,
            model=model,
            messages=messages,
            session=session,
            service_tier=service_tier,
        )
        item = self._seals.sealed(principal.tenant.id, item_id, made.text, kept)
        return ConversationSummary(item, made.text, made.usage)

    async def summary_of(
        self,
        request: web.Request,
        principal: Principal,
        *,
        model: str,
        messages: Sequence[Message],
        session: str,
        service_tier: ServiceTier | None,
    ) -> ModelSummary:
        """Return a model's summary of messages.

        Raises PlatformError if the model's request was refused.
        """
        identity = identity_of_part(request, 0)
        task = SummaryTask.model_construct(
            model=model,
            messages=[*messages, Message.model_construct(role="user", content=SUMMARY_PROMPT)],
            temperature=0.0,
            truncation="auto",
            session_id=session or None,
            service_tier=service_tier,
        )
        resolved = await self._completer.resolved(principal, task, identity)
        room = resolved.context_tokens_max // _ROOM_PARTS or _SUMMARY_TOKENS
        bounds = {"max_completion_tokens": min(_SUMMARY_TOKENS, room)}
        task = task.model_copy(update=bounds)
        sink = BodySink(lambda _: None)  # the summary is not streamed, so the sink receives nothing
        part = in_process_request(PATH, b"", sink, identity)
        give_principal(part, principal)
        answer = await self._completer.answer(part, principal, task)
        assert isinstance(answer, web.Response), "it is no stream"
        assert isinstance(answer.body, bytes)
        told: dict[str, Any] = orjson.loads(answer.body)
        return ModelSummary(told["choices"][0]["message"]["content"] or "", told["usage"])


class Compaction:
    """The endpoint POST /v1/responses/compact."""

    def __init__(
        self,
        directory: Directory,
        compactor: Compactor,
        contexts: CountedContexts,
        store: ResponseStore,
    ) -> None:
        """`contexts` reads the conversation, and `compactor` summarizes it."""
        self._directory, self._compactor = directory, compactor
        self._contexts, self._store = contexts, store

    async def compact(self, request: web.Request) -> web.Response:
        """Answer with a compaction item that replaces the whole conversation."""
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        wanted = await read_parsed(request, partial(parse, CompactRequest))
        tenant_id = principal.tenant.id
        context = await self._contexts.read(principal, wanted)
        response_id = self._store.new_id(tenant_id)
        made = await self._compactor.summed_up_whole(
            request, principal, wanted, context, response_id
        )
        usage = made.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        told = {
            "id": response_id,
            "object": "response.compaction",
            "created_at": created_unix_ms(response_id) // 1000,
            "output": [orjson.Fragment(compaction_item(made.item))],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": usage["total_tokens"],
            },
        }
        return web.Response(body=orjson.dumps(told), content_type="application/json")
