"""The limits that all gateways share, with reservations in batches and with a circuit breaker.

At most one batch is in flight, and calls that arrive meanwhile form the next batch. Valkey
therefore receives this process's numbers of open requests in order. Each batch has the number
itself, because a lost batch would lose a difference. A caller without an answer in time decides
without Valkey. After a stall or an error, no caller waits for Valkey until Valkey has answered a
probe in time.
"""

import asyncio
import os
import random
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import structlog
from redis.exceptions import MasterDownError, NoScriptError, ReadOnlyError, ResponseError

from gateway.limits.buckets import BucketScope
from gateway.limits.script import TAG_BYTES, Call, LimitBatch
from gateway.limits.valkey import ValkeyClient
from gateway.limits.verdict import Verdict
from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

# Maximum number of waiting calls. Further calls would not be answered within the deadline.
_CALLS_MAX = 20_000
_BATCH_CALLS = 256  # calls per batch, so that a run of the script stays below about 3 ms
_BATCH_CHANGES = 256
_CHANGES_MAX = 100_000  # maximum number of scopes with unsent changes
_DEAD_AFTER_S = 1.0  # seconds without a reply after which the connection is closed
_DOUBT_S = 0.001
_REFRESH_S = 2.0  # Seconds between renewals of the leases of open requests, a fifth of a lease.
_PROBE_FIRST_S, _PROBE_MAX_S = 0.05, 1.0
_HEALTHY_S = 5.0  # Seconds without a failure after which earlier failures no longer count.
# Errors of a server that is no longer the primary after a failover. Only these errors require a new
# connection. Other errors would remain, and reconnecting gateways would add load.
_DEMOTIONS = (ReadOnlyError, MasterDownError)
_TOO_FEW_REPLICAS = "NOREPLICAS"

# Writing and reading the socket once costs as much as ten calls. Changes that no caller waits for
# are therefore always batched. Above this rate of calls, reservations and ended concurrent requests
# are batched, too.
_BUSY_CALLS_PER_S = 2500.0
_BUSY_CALLS, _BUSY_CALLS_MAX = 16.0, 32.0
_PACE_S = 0.002
_CHANGES_PACE_S = 0.005
_FLUSH_POLL_S = 0.001


class SharedBuckets:
    """Buckets in Valkey that are reserved and settled in batches.

    Attributes:
        is_up: Whether calls wait for Valkey.
        lost_settlements: Scopes whose settlements Valkey may not have received.
    """

    def __init__(self, valkey: ValkeyClient, *, tag: bytes = b"") -> None:
        """The `tag` identifies this process among all gateways and is random by default."""
        self._valkey = valkey
        self._deadline_s = valkey.deadline_s
        self._tag = tag or os.urandom(TAG_BYTES)
        self._loop = asyncio.get_running_loop()
        self.is_up = False
        self.lost_settlements = 0
        self._calls: list[Call] = []
        self._called_at_s = 0.0  # arrival of the first waiting call, on the event loop's clock
        self._changes: deque[BucketScope] = deque()
        self._leased: set[BucketScope] = set()
        self._probe_scope = BucketScope(
            "limits:probe", "", requests_max=1
        )  # has a limit, so that a probe always writes its row
        self._batch: LimitBatch | None = None  # the batch in flight
        self._sent_at_s = 0.0
        self._batch_called_at_s = 0.0
        self._doubted: LimitBatch | None = None  # in flight after its deadline, checked once more
        self._is_scheduled = self._is_changes_scheduled = self._is_watched = False
        # Whether an ended request may have freed a slot of a limit on concurrent requests.
        self._has_free_place = False
        self._load = 0.0  # level of a leaky bucket of calls, which drains at `_BUSY_CALLS_PER_S`
        self._failures = 0
        self._failed_at_s = 0.0
        self._probe_timer: asyncio.TimerHandle | None = None
        self._refresh_timer: asyncio.TimerHandle | None = None
        valkey.listen(self)

    def reserve(
        self, scopes: Sequence[BucketScope], caps: Sequence[int], tokens: int
    ) -> asyncio.Future[Verdict | None] | None:
        """Reserve tokens in all scopes or in none, and return a future of the verdict.

        The result is None, at once or after the deadline, if the caller has to decide without
        Valkey. `caps` are the scopes' present maximums of tokens, which may change before the
        reply.
        """
        if not self.is_up or len(self._calls) >= _CALLS_MAX:
            return None
        future: asyncio.Future[Verdict | None] = self._loop.create_future()
        if not self._calls:
            self._called_at_s = self._loop.time()
            self._wake()
        self._calls.append((future, scopes, caps, tokens))
        return future

    def send_changes(self, scopes: Sequence[BucketScope]) -> None:
        """Send the changes of the scopes with the next batch."""
        for scope in scopes:
            if scope.is_waiting or scope.rest:
                continue
            if len(self._changes) >= _CHANGES_MAX:
                self.lost_settlements += 1
                continue
            scope.is_waiting = True
            self._changes.append(scope)
            if scope.is_leased:
                self._has_free_place = True
        if self.is_up and self._changes:
            self._schedule_changes()

    async def flush(self) -> None:
        """Wait until all changes are sent, for at most the deadline of a call."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                while self.is_up and (self._changes or self._batch is not None):  # noqa: ASYNC110 - at exit only
                    await asyncio.sleep(_FLUSH_POLL_S)

    def hold(self, scopes: Sequence[BucketScope]) -> None:
        """Count a request granted without Valkey as open, and report it when Valkey is back.

        The lease of the request is renewed until its settlement.
        """
        for scope in scopes:
            scope.held += 1
            if scope.is_leased:
                self._leased.add(scope)
        self.send_changes(scopes)

    def abandon(
        self,
        answer: asyncio.Future[Verdict | None],
        scopes: Sequence[BucketScope],
        caps: Sequence[int],
        tokens: int,
    ) -> None:
        """Undo a grant whose caller was cancelled before the grant arrived."""
        if answer.cancelled():
            return  # `replied` will handle the cancelled call
        verdict = answer.result()
        if verdict is not None and not verdict[0]:
            for scope in scopes:
                scope.held -= 1
            self._give_back(scopes, caps, tokens)

    # Callbacks of the connection.

    def connected(self) -> None:
        """Report open requests to the server, which may be new, before calls wait for it."""
        self._refresh()
        self._send()

    def replied(self, reply: object) -> None:
        """Answer the calls of the batch."""
        batch = self._batch
        verdicts = None if batch is None else batch.verdicts(reply)
        if batch is None or verdicts is None:
            self._valkey.drop("unexpected reply")
            return
        self._batch = None
        self._answer(batch.calls, verdicts)
        if not self.is_up:
            if self._loop.time() - self._sent_at_s >= self._deadline_s:
                self._fail("slow")
                return
            self.is_up = True
            log.info("limits_restored")
        if self._calls:
            self._wake()
        elif self._changes:
            self._schedule_changes()

    def refused(self, error: ResponseError) -> None:
        """Send the script if the server lacks it.

        After any other error the calls decide without Valkey.
        """
        batch = self._batch
        if batch is not None and isinstance(error, NoScriptError):
            self._valkey.send(batch.command(in_full=True))
            return
        self._batch = None
        self._fail(f"{type(error).__name__}: {error}", is_primary=not _is_demotion(error))
        if batch is not None:
            batch.restore()
            self._release(batch.calls)
            self.send_changes(batch.rows)

    def disconnected(self) -> None:
        """Release all waiting calls, which then decide without Valkey."""
        batch, self._batch = self._batch, None
        self._stall("disconnected")
        if batch is not None:
            self.lost_settlements += batch.settlements
            self._release(batch.calls)
            self.send_changes(batch.rows)  # corrects the number of open requests in Valkey
        for timer in (self._probe_timer, self._refresh_timer):
            if timer is not None:
                timer.cancel()

    # Output.

    def _wake(self) -> None:
        """Schedule the next batch, or leave it to the reply of the batch in flight."""
        if self._is_scheduled or self._batch is not None:
            return
        self._is_scheduled = True
        if self._load >= _BUSY_CALLS and len(self._calls) < _BATCH_CALLS:
            pause_s = self._sent_at_s + _PACE_S - self._loop.time()
            if pause_s > 0:
                self._loop.call_later(pause_s, self._send)
                return
        self._loop.call_soon(self._send)

    def _schedule_changes(self) -> None:
        """Send changes within a bounded time or with the next call. No local caller waits for them.

        The bound matters to other gateways. A caller with a limit of concurrent requests may send
        its next request to another gateway. That gateway would refuse the request until this
        gateway has reported the end of the caller's earlier request.
        """
        if self._has_free_place:
            self._wake()
            return
        if self._is_changes_scheduled or self._is_scheduled or self._batch is not None:
            return
        self._is_changes_scheduled = True
        self._loop.call_later(_CHANGES_PACE_S, self._send_changes)

    def _send_changes(self) -> None:
        self._is_changes_scheduled = False
        if self.is_up and not self._is_scheduled:
            self._send()

    def _send(self) -> None:
        self._is_scheduled = False
        if self._batch is not None or not self._valkey.is_connected:
            return
        now_s = self._loop.time()
        calls, self._calls = self._calls[:_BATCH_CALLS], self._calls[_BATCH_CALLS:]
        news: list[BucketScope] = [] if self.is_up else [self._probe_scope]
        while self._changes and len(news) < _BATCH_CHANGES:
            scope = self._changes.popleft()
            if scope.is_waiting:
                news.append(scope)
        self._has_free_place = self._has_free_place and bool(self._changes)
        if not calls and not news:
            return
        batch = self._batch = LimitBatch(self._tag, calls, news)
        self._batch_called_at_s = self._called_at_s if calls else now_s
        leaked = (now_s - self._sent_at_s) * _BUSY_CALLS_PER_S
        self._load = min(_BUSY_CALLS_MAX, max(0.0, self._load - leaked) + len(calls) + len(news))
        self._sent_at_s = now_s
        self._valkey.send(batch.command())
        if not self._is_watched:
            self._is_watched = True
            self._loop.call_later(self._deadline_s, self._watch)

    def _refresh(self) -> None:
        """Renew the leases of all open requests."""
        held = [scope for scope in self._leased if scope.held]
        self._leased = set(held)
        self._refresh_timer = self._loop.call_later(_REFRESH_S, self._refresh)
        self.send_changes(held)

    # Failures.

    def _watch(self) -> None:
        """Watch the deadline of the batch in flight, with one timer for any number of calls."""
        now_s, batch = self._loop.time(), self._batch
        if batch is None:
            self._is_watched = False
            return
        due_s = self._batch_called_at_s + self._deadline_s
        if now_s >= due_s:
            if self.is_up and self._doubted is not batch:
                # The reply may have arrived while this event loop was late, so the loop reads once
                # more.
                self._doubted = batch
                self._loop.call_later(_DOUBT_S, self._watch)
                return
            if self.is_up:
                self._stall("no reply in time")
                self._release(batch.calls)
            due_s = self._sent_at_s + _DEAD_AFTER_S
            if now_s >= due_s:
                self._is_watched = False
                self._valkey.drop("no reply")
                return
        self._loop.call_later(due_s - now_s, self._watch)

    def _stall(self, reason: str) -> None:
        """Release all callers.

        No caller waits for Valkey again before a probe is answered in time.
        """
        if self.is_up:
            log.warning("limits_degraded", reason=reason)
        self.is_up = False
        calls, self._calls = self._calls, []
        self._release(calls)

    def _fail(self, reason: str, *, is_primary: bool = True) -> None:
        """Stall, and probe later after a pause that grows with recent failures."""
        self._stall(reason)
        now_s = self._loop.time()
        if now_s - self._failed_at_s > _HEALTHY_S:
            self._failures = 0
        pause_s = backoff_s(self._failures, first_s=_PROBE_FIRST_S, max_s=_PROBE_MAX_S)
        pause_s *= random.uniform(0.5, 1.0)  # noqa: S311 - spreads load
        self._failures += 1
        self._failed_at_s = now_s
        self._probe_timer = self._loop.call_later(pause_s, self._probe, reason, is_primary)

    def _probe(self, reason: str, is_primary: bool) -> None:
        if is_primary:
            self._send()
        else:
            self._valkey.drop(reason)

    def _answer(self, calls: Sequence[Call], verdicts: Iterable[Verdict]) -> None:
        leased = self._leased
        for verdict, (future, scopes, caps, tokens) in zip(verdicts, calls, strict=True):
            is_granted = not verdict[0]
            if future.done():
                if is_granted:
                    self._give_back(scopes, caps, tokens)
                continue
            if is_granted:
                # inlined from `hold`, which saves a call of Python per reservation
                for scope in scopes:
                    scope.held += 1
                    if scope.is_leased:
                        leased.add(scope)
            else:  # requests that began before the limit existed need a lease, too
                leased.update([it for it in scopes if it.is_leased and it.held])
            future.set_result(verdict)

    def _release(self, calls: Sequence[Call]) -> None:
        for future, _, _, _ in calls:
            if not future.done():
                future.set_result(None)

    def _give_back(self, scopes: Sequence[BucketScope], caps: Sequence[int], tokens: int) -> None:
        for scope, cap in zip(scopes, caps, strict=True):
            scope.give_back(min(tokens, cap))
        self.send_changes(scopes)


def _is_demotion(error: ResponseError) -> bool:
    return isinstance(error, _DEMOTIONS) or str(error).startswith(_TOO_FEW_REPLICAS)
