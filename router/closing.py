"""What dead gateways leave open: the router ends their requests' accounts. Pure.

A gateway that is killed tells nobody of the requests that it had with a router, nor of those whose
events it had not brought to the broker. With each request it gives the router the part of its event
that it knows. When its stream is cut, the router fills in what engines made, and another gateway
(or the same one, started again) brings these *closings* to the broker: routers know no broker.

Whether the gateway is dead or only the stream broke is not known here. A closing counts only where
the gateway's own event does not come; see `telemetry.closings`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from google.protobuf.message import DecodeError

from router.core.model import Batch, Gateway, Slot
from router.counting import TokenCounts
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

OUTCOME = "gateway_lost"
SCHEMA_VERSION = 2
# How long an event may be on its way from the end of its request to the broker, or to the spool:
# gateways give a broker 5 s before they spool.
KEPT_S = 10.0
_ENDED_MAX = 20_000  # kept of one gateway; about 10 MB
_WAITING_MAX = 100_000  # closings that wait for a gateway, or to be forgotten
_MESSAGE_MAX = 5_000  # closings; 2 MB
_LAST_WORD_S = 5.0  # engines report the end of a cancelled sequence within two steps


class _Account:
    """One request of a gateway that may be lost."""

    __slots__ = ("before", "closing", "ended_at", "output_tokens", "placed", "took")

    def __init__(self, closing: bytes, before: int) -> None:
        self.closing = closing
        self.before = before  # tokens of earlier attempts
        self.output_tokens = before  # of all attempts, at the end
        self.took: int | None = None  # by a gateway that ended it itself
        self.placed: wire.Placed | None = None
        self.ended_at = 0.0


class Accounts:
    """What would have to be told if one gateway were lost now.

    These are its requests, those that have ended so late that their events may not have arrived,
    and closings that it was given to bring to the broker.
    """

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts
        self._open: dict[int, _Account] = {}
        self._ended: dict[int, _Account] = {}
        self._carried: deque[tuple[float, bytes]] = deque(maxlen=_WAITING_MAX)

    def submitted(self, submits: Iterable[wire.Submit]) -> None:
        """Open accounts for requests of which something is known."""
        for submit in submits:
            if submit.closing:
                self._open[submit.handle] = _Account(submit.closing, submit.resumed_tokens)

    def told(self, batch: Batch, now: float) -> None:
        """Take note of what a gateway is told."""
        accounts = self._open
        if not accounts:
            return
        for placed in batch.placed:
            if (account := accounts.get(placed.handle)) is not None:
                account.placed = placed
        for outcome in batch.outcomes:
            account = accounts.pop(outcome.handle, None)
            if account is not None and outcome.kind != wire.OUTCOME_KIND_REJECTED:
                self._end(outcome, account, now)

    def _end(self, outcome: wire.Outcome, account: _Account, now: float) -> None:
        made = outcome.output_tokens
        took = made if account.took is None else min(account.took, made)
        account.output_tokens += took
        account.ended_at = now
        if made:
            self._counts.add(account.closing, took, discarded=made - took)
        ended = self._ended
        ended[outcome.handle] = account
        while ended:
            handle, oldest = next(iter(ended.items()))
            if oldest.ended_at >= now - KEPT_S and len(ended) <= _ENDED_MAX:
                return
            del ended[handle]

    def cancelled(self, message: wire.ConnectRequest) -> None:
        """Take note of how much a gateway took of what it ends; call before that is cancelled."""
        for handle, took in zip(message.cancels, message.cancel_took, strict=False):
            account = self._open.get(handle)
            if account is not None:
                account.took = took
            elif (account := self._ended.get(handle)) is not None:  # it ended meanwhile
                surplus = account.output_tokens - account.before - took
                if surplus > 0:
                    account.output_tokens -= surplus
                    self._counts.add(account.closing, -surplus, discarded=surplus)

    def carried(self, closings: Iterable[bytes], now: float) -> None:
        """Note closings that this gateway was given."""
        self._carried.extend((now, closing) for closing in closings)

    def still_carried(self, now: float) -> list[bytes]:
        """Return those that may not have reached the broker."""
        return [closing for at, closing in self._carried if at >= now - KEPT_S]

    def ended(self, now: float) -> list[_Account]:
        """Return those of requests that ended a moment ago."""
        return [it for it in self._ended.values() if it.ended_at >= now - KEPT_S]

    def open(self, handle: int) -> _Account | None:
        """Return that of a request that lives."""
        return self._open.get(handle)


class Closings:
    """Of all gateways that were lost, until another one has taken them."""

    def __init__(self, router_id: str, counts: TokenCounts) -> None:
        self._router_id = router_id
        self._counts = counts
        self._waiting: list[tuple[_Account, Slot, int, float]] = []
        self._ready: deque[bytes] = deque()
        self._dropped = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is to be told."""
        return bool(self._waiting or self._ready)

    def cut(self, accounts: Accounts, gateway: Gateway, now: float) -> None:
        """Close everything of a gateway that is gone; call before its requests are withdrawn."""
        accounts.told(gateway.batch, now)
        for closing in accounts.still_carried(now):
            self._put(closing)
        for account in accounts.ended(now):
            self._close(account, account.before - account.output_tokens)
        for request in gateway.requests.values():
            account = accounts.open(request.handle)
            if account is None:
                continue
            slot = request.slot
            made = len(request.output) if request.output is not None else 0
            if slot is None:
                account.output_tokens += made
                self._close(account)
            else:
                account.placed = account.placed or _placed(slot)
                before = account.output_tokens + max(0, made - slot.emitted)
                self._waiting.append((account, slot, before, now + _LAST_WORD_S))

    def settle(self, is_over: Callable[[Slot], bool], now: float) -> None:
        """Close what engines have said their last word about, or have had their time for it."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            account, slot, before, due_at = entry
            if is_over(slot) or now >= due_at:
                account.output_tokens = before + slot.emitted
                self._close(account)
            else:
                self._waiting.append(entry)

    def report(self, reports: Iterable[bytes]) -> None:
        """Let what was counted be told, too."""
        for report in reports:
            self._put(report)

    def take(self) -> list[bytes]:
        """Return what is ready for a gateway to carry, as much as a message may hold."""
        return [self._ready.popleft() for _ in range(min(_MESSAGE_MAX, len(self._ready)))]

    def take_dropped(self) -> int:
        """Return how many were forgotten since the last call, because no gateway came."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _close(self, account: _Account, uncounted: int = 0) -> None:
        """Tell of a request, whose tokens are not certain; `uncounted`: those counted as such."""
        tokens, placed = account.output_tokens, account.placed
        if own := tokens - account.before:
            self._counts.add(account.closing, uncounted, uncertain=own)
        with suppress(DecodeError):  # of a gateway that sends anything
            self._put(closed(account.closing, tokens, placed, self._router_id))

    def _put(self, closing: bytes) -> None:
        if len(self._ready) >= _WAITING_MAX:
            self._ready.popleft()
            self._dropped += 1
        self._ready.append(closing)


def closed(closing: bytes, tokens: int, placed: wire.Placed | None, router_id: str) -> bytes:
    """Return the event that a gateway would have told, as far as it is known here."""
    event = RequestEvent.FromString(closing)
    event.schema_version = SCHEMA_VERSION
    event.outcome, event.status = OUTCOME, 500
    event.router_id = router_id
    event.output_tokens = tokens
    if placed is not None:
        event.replica_id = placed.replica_id
        event.queue_us = placed.queue_us
        event.engine_queue_us = placed.engine_queue_us
        event.cached_tokens = placed.cached_tokens
    return event.SerializeToString()


def _placed(slot: Slot) -> wire.Placed | None:
    """Return where a request runs, if its engine has begun; else it has cost nothing."""
    if not slot.is_admitted and not slot.emitted:
        return None
    return wire.Placed(replica_id=slot.replica_id, cached_tokens=slot.cached_tokens)
