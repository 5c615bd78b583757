"""Token buckets for requests and tokens per minute: the arithmetic, and the same for Valkey.

Pure. A bucket holds what one minute grants and refills steadily. A reservation takes one request
and an estimate of tokens; the settlement puts back what was not used, or takes what was used
beyond, even below zero: the debt is paid by waiting. A need larger than a bucket takes a full one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Scope:
    """Something that is limited: a tenant, or a key.

    Attributes:
        name: Unique; also the name in Valkey.
        rpm: Requests per minute; 0 is no limit.
        tpm: Tokens per minute; 0 is no limit.
    """

    name: str
    rpm: int
    tpm: int


@dataclass(frozen=True, slots=True)
class Level:
    """What is left in a scope's two buckets at a time; tokens may be negative."""

    requests: float
    tokens: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a reservation.

    Attributes:
        is_granted: Whether all scopes had room; if not, nothing was taken.
        is_request_limit: When refused: whether requests, not tokens, make the caller wait longest.
        wait_s: When refused: after this time the same reservation has room, if nobody else comes.
        left: Requests and tokens left, by scope in the order asked; meaningless without a limit.
    """

    is_granted: bool
    is_request_limit: bool
    wait_s: float
    left: Sequence[tuple[float, float]]


def level_now(scope: Scope, level: Level | None, now_s: float) -> Level:
    """Return the level after refilling; a scope never seen before is full."""
    if level is None:
        return Level(scope.rpm, scope.tpm, now_s)
    minutes = max(0.0, now_s - level.at_s) / MINUTE_S
    return Level(
        min(scope.rpm, level.requests + minutes * scope.rpm),
        min(scope.tpm, level.tokens + minutes * scope.tpm),
        now_s,
    )


def waits_s(scope: Scope, level: Level, need_tokens: int) -> tuple[float, float]:
    """Return how long requests and tokens must refill; zeros when there is room."""
    need = min(need_tokens, scope.tpm)
    requests = (1 - level.requests) * MINUTE_S / scope.rpm if scope.rpm else 0.0
    tokens = (need - level.tokens) * MINUTE_S / scope.tpm if scope.tpm else 0.0
    return max(0.0, requests), max(0.0, tokens)


class LocalBuckets:
    """Buckets of this process alone, for the time that Valkey does not answer."""

    def __init__(self, *, share: float, scopes_max: int = 100_000) -> None:
        """Prepare.

        Args:
            share: Of each limit, what this process may grant by itself: 1 / gateways is exact.
            scopes_max: Above it the scopes used longest ago are forgotten.
        """
        self._share = share
        self._scopes_max = scopes_max
        self._levels: dict[str, Level] = {}

    def reserve(self, scopes: Sequence[Scope], need_tokens: int, now_s: float) -> Verdict:
        """Take one request and `need_tokens` from all scopes, or nothing."""
        shared = [self._shared(scope) for scope in scopes]
        levels = [level_now(scope, self._levels.get(scope.name), now_s) for scope in shared]
        pairs = [
            waits_s(scope, level, need_tokens) for scope, level in zip(shared, levels, strict=True)
        ]
        requests_s = max((pair[0] for pair in pairs), default=0.0)
        tokens_s = max((pair[1] for pair in pairs), default=0.0)
        wait_s = max(requests_s, tokens_s)
        if wait_s == 0.0:
            levels = [
                replace(
                    level,
                    requests=level.requests - 1,
                    tokens=level.tokens - min(need_tokens, scope.tpm),
                )
                for scope, level in zip(shared, levels, strict=True)
            ]
            for scope, level in zip(shared, levels, strict=True):
                self._keep(scope.name, level)
        left = [(level.requests, level.tokens) for level in levels]
        return Verdict(wait_s == 0.0, requests_s >= tokens_s, wait_s, left)

    def settle(
        self, scopes: Sequence[Scope], reserved: int, used: int, requests: int, now_s: float
    ) -> None:
        """Correct a granted reservation: `used` tokens instead, and `requests` given back."""
        for scope in map(self._shared, scopes):
            level = level_now(scope, self._levels.get(scope.name), now_s)
            tokens = level.tokens + min(reserved, scope.tpm) - used
            self._keep(
                scope.name,
                Level(
                    min(scope.rpm, level.requests + requests), min(scope.tpm, tokens), level.at_s
                ),
            )

    def _shared(self, scope: Scope) -> Scope:
        return Scope(scope.name, _part(scope.rpm, self._share), _part(scope.tpm, self._share))

    def _keep(self, name: str, level: Level) -> None:
        self._levels.pop(name, None)  # the order of insertion is the order of use
        self._levels[name] = level
        if len(self._levels) > self._scopes_max:
            del self._levels[next(iter(self._levels))]

    @property
    def levels(self) -> Mapping[str, Level]:
        """The scopes that are known, used last comes last."""
        return self._levels


def _part(limit: int, share: float) -> int:
    """Return the share of a limit; at least 1, because 0 would be no limit at all."""
    return max(1, int(limit * share)) if limit else 0


# Both scripts: KEYS are the scopes; ARGV holds a head, then rpm and tpm of each scope. Time is the
# server's, so that the clocks of gateways do not matter. Levels are fields r, k and t (ms).
_LEVELS = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function level(key, rpm, tpm)
  local v = redis.call('HMGET', key, 'r', 'k', 't')
  local minutes = math.max(0, now - (tonumber(v[3]) or now)) / 60000
  return math.min(rpm, (tonumber(v[1]) or rpm) + minutes * rpm),
         math.min(tpm, (tonumber(v[2]) or tpm) + minutes * tpm)
end
local function keep(key, r, k, tpm)
  redis.call('HSET', key, 'r', string.format('%.6f', r), 'k', string.format('%.6f', k), 't', now)
  local debt = (tpm > 0 and k < 0) and math.ceil(-k * 60000 / tpm) or 0
  redis.call('PEXPIRE', key, 120000 + math.min(debt, 86400000))
end
"""

# ARGV[1]: tokens needed. Returns granted, is it the request limit, ms to wait, then r and k of
# each scope, rounded down.
RESERVE_SCRIPT = (
    _LEVELS
    + """
local need, wait, by_requests = tonumber(ARGV[1]), 0, 0
local found = {}
for i, key in ipairs(KEYS) do
  local rpm, tpm = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local r, k = level(key, rpm, tpm)
  found[i] = {r, k}
  if rpm > 0 and (1 - r) * 60000 / rpm > wait then
    wait = (1 - r) * 60000 / rpm
    by_requests = 1
  end
  local short = math.min(need, tpm) - k
  if tpm > 0 and short * 60000 / tpm > wait then
    wait = short * 60000 / tpm
    by_requests = 0
  end
end
local reply = {wait > 0 and 0 or 1, by_requests, math.ceil(wait)}
for i, key in ipairs(KEYS) do
  local r, k = found[i][1], found[i][2]
  if wait == 0 then
    local tpm = tonumber(ARGV[2 * i + 1])
    r, k = r - 1, k - math.min(need, tpm)
    keep(key, r, k, tpm)
  end
  reply[2 * i + 2] = math.floor(r)
  reply[2 * i + 3] = math.floor(k)
end
return reply
"""
)

# ARGV[1..3]: tokens reserved, tokens used, requests given back; limits follow from ARGV[4].
SETTLE_SCRIPT = (
    _LEVELS
    + """
local reserved, used, requests = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
for i, key in ipairs(KEYS) do
  local rpm, tpm = tonumber(ARGV[2 * i + 2]), tonumber(ARGV[2 * i + 3])
  local r, k = level(key, rpm, tpm)
  keep(key, math.min(rpm, r + requests), math.min(tpm, k + math.min(reserved, tpm) - used), tpm)
end
return 1
"""
)
