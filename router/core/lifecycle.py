"""The life of requests: accepted, queued, run, requeued, and ended exactly once."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

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
_UNTOLD_MAX = 8  # of one request: it may be preempted again and again before it is placed
_LOOK_S = 1.0  # between two looks at requests that wait only briefly for a replica
MOVED_RETRY_S = 0.2  # the gateway's next snapshot names the new owner


class RequestLifecycle:
    """Moves the live requests of a router from acceptance to their single end.

    Attributes:
        live: Number of accepted requests that have not ended.
        cancels: Sequences to cancel, by replica; the core takes them at its tick.
        stats: Totals since the shell last took them.
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
        self._now = 0.0  # of the last tick
        self.live = 0
        self.cancels: dict[str, list[int]] = {}
        self.stats = Stats()

    # --- in ---------------------------------------------------------------------------------

    def stamp(self, gateway: ConnectedGateway, request: Request, now: float) -> None:
        """Set the arrival and the gateway of a request."""
        self._orders += 1
        request.order = self._orders
        request.gateway = gateway
        request.arrived_at = now
        request.deadline_at = now + request.longest_wait_s(self._config.deadline_default_s)

    def accept(self, request: Request, cell: CellBook, now: float) -> None:
        """Queue a stamped request; from now on it ends exactly once."""
        request.gateway.requests[request.handle] = request
        cell.enqueue(request, now)
        self.live += 1
        heappush(self._deadlines, (request.deadline_at, request.order, request))
        if request.absence_s:
            heappush(self._looks, (now, request.order, request))

    # --- back into the queue ----------------------------------------------------------------

    def retry(self, dispatch: Dispatch, code: ErrorCode | None, what: str, now: float) -> None:
        """Queue an open dispatch's request again if no token was emitted; end it otherwise.

        Without a code it is backpressure, which is no failure and has no limit but the deadline.
        `what` is the text that follows the replica's name.
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
                # The client sees this text, too; the dispatch names the replica.
                text = f"gave up after {request.attempts} attempts; last: the replica{what}"
                self.end(request, Ending(wire.OUTCOME_KIND_FAILED, code, text))
                return
        if code is not None or dispatch.is_placed:
            _interrupted(dispatch, code or "", message, now)
        self.requeue(dispatch, now)

    def preempt(self, dispatch: Dispatch, now: float) -> None:
        """Preempt an open dispatch's request: it continues later, behind its emitted tokens."""
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
        """Queue an open dispatch's request again, behind its emitted tokens."""
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

    # --- out --------------------------------------------------------------------------------

    def end(self, request: Request, ending: Ending) -> None:
        """Give a request its single outcome; its dispatch stays booked until the engine's end."""
        assert request.state is not RequestState.DONE, "a request ends once"
        if request.output:
            ending.output_tokens = len(request.output)  # of all its dispatches
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
        """End a waiting or running request with the given ending."""
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
        """Evict requests that miss their deadline, or wait too long for replicas."""
        self._now = now
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            request = heappop(deadlines)[2]
            if not _has_begun(request):
                self._evict(request, now)
        if len(deadlines) > 2 * self.live + 64:  # mostly of requests that have ended
            self._deadlines = _live(deadlines)
        self._look(now)

    def _look(self, now: float) -> None:
        """Evict requests whose wait for a cell without replicas is over."""
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
            message = f"no first token after {admission.told(waited_s)}; try again later"
        else:
            code = ErrorCode.NO_CAPACITY
            message = f"no replica was ready for {admission.told(waited_s)}; try again later"
        wait_s = admission.drain_s(cell, now)
        ending = Ending(wire.OUTCOME_KIND_EVICTED, code, message, retry_after_s=wait_s)
        self.withdraw(request, ending)

    def next_deadline(self) -> float:
        """Return when `expire` is due; inf: unknown."""
        return min(_next_at(self._deadlines), _next_at(self._looks))


def _has_begun(request: Request) -> bool:
    """Return whether a request has a first token, or has ended."""
    dispatch = request.dispatch
    return bool(request.is_done or request.output or (dispatch is not None and dispatch.emitted))


def _live(entries: list[tuple[float, int, Request]]) -> list[tuple[float, int, Request]]:
    """Return a heap without the requests that have ended."""
    left = [entry for entry in entries if not entry[2].is_done]
    heapify(left)
    return left


def _next_at(entries: list[tuple[float, int, Request]]) -> float:
    while entries and entries[0][2].is_done:
        heappop(entries)
    return entries[0][0] if entries else float("inf")


def _interrupted(dispatch: Dispatch, code: str, message: str, now: float) -> None:
    """Note for the gateway the end of a dispatch whose request goes on."""
    request = dispatch.request
    if request.prefilled_on:  # two replicas at one answer: the gateway knows of the first one
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
    """Return the ending of a request whose cell has a new owner: its gateway submits it there."""
    kind = wire.OUTCOME_KIND_LOST if emitted else wire.OUTCOME_KIND_EVICTED
    text = f"cell {cell_id} moved to another router; try again"
    return Ending(kind, ErrorCode.UNAVAILABLE, text, retry_after_s=MOVED_RETRY_S)
