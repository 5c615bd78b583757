"""Decides which share of an overloaded tier's requests gateways forward to a cell. Pure.

Before the router can refuse a request, the gateway has tokenized the whole prompt. So while most
requests of a tier are refused, the router sends a gate to the gateways. The gate is the share of
the tier's requests to forward. Gateways refuse the other requests before any work on them.

The share is set so that about twice as many requests are forwarded as the cell can admit. The
router still refuses half of them. So its queue stays as long as the tier's deadline permits, and no
replica idles. A gate opens fully as soon as a request at the end of the queue would meet its
deadline.
"""

from collections.abc import Iterator
from math import exp

from router.core.cell import CellBook
from router.core.decide.forecast import bounded_retry_s, service_s
from router.core.types.request import Request
from sluice.wire.router.v1 import router_pb2 as wire

# Intended share of admitted requests among the forwarded requests. The other half is a margin,
# because only admission can decide which request is short enough.
_FITTING = 0.5
# A tier is saturated if at most `_SATURATED` of its requests were admitted during `_WINDOW_S`.
_WINDOW_S = 1.0  # time constant of the counts, and least age of an open gate, in seconds
_SATURATED = 0.25
_SEEN_MIN = 8  # least requests in the window, because fewer are too small a sample
# Samples of the intended share that each decrease is mixed with, so that one refusal among few
# requests changes little.
_PRIOR = 2.0
_STEP_S = 0.25  # least seconds between two changes of a share
_FALL_MAX, _RISE = 2.0, 4.0  # the largest factor of a decrease, and that of an increase
_LEAST = 1 / 64  # least share, so that some requests always test whether there is room
_TENANTS_MAX = 32  # most tenants of a cell with separate gates, while others share one per tier
_FORGOTTEN_S = 5.0  # seconds after the last refusal until an open gate is deleted
_OPENING = 0.75  # part of the deadline that the predicted wait must not exceed for a gate to open


class GateShare:
    """The gate of a tier, or of one tenant within a tier.

    Attributes:
        share: Share of the requests that gateways forward.
        refused_at: Time of the last refusal.
        retry_at: Time at which the last refused request should be retried.
        admission_s: Deadline of the tier, in seconds.
        reserved_permille: Share of the cell that is reserved for the tier.
    """

    __slots__ = (
        *("_at", "_came", "_changed_at", "_fitted", "_open_since", "admission_s", "refused_at"),
        *("reserved_permille", "retry_at", "share"),
    )

    def __init__(self, now: float) -> None:
        self.share = 1.0
        self.admission_s = 0.0
        self.reserved_permille = 0
        self.refused_at = self.retry_at = now
        self._at = self._changed_at = self._open_since = now
        self._came = self._fitted = 0.0  # arrived and admitted requests, decaying over time

    def refused(self, request: Request, retry_after_s: float, now: float) -> None:
        """Record a refused request."""
        self._fade(now)
        self._came += 1.0
        self.refused_at, self.retry_at = now, now + retry_after_s
        self.admission_s = request.admission_s
        self.reserved_permille = request.reserved_permille

    def fitted(self) -> None:
        """Record an admitted request."""
        self._came += 1.0
        self._fitted += 1.0

    def _fade(self, now: float) -> None:
        kept = exp((self._at - now) / _WINDOW_S)
        self._came, self._fitted, self._at = kept * self._came, kept * self._fitted, now

    def is_saturated(self, now: float) -> bool:
        """Return whether an open gate must start to limit requests."""
        return (
            self.share == 1.0
            and now - self._open_since >= _WINDOW_S
            and self._came >= _SEEN_MIN
            and self._fitted <= _SATURATED * self._came
        )

    def step(self, now: float) -> None:
        """Adjust the share by the recent requests, at most every `_STEP_S`."""
        self._fade(now)
        is_closing = self.is_saturated(now)
        # Where no request tests whether there is room, a share rises only after a second.
        pause_s = _STEP_S if self._came else _WINDOW_S
        if not is_closing and (self.share == 1.0 or now - self._changed_at < pause_s):
            return
        fitting = (self._fitted + _FITTING * _PRIOR) / (self._came + _PRIOR)
        least = 0.0 if is_closing else 1 / _FALL_MAX
        factor = max(fitting / _FITTING, least)
        if self._fitted > _FITTING * self._came or not self._came:
            factor = _RISE  # at once, because room comes in lumps that last for a few steps
        self.share = min(max(self.share * factor, _LEAST), 1.0)
        self._changed_at = now
        self._came = self._fitted = 0.0  # counts of an earlier share say nothing of the new one
        if self.share == 1.0:
            self._open_since = now

    def open(self, now: float) -> None:
        """Open the gate, so that gateways forward all requests."""
        self.share = 1.0
        self._came = self._fitted = 0.0
        self._changed_at = self._open_since = now


class TierGates:
    """The gates of one cell."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        # By priority and tenant id, which is empty for all tenants without a separate gate.
        self._shares: dict[tuple[int, str], GateShare] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no gate exists, because no request was refused recently."""
        return not self._shares

    def refused(self, request: Request, retry_after_s: float, now: float) -> bool:
        """Record a refused request, and return whether to send gateways the gates at once."""
        if not _counts(request):
            return False
        key = (request.priority, request.tenant_id)
        found = self._shares.get(key)
        if found is None:
            if len(self._shares) >= _TENANTS_MAX:
                key = (request.priority, "")
            found = self._shares.setdefault(key, GateShare(now))
        found.refused(request, retry_after_s, now)
        return found.is_saturated(now)

    def fitted(self, request: Request) -> None:
        """Record an admitted request."""
        if not _counts(request):
            return
        shares, priority = self._shares, request.priority
        found = shares.get((priority, request.tenant_id)) or shares.get((priority, ""))
        if found is not None:
            found.fitted()

    def messages(self, cell: CellBook, gateways: int, now: float) -> Iterator[wire.TierGate]:
        """Adjust the shares, and yield the messages for all gates that are not fully open.

        Args:
            cell: The cell.
            gateways: Number of gateways, each of which computes retry times independently.
            now: Time, in seconds.
        """
        if not self._shares:
            return
        each_s = service_s(cell.supply(now), cell.uncached_mean)
        for key, found in list(self._shares.items()):
            if found.share < 1.0 and _has_room(cell, key[0], found, now):
                found.open(now)
            found.step(now)
            if found.share == 1.0:
                if now - found.refused_at >= _FORGOTTEN_S:
                    del self._shares[key]
                continue
            yield wire.TierGate(
                priority=key[0],
                tenant_id=key[1],
                passing_permille=max(1, round(1000 * found.share)),
                retry_ms=max(0, int(1000 * (found.retry_at - now))),
                service_us=min(int(1e6 * each_s * max(1, gateways)), 1 << 31),
            )

    def turned_away(self, priority: int, requests: int, cell: CellBook, now: float) -> None:
        """Postpone the retry times of later refusals behind the retries that gateways promised."""
        taken_s = requests * service_s(cell.supply(now), cell.uncached_mean)
        retry_s = cell.forecast.promises.retry_after_s(priority, 0.0, taken_s, now) + taken_s
        retry_at = now + bounded_retry_s(retry_s)
        for (of_priority, _), found in self._shares.items():
            if of_priority == priority:
                found.retry_at = max(found.retry_at, retry_at)


def _counts(request: Request) -> bool:
    """Return whether a gate applies to a request.

    Gateways refuse only because of the tier's deadline, and never a request with a begun answer.
    """
    return request.admission_s > 0.0 and not request.is_begun


def _has_room(cell: CellBook, priority: int, gate: GateShare, now: float) -> bool:
    """Return whether a request at the end of the queue would meet the tier's deadline."""
    queue = cell.queue
    if not queue.requests:
        return True
    forecast = cell.forecast
    wait_s = forecast.wait_s(
        cell.supply(now),
        (queue.requests, queue.tokens),
        priority=priority,
        reserved_permille=gate.reserved_permille,
        now=now,
    )
    mean = cell.uncached_mean
    correction = forecast.accuracy(round(mean), mean).correction()
    return wait_s * correction <= _OPENING * gate.admission_s
