"""The stream of a stored response, from the reader's position to the end."""

import asyncio
from collections.abc import AsyncIterator

import orjson
from aiohttp import web

from gateway.bodies.mistakes import bad_value
from gateway.limits.valkey_commands import ValkeyDownError
from gateway.responses.events import EVENT_NUMBER, cut_at, written_event
from gateway.responses.retold import retold
from gateway.responses.store import ResponseStore, cannot_store
from gateway.server.identity import identity_of
from gateway.text.sse import DONE, KEEP_ALIVE
from sluice.errors import PlatformError
from sluice.wire.state.v1 import state_pb2 as wire

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_POLL_S, _POLL_MAX_S = 0.05, 0.4
_SILENCE_S = 5.0  # longest silence of a stream
# Seconds without events after which the stored response is checked. The events of a response that
# runs for another client are not in Valkey, so only the stored response shows its end.
_LOOK_S, _PLAIN_LOOK_S = 5.0, 0.5
_THREAD_BYTES = 64 << 10  # responses above this size are rebuilt in a thread
_WRITE_S = 30.0
_EVENT_END = b"\n\n"


class Following:
    """Streams the events of stored responses, for one worker."""

    def __init__(self, store: ResponseStore) -> None:
        """`store` has the responses and their events."""
        self._store = store

    async def answer(
        self, request: web.Request, tenant_id: str, response_id: str, behind: int | None
    ) -> web.StreamResponse:
        """Stream the events of a response that have sequence numbers above `behind`.

        Raises:
            BadRequestError: The events of the response cannot be repeated with their numbers.
            PlatformError: NOT_FOUND for an unknown response.
            RejectedError: UNAVAILABLE if no store answers.
        """
        found = await self._store.find(tenant_id, response_id)
        try:
            blocks = await self._store.background.events(tenant_id, response_id, 0)
        except ValkeyDownError:
            blocks = []
            if found.stored is None:
                raise cannot_store() from None
        last = -1 if behind is None else behind
        if found.stored is not None and not blocks:
            if behind is not None and not found.stored.deltas:
                text = "the events of this response are not stored: leave it out, and get all again"
                raise bad_value("starting_after", text)
            return await _sent(request, _single(await _rest(found.stored, last)))
        is_background = found.stored is not None or orjson.loads(found.under_way)["background"]
        look_s = _LOOK_S if is_background else _PLAIN_LOOK_S
        return await _sent(request, self._events(tenant_id, response_id, last, look_s))

    async def _events(
        self, tenant_id: str, response_id: str, last: int, look_s: float
    ) -> AsyncIterator[bytes]:
        """Yield the events after number `last`, and a comment after each silence."""
        position, unseen_s, silent_s, pause_s = 0, 0.0, 0.0, _POLL_S
        log = self._store.background
        try:
            while True:
                blocks = await log.events(tenant_id, response_id, position, is_following=True)
                position += len(blocks)
                if events := b"".join([_behind(block, last) for block in blocks]):
                    last = max(last, *map(int, EVENT_NUMBER.findall(events)), -1)
                    yield events
                if blocks and blocks[-1].endswith(DONE):
                    return
                if blocks:
                    unseen_s, silent_s, pause_s = 0.0, 0.0, _POLL_S
                if unseen_s > look_s:
                    unseen_s = 0.0
                    found = await self._store.find(tenant_id, response_id)
                    if found.stored is not None:  # its last events are not in Valkey
                        yield await _rest(found.stored, last)
                        return
                if silent_s > _SILENCE_S:
                    silent_s = 0.0
                    yield KEEP_ALIVE
                await asyncio.sleep(pause_s)
                unseen_s, silent_s = unseen_s + pause_s, silent_s + pause_s
                pause_s = min(2 * pause_s, _POLL_MAX_S)
        except ValkeyDownError:
            yield _error(cannot_store())
        except PlatformError as error:
            yield _error(error)


async def _sent(request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers=_HEADERS | identity_of(request).headers)
    await response.prepare(request)
    async for some in events:
        async with asyncio.timeout(_WRITE_S):
            await response.write(some)
    await response.write_eof()
    return response


async def _single(events: bytes) -> AsyncIterator[bytes]:
    yield events


async def _rest(stored: wire.StoredResponse, last: int) -> bytes:
    """Return the events of an ended response after number `last`.

    If their numbers are unknown, only the final event is returned.
    """
    if last >= 0 and not stored.deltas:
        return cut_at(last + 1, orjson.loads(stored.response)["status"], stored.response)
    if len(stored.response) < _THREAD_BYTES:
        return _behind(retold(stored.response, stored.deltas), last)
    return _behind(await asyncio.to_thread(retold, stored.response, stored.deltas), last)


def _behind(events: bytes, number: int) -> bytes:
    """Return the complete events numbered above `number`, and all events without a number."""
    if number < 0:
        return events
    kept = list[bytes]()
    for event in events.split(_EVENT_END)[:-1]:
        found = EVENT_NUMBER.search(event)
        if found is None or int(found[1]) > number:
            kept.append(event + _EVENT_END)
    return b"".join(kept)


def _error(error: PlatformError) -> bytes:
    told = {"code": str(error.code), "message": error.message, "param": None}
    return written_event("error", 0, orjson.dumps(told)[1:-1]) + DONE
