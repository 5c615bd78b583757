"""Token buckets of limits, and this process's decisions without Valkey. Pure.

A bucket's capacity is the limit of one window, and the bucket refills steadily. A reservation
removes one request and an estimate of tokens. The settlement returns unused tokens, or removes the
tokens used beyond the estimate, even below zero. Later requests then wait until the debt has
refilled. A request may need more tokens than a bucket's capacity. In each scope, the request then
removes the capacity of the scope's smallest token bucket.
"""

from collections.abc import Iterator, Sequence
from struct import Struct

from gateway.limits.verdict import UNLIMITED, Verdict, verdict_of
from sluice.limits import BY_NAME, Counted, LimitKind

UNSIGNED_MAX = 0xFFFFFFFF  # largest number of tokens in one reservation, a 32-bit field

# Format of a scope's row, which consists of a head, limits and news (changes for Valkey).
# - Head: number of limits, whether news follow, number of open requests.
# - Each limit: kind, counted unit, window in ms, value.
# - News: requests to return, requests and tokens to remove (not below zero), tokens to return.
HEAD_FORMAT, LIMIT_FORMAT, NEWS_FORMAT = "<BBI", "<BBId", "<IIId"
LIMIT_BYTES = Struct(LIMIT_FORMAT).size
_pack_head = Struct(HEAD_FORMAT).pack
_pack_limit = Struct(LIMIT_FORMAT).pack
_pack_change = Struct(NEWS_FORMAT).pack

# Requests and tokens to return, then requests and tokens not yet reported, as in `BucketScope`.
News = tuple[int, int, int, int]
_NO_CHANGE = (0, 0, 0, 0)


class BucketScope:
    """A scope of limits, which is an account, a key, or a model within an account.

    The scope accumulates changes that Valkey has not received yet, so that any number of
    settlements costs one row of the next batch.

    Attributes:
        name: Name, unique among scopes.
        label: Name of the scope for users.
        kind: `account`, `key` or `model`.
        key: Name of the scope in Valkey, as bytes.
        limits: Values by the names of their kinds. Every value is positive.
        tokens_max: Maximum of tokens that a request removes from the scope, or 0 without a limit.
        is_leased: Whether the number of concurrent requests is limited.
        limited_by: Number of the principal whose limits apply. Newer principals have larger ones.
        told: Name and limits in the form of events.
        rest: Cached row for a batch. It is empty if the scope has changes, or if its number of
            concurrent requests is limited.
        held: Requests of this process that are open now.
        back_requests: Requests to return to the shared buckets.
        back_tokens: Tokens to return. A negative number is removed, even below zero.
        untold_requests: Requests granted without Valkey. When Valkey is back, the shared buckets
            subtract them, but not below zero.
        untold_tokens: Tokens granted without Valkey. The number is negative if a settlement returns
            tokens that were already reported to Valkey.
    """

    __slots__ = (
        "__weakref__",
        "_at_ms",
        "_levels",
        "_packed",
        "_rest",
        "back_requests",
        "back_tokens",
        "held",
        "is_leased",
        "is_waiting",
        "key",
        "kind",
        "label",
        "limited_by",
        "limits",
        "name",
        "rest",
        "row",
        "tokens_max",
        "told",
        "untold_requests",
        "untold_tokens",
    )

    def __init__(self, name: str, label: str, kind: str = "account", **limits: int) -> None:
        self.name = name
        self.label = label
        self.kind = kind
        self.key = name.encode()
        self.limit(limits)
        self.limited_by = 0
        self.held = 0
        self.back_requests = self.back_tokens = 0
        self.untold_requests = self.untold_tokens = 0
        self.row = 0  # number of its row in the batch that is being built, or 0 without a row
        self.is_waiting = False  # whether its changes wait for the next batch
        self._levels: dict[str, float] = {}  # levels of this process's own buckets, by kind
        self._at_ms = 0.0

    def limit(self, limits: dict[str, int]) -> None:
        """Set the limits, and keep the number of open requests and the present levels."""
        self.limits = {name: value for name, value in limits.items() if value}
        kinds = [(BY_NAME[name], value) for name, value in self.limits.items()]
        of_tokens = [value for kind, value in kinds if kind.counted is Counted.TOKENS]
        self.tokens_max = min(of_tokens, default=0)
        self.is_leased = any(kind.counted is Counted.OPEN for kind, _ in kinds)
        told = [f"{kind.event_name or kind.name}={value}" for kind, value in kinds]
        self.told = " ".join([self.kind, *told])
        self._packed = b"".join(
            [_pack_limit(kind.number, kind.counted, kind.window_ms, value) for kind, value in kinds]
        )
        # The number of open requests is sent only if concurrency is limited.
        self._rest = b"" if self.is_leased else self._pack(_NO_CHANGE, 0)
        self.rest = b""

    def restore_changes(self, news: News) -> None:
        """Add changes again for the next batch, because Valkey did not receive them."""
        self.rest = b""
        self.back_requests += news[0]
        self.back_tokens += news[1]
        self.untold_requests += news[2]
        self.untold_tokens += news[3]

    def take_changes(self) -> News:
        """Return the changes for Valkey, and clear them."""
        self.rest = self._rest
        news = self.back_requests, self.back_tokens, self.untold_requests, self.untold_tokens
        self.back_requests = self.back_tokens = 0
        self.untold_requests = self.untold_tokens = 0
        return news

    def take_row(self) -> tuple[bytes, News | None]:
        """Return the complete row of the scope, and the changes that it contains, if any."""
        self.is_waiting = False
        news = self.take_changes()
        return self._pack(news, self.held), news if news != _NO_CHANGE else None

    def _pack(self, news: News, held: int) -> bytes:
        count = len(self.limits)
        if news == _NO_CHANGE:
            return _pack_head(count, 0, held) + self._packed
        back_requests, back_tokens, untold_requests, untold_tokens = news
        told = _pack_change(
            back_requests + max(0, -untold_requests),
            min(UNSIGNED_MAX, max(0, untold_requests)),
            min(UNSIGNED_MAX, max(0, untold_tokens)),
            back_tokens + max(0, -untold_tokens),
        )
        return _pack_head(count, 1, held) + self._packed + told

    # Without Valkey.

    def refill(self, share: float, now_ms: float) -> dict[str, float]:
        """Refill this process's own buckets and return the level of each kind.

        The buckets' capacity is `share` of the limits. The buckets of a new scope are full.
        """
        elapsed_ms = max(0.0, now_ms - self._at_ms)
        self._at_ms = now_ms
        levels, self._levels = self._levels, {}
        for kind, most in self._parts(share):
            if kind.counted is Counted.OPEN:
                left: float = max(0, most - self.held)
            else:
                refilled = elapsed_ms / kind.ms_each(most)
                left = min(most, levels.get(kind.name, UNLIMITED) + refilled)
            self._levels[kind.name] = left
        return self._levels

    def shortages(self, tokens: int, share: float) -> Iterator[tuple[LimitKind, float]]:
        """Yield for each kind of limit the milliseconds until a request fits, after a `refill`."""
        need = self._need(tokens, share)
        for kind, most in self._parts(share):
            yield kind, (need[kind.counted] - self._levels[kind.name]) * kind.ms_each(most)

    def take(self, tokens: int, share: float) -> None:
        """Remove a request that is granted without Valkey. The caller calls `refill` before."""
        need = self._need(tokens, share)
        self._change(-need[Counted.REQUESTS], -need[Counted.TOKENS])
        self.untold_requests += 1
        self.untold_tokens += need[Counted.TOKENS]

    def settle_local(self, taken: int, used: int, *, was_served: bool) -> None:
        """Correct a grant without Valkey by the usage. The scope has granted `taken` tokens."""
        self.held -= 1
        extra = used - taken
        if not was_served:
            self.untold_requests -= 1
        self.untold_tokens += extra
        self._change(0 if was_served else 1, -extra)

    def _need(self, tokens: int, share: float) -> dict[Counted, int]:
        tokens = min(tokens, part(self.tokens_max, share))
        return {Counted.REQUESTS: 1, Counted.TOKENS: tokens, Counted.OPEN: 1}

    def _parts(self, share: float) -> list[tuple[LimitKind, int]]:
        return [(BY_NAME[name], part(value, share)) for name, value in self.limits.items()]

    def _change(self, requests: int, tokens: int) -> None:
        """Add numbers of requests and tokens to this process's own levels."""
        self.rest = b""
        added = {Counted.REQUESTS: requests, Counted.TOKENS: tokens}
        for name in self._levels:
            self._levels[name] += added.get(BY_NAME[name].counted, 0)

    # With Valkey.

    def settle(self, taken: int, used: int, *, was_served: bool) -> None:
        """Correct a grant of Valkey by the usage, with the next batch.

        The scope has granted `taken` tokens.
        """
        self.held -= 1
        if not was_served:
            self.back_requests += 1
            self.rest = b""
        if self.tokens_max:
            self.back_tokens += taken - used
            self.rest = b""

    def owe_request(self) -> None:
        """Remove a request from the shared buckets with the next batch, not below zero."""
        self.rest = b""
        self.untold_requests += 1

    def give_back(self, taken: int) -> None:
        """Undo a grant of Valkey whose caller no longer waits for it."""
        self.rest = b""
        self.back_requests += 1
        self.back_tokens += taken


def decide_locally(
    scopes: Sequence[BucketScope], tokens: int, share: float, now_ms: float
) -> Verdict:
    """Reserve one request and `tokens` in this process's share of all scopes, or in none."""
    number, at, wait_ms = 0, 0, 0.0
    for index, scope in enumerate(scopes):
        scope.refill(share, now_ms)
        for kind, short_ms in scope.shortages(tokens, share):
            if short_ms > wait_ms:
                number, at, wait_ms = kind.number, index, short_ms
    if not number:
        for scope in scopes:
            scope.take(tokens, share)
    levels = [scope.refill(share, now_ms) for scope in scopes]
    return verdict_of(number, at, wait_ms, levels)


def part(limit: int, share: float) -> int:
    """Return a share of a limit, at least 1, because 0 would mean no limit."""
    return max(1, int(limit * share)) if limit else 0
