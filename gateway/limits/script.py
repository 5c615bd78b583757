"""The script that is the shared truth, and its batches as bytes. Pure.

One run takes a batch: first what changed in the scopes (settlements, requests held), then the
reservations in their order, each from all of its scopes or from none. Valkey runs it atomically.
Numbers travel packed, because formatting and parsing them apart costs more than the decision.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Protocol, cast

from gateway.limits.buckets import (
    SLOT_WAIT_MS,
    UNLIMITED,
    UNSIGNED_MAX,
    WAIT_MAX_MS,
    News,
    Scope,
    pack_row,
)

LEASE_MS = 10_000  # a process that is silent for so long holds nothing any more
TAG_BYTES = 8

# Of a scope, stored: requests and tokens left, time in ms; its limits: both per minute, a zero, and
# at once; then for each process that holds open requests its tag, their number, and until when that
# counts. Time is the server's: the clocks of gateways do not matter; a time to come, from before it
# was set back, is replaced by now. A value that is none of this counts as absent; one of the last
# release has no limits. They are those of the last caller, also of a refused one: a process that
# only tells of open requests may not know of a change.
_TEXT = f"""
local me, leases, rows, calls = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local asked = tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local count, FULL = #KEYS, {UNLIMITED:.0f}
local stored = count > 0 and redis.call('MGET', unpack(KEYS)) or {{}}
local rpm, tpm, most, held, requests, tokens, open = {{}}, {{}}, {{}}, {{}}, {{}}, {{}}, {{}}
local others, changed = {{}}, {{}}
local min, max, pack, unpack_ = math.min, math.max, struct.pack, struct.unpack
local pos = 1
for i = 1, count do
  local back_r, owed_r, owed_k, back_k
  rpm[i], tpm[i], most[i], held[i], back_r, owed_r, owed_k, back_k, pos =
    unpack_('<I4I4I4I4I4I4I4d', rows, pos)
  local r, k, at, sum, kept = FULL, FULL, now, 0, ''
  local value, from, is_new = stored[i], 25, i <= asked
  if value and #value > 0 and #value % 24 == 0 then
    r, k, at = unpack_('<ddd', value)
    if not (r >= -FULL and r <= FULL and k >= -FULL and k <= FULL and at >= 0) then
      r, k, at = FULL, FULL, now
    else
      if #value > 24 then
        local r_limit, k_limit, zero, limit = unpack_('<I4I4dd', value, from)
        if zero == 0 and limit >= 0 and limit < FULL then
          from = from + 24
          if i > asked then rpm[i], tpm[i], most[i] = r_limit, k_limit, limit end
          is_new = at > now or r_limit ~= rpm[i] or k_limit ~= tpm[i] or limit ~= most[i]
        end
      end
      for holder = from, most[i] > 0 and #value or 0, 24 do
        local tag, n, ends = unpack_('<c{TAG_BYTES}dd', value, holder)
        if tag ~= me and n > 0 and n < FULL and ends > now and ends <= now + leases then
          sum = sum + n
          kept = kept .. string.sub(value, holder, holder + 23)
        end
      end
    end
  end
  local minutes = max(0, now - at) / 60000
  r = rpm[i] > 0 and min(rpm[i], r + minutes * rpm[i] + back_r) or FULL
  k = tpm[i] > 0 and min(tpm[i], min(tpm[i], k + minutes * tpm[i]) + back_k) or FULL
  requests[i] = r - min(owed_r, max(0, r))
  tokens[i] = k - min(owed_k, max(0, k))
  open[i], others[i] = sum + held[i], kept
  changed[i] = is_new or most[i] > 0 or back_r > 0 or owed_r > 0 or owed_k > 0 or back_k ~= 0
end
local reply, of = {{}}, {{}}
pos = 1
while pos <= #calls do
  local need
  need, of[1], of[2], of[3], pos = unpack_('<I4I4I4I4', calls, pos)
  local limit, where, wait = 0, 0, 0
  for j = 1, 3 do
    local i = of[j]
    if i > 0 then
      if rpm[i] > 0 then
        local short = (1 - requests[i]) * 60000 / rpm[i]
        if short > wait then limit, where, wait = 1, j - 1, short end
      end
      if tpm[i] > 0 then
        local short = (min(need, tpm[i]) - tokens[i]) * 60000 / tpm[i]
        if short > wait then limit, where, wait = 2, j - 1, short end
      end
      if most[i] > 0 and open[i] >= most[i] and wait < {SLOT_WAIT_MS} then
        limit, where, wait = 3, j - 1, {SLOT_WAIT_MS}
      end
    end
  end
  local least_r, r_at, least_k, k_at = FULL, 0, FULL, 0
  for j = 1, 3 do
    local i = of[j]
    if i > 0 then
      if limit == 0 then
        if rpm[i] > 0 then requests[i] = requests[i] - 1 end
        if tpm[i] > 0 then tokens[i] = tokens[i] - min(need, tpm[i]) end
        open[i], held[i], changed[i] = open[i] + 1, held[i] + 1, true
      end
      if requests[i] < least_r then least_r, r_at = requests[i], j - 1 end
      if tokens[i] < least_k then least_k, k_at = tokens[i], j - 1 end
    end
  end
  wait = min(math.ceil(wait), {WAIT_MAX_MS})
  reply[#reply + 1] = pack('<BBBBI4dd', limit, where, r_at, k_at, wait, least_r, least_k)
end
for i = 1, count do
  if changed[i] then
    local limits = pack('<I4I4dd', rpm[i], tpm[i], 0, most[i])
    local value, debt = pack('<ddd', requests[i], tokens[i], now) .. limits, 0
    if tpm[i] > 0 and tokens[i] < 0 then debt = -tokens[i] * 60000 / tpm[i] end
    if most[i] > 0 then
      value = value .. others[i]
      if held[i] > 0 then value = value .. pack('<c{TAG_BYTES}dd', me, held[i], now + leases) end
    end
    redis.call('SET', KEYS[i], value, 'PX', 120000 + math.ceil(min(debt, {WAIT_MAX_MS})))
  end
end
return table.concat(reply)
""".strip()

SCRIPT = _TEXT.encode()
_SHA = hashlib.sha1(SCRIPT).hexdigest().encode()  # noqa: S324 - Valkey's name for it

# After the rows of a call, by their number: a row of 0 is none.
_PADDING = ((0, 0, 0), (0, 0), (0,), ())
_VERDICT = Struct("<4BI2d")

RawVerdict = tuple[int, int, int, int, int, float, float]  # see `Verdict`


class Waiter(Protocol):
    """Who waits for a verdict: a future."""

    def done(self) -> bool:
        """Return whether it waits no more."""
        ...

    def set_result(self, result: RawVerdict | None, /) -> None:
        """Tell it the verdict; None: there is none."""
        ...


# At most 3 scopes; of each what it gives at most, its tokens per minute; tokens.
Call = tuple[Waiter, Sequence[Scope], Sequence[int], int]


class Batch:
    """What one run of the script takes.

    Attributes:
        calls: The reservations, in their order.
        rows: Every scope once, those of the calls first.
    """

    def __init__(self, tag: bytes, calls: Sequence[Call], others: Sequence[Scope]) -> None:
        """Collect, and take what waited in the scopes; `restore` puts it back.

        Args:
            tag: Of this process, `TAG_BYTES` bytes.
            calls: See `calls`.
            others: Scopes that have something to tell; they may be among those of the calls.
        """
        self.calls = calls
        self.rows: list[Scope] = []
        self._taken: list[tuple[Scope, News]] = []
        rows, numbers = self.rows, list[int]()
        for _, scopes, _, tokens in calls:
            numbers.append(tokens)
            for scope in scopes:
                row = scope.row
                if not row:
                    rows.append(scope)
                    row = scope.row = len(rows)
                numbers.append(row)
            numbers += _PADDING[len(scopes)]
        asked = len(rows)
        for scope in others:
            if not scope.row:
                rows.append(scope)
                scope.row = len(rows)
        packed_calls = array("I", numbers).tobytes()  # little-endian, as all machines we run on
        packed_rows = b"".join([scope.rest or self._pack_row(scope) for scope in rows])
        for scope in rows:
            scope.row = 0
        self._words = (
            len(rows),
            *[scope.key for scope in rows],
            tag,
            LEASE_MS,
            packed_rows,
            packed_calls,
            asked,
        )

    def command(self, *, in_full: bool = False) -> tuple[bytes | int, ...]:
        """Return what to send; `in_full` with the script, for a server that does not know it."""
        return (b"EVAL", SCRIPT, *self._words) if in_full else (b"EVALSHA", _SHA, *self._words)

    def verdicts(self, reply: object) -> Iterator[RawVerdict] | None:
        """Return the answers to the calls; None when this is no reply of the script."""
        if not isinstance(reply, bytes) or len(reply) != _VERDICT.size * len(self.calls):
            return None
        return cast("Iterator[RawVerdict]", _VERDICT.iter_unpack(reply))

    def restore(self) -> None:
        """Let what was taken wait again: the script did not run."""
        for scope, news in self._taken:
            scope.restore_news(news)
        self._taken.clear()

    @property
    def settlements(self) -> int:
        """How many scopes had something to settle."""
        return len(self._taken)

    def _pack_row(self, scope: Scope) -> bytes:
        scope.is_waiting = False
        rpm, tpm, most, held = scope.rpm, scope.tpm, scope.requests_max, scope.held
        news = scope.take_news()
        back_requests, back_tokens, untold_requests, untold_tokens = news
        if untold_requests or untold_tokens:
            self._taken.append((scope, news))
            return pack_row(
                rpm,
                tpm,
                most,
                held,
                back_requests + max(0, -untold_requests),
                min(UNSIGNED_MAX, max(0, untold_requests)),
                min(UNSIGNED_MAX, max(0, untold_tokens)),
                back_tokens + max(0, -untold_tokens),
            )
        if back_requests or back_tokens:
            self._taken.append((scope, news))
        return pack_row(rpm, tpm, most, held, back_requests, 0, 0, back_tokens)
