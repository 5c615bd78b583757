"""Recent responses in Valkey, where every gateway can read them at once.

A value is a response, a mark that a response is under way, or a mark that a response was deleted. A
list names the responses that PostgreSQL lacks, each with the time at which a gateway last said that
it holds the response. If their gateway is killed, another gateway takes them over.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

from gateway.limits.valkey import Word
from gateway.limits.valkey_commands import ValkeyCommands
from sluice.wire.state.v1 import state_pb2 as wire

# Maximum number of commands that wait for a reply. Further commands are not sent.
COMMANDS_MAX = 256
_KEY, _WAITING = b"sluice:response:", b"sluice:responses:waiting"
_STORED, _UNDER_WAY, _DELETED = b"=", b"+", b"-"
_DELETED_MS = 3_600_000
# Milliseconds without renewal after which a dead gateway's mark of a response expires.
UNDER_WAY_MS = 60_000
_AT_ONCE = 512  # ids in one command
# Milliseconds that a response waits in Valkey while PostgreSQL lacks it.
_WAITING_MS = 48 * 3_600_000

# Times are read from Valkey's clock, because the clocks of gateways differ.
_NOW = b"local time = redis.call('TIME') local now = time[1] * 1000 + math.floor(time[2] / 1000) "
# A deletion is final. A later write of the same response, by any gateway, has no effect.
_KEEP = _NOW + (
    b"if redis.call('GETRANGE', KEYS[1], 0, 0) == '-' then return 0 end"
    b" redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"
    b" redis.call('ZADD', KEYS[2], now, ARGV[3]) return 1"
)
# Returns the ids that the list lacks.
_HOLD = _NOW + (
    b"local lacking = {} for _, id in ipairs(ARGV) do"
    b" if redis.call('ZSCORE', KEYS[1], id) then redis.call('ZADD', KEYS[1], now, id)"
    b" else lacking[#lacking + 1] = id end end return lacking"
)
_TAKE_OVER = _NOW + (
    b"local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1], 'LIMIT', 0, ARGV[2])"
    b" for _, id in ipairs(ids) do redis.call('ZADD', KEYS[1], now, id) end return ids"
)
_EXTEND = b"for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[1]) end"
_LOAD = (
    b"local function renew(key, kind)"
    b" if kind == '=' and redis.call('PTTL', key) < tonumber(ARGV[1])"
    b" then redis.call('PEXPIRE', key, ARGV[1]) end end"
    b" local kinds = {} for key in string.gmatch(ARGV[2], '%S+') do"
    b" local kind = redis.call('GETRANGE', key, 0, 0) if kind == '' then kind = ' ' end"
    b" renew(key, kind) kinds[#kinds + 1] = kind end"
    b" local found = {table.concat(kinds)} for i, key in ipairs(KEYS) do"
    b" local value = redis.call('GET', key)"
    b" if value then renew(key, string.sub(value, 1, 1)) end"
    b" found[i + 1] = value end return found"
)
# The first key is the list of waiting responses. One script for many costs less than two commands
# for each.
_SETTLE = (
    b"redis.call('ZREM', KEYS[1], unpack(ARGV, 2))"
    b" for i = 2, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end"
)
_UNMARK = b"if redis.call('GETRANGE', KEYS[1], 0, 0) == '+' then redis.call('DEL', KEYS[1]) end"
_WARM = (
    b"if redis.call('EXISTS', KEYS[1]) == 0 then"
    b" redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end"
)


class Found(NamedTuple):
    """The state of a response in Valkey. All fields are empty if Valkey lacks the response.

    Attributes:
        stored: The response, if its content was requested.
        under_way: JSON of a response under way.
        is_deleted: Whether the response was deleted.
        is_there: Whether the response exists, if only its existence was requested.
    """

    stored: wire.StoredResponse | None = None
    under_way: bytes = b""
    is_deleted: bool = False
    is_there: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether the response exists, with or without its content in `stored`."""
        return self.is_there or self.stored is not None


NOTHING, _THERE = Found(), Found(is_there=True)


class HotStore:
    """Writes responses to Valkey and reads them back, for one worker."""

    def __init__(self, commands: ValkeyCommands, *, idle_s: float) -> None:
        """A response expires `idle_s` seconds after its last read."""
        self._commands = commands
        self._idle_ms = round(idle_s * 1000)

    async def keep(self, stored: wire.StoredResponse) -> None:
        """Write a response and list it as missing in PostgreSQL.

        Raises ValkeyDownError without Valkey.
        """
        value = _STORED + stored.SerializeToString()
        keys = (key_of(stored.id), _WAITING)
        await self.run(_KEEP, keys, (value, _WAITING_MS, stored.id.encode()))

    async def hold(self, ids: Sequence[str]) -> list[str]:
        """Renew this worker's claims on responses that PostgreSQL lacks.

        Returns:
            The ids that Valkey does not list.

        Raises:
            ValkeyDownError: Valkey cannot be reached.
        """
        lacking = list[str]()
        for start in range(0, len(ids), _AT_ONCE):
            some = [it.encode() for it in ids[start : start + _AT_ONCE]]
            reply = cast("list[bytes]", await self.run(_HOLD, (_WAITING,), some))
            lacking += [it.decode() for it in reply]
        return lacking

    async def settle(self, ids: Sequence[str]) -> None:
        """Record that PostgreSQL has these responses, so that Valkey may drop them.

        Raises ValkeyDownError without Valkey.
        """
        keys = (_WAITING, *map(key_of, ids))
        await self.run(_SETTLE, keys, (self._idle_ms, *(it.encode() for it in ids)))

    async def warm(self, stored: wire.StoredResponse) -> None:
        """Copy a response from PostgreSQL unless Valkey has an entry for it.

        Raises ValkeyDownError without Valkey.
        """
        value = _STORED + stored.SerializeToString()
        await self.run(_WARM, (key_of(stored.id),), (value, self._idle_ms))

    async def find(self, ids: Sequence[str], known: int = 0) -> list[Found]:
        """Return the states of responses, and renew their expiry.

        For the first `known` ids the states only report whether the responses exist, without text.
        Raises ValkeyDownError without Valkey.
        """
        # The keys of the first `known` ids are sent as one word, because each word of a command
        # costs as much as its text.
        told = _KEY + (b" " + _KEY).join([it.encode() for it in ids[:known]]) if known else b""
        keys = [key_of(it) for it in ids[known:]]
        reply = await self.run(_LOAD, keys, (self._idle_ms, told))
        kinds, *values = cast("list[bytes | None]", reply)
        assert kinds is not None, "it is a text"
        return [*_parse_known(kinds, known), *map(_parse_state, values)]

    async def delete(self, response_id: str) -> None:
        """Mark a response as deleted, or raise ValkeyDownError without Valkey."""
        await self._commands.call((b"SET", key_of(response_id), _DELETED, b"PX", _DELETED_MS))
        await self._commands.call((b"ZREM", _WAITING, response_id.encode()))

    def mark(self, response_id: str, under_way: bytes) -> None:
        """Mark a response as under way, without waiting for Valkey."""
        value = _UNDER_WAY + under_way
        self._commands.send_only((b"SET", key_of(response_id), value, b"PX", UNDER_WAY_MS, b"NX"))

    def unmark(self, response_id: str) -> None:
        """Remove the mark of a response that was not stored, without waiting for Valkey."""
        self._commands.send_only((b"EVAL", _UNMARK, 1, key_of(response_id)))

    def extend(self, ids: Sequence[str]) -> None:
        """Renew the marks of responses under way, without waiting for Valkey."""
        for start in range(0, len(ids), _AT_ONCE):
            keys = [key_of(it) for it in ids[start : start + _AT_ONCE]]
            self._commands.send_only((b"EVAL", _EXTEND, len(keys), *keys, UNDER_WAY_MS))

    async def take_over(self, silent_ms: int, most: int) -> list[str]:
        """Claim responses that PostgreSQL lacks and no gateway has claimed for `silent_ms`.

        Returns the ids of at most `most` responses. The oldest claim is the first. Raises
        ValkeyDownError without Valkey.
        """
        reply = await self.run(_TAKE_OVER, (_WAITING,), (silent_ms, most))
        return [it.decode() for it in cast("list[bytes]", reply)]

    async def waiting(self, ids: Sequence[str]) -> list[wire.StoredResponse]:
        """Return listed responses, and remove those from the list that are deleted or expired.

        Raises ValkeyDownError without Valkey.
        """
        found = await self.find(ids)
        gone = [it.encode() for it, state in zip(ids, found, strict=True) if state.stored is None]
        if gone:
            await self._commands.call((b"ZREM", _WAITING, *gone))
        return [it.stored for it in found if it.stored is not None]

    async def run(self, script: bytes, keys: Sequence[bytes], values: Sequence[Word]) -> object:
        """Return the result of a Lua script, or raise ValkeyDownError without Valkey."""
        return await self._commands.call((b"EVAL", script, len(keys), *keys, *values))


def key_of(response_id: str) -> bytes:
    """Return the Valkey key of a response."""
    return _KEY + response_id.encode()


def _parse_known(kinds: bytes, known: int) -> list[Found]:
    """Return states by the first byte of each value, which is a space if there is no value."""
    if kinds == _STORED * known:
        return [_THERE] * known
    states = {_STORED: _THERE, b" ": NOTHING}
    return [states.get(kinds[at : at + 1], Found(is_deleted=True)) for at in range(known)]


def _parse_state(value: bytes | None) -> Found:
    if value is None:
        return NOTHING
    kind, rest = value[:1], value[1:]
    if kind == _STORED:
        return Found(stored=wire.StoredResponse.FromString(rest))
    return Found(under_way=rest) if kind == _UNDER_WAY else Found(is_deleted=True)
