"""Reads the earlier turns that a response continues, and the items that it refers to."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from gateway.bases.prompt_trail import NO_TRAIL, PromptTrail
from gateway.bodies.compaction import expanded, has_compaction
from gateway.bodies.mistakes import bad_value
from gateway.bodies.response_items import InputItem, ItemReference, ItemTurns
from gateway.conversations.store import ConversationStore
from gateway.responses.chain_memory import ChainMemory, KnownChain, items_of
from gateway.responses.compaction_seal import CompactionSeals
from gateway.responses.local_turns import LocalTurns
from gateway.responses.store import ResponseStore
from sluice.wire.state.v1 import state_pb2 as wire

TURNS_MAX = 1000  # maximum number of turns in one chain
_PREVIOUS, _CONVERSATION = "previous_response_id", "conversation"
_REFERENCES_MAX = 64  # maximum number of references to items of other responses


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The items that a response continues, and the items of its own turn.

    Attributes:
        before: Items of earlier turns, oldest first.
        items: Items of the response's own turn. Each reference is replaced by the item it names.
        ancestors: Ids of the continued responses, oldest first.
        session: Key that groups the turns, empty if no response is continued.
        conversation_id: Conversation to which the turn is added, empty without a conversation.
        is_local: Whether a continued response exists only in this worker's memory, so that this
            response cannot be stored either.
        shown: `before` and `items` in the form that the model reads, or None if the model reads
            them unchanged.
        begun: Chat turns that `before` was converted to, or None if not converted.
        trail: Stored prompt of the continued responses.
    """

    before: Sequence[InputItem]
    items: Sequence[InputItem]
    ancestors: Sequence[str] = ()
    session: str = ""
    conversation_id: str = ""
    is_local: bool = False
    shown: tuple[Sequence[InputItem], Sequence[InputItem]] | None = None
    begun: ItemTurns | None = None
    trail: PromptTrail = NO_TRAIL

    @property
    def all_shown(self) -> list[InputItem]:
        """All items in the form that the model reads."""
        before, items = self.shown or (self.before, self.items)
        return [*before, *items]


class ContinuingRequest(Protocol):
    """A request that may continue earlier turns."""

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the request belongs to."""
        ...

    @property
    def previous_response_id(self) -> str | None:
        """The response that the request continues."""
        ...

    @property
    def items(self) -> Sequence[InputItem]:
        """Items of the request itself."""
        ...


def is_continuing(wanted: ContinuingRequest) -> bool:
    """Return whether a request continues, or refers to, stored turns."""
    if wanted.conversation_id or wanted.previous_response_id is not None:
        return True
    return any(isinstance(item, ItemReference) for item in wanted.items)


class ContextReader:
    """Reads the contexts of responses for one worker."""

    def __init__(
        self, store: ResponseStore, conversations: ConversationStore, seals: CompactionSeals
    ) -> None:
        """`seals` decrypts the compaction items of a context."""
        self._store, self._conversations, self._seals = store, conversations, seals
        self._memory = ChainMemory()

    def forget_idle(self) -> None:
        """Drop the chains that have been idle for 15 minutes."""
        self._memory.expire(time.monotonic())

    async def read(
        self, tenant_id: str, wanted: ContinuingRequest, local: LocalTurns | None = None
    ) -> ResponseContext:
        """Return the context of a request, with the turns that it continues and its own items.

        Args:
            tenant_id: The caller's tenant.
            wanted: The request.
            local: Responses that exist only in the memory of the request's WebSocket.

        Raises:
            PlatformError: NOT_FOUND if a continued response or a referenced item is missing, or
                CONFLICT if a continued response is still under way.
            BadRequestError: The chain is too long, or belongs to a conversation that the request
                omits.
            RejectedError: UNAVAILABLE if no store answers.
        """
        return self._opened(tenant_id, await self._read(tenant_id, wanted, local))

    def _opened(self, tenant_id: str, context: ResponseContext) -> ResponseContext:
        """Return a context with decrypted compaction items.

        Raises BadRequestError if an item is not valid.
        """
        before, items = context.before, context.items
        opened = partial(self._seals.opened, tenant_id)
        if has_compaction(items):
            behind = len(before)
            shown = expanded(
                [*before, *items],
                lambda index, item: opened(item, f"input[{index - behind}].encrypted_content"),
            )
            return replace(context, shown=((), shown))
        if context.begun is None and has_compaction(before):
            shown = expanded(before, lambda _, item: opened(item, _PREVIOUS))
            return replace(context, shown=(shown, items))
        return context

    async def _read(
        self, tenant_id: str, wanted: ContinuingRequest, local: LocalTurns | None
    ) -> ResponseContext:
        conversation_id = wanted.conversation_id or ""
        if conversation_id:
            before = await self._conversations.context(tenant_id, conversation_id, _CONVERSATION)
            items = await self._followed(tenant_id, wanted.items, before)
            own = [it.model_copy(update={"id": None}) for it in items]
            return ResponseContext(
                before, own, session=conversation_id, conversation_id=conversation_id
            )
        if wanted.previous_response_id is None:
            return ResponseContext((), await self._followed(tenant_id, wanted.items, ()))
        newest = None if local is None else local.find(wanted.previous_response_id, _PREVIOUS)
        if local is None or newest is None:
            chain = await self._stored_chain(tenant_id, wanted.previous_response_id)
        else:
            chain = KnownChain().extended(await self._local_chain(tenant_id, newest, local))
        if chain.conversation_id:
            text = f"it belongs to conversation '{chain.conversation_id}': continue that one"
            raise bad_value(_PREVIOUS, text)
        if len(chain.ids) >= TURNS_MAX:
            raise bad_value(_PREVIOUS, f"a chain has at most {TURNS_MAX} turns; begin another one")
        items = await self._followed(tenant_id, wanted.items, chain.items)
        return ResponseContext(
            chain.items,
            items,
            chain.ids,
            chain.ids[0],
            is_local=newest is not None,
            begun=chain.turns,
            trail=chain.trail,
        )

    async def _stored_chain(self, tenant_id: str, response_id: str) -> KnownChain:
        """Return a chain of stored responses, and read only the part that is not in memory."""
        known = dict[str, KnownChain]()

        def ids_of(newest: str) -> Sequence[str]:
            chain = self._memory.find(tenant_id, newest, time.monotonic())
            if chain is None:
                return ()
            known[newest] = chain
            return chain.ids

        turns = await self._store.chain(tenant_id, response_id, _PREVIOUS, ids_of)
        if not turns:
            return known[response_id]
        before = turns[0].ancestors
        chain = (known[before[-1]] if before else KnownChain()).extended(turns)
        if not chain.conversation_id:
            self._memory.keep(tenant_id, chain, time.monotonic())
        return chain

    async def _local_chain(
        self, tenant_id: str, newest: wire.StoredResponse, local: LocalTurns
    ) -> list[wire.StoredResponse]:
        """Return a response of a socket and all responses that it continues, oldest first."""
        turns, stored = [newest], list[wire.StoredResponse]()
        for ancestor in reversed(newest.ancestors):
            turn = local.find(ancestor, _PREVIOUS)
            if turn is None:
                stored = await self._store.chain(tenant_id, ancestor, _PREVIOUS)
                break
            turns.append(turn)
        return [*stored, *reversed(turns)]

    async def _followed(
        self, tenant_id: str, items: Sequence[InputItem], before: Sequence[InputItem]
    ) -> Sequence[InputItem]:
        """Replace each reference in the items by its item. Raises NOT_FOUND if one is missing."""
        if not any(isinstance(item, ItemReference) for item in items):
            return items
        known: dict[str, InputItem] = {
            it.id: it for it in before if it.id and not isinstance(it, ItemReference)
        }
        followed, looked = list[InputItem](), 0
        for index, item in enumerate(items):
            if not isinstance(item, ItemReference):
                followed.append(item)
                continue
            param = f"input[{index}].id"
            if item.id not in known:
                looked += 1
                if looked > _REFERENCES_MAX:
                    text = f"at most {_REFERENCES_MAX} references to other responses; send the item"
                    raise bad_value(param, text)
                known |= await self._items_with(tenant_id, item.id, param)
            followed.append(known[item.id])
        return followed

    async def _items_with(
        self, tenant_id: str, item_id: str, param: str
    ) -> Mapping[str, InputItem]:
        """Return all items of the response that contains `item_id`, as a mapping by id.

        Raises PlatformError NOT_FOUND if no response has the item.
        """
        turn = await self._store.turn_of_item(tenant_id, item_id, param)
        found = {it.id: it for it in items_of(turn) if not isinstance(it, ItemReference) and it.id}
        if item_id not in found:
            raise self._store.no_item(item_id, param)
        return found
