"""Writes *closings*, which are the events of requests that a lost gateway left open. Pure.

A gateway that is killed cannot report its open requests, nor ended requests whose events had not
reached the broker. So with each request a gateway sends the router the known part of the request's
event. When the gateway's stream is lost, the router adds the token counts of the engines. Routers
have no connection to the broker. So another gateway, or the same gateway after a restart, sends the
closings to the broker.

The router cannot distinguish a dead gateway from a broken stream. So `telemetry.closings` uses a
closing only if the gateway's own event is missing.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat

from google.protobuf.message import DecodeError

from router.core.types.batch import GatewayBatch
from router.core.types.request import ConnectedGateway, Dispatch
from router.counting import Key, Prompts, TokenCounts, key_of
from router.wire import prompt_tokens_of
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

OUTCOME = "gateway_lost"
SCHEMA_VERSION = 2
# Seconds for which an ended answer is kept, because its event may still be lost with the gateway. A
# slow client has 30 s to read the rest, and a broker has 5 s before the gateway spools. The power
# loss of a gateway's host is noticed after 25 s.
KEPT_S = 75.0
KEPT_BYTES_MAX = 32 << 20  # most bytes of ended answers per gateway, about 60,000 answers
_ENDED_MAX = 60_000
_WAITING_MAX = 100_000  # most closings that wait for a gateway, or that a gateway carries
_MESSAGE_MAX = 500  # most closings per message, 300 KB
_SLICE = 200  # most accounts that one call of `Closings.settle` closes, in about 2 ms
_LOOKS = 32  # ended answers examined for expiry whenever another answer ends
_LAST_WORD_S = 5.0  # longest wait for an engine to report the end of a cancelled sequence


class _Event:
    """The event of one gateway request. The request may have several answers."""

    __slots__ = ("ended_at", "event_id", "open")

    def __init__(self, event_id: str) -> None:
        self.event_id = event_id
        self.open = 0  # number of answers that have not ended
        self.ended_at = 0.0  # time at which the latest of the ended answers ended


class _Account:
    """The token counts of one answer, which the router reports if the gateway is lost."""

    __slots__ = (
        *("before", "closing", "ended_at", "event", "is_counted", "is_heard", "key"),
        *("output_tokens", "placed", "places", "prompt", "took", "was_placed"),
    )

    def __init__(self, closing: bytes, before: int, key: Key, event: _Event) -> None:
        self.closing = closing
        self.before = before  # output tokens of earlier attempts
        self.key = key  # hour and model of the token counts
        self.event = event
        self.output_tokens = before  # output tokens of all attempts
        self.took: int | None = None  # tokens received before the gateway cancelled the answer
        self.placed: wire.Placed | None = None
        self.prompt = 0  # tokens of prompt and `before`, or 0 for a further answer to a prompt
        self.was_placed = False  # whether an earlier attempt has already counted the prompt
        self.places = 0  # placements of this attempt
        self.is_heard = True  # whether the gateway has received a placement
        self.is_counted = False  # whether this attempt has already counted the prompt
        self.ended_at = 0.0  # end of the answer, or time of the last check for expiry

    def end_prompt(self) -> Prompts:
        """Return the prompt counts of an ended attempt, and mark the prompt as counted."""
        self.is_counted = True
        tokens, places = self.prompt, self.places
        if self.was_placed:
            return Prompts(resumed=places * tokens)
        again = max(0, places - 1) * tokens
        if not places:
            return Prompts()
        if not self.is_heard:
            return Prompts(discarded=tokens, resumed=again)
        return Prompts(certain=tokens, resumed=again)

    def unheard(self, *, is_heard: bool) -> Prompts:
        """Return a count correction if the gateway cancelled before it received the placement."""
        if is_heard or not self.is_heard or self.was_placed or not self.places:
            return Prompts()
        self.is_heard = False
        return Prompts(certain=-self.prompt, discarded=self.prompt)

    def cut_prompt(self) -> Prompts:
        """Return a prompt's counts as uncertain, since the lost gateway may retry elsewhere."""
        if self.was_placed or self.placed is None:
            return Prompts() if self.is_counted else self.end_prompt()
        tokens = self.prompt
        if not self.is_counted:
            self.is_counted = True
            return Prompts(uncertain=tokens, resumed=max(0, self.places - 1) * tokens)
        certain = tokens if self.is_heard else 0
        return Prompts(-certain, tokens, certain - tokens)


class Accounts:
    """The accounts that must be closed if one gateway is lost.

    An account belongs to an open request, or to a recently ended request whose event may not have
    reached the broker. The closings of other gateways that this gateway carries are included.
    """

    def __init__(self, counts: TokenCounts, *, counts_prompts: bool = True) -> None:
        """Create an empty set. `counts_prompts` states whether the gateway marks new prompts."""
        self._counts = counts
        self._counts_prompts = counts_prompts
        self._open: dict[int, _Account] = {}
        self._events: dict[str, _Event] = {}  # events of requests with several answers, some open
        self._ended: OrderedDict[int, _Account] = OrderedDict()
        self._ended_bytes = 0
        self._carried: deque[tuple[float, bytes]] = deque(maxlen=_WAITING_MAX)

    def submitted(self, submits: Iterable[wire.Submit]) -> bool:
        """Open accounts for new requests, and return whether each includes its part of an event."""
        is_known = True
        for submit in submits:
            try:
                told = RequestEvent.FromString(submit.closing) if submit.closing else None
            except DecodeError:  # the gateway sent invalid bytes
                told = None
            if told is None:
                is_known = False
                continue
            event_id = told.event_id
            event = self._events.get(event_id) or _Event(event_id)
            if told.choices != 1:
                self._events[event_id] = event
            event.open += 1
            account = _Account(submit.closing, submit.resumed_tokens, key_of(told), event)
            account.prompt = prompt_tokens_of(submit) if told.prompt_tokens else 0
            account.was_placed = submit.was_placed
            self._open[submit.handle] = account
            if not self._counts_prompts:
                self._counts.add(account.key, 0, has_prompts=False)
        return is_known

    def note_outcomes(self, batch: GatewayBatch, now: float) -> None:
        """Record the placements and outcomes that are sent to the gateway."""
        accounts = self._open
        if not accounts:
            return
        for placed in batch.placed:
            if (account := accounts.get(placed.handle)) is not None:
                account.placed = _lean(placed)
                account.places += 1
        for outcome in batch.outcomes:
            if (account := accounts.pop(outcome.handle, None)) is None:
                continue
            event = account.event
            event.open -= 1
            event.ended_at = now
            if not event.open:
                self._events.pop(event.event_id, None)
            if outcome.kind != wire.OUTCOME_KIND_REJECTED:
                self._end(outcome, account, now)

    def _end(self, outcome: wire.Outcome, account: _Account, now: float) -> None:
        made = outcome.output_tokens
        took = made if account.took is None else min(account.took, made)
        account.output_tokens += took
        account.ended_at = now
        prompts = account.end_prompt()
        if made or any(prompts):
            self._counts.add(account.key, took, discarded=made - took, prompts=prompts)
        self._ended[outcome.handle] = account
        self._ended_bytes += len(account.closing)
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Drop accounts whose events must have arrived, and the oldest above the size bounds."""
        ended = self._ended
        for _ in range(min(_LOOKS, len(ended))):
            handle = next(iter(ended))
            oldest = ended[handle]
            is_full = len(ended) > _ENDED_MAX or self._ended_bytes > KEPT_BYTES_MAX
            if oldest.ended_at >= now - KEPT_S and not is_full:
                return
            if not is_full and _is_untold(oldest, now):
                oldest.ended_at = now
                ended.move_to_end(handle)
            else:
                del ended[handle]
                self._ended_bytes -= len(oldest.closing)

    def cancelled(self, message: wire.ConnectRequest) -> None:
        """Record how many tokens of cancelled answers a gateway received.

        This method must be called before the core cancels the requests.
        """
        placed = message.cancel_placed or repeat(True)  # older gateways do not send this field
        for handle, took, is_heard in zip(
            message.cancels, message.cancel_took, placed, strict=False
        ):
            account = self._open.get(handle)
            if account is not None:
                account.took = took
                account.is_heard = is_heard
            elif (account := self._ended.get(handle)) is not None:  # ended before the cancel
                surplus = max(0, account.output_tokens - account.before - took)
                unheard = account.unheard(is_heard=is_heard)
                if surplus or any(unheard):
                    account.output_tokens -= surplus
                    self._counts.add(account.key, -surplus, discarded=surplus, prompts=unheard)

    def carried(self, closings: Iterable[bytes], now: float) -> None:
        """Record closings that are sent through this gateway."""
        carried = self._carried
        while carried and carried[0][0] < now - KEPT_S:
            carried.popleft()
        carried.extend((now, closing) for closing in closings)

    def still_carried(self, now: float) -> Iterator[bytes]:
        """Yield carried closings that may not have reached the broker."""
        return (closing for at, closing in self._carried if at >= now - KEPT_S)

    def ended(self, now: float) -> Iterator[_Account]:
        """Yield the accounts of ended answers whose events may still be missing."""
        return (it for it in self._ended.values() if _is_untold(it, now))

    def open(self, handle: int) -> _Account | None:
        """Return the account of a live request."""
        return self._open.get(handle)


def _is_untold(account: _Account, now: float) -> bool:
    """Return whether the gateway's event of an ended answer may be missing."""
    return account.event.open > 0 or account.event.ended_at >= now - KEPT_S


class Closings:
    """The closings of all lost gateways, until other gateways have received them."""

    def __init__(self, router_id: str, counts: TokenCounts) -> None:
        self._router_id = router_id
        self._counts = counts
        self._waiting: list[tuple[_Account, Dispatch, int, float]] = []
        self._cut: deque[Iterator[bytes | tuple[_Account, int]]] = deque()
        self._ready: deque[bytes] = deque()
        self._reports: deque[Iterator[bytes]] = deque()
        self._dropped = 0

    @property
    def has_work(self) -> bool:
        """Whether an account must still be closed, or a closing or report is still unsent."""
        return self.is_closing or self.is_ready

    @property
    def is_closing(self) -> bool:
        """Whether accounts of lost gateways must still be closed."""
        return bool(self._waiting or self._cut)

    @property
    def is_ready(self) -> bool:
        """Whether closings or reports wait for a gateway."""
        return bool(self._ready or self._reports)

    @property
    def is_reporting(self) -> bool:
        """Whether reports of token counts wait for a gateway."""
        return bool(self._reports)

    def cut(self, accounts: Accounts, gateway: ConnectedGateway, now: float) -> None:
        """Begin to close all accounts of a lost gateway, before its requests are cancelled.

        Later calls of `settle` close the accounts in parts, so the accounts must not change after
        this call.
        """
        accounts.note_outcomes(gateway.batch, now)
        queued: list[_Account] = []
        for request in gateway.requests.values():
            account = accounts.open(request.handle)
            if account is None:
                continue
            dispatch = request.dispatch
            made = len(request.output) if request.output is not None else 0
            if dispatch is None:
                account.output_tokens += made
                queued.append(account)
            else:
                account.placed = account.placed or _placed(dispatch)
                before = account.output_tokens + max(0, made - dispatch.emitted)
                self._waiting.append((account, dispatch, before, now + _LAST_WORD_S))
        self._cut.append(_left(accounts, queued, now))

    def settle(self, is_over: Callable[[Dispatch], bool], now: float) -> None:
        """Close at most `_SLICE` accounts. A running sequence delays the closing by up to 5 s."""
        budget = _SLICE
        while self._cut and budget:
            left = next(self._cut[0], None)
            if left is None:
                self._cut.popleft()
                continue
            budget -= 1
            if isinstance(left, bytes):
                self._put(left)
            else:
                self._close(*left)
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            account, dispatch, before, due_at = entry
            if budget and (is_over(dispatch) or now >= due_at):
                budget -= 1
                account.output_tokens = before + dispatch.emitted
                self._close(account)
            else:
                self._waiting.append(entry)

    def report(self, reports: Iterator[bytes]) -> None:
        """Queue reports of token counts, to be sent before all closings."""
        self._reports.append(reports)

    def take(self) -> list[bytes]:
        """Return the reports and closings for one message to a gateway, which forwards them."""
        taken: list[bytes] = []
        while self._reports and len(taken) < _MESSAGE_MAX:
            size = len(taken)
            taken += islice(self._reports[0], _MESSAGE_MAX - size)
            if len(taken) < _MESSAGE_MAX:
                self._reports.popleft()
        room = min(_MESSAGE_MAX - len(taken), len(self._ready))
        taken += (self._ready.popleft() for _ in range(room))
        return taken

    def drop(self) -> int:
        """Drop all reports and closings that no gateway has received, and return their number."""
        left = len(self._ready) + len(self._waiting)
        left += sum(1 for them in (*self._cut, *self._reports) for _ in them)
        for them in (self._ready, self._waiting, self._cut, self._reports):
            them.clear()
        self._dropped += left
        return left

    def take_dropped(self) -> int:
        """Return the number of closings that were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _close(self, account: _Account, uncounted: int = 0) -> None:
        """Write the closing of an account, and count its tokens as uncertain.

        `uncounted` is the change of the certain tokens, which is negative for tokens counted
        before.
        """
        tokens, placed = account.output_tokens, account.placed
        own, prompts = tokens - account.before, account.cut_prompt()
        if own or any(prompts):
            self._counts.add(account.key, uncounted, uncertain=own, prompts=prompts)
        self._put(closed(account.closing, tokens, placed, self._router_id))

    def _put(self, closing: bytes) -> None:
        if len(self._ready) >= _WAITING_MAX:
            self._ready.popleft()
            self._dropped += 1
        self._ready.append(closing)


def _left(
    accounts: Accounts, queued: list[_Account], now: float
) -> Iterator[bytes | tuple[_Account, int]]:
    """Yield the closings that a lost gateway carried, and then the accounts to close.

    Each account comes with the change of its certain tokens.
    """
    yield from accounts.still_carried(now)
    for account in accounts.ended(now):
        yield account, account.before - account.output_tokens
    for account in queued:
        yield account, 0


def closed(closing: bytes, tokens: int, placed: wire.Placed | None, router_id: str) -> bytes:
    """Return the event of a lost gateway's request, completed with the facts of the router."""
    event = RequestEvent.FromString(closing)
    event.schema_version = SCHEMA_VERSION
    event.outcome, event.status = OUTCOME, 500
    event.router_id = router_id
    event.output_tokens = tokens
    if placed is not None:
        event.replica_id = placed.replica_id
        event.queue_us = placed.queue_us
        event.engine_queue_us = placed.engine_queue_us
        event.load_us = placed.load_us
        # As in the gateway's own event, a prompt's tokens count only in the event of its first
        # answer.
        event.cached_tokens = min(placed.cached_tokens, event.prompt_tokens)
    return event.SerializeToString()


def _lean(placed: wire.Placed) -> wire.Placed:
    """Return a placement with only the fields that closings need, to save memory."""
    if not placed.HasField("decision") and not placed.before:
        return placed
    return wire.Placed(
        replica_id=placed.replica_id,
        queue_us=placed.queue_us,
        engine_queue_us=placed.engine_queue_us,
        load_us=placed.load_us,
        cached_tokens=placed.cached_tokens,
    )


def _placed(dispatch: Dispatch) -> wire.Placed | None:
    """Return the placement of a dispatch that its engine has started, or None before the start."""
    if not dispatch.is_admitted and not dispatch.emitted:
        return None
    return wire.Placed(replica_id=dispatch.replica_id, cached_tokens=dispatch.cached_tokens)
