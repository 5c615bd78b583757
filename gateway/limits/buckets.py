"""What is limited, and how this process decides without Valkey. Pure.

A bucket holds what one minute grants and refills steadily. A reservation takes one request and an
estimate of tokens; the settlement puts back what was not used, or takes what was used beyond, even
below zero: the debt is paid by waiting. A need larger than a bucket takes a full one.
"""

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

MINUTE_MS = 60_000
UNSIGNED_MAX = 0xFFFFFFFF  # of a limit, and of the tokens of one reservation
WAIT_MAX_MS = 86_400_000
SLOT_WAIT_MS = 1000  # when one of too many requests at once ends is not known


class Limit(IntEnum):
    """What a reservation failed at; on the wire, too."""

    NONE = 0
    REQUESTS = 1
    TOKENS = 2
    CONCURRENCY = 3


class Verdict(NamedTuple):
    """The answer to a reservation.

    Attributes:
        limit: `Limit.NONE` when it was granted; else nothing was taken from any scope.
        scope: When refused: the scope that makes the caller wait longest, by its place.
        requests_scope: The scope with the fewest requests left.
        tokens_scope: The scope with the fewest tokens left.
        wait_ms: When refused: after this time there is room, if nobody else comes.
        requests_left: In that scope's minute; above any limit when no scope has one.
        tokens_left: The same; negative when tokens are owed.
    """

    limit: int
    scope: int
    requests_scope: int
    tokens_scope: int
    wait_ms: int
    requests_left: float
    tokens_left: float


UNLIMITED = 1e15  # what is left where nothing is limited

# On the wire: requests and tokens per minute, requests at once, those held; requests to be put
# back, requests and tokens to be taken as far as there are, tokens to be put back.
pack_row = Struct("<7Id").pack

# Requests and tokens to be put back, requests and tokens that are untold: see `Scope`.
News = tuple[int, int, int, int]


class Scope:
    """Something that is limited: an account, a key, or a model within an account.

    What has not been told to Valkey yet waits here, so that any number of settlements costs one
    row of the next batch.

    Attributes:
        name: Unique among scopes.
        label: What its user calls it.
        kind: `account`, `key` or `model`.
        key: Its name in Valkey, as bytes.
        rpm: Requests per minute; 0 is no limit, as in the next two.
        tpm: Tokens per minute.
        requests_max: Requests at once.
        limited_by: Number of the principal whose limits they are.
        told: All that, for events.
        rest: Its row in a batch for as long as it says the limits only; empty when there is more
            to say, or may be.
        held: Requests of this process that are open now.
        back_requests: To be put back into the shared bucket.
        back_tokens: To be put back; negative: to be taken, even below zero.
        untold_requests: Granted without Valkey; to be taken when it is back, as far as there are.
        untold_tokens: The same; negative when a settlement came after they were told.
    """

    __slots__ = (
        "__weakref__",
        "_at_ms",
        "_requests",
        "_rest",
        "_tokens",
        "back_requests",
        "back_tokens",
        "held",
        "is_waiting",
        "key",
        "kind",
        "label",
        "limited_by",
        "name",
        "requests_max",
        "rest",
        "row",
        "rpm",
        "told",
        "tpm",
        "untold_requests",
        "untold_tokens",
    )

    def __init__(
        self,
        name: str,
        label: str,
        kind: str = "account",
        *,
        rpm: int = 0,
        tpm: int = 0,
        requests_max: int = 0,
    ) -> None:
        self.name = name
        self.label = label
        self.kind = kind
        self.key = name.encode()
        self.limit(rpm, tpm, requests_max)
        self.limited_by = 0
        self.held = 0
        self.back_requests = self.back_tokens = 0
        self.untold_requests = self.untold_tokens = 0
        self.row = 0  # in the batch that is being built; 0: none
        self.is_waiting = False  # for a row in the next batch
        self._requests = self._tokens = UNLIMITED
        self._at_ms = 0.0

    def limit(self, rpm: int, tpm: int, requests_max: int) -> None:
        """Set the limits; what is open and what is left stay."""
        self.rpm, self.tpm, self.requests_max = rpm, tpm, requests_max
        limits = {"rpm": rpm, "tpm": tpm, "at_once": requests_max}
        self.told = " ".join(
            [self.kind, *(f"{name}={limit}" for name, limit in limits.items() if limit)]
        )
        # How many are held matters only where that is limited.
        self._rest = b"" if requests_max else pack_row(rpm, tpm, 0, 0, 0, 0, 0, 0)
        self.rest = b""

    def restore_news(self, news: News) -> None:
        """Let what was taken wait again: Valkey did not hear it."""
        self.rest = b""
        self.back_requests += news[0]
        self.back_tokens += news[1]
        self.untold_requests += news[2]
        self.untold_tokens += news[3]

    def take_news(self) -> News:
        """Return what Valkey is to be told, and forget it."""
        self.rest = self._rest
        news = self.back_requests, self.back_tokens, self.untold_requests, self.untold_tokens
        self.back_requests = self.back_tokens = 0
        self.untold_requests = self.untold_tokens = 0
        return news

    def refill(self, share: float, now_ms: float) -> tuple[float, float]:
        """Return requests and tokens in the buckets of this process alone, after refilling.

        They hold `share` of the limits: a scope never seen before is full.
        """
        minutes = max(0.0, now_ms - self._at_ms) / MINUTE_MS
        self._at_ms = now_ms
        rpm, tpm = part(self.rpm, share), part(self.tpm, share)
        self._requests = min(rpm, self._requests + minutes * rpm) if rpm else UNLIMITED
        self._tokens = min(tpm, self._tokens + minutes * tpm) if tpm else UNLIMITED
        return self._requests, self._tokens

    def take(self, tokens: int, share: float) -> None:
        """Take a request that is granted without Valkey; `refill` was just called."""
        tokens = min(tokens, part(self.tpm, share))
        self.rest = b""
        self._requests -= 1
        self._tokens -= tokens
        self.untold_requests += 1
        self.untold_tokens += tokens

    def settle(self, taken: int, used: int, *, was_served: bool) -> None:
        """Correct what Valkey granted, with the next batch; `taken` tokens of this scope."""
        self.held -= 1
        if not was_served:
            self.back_requests += 1
            self.rest = b""
        if self.tpm:
            self.back_tokens += taken - used
            self.rest = b""

    def settle_local(self, taken: int, used: int, *, was_served: bool) -> None:
        """Correct what was granted without Valkey; `taken` tokens of this scope."""
        self.held -= 1
        self.rest = b""
        extra = used - taken
        if not was_served:
            self._requests += 1
            self.untold_requests -= 1
        self._tokens -= extra
        self.untold_tokens += extra

    def owe_request(self) -> None:
        """Let a request be taken with the next batch, as far as there is one left."""
        self.rest = b""
        self.untold_requests += 1

    def give_back(self, taken: int) -> None:
        """Undo what Valkey granted to somebody who no longer waits for it."""
        self.rest = b""
        self.back_requests += 1
        self.back_tokens += taken


def decide_locally(scopes: Sequence[Scope], tokens: int, share: float, now_ms: float) -> Verdict:
    """Take one request and `tokens` from this process's share of all scopes, or nothing."""
    limit, at, wait_ms = Limit.NONE, 0, 0.0
    levels = [scope.refill(share, now_ms) for scope in scopes]
    for index, (scope, (requests, left)) in enumerate(zip(scopes, levels, strict=True)):
        rpm, tpm, most = (part(x, share) for x in (scope.rpm, scope.tpm, scope.requests_max))
        for kind, short_ms in (
            (Limit.REQUESTS, (1 - requests) * MINUTE_MS / rpm if rpm else 0.0),
            (Limit.TOKENS, (min(tokens, tpm) - left) * MINUTE_MS / tpm if tpm else 0.0),
            (Limit.CONCURRENCY, SLOT_WAIT_MS if most and scope.held >= most else 0.0),
        ):
            if short_ms > wait_ms:
                limit, at, wait_ms = kind, index, short_ms
    if limit is Limit.NONE:
        for scope in scopes:
            scope.take(tokens, share)
        levels = [scope.refill(share, now_ms) for scope in scopes]
    requests_scope = min(range(len(scopes)), key=lambda index: levels[index][0])
    tokens_scope = min(range(len(scopes)), key=lambda index: levels[index][1])
    return Verdict(
        limit,
        at,
        requests_scope,
        tokens_scope,
        min(WAIT_MAX_MS, -int(-wait_ms // 1)),
        levels[requests_scope][0],
        levels[tokens_scope][1],
    )


def part(limit: int, share: float) -> int:
    """Return the share of a limit; at least 1, because 0 would be no limit at all."""
    return max(1, int(limit * share)) if limit else 0
