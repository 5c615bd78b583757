"""Chains of responses that this worker has read: their items, and the turns that these come to.

A chain that goes on is all of the chain before it. So only its newest turn is read and parsed; of
earlier ones it is asked whether they are still there. A chain is known by its tenant and its newest
response.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from pydantic import TypeAdapter

from gateway.bases.prompt_trail import NO_TRAIL, PromptTrail
from gateway.bodies.compaction import has_compaction
from gateway.bodies.response_items import InputItem, InputItems, ItemTurns
from sluice.errors import BadRequestError
from sluice.wire.state.v1 import state_pb2 as wire

_BYTES_MAX = 64 << 20  # of one worker: a hundred chains of 50,000 tokens
_SHARE_MAX = 4  # a chain that takes more than this part of it is not kept
_IDLE_S = 900.0  # texts that were deleted are in no memory an hour later
_ITEM_BYTES = 2048  # of an item and its message, besides their text
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)


@dataclass(frozen=True, slots=True)
class KnownChain:
    """The turns of a chain, oldest first.

    Attributes:
        ids: Ids of its responses.
        items: All items.
        turns: Turns of a chat that the items come to; None: they have to be seen together with
            what comes behind them.
        size: Bytes that it takes, about.
        conversation_id: Conversation of the newest response; empty: it belongs to none.
        trail: Prompt that the turns have stored.
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
                if has_compaction(items):
                    return None
                turns.take(items, -len(items))
        except BadRequestError:
            return None  # told of the request that continues it
        return turns


class ChainMemory:
    """The latest chains of one worker.

    Attributes:
        held_bytes: Bytes of all chains, about.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        """Start empty."""
        self._bytes_max = bytes_max
        # By tenant and newest response, with the time of the last use; the oldest use is first.
        self._chains: OrderedDict[tuple[str, str], tuple[KnownChain, float]] = OrderedDict()
        self.held_bytes = 0

    def find(self, tenant_id: str, response_id: str, now_s: float) -> KnownChain | None:
        """Return the chain of a tenant that ends with a response."""
        self.expire(now_s)
        key = (tenant_id, response_id)
        if key not in self._chains:
            return None
        chain, _ = self._chains[key]
        self._chains[key] = chain, now_s
        self._chains.move_to_end(key)
        return chain

    def keep(self, tenant_id: str, chain: KnownChain, now_s: float) -> None:
        """Take a chain in place of the one that it continues."""
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
        """Let go of chains that no request has continued for a while."""
        while self._chains:
            key, (_, used_s) = next(iter(self._chains.items()))
            if now_s - used_s < _IDLE_S:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        chain, _ = self._chains.pop(key)
        self.held_bytes -= chain.size


def items_of(turn: wire.StoredResponse) -> list[InputItem]:
    """Return what a turn has brought, and what was answered."""
    return _items_of(turn.input_items, orjson.loads(turn.response)["output"])


def _items_of(input_items: bytes, output: object) -> list[InputItem]:
    return [*_ITEMS.validate_json(input_items), *_ITEMS.validate_python(output)]
