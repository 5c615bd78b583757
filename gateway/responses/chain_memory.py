"""Cache of the response chains that this worker has read, with their items parsed to chat turns.

A response continues a chain, and together they are a new chain. If the old chain is cached, only
the new turn is read and parsed, while earlier turns are only checked for existence. A chain's cache
key is its tenant and its newest response.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from pydantic import TypeAdapter

from gateway.bases.prompt_trail import NO_TRAIL, PromptTrail
from gateway.bodies.compaction import has_compaction
from gateway.bodies.response_items import InputItem, InputItems, ItemTurns, answers_earlier
from sluice.errors import BadRequestError
from sluice.wire.state.v1 import state_pb2 as wire

# Bytes of one worker's cache, enough for about a hundred chains of 50,000 tokens.
_BYTES_MAX = 64 << 20
_SHARE_MAX = 4  # A chain larger than a quarter of the cache is not cached.
# Seconds without use until a chain is dropped, so that memory has no deleted text after an hour.
_IDLE_S = 900.0
_ITEM_BYTES = 2048  # Estimated bytes of an item and its message, besides their text.
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)


@dataclass(frozen=True, slots=True)
class KnownChain:
    """The turns of a chain, oldest first.

    Attributes:
        ids: Ids of the chain's responses.
        items: All items of the chain.
        turns: Chat turns that the items were converted to, or None if the items can only be
            converted together with the items that follow them.
        size: Approximate bytes of memory that the chain uses.
        conversation_id: Conversation of the newest response, empty without a conversation.
        trail: Stored prompt of the turns.
    """

    ids: Sequence[str] = ()
    items: Sequence[InputItem] = ()
    turns: ItemTurns | None = None
    size: int = 0
    conversation_id: str = ""
    trail: PromptTrail = NO_TRAIL

    def extended(self, turns: Sequence[wire.StoredResponse]) -> "KnownChain":
        """Return the chain with further turns."""
        made, conversation_id = list[list[InputItem]](), self.conversation_id
        size = self.size
        for turn in turns:
            response = orjson.loads(turn.response)
            conversation_id = (response.get("conversation") or {}).get("id", "")
            items = _items_of(turn.input_items, response["output"])
            size += len(turn.input_items) + len(turn.response) + _ITEM_BYTES * len(items)
            made.append(items)
        trail = self.trail.extended([turn.prompt for turn in turns])
        return KnownChain(
            [*self.ids, *(turn.id for turn in turns)],
            [*self.items, *(item for items in made for item in items)],
            self._turns_with(made),
            size + trail.size - self.trail.size,
            conversation_id,
            trail,
        )

    def _turns_with(self, made: Sequence[Sequence[InputItem]]) -> ItemTurns | None:
        if self.ids and self.turns is None:
            return None
        turns = ItemTurns() if self.turns is None else self.turns.copy()
        try:
            for items in made:
                if has_compaction(items) or answers_earlier(items):
                    return None
                turns.take(items, -len(items))
        except BadRequestError:
            return None  # the error is reported for the request that continues the chain
        return turns


class ChainMemory:
    """The chains that one worker has used most recently.

    Attributes:
        held_bytes: Approximate bytes of all chains.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        """`bytes_max` bounds the memory of all cached chains together."""
        self._bytes_max = bytes_max
        # Chains by tenant and newest response, with the time of the last use. The oldest is first.
        self._chains: OrderedDict[tuple[str, str], tuple[KnownChain, float]] = OrderedDict()
        self.held_bytes = 0

    def find(self, tenant_id: str, response_id: str, now_s: float) -> KnownChain | None:
        """Return the cached chain of a tenant that ends with a response, or None."""
        self.expire(now_s)
        key = (tenant_id, response_id)
        if key not in self._chains:
            return None
        chain, _ = self._chains[key]
        self._chains[key] = chain, now_s
        self._chains.move_to_end(key)
        return chain

    def keep(self, tenant_id: str, chain: KnownChain, now_s: float) -> None:
        """Cache a chain in place of the shorter chain that it continues."""
        for response_id in chain.ids[-2:]:
            if (tenant_id, response_id) in self._chains:
                self._forget((tenant_id, response_id))
        if chain.size > self._bytes_max // _SHARE_MAX:
            return
        self._chains[tenant_id, chain.ids[-1]] = chain, now_s
        self.held_bytes += chain.size
        while self.held_bytes > self._bytes_max:
            self._forget(next(iter(self._chains)))

    def expire(self, now_s: float) -> None:
        """Drop the chains that no request has continued for `_IDLE_S` seconds."""
        while self._chains:
            key, (_, used_s) = next(iter(self._chains.items()))
            if now_s - used_s < _IDLE_S:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        chain, _ = self._chains.pop(key)
        self.held_bytes -= chain.size


def items_of(turn: wire.StoredResponse) -> list[InputItem]:
    """Return the input items of a stored turn, followed by its output items."""
    return _items_of(turn.input_items, orjson.loads(turn.response)["output"])


def _items_of(input_items: bytes, output: object) -> list[InputItem]:
    return [*_ITEMS.validate_json(input_items), *_ITEMS.validate_python(output)]
