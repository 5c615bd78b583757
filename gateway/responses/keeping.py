"""The storage of a response under way, with its content so far and whether it is stored yet."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import orjson

from gateway.bodies.response_items import InputItem, stored_items
from gateway.endpoints.task import LastingEnd
from gateway.responses.durable import RECORD_BYTES_MAX
from gateway.responses.events import ResponseEvents
from gateway.responses.store import ResponseStore
from sluice.errors import PlatformError
from sluice.response_ids import created_unix_ms, item_stem
from sluice.wire.state.v1 import state_pb2 as wire

# Bytes of a turn with its prompt. Encryption adds up to 64 KiB.
_WITH_PROMPT_MAX = RECORD_BYTES_MAX - (64 << 10)

Publish = Callable[[wire.StoredResponse], Awaitable[bool]]
Detach = Callable[["Keeping", ResponseEvents], "Detached | None"]


class Detached(NamedTuple):
    """A response that goes on without its client.

    Attributes:
        keeping: Storage of the response from now on.
        transport: Receives the rest of its events.
    """

    keeping: "Keeping"
    transport: asyncio.WriteTransport


class Keeping:
    """The storage of one response under way.

    Attributes:
        detach: Continues the response when its client disconnects, or None if it then ends.
        is_kept: Whether `keep` has stored the response. It is false while the response runs.
        keeps_failures: Whether a failed response is stored, too.
        is_storing: Whether `keep` stores responses for all requests. It is false for
            `LocalKeeping`, whose responses only the request's own socket can continue.
    """

    __slots__ = ("_is_marked", "_publish", "_store", "_turn", "detach", "is_kept")

    keeps_failures = False
    is_storing = True

    def __init__(
        self,
        store: ResponseStore,
        response_id: str,
        tenant_id: str,
        *,
        items: Sequence[InputItem],
        ancestors: Sequence[str],
        publish: Publish | None = None,
    ) -> None:
        """Nothing is stored before `keep`.

        Args:
            store: Store of the response.
            response_id: Id of the response.
            tenant_id: Tenant that owns it.
            items: Input items of this turn.
            ancestors: Ids of the continued responses, oldest first.
            publish: Adds the turn to a conversation, and returns whether that was possible.
        """
        self._store, self._publish = store, publish
        self._turn = wire.StoredResponse(
            id=response_id,
            tenant_id=tenant_id,
            created_at_unix_ms=created_unix_ms(response_id),
            ancestors=ancestors,
            input_items=orjson.dumps(stored_items(items, item_stem(response_id))),
        )
        self._is_marked = self.is_kept = False
        self.detach: Detach | None = None

    @property
    def tenant_id(self) -> str:
        """Id of the response's tenant."""
        return self._turn.tenant_id

    def handed_over(self) -> tuple[ResponseStore, Publish | None, wire.StoredResponse]:
        """Return the parts of another record, and leave the mark in the store to that record."""
        self._is_marked = False
        return self._store, self._publish, self._turn

    def begin(self, events: ResponseEvents) -> None:
        """Mark the response in the store as under way. From now on the client has its id."""
        self._is_marked = True
        self._store.mark(self._turn.tenant_id, self._turn.id, events.under_way())

    def note_prompt(self, record: bytes) -> None:
        """Set the part of the stored prompt that this turn adds. A later call replaces the part."""
        self._turn.prompt = record

    def note_failure(self, response: bytes) -> None:
        """Accept the JSON of a failed response, which only subclasses store."""

    async def keep(self, response: bytes, deltas: bytes = b"") -> bool:
        """Store a complete response, and return whether it was stored.

        Args:
            response: The response as JSON, as the client reads it.
            deltas: Sizes of the deltas of its stream, empty without a stream.
        """
        self._turn.response, self._turn.deltas = response, deltas
        if self._turn.ByteSize() > _WITH_PROMPT_MAX:
            self._turn.prompt = b""  # a later turn can render the prompt anew
        publish, self._publish = self._publish, None  # a second call adds no second turn
        if publish is None or await publish(self._turn):
            self.is_kept = await self._store.keep(self._turn)
        return self.is_kept

    def end(self) -> None:
        """End the response under way, and remove its mark if it was not stored."""
        if self._is_marked and not self.is_kept:
            self._store.unmark(self._turn.id)


class ResponseEnd(LastingEnd):
    """Writes the end of a stream, after storing the response."""

    __slots__ = ("_events", "_keeping")

    def __init__(self, events: ResponseEvents, keeping: Keeping | None) -> None:
        """Nothing is stored if `keeping` is None."""
        self._events, self._keeping = events, keeping

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        """Store the response, and return the event that ends the stream."""
        events = self._events
        if self._keeping is not None:
            stored = events.response(usage, ended_unix_s, is_stored=True)
            if await self._keeping.keep(stored, events.deltas):
                return events.last(stored)
        return events.last(events.response(usage, ended_unix_s))

    def detach(self) -> asyncio.WriteTransport | None:
        """Return the transport for the rest of the stream, as `LastingEnd` describes."""
        keeping = self._keeping
        if keeping is None or keeping.detach is None:
            return None
        detached = keeping.detach(keeping, self._events)
        if detached is None:
            return None
        self._keeping = detached.keeping
        return detached.transport

    def failure(self, error: PlatformError) -> bytes:
        """Return the event that ends a failed stream, and pass the failed response to `keeping`."""
        events, keeping = self._events, self._keeping
        response = events.failed(error, is_stored=keeping is not None and keeping.keeps_failures)
        if keeping is not None:
            keeping.note_failure(response)
        return events.cut("failed", response)
