"""The script that updates the shared levels in Valkey, and its input batches as bytes. Pure.

One run of the script processes a batch in two parts. The first part applies the changes of the
scopes (settlements, numbers of open requests). The second part processes the reservations in order,
each in all of its scopes or in none. Valkey runs the script atomically. Numbers are sent packed,
because formatting and parsing each number as text would cost more than the decision.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from gateway.limits.buckets import (
    HEAD_FORMAT,
    LIMIT_BYTES,
    LIMIT_FORMAT,
    NEWS_FORMAT,
    BucketScope,
    News,
)
from gateway.limits.verdict import FORMAT, SHOWN, UNLIMITED, VERDICT, WAIT_MAX_MS, Verdict
from sluice.limits import SLOT_WAIT_MS, Counted

LEASE_MS = 10_000  # Milliseconds after which a silent process's open requests no longer count.
TAG_BYTES = 8
_STORED_BYTES = LIMIT_BYTES + 8  # Stored bytes per limit, for its fields and its remaining amount.
_LEAST = ", ".join(f"least[{kind.number}]" for kind in SHOWN)
_PLACES = ", ".join(f"at[{kind.number}]" for kind in SHOWN)

# The stored value of a scope has three parts.
# - The time in ms and the number of limits.
# - The limits in the format of a row, each with its remaining amount.
# - For each process with open requests, the process's tag, its number of open requests, and the
#   time at which that number expires.
#
# Rules of the script:
# - All times come from Valkey's clock, so that gateways' clocks do not matter. A stored time in the
#   future (the clock was set back) is replaced by the present time.
# - A value in any other format counts as absent.
# - The stored limits are the limits of the last reservation, granted or refused. A process that
#   only reports open requests may not have received a change of the limits yet.
# - Most scopes of a batch share a few lists of limits. Each list is parsed once, as a shape.
# - The limit of concurrent requests has no bucket. The open requests are summed at each run.
_TEXT = f"""
local me, leases, rows, calls = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local asked = tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local count, FULL, OPEN = #KEYS, {UNLIMITED:.0f}, {Counted.OPEN:d}
local min, max, sub, pack, unpack_ = math.min, math.max, string.sub, struct.pack, struct.unpack
local stored = count > 0 and redis.call('MGET', unpack(KEYS)) or {{}}
local shapes, levels, held, others, changed = {{}}, {{}}, {{}}, {{}}, {{}}
local known = {{}}
local function shape_of(list)
  if known[list] ~= nil then return known[list] end
  local n = #list / {LIMIT_BYTES}
  local shape = {{list = list, n = n, levels = '<' .. string.rep('d', n), keep = 120000,
    kind = {{}}, counted = {{}}, value = {{}}, each = {{}}, cap = FULL, open = false}}
  known[list] = shape
  for p = 1, n do
    local first = (p - 1) * {LIMIT_BYTES} + 1
    local kind, counted, window, value = unpack_('{LIMIT_FORMAT}', list, first)
    local is_open = counted == OPEN
    if not (value > 0 and value < FULL and counted >= 1 and counted <= OPEN)
      or (window == 0) ~= is_open then
      known[list] = false
      return false
    end
    shape.kind[p], shape.counted[p], shape.value[p] = kind, counted, value
    shape.each[p] = is_open and {SLOT_WAIT_MS} or window / value
    shape.open = shape.open or is_open
    shape.keep = max(shape.keep, 2 * window)
    if counted == {Counted.TOKENS:d} then shape.cap = min(shape.cap, value) end
  end
  return shape
end
local pos = 1
for i = 1, count do
  local n, has_news, back, owed
  n, has_news, held[i], pos = unpack_('{HEAD_FORMAT}', rows, pos)
  local shape = shape_of(sub(rows, pos, pos + n * {LIMIT_BYTES} - 1))
  pos = pos + n * {LIMIT_BYTES}
  if has_news > 0 then
    back, owed = {{}}, {{}}
    back[1], owed[1], owed[2], back[2], pos = unpack_('{NEWS_FORMAT}', rows, pos)
  end
  local at, level, sum, kept, is_new = now, nil, 0, '', i <= asked
  local value, from = stored[i], 13
  if value and #value > 12 then
    local time, m = unpack_('<dI4', value)
    from = 13 + m * {_STORED_BYTES}
    local was = time >= 0 and from <= #value + 1 and (#value + 1 - from) % 24 == 0
      and shape_of(sub(value, 13, 12 + m * {LIMIT_BYTES}))
    if was then
      at = time
      level = {{unpack_(was.levels, value, 13 + m * {LIMIT_BYTES})}}
      if i > asked then shape = was end
      is_new = at > now or was ~= shape
      if was ~= shape then
        local before = {{}}
        for p = 1, was.n do before[was.kind[p]] = level[p] end
        level = {{}}
        for p = 1, shape.n do level[p] = before[shape.kind[p]] or FULL end
      end
      for holder = from, shape.open and #value or 0, 24 do
        local tag, n, ends = unpack_('<c{TAG_BYTES}dd', value, holder)
        if tag ~= me and n > 0 and n < FULL and ends > now and ends <= now + leases then
          sum = sum + n
          kept = kept .. sub(value, holder, holder + 23)
        end
      end
    end
  end
  level = level or {{}}
  local elapsed, counted, most, each = max(0, now - at), shape.counted, shape.value, shape.each
  for p = 1, shape.n do
    local c, v, left = counted[p], most[p], level[p]
    if c == OPEN then
      left = max(0, v - sum - held[i])
    else
      if not left or not (left >= -FULL and left <= FULL) then left = FULL end
      left = min(v, left + elapsed / each[p])
      if back then
        left = min(v, left + back[c])
        left = left - min(owed[c], max(0, left))
      end
    end
    level[p] = left
  end
  shapes[i], levels[i], others[i] = shape, level, kept
  changed[i] = is_new or shape.open or has_news > 0
end
local reply, of, at, least, amount = {{}}, {{}}, {{}}, {{}}, {{1, 0, 1}}
pos = 1
while pos <= #calls do
  local need
  need, of[1], of[2], of[3], pos = unpack_('<I4I4I4I4', calls, pos)
  local limit, where, wait = 0, 0, 0
  for j = 1, 3 do
    local i = of[j]
    if i > 0 then
      local shape, level = shapes[i], levels[i]
      local counted, each = shape.counted, shape.each
      amount[2] = min(need, shape.cap)
      for p = 1, shape.n do
        local short = (amount[counted[p]] - level[p]) * each[p]
        if short > wait then limit, where, wait = shape.kind[p], j - 1, short end
      end
    end
  end
  {_LEAST} = {", ".join("FULL" for _ in SHOWN)}
  {_PLACES} = {", ".join("0" for _ in SHOWN)}
  for j = 1, 3 do
    local i = of[j]
    if i > 0 then
      local shape, level = shapes[i], levels[i]
      local counted, kind = shape.counted, shape.kind
      if limit == 0 then
        amount[2] = min(need, shape.cap)
        held[i], changed[i] = held[i] + 1, true
        for p = 1, shape.n do level[p] = level[p] - amount[counted[p]] end
      end
      for p = 1, shape.n do
        local k, left = kind[p], level[p]
        if least[k] and left < least[k] then least[k], at[k] = left, j - 1 end
      end
    end
  end
  wait = min(math.ceil(wait), {WAIT_MAX_MS})
  reply[#reply + 1] = pack('{FORMAT}', limit, where, wait, {_PLACES}, {_LEAST})
end
for i = 1, count do
  if changed[i] then
    local shape, level, debt = shapes[i], levels[i], 0
    for p = 1, shape.n do debt = max(debt, -level[p] * shape.each[p]) end
    local left = pack(shape.levels, unpack(level, 1, shape.n))
    local value = pack('<dI4', now, shape.n) .. shape.list .. left
    if shape.open then
      value = value .. others[i]
      if held[i] > 0 then value = value .. pack('<c{TAG_BYTES}dd', me, held[i], now + leases) end
    end
    redis.call('SET', KEYS[i], value, 'PX', shape.keep + math.ceil(min(debt, {WAIT_MAX_MS})))
  end
end
return table.concat(reply)
""".strip()

SCRIPT = _TEXT.encode()
_SHA = hashlib.sha1(SCRIPT).hexdigest().encode()  # noqa: S324 - Valkey names scripts by SHA-1

# Zeros that extend a call's row numbers to three, by the count of its rows. A zero means no row.
_PADDING = ((0, 0, 0), (0, 0), (0,), ())


class Waiter(Protocol):
    """A future that waits for a verdict."""

    def done(self) -> bool:
        """Return whether the wait is over."""
        ...

    def set_result(self, result: Verdict | None, /) -> None:
        """Deliver the verdict, or None without a verdict of Valkey."""
        ...


# A reservation with its waiter, up to three scopes, the maximum of tokens that each scope grants,
# and the requested tokens.
Call = tuple[Waiter, Sequence[BucketScope], Sequence[int], int]


class LimitBatch:
    """The input of one run of the script.

    Attributes:
        calls: Reservations, in order.
        rows: Every scope once, the scopes of the calls first.
    """

    def __init__(self, tag: bytes, calls: Sequence[Call], others: Sequence[BucketScope]) -> None:
        """Move the scopes' waiting changes into the batch. `restore` moves them back.

        Args:
            tag: Tag of this process, `TAG_BYTES` bytes.
            calls: Reservations, in the form of the attribute.
            others: Further scopes with changes, which may be among the scopes of the calls.
        """
        self.calls = calls
        self.rows: list[BucketScope] = []
        self._taken: list[tuple[BucketScope, News]] = []
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
        # packed in native byte order, which is little-endian on all supported machines
        packed_calls = array("I", numbers).tobytes()
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
        """Return the command to send.

        With `in_full` it includes the script, for a server without it.
        """
        return (b"EVAL", SCRIPT, *self._words) if in_full else (b"EVALSHA", _SHA, *self._words)

    def verdicts(self, reply: object) -> Iterator[Verdict] | None:
        """Return the verdicts on the calls, or None if the reply lacks the script's format."""
        if not isinstance(reply, bytes) or len(reply) != VERDICT.size * len(self.calls):
            return None
        return VERDICT.iter_unpack(reply)

    def restore(self) -> None:
        """Move the changes back to their scopes for a later batch, if the script did not run."""
        for scope, news in self._taken:
            scope.restore_changes(news)
        self._taken.clear()

    @property
    def settlements(self) -> int:
        """Number of scopes with settlements."""
        return len(self._taken)

    def _pack_row(self, scope: BucketScope) -> bytes:
        row, news = scope.take_row()
        if news is not None:
            self._taken.append((scope, news))
        return row
