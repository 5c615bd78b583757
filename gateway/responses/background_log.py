"""Background responses in Valkey, with their events, their gateways and cancellations.

A gateway renews its claim on each response every second. A gateway that stays silent for much
longer counts as dead, and another gateway claims its responses one by one.
"""

import time
from typing import NamedTuple, cast

from gateway.responses.hot_store import UNDER_WAY_MS, HotStore, key_of
from gateway.responses.turn_seals import TurnSeals
from sluice.wire.state.v1 import state_pb2 as wire

_MAKING = b"sluice:responses:background"
_EVENTS, _TURN, _CANCEL, _READER = b":events", b":turn", b":cancel", b":reader"
_TURN_MS = 48 * 3_600_000
_CANCEL_MS = 600_000
_READER_MS = 2_000  # longer than the pause between two reads of one reader
_BLOCKS_AT_ONCE = 64

# A response that has ended meanwhile stays as it is.
_BEGIN = (
    b"local kind = redis.call('GETRANGE', KEYS[1], 0, 0)"
    b" if kind ~= '=' and kind ~= '-' then"
    b" redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end"
    b" redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])"
    b" redis.call('ZADD', KEYS[3], ARGV[5], ARGV[6]) return 1"
)
# A response that has ended or was deleted is not changed any more.
_PROGRESS = (
    b"if redis.call('GETRANGE', KEYS[1], 0, 0) == '+' then"
    b" redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end return 1"
)
_BEAT = (
    b"if ARGV[1] ~= '' then redis.call('RPUSH', KEYS[2], ARGV[1]) end"
    b" redis.call('PEXPIRE', KEYS[2], ARGV[2])"
    b" if redis.call('GETRANGE', KEYS[1], 0, 0) == '+' then"
    b" redis.call('PEXPIRE', KEYS[1], ARGV[3]) end"
    b" redis.call('ZADD', KEYS[4], 'XX', ARGV[4], ARGV[5])"
    b" return redis.call('EXISTS', KEYS[3]) + 2 * redis.call('EXISTS', KEYS[5])"
)
_END = (
    b"if ARGV[1] ~= '' then redis.call('RPUSH', KEYS[1], ARGV[1]) end"
    b" redis.call('PEXPIRE', KEYS[1], ARGV[2])"
    b" redis.call('DEL', KEYS[2], KEYS[3]) redis.call('ZREM', KEYS[4], ARGV[3]) return 1"
)
_TAKE_OVER = (
    b"local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1)"
    b" if not ids[1] then return false end"
    b" redis.call('ZADD', KEYS[1], ARGV[2], ids[1]) return ids[1]"
)
_TURN_OF = b"return {redis.call('GET', KEYS[1]), redis.call('LLEN', KEYS[2])}"
_READ = (
    b"if ARGV[3] ~= '0' then redis.call('SET', KEYS[2], '1', 'PX', ARGV[3]) end"
    b" return redis.call('LRANGE', KEYS[1], ARGV[1], ARGV[2])"
)
_SET = b"redis.call('SET', KEYS[1], '1', 'PX', ARGV[1]) return 1"


class Beat(NamedTuple):
    """The effects of other requests on a response under way.

    Attributes:
        is_cancelled: Whether a request has cancelled it.
        is_read: Whether a request follows its events.
    """

    is_cancelled: bool
    is_read: bool


class BackgroundLog:
    """Writes and reads the log of background responses, for one worker.

    Each method raises ValkeyDownError without Valkey. Methods that write raise RejectedError
    UNAVAILABLE if the tenant's encryption key cannot be opened.
    """

    def __init__(self, hot: HotStore, seals: TurnSeals, *, idle_s: float) -> None:
        """Events expire `idle_s` seconds after the last event."""
        self._hot, self._seals = hot, seals
        self._idle_ms = round(idle_s * 1000)

    async def begin(self, turn: wire.StoredResponse) -> None:
        """Write a queued response, whose JSON is `turn.response`."""
        keys = (key_of(turn.id), key_of(turn.id) + _TURN, _MAKING)
        under_way = self._seals.under_way(turn.tenant_id, turn.id, turn.response)
        sealed = self._seals.sealed(turn).SerializeToString()
        values = (b"+" + under_way, UNDER_WAY_MS, sealed, _TURN_MS)
        await self._hot.run(_BEGIN, keys, (*values, _now_ms(), turn.id.encode()))

    async def progress(self, tenant_id: str, response_id: str, under_way: bytes) -> None:
        """Replace the JSON of a response under way."""
        sealed = self._seals.under_way(tenant_id, response_id, under_way)
        await self._hot.run(_PROGRESS, (key_of(response_id),), (b"+" + sealed, UNDER_WAY_MS))

    async def beat(self, tenant_id: str, response_id: str, events: bytes) -> Beat:
        """Add complete events, renew the claim, and return the effects of other requests."""
        key = key_of(response_id)
        keys = (key, key + _EVENTS, key + _CANCEL, _MAKING, key + _READER)
        sealed = self._seals.events(tenant_id, response_id, events)
        values = (sealed, self._idle_ms, UNDER_WAY_MS, _now_ms(), response_id.encode())
        told = cast("int", await self._hot.run(_BEAT, keys, values))
        return Beat(bool(told & 1), bool(told & 2))

    async def end(self, tenant_id: str, response_id: str, events: bytes) -> None:
        """Add the last events of a stored response.

        `tenant_id` may be empty if there are no last events.
        """
        key = key_of(response_id)
        keys = (key + _EVENTS, key + _TURN, key + _CANCEL, _MAKING)
        sealed = self._seals.events(tenant_id, response_id, events)
        await self._hot.run(_END, keys, (sealed, self._idle_ms, response_id.encode()))

    async def cancel(self, response_id: str) -> None:
        """Request that the gateway of the response cancels it."""
        await self._hot.run(_SET, (key_of(response_id) + _CANCEL,), (_CANCEL_MS,))

    async def events(
        self, tenant_id: str, response_id: str, position: int, *, is_following: bool = False
    ) -> list[bytes]:
        """Return at most `_BLOCKS_AT_ONCE` blocks of complete events, from a position on.

        A reader that follows a response under way is reported by `beat`.
        """
        key, last = key_of(response_id), position + _BLOCKS_AT_ONCE - 1
        values = (position, last, _READER_MS if is_following else 0)
        reply = await self._hot.run(_READ, (key + _EVENTS, key + _READER), values)
        blocks = cast("list[bytes]", reply)
        return self._seals.events_opened(tenant_id, response_id, blocks)

    async def take_over(self, silent_ms: int) -> tuple[str, wire.StoredResponse | None, int] | None:
        """Claim one response of a dead gateway.

        Returns:
            Id, stored turn, and number of blocks of events, or None if no gateway is dead. The
            turn is None if the response has ended.
        """
        now_ms = _now_ms()
        found = await self._hot.run(_TAKE_OVER, (_MAKING,), (now_ms - silent_ms, now_ms))
        if found is None:
            return None
        response_id = cast("bytes", found).decode()
        key = key_of(response_id)
        reply = await self._hot.run(_TURN_OF, (key + _TURN, key + _EVENTS), ())
        turn, blocks = cast("tuple[bytes | None, int]", reply)
        kept = None if turn is None else self._seals.opened(wire.StoredResponse.FromString(turn))
        return response_id, kept, blocks


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
