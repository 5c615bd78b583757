"""Decides which share of a tier's requests gateways let through while most are refused; pure.

A refusal at the router costs the gateway a whole prompt's tokens. So gateways hear of tiers whose
requests are mostly refused, and refuse a part of them before any work. The router sees only the
requests that come through. It lets twice as many through as it has room for: half of them are still
refused here, so its queue stays as long as the tier's deadline allows, and no replica waits for
work. The share opens at once when a request behind all that waits would be in time.
"""

from collections.abc import Iterator
from math import exp

from router.core.cell import CellBook
from router.core.decide.forecast import bounded_retry_s, service_s
from router.core.types.request import Request
from sluice.wire.router.v1 import router_pb2 as wire

# Of the requests that gateways let through, so many shall find room. The rest is the margin: a
# gate never knows better than admission which request is short enough.
_FITTING = 0.5
# A tier is saturated once, for as long as this, no more than so many of its requests found room.
_WINDOW_S = 1.0
_SATURATED = 0.25
_SEEN_MIN = 8  # requests in the window: fewer say nothing
_STEP_S = 0.25  # between two changes of a share
_FALL_MAX, _RISE_MAX = 2.0, 4.0  # factors by which a share changes at once
_LEAST = 1 / 64  # one request in so many is let through in any case, to see when there is room
_TENANTS_MAX = 32  # of a cell, told apart; all others of a tier have one gate
_FORGOTTEN_S = 5.0  # after the last refusal, an open gate is forgotten
_OPENING = 0.75  # of its deadline: a request that would wait no longer than that finds room


class GateShare:
    """The gate of a tier, or of one tenant in it.

    Attributes:
        share: Share of the requests that gateways let through.
        refused_at: Time of the last refusal.
        retry_at: Time at which a request that was refused last may come again.
        admission_s: Deadline of the tier, in seconds.
        reserved_permille: Share of the cell that the tier gets at least.
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
        self._came = self._fitted = 0.0  # in the window, which fades

    def refused(self, request: Request, retry_after_s: float, now: float) -> None:
        """Count a request without room."""
        self._fade(now)
        self._came += 1.0
        self.refused_at, self.retry_at = now, now + retry_after_s
        self.admission_s = request.admission_s
        self.reserved_permille = request.reserved_permille

    def fitted(self) -> None:
        """Count a request that found room."""
        self._came += 1.0
        self._fitted += 1.0

    def _fade(self, now: float) -> None:
        kept = exp((self._at - now) / _WINDOW_S)
        self._came, self._fitted, self._at = kept * self._came, kept * self._fitted, now

    def is_saturated(self, now: float) -> bool:
        """Return whether an open gate is to be closed."""
        return (
            self.share == 1.0
            and now - self._open_since >= _WINDOW_S
            and self._came >= _SEEN_MIN
            and self._fitted <= _SATURATED * self._came
        )

    def step(self, now: float) -> None:
        """Change the share by the requests that came of late."""
        self._fade(now)
        is_closing = self.is_saturated(now)
        if not is_closing and (self.share == 1.0 or now - self._changed_at < _STEP_S):
            return
        fitting = self._fitted / self._came if self._came >= 1.0 else 1.0
        least = 0.0 if is_closing else 1 / _FALL_MAX
        factor = min(max(fitting / _FITTING, least), _RISE_MAX)
        self.share = min(max(self.share * factor, _LEAST), 1.0)
        self._changed_at = now
        if self.share == 1.0:
            self._open_since = now

    def open(self, now: float) -> None:
        """Let everything through."""
        self.share = 1.0
        self._came = self._fitted = 0.0
        self._changed_at = self._open_since = now


class TierGates:
    """The gates of one cell."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[tuple[int, str], GateShare] = {}  # by priority and tenant, "": others

    @property
    def is_empty(self) -> bool:
        """Whether no refusal is remembered."""
        return not self._shares

    def refused(self, request: Request, retry_after_s: float, now: float) -> bool:
        """Count a request without room; return whether gateways should hear of it at once."""
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
        """Count a request that found room."""
        if not _counts(request):
            return
        shares, priority = self._shares, request.priority
        found = shares.get((priority, request.tenant_id)) or shares.get((priority, ""))
        if found is not None:
            found.fitted()

    def told(self, cell: CellBook, gateways: int, now: float) -> Iterator[wire.TierGate]:
        """Change the shares, and yield the gates that are not open.

        Args:
            cell: The cell.
            gateways: Number of gateways; each promises retries by itself.
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
        """Promise retries behind requests that gateways refused."""
        taken_s = requests * service_s(cell.supply(now), cell.uncached_mean)
        retry_s = cell.forecast.promises.retry_after_s(priority, 0.0, taken_s, now) + taken_s
        retry_at = now + bounded_retry_s(retry_s)
        for (of_priority, _), found in self._shares.items():
            if of_priority == priority:
                found.retry_at = max(found.retry_at, retry_at)


def _counts(request: Request) -> bool:
    """Return whether a gateway could have refused a request: by the deadline of its tier alone."""
    return request.admission_s > 0.0 and not request.is_begun


def _has_room(cell: CellBook, priority: int, gate: GateShare, now: float) -> bool:
    """Return whether a request would be in time behind all that waits."""
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
