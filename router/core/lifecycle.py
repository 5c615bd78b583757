"""Moves requests from acceptance through queue, dispatches and requeues to their single ending."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from router.core import cell_admission
from router.core.cell import CellBook
from router.core.decide import admission
from router.core.explain.decision_log import DecisionLog
from router.core.types.actions import Stats
from router.core.types.batch import wire_us
from router.core.types.config import CoreConfig
from router.core.types.ending import Ending, count
from router.core.types.request import ConnectedGateway, Dispatch, Request, RequestState
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

_REASON_MAX = 200
_UNTOLD_MAX = 8  # most stored interruptions per request until its gateway is sent a new placement
_LOOK_S = 1.0  # most seconds between two checks of a request whose wait for replicas is limited
MOVED_RETRY_S = 0.2  # seconds until the gateway's next snapshot names the cell's new owner


class RequestLifecycle:
    """Moves the live requests of a router from acceptance to their single outcome.

    Attributes:
        live: Number of accepted requests that have not ended.
        cancels: Sequences to cancel, by replica, which are sent and cleared at the core's next
            tick.
        stats: Totals since the last call of `RouterCore.take_stats`.
    """

    def __init__(
        self, config: CoreConfig, cells: Mapping[str, CellBook], decisions: DecisionLog
    ) -> None:
        self._config = config
        self._cells = cells
        self._decisions = decisions
        self._orders = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._looks: list[tuple[float, int, Request]] = []
        self._now = 0.0  # time of the last tick
        self.live = 0
        self.cancels: dict[str, list[int]] = {}
        self.stats = Stats()

    # --- acceptance -------------------------------------------------------------------------

    def stamp(self, gateway: ConnectedGateway, request: Request, now: float) -> None:
        """Set the arrival number, the gateway, and the deadline of a request."""
        self._orders += 1
        request.order = self._orders
        request.gateway = gateway
        request.arrived_at = now
        request.deadline_at = now + request.longest_wait_s(self._config.deadline_default_s)

    def accept(self, request: Request, cell: CellBook, now: float) -> None:
        """Queue a request that `stamp` has numbered. Every accepted request ends exactly once."""
        request.gateway.requests[request.handle] = request
        cell.enqueue(request, now)
        self.live += 1
        heappush(self._deadlines, (request.deadline_at, request.order, request))
        if request.absence_s:
            heappush(self._looks, (now, request.order, request))

    # --- back into the queue ----------------------------------------------------------------

    def retry(self, dispatch: Dispatch, code: ErrorCode | None, what: str, now: float) -> None:
        """Queue an open dispatch's request again, or end the request if tokens were emitted.

        Args:
            dispatch: The dispatch that ended without an answer.
            code: Error code of the failure, or None for backpressure. Backpressure does not count
                as an attempt, so such dispatches may be repeated until the deadline.
            what: Text that follows the replica's name in messages.
            now: Time, in seconds.
        """
        request = dispatch.request
        message = f"replica {dispatch.replica_id}{what}"
        if dispatch.emitted:
            kind = wire.OUTCOME_KIND_LOST
            emitted = dispatch.emitted
            self.end(
                request,
                Ending(kind, code or ErrorCode.ENGINE_BUSY, message, output_tokens=emitted),
            )
            return
        if code is not None:
            request.attempts += 1
            request.avoid = dispatch.replica_id
            if request.attempts > self._config.retries_max:
                # Clients can read this text, so it does not name the replica.
                text = f"gave up after {request.attempts} attempts; last: the replica{what}"
                self.end(request, Ending(wire.OUTCOME_KIND_FAILED, code, text))
                return
        if code is not None or dispatch.is_placed:
            _interrupted(dispatch, code or "", message, now)
        self.requeue(dispatch, now)

    def preempt(self, dispatch: Dispatch, now: float) -> None:
        """Preempt an open dispatch, and queue its request again with the emitted tokens."""
        assert dispatch.request.output is not None, "only preemptible requests keep their output"
        self.cancels.setdefault(dispatch.replica_id, []).append(dispatch.sequence)
        dispatch.request.preemptions += 1
        self.stats.preemptions += 1
        _interrupted(
            dispatch,
            "",
            f"replica {dispatch.replica_id}: interrupted for work of a higher tier",
            now,
        )
        self.requeue(dispatch, now)

    def requeue(self, dispatch: Dispatch, now: float) -> None:
        """Queue an open dispatch's request again, with the emitted tokens behind its prompt."""
        request = dispatch.request
        cell = self._cells[request.cell_id]
        if not cell.is_owned:
            self.end(request, moved(cell.cell_id, emitted=bool(request.output)))
            return
        dispatch.is_open = False
        request.dispatch = None
        request.state = RequestState.QUEUED
        cell.queue.push_front(request, now)
        cell.is_dirty = True
        self.stats.requeues += 1

    # --- endings ----------------------------------------------------------------------------

    def end(self, request: Request, ending: Ending) -> None:
        """Send a request's single outcome to its gateway.

        The dispatch stays in the replica's record until the engine reports its end.
        """
        assert request.state is not RequestState.DONE, "a request ends once"
        if request.output:
            ending.output_tokens = len(request.output)  # tokens of all dispatches of the request
        request.state = RequestState.DONE
        request.payload = None
        outcome = ending.outcome(request.handle)
        if request.untold is not None:
            outcome.before.extend(request.untold)
        if request.dispatch is not None:
            self._decisions.tell(request.dispatch, outcome, self._now)
            self._cells[request.cell_id].queue.settle(request.dispatch)
            request.dispatch.is_open = False
            request.dispatch = None
        self.live -= 1
        del request.gateway.requests[request.handle]
        request.gateway.batch.outcomes.append(outcome)
        count(ending, self.stats)

    def withdraw(self, request: Request, ending: Ending) -> None:
        """Remove a request from the queue, or cancel its sequence, and end the request."""
        dispatch = request.dispatch
        if dispatch is None:
            cell = self._cells[request.cell_id]
            cell.queue.remove(request)
            cell.is_dirty = True
        else:
            ending.output_tokens = dispatch.emitted
            self.cancels.setdefault(dispatch.replica_id, []).append(dispatch.sequence)
        self.end(request, ending)

    def expire(self, now: float) -> None:
        """Evict requests that missed their deadline, or waited too long for a ready replica."""
        self._now = now
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            request = heappop(deadlines)[2]
            if not _has_begun(request):
                self._evict(request, now)
        if len(deadlines) > 2 * self.live + 64:  # most entries belong to ended requests
            self._deadlines = _live(deadlines)
        self._look(now)

    def _look(self, now: float) -> None:
        """Evict requests that have waited for a ready replica longer than `Request.absence_s`."""
        looks = self._looks
        while looks and looks[0][0] <= now:
            request = heappop(looks)[2]
            if _has_begun(request):
                continue
            left_s = request.absence_s - self._cells[request.cell_id].fleet.absent_s(now)
            if left_s <= 0.0 and request.dispatch is None:
                self._evict(request, now)
            else:
                again_at = now + (min(left_s, _LOOK_S) if left_s > 0.0 else _LOOK_S)
                heappush(looks, (again_at, request.order, request))
        if len(looks) > 2 * self.live + 64:
            self._looks = _live(looks)

    def _evict(self, request: Request, now: float) -> None:
        cell = self._cells[request.cell_id]
        waited_s = now - request.arrived_at
        if request.prediction is not None:
            request.prediction.expired(waited_s)
        if cell.fleet.ready():
            code = ErrorCode.DEADLINE_EXCEEDED
            message = f"no first token after {admission.duration_text(waited_s)}; try again later"
        else:
            code = ErrorCode.NO_CAPACITY
            message = (
                f"no replica was ready for {admission.duration_text(waited_s)}; try again later"
            )
        wait_s = cell_admission.half_queue_s(cell, now)
        ending = Ending(wire.OUTCOME_KIND_EVICTED, code, message, retry_after_s=wait_s)
        self.withdraw(request, ending)

    def next_deadline(self) -> float:
        """Return the time at which `expire` is due, or inf if no request has a deadline."""
        return min(_next_at(self._deadlines), _next_at(self._looks))


def _has_begun(request: Request) -> bool:
    """Return whether a request has its first token, or has ended."""
    dispatch = request.dispatch
    return bool(request.is_done or request.output or (dispatch is not None and dispatch.emitted))


def _live(entries: list[tuple[float, int, Request]]) -> list[tuple[float, int, Request]]:
    """Return the heap without the entries of ended requests."""
    left = [entry for entry in entries if not entry[2].is_done]
    heapify(left)
    return left


def _next_at(entries: list[tuple[float, int, Request]]) -> float:
    while entries and entries[0][2].is_done:
        heappop(entries)
    return entries[0][0] if entries else float("inf")


def _interrupted(dispatch: Dispatch, code: str, message: str, now: float) -> None:
    """Record, for the gateway, the end of a dispatch whose request is still live."""
    request = dispatch.request
    if request.prefilled_on:  # the gateway was only sent the prefill replica of this split request
        return
    arrived_at = request.arrived_at
    untold = request.untold = request.untold or []
    if len(untold) < _UNTOLD_MAX:
        request.interrupted += 1
    else:
        untold.pop()
    untold.append(
        wire.Interruption(
            replica_id=dispatch.replica_id,
            code=code,
            reason=message[:_REASON_MAX],
            queue_us=wire_us(dispatch.dispatched_at - arrived_at),
            ended_us=wire_us(now - arrived_at),
        )
    )


def moved(cell_id: str, *, emitted: bool) -> Ending:
    """Return the ending of a request whose cell has a new owner.

    The gateway submits the request again, to the new owner.
    """
    kind = wire.OUTCOME_KIND_LOST if emitted else wire.OUTCOME_KIND_EVICTED
    text = f"cell {cell_id} moved to another router; try again"
    return Ending(kind, ErrorCode.UNAVAILABLE, text, retry_after_s=MOVED_RETRY_S)
