"""Dispatches waiting requests as late as possible, when a replica can start them soon."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from router.core.cell import CellBook, CellReadiness
from router.core.decide.placement import PlacementChoice
from router.core.explain.decision_log import DecisionLog
from router.core.handovers import Handovers
from router.core.lifecycle import RequestLifecycle
from router.core.types.account import ServiceAccount
from router.core.types.actions import Actions
from router.core.types.ending import Ending
from router.core.types.request import Dispatch, Request, RequestState
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

if TYPE_CHECKING:
    from router.core.fleet.replica import ReplicaBook

_LOOK_AHEAD = 8  # queued requests examined when the first request fits on no replica


class QueueDispatcher:
    """Dispatches queued requests to replicas, and assigns sequence numbers.

    Attributes:
        sequences: The last assigned sequence number.
    """

    def __init__(
        self, lifecycle: RequestLifecycle, handovers: Handovers, decisions: DecisionLog
    ) -> None:
        self._lifecycle = lifecycle
        self._handovers = handovers
        self._decisions = decisions
        self.sequences = 0

    def bind(self, cell: CellBook, actions: Actions, now: float) -> None:
        """Dispatch requests in the queue's order while the next step of a replica has room."""
        queue = cell.queue
        cell.renew_mean_speed(now)
        while queue.requests and _opens_at(cell, now) <= now:
            found = self._next(cell, now)
            if found is None:
                break
            request, choice = found
            account = queue.take(request, now)
            dispatch = self._book(cell, request, account, choice, now)
            if dispatch is not None:
                actions.dispatches.setdefault(dispatch.replica_id, []).append(dispatch)
        if queue.requests:
            self._preempt(cell, now)

    def hand_over(self, cell: CellBook, dispatch: Dispatch, now: float) -> None:
        """Dispatch a split request, after its first token, to a replica that decodes."""
        request = dispatch.request
        request.prefilled_on = dispatch.replica_id
        matches = cell.fleet.index.matches(request.hashes)
        choice = cell.choose(request, matches, now) if cell.is_owned else None
        if choice is None:
            self._lifecycle.requeue(dispatch, now)
            return
        dispatch.is_open = False
        follower = self._book(cell, request, dispatch.account, choice, now)
        if follower is not None:
            self._handovers.ready.append(follower)

    def _preempt(self, cell: CellBook, now: float) -> None:
        """Preempt batch work for the next queued requests, where a preemption speeds them up."""
        victims: list[Dispatch] = []
        request = cell.queue.peek(now)
        for _ in range(_LOOK_AHEAD):
            if request is None:
                break
            found = cell.victims(request, now)
            if not found and not cell.makes_room_for(request):
                break
            victims += found
            request = cell.queue.skip(request)
        for dispatch in victims:
            self._lifecycle.preempt(dispatch, now)

    def _next(self, cell: CellBook, now: float) -> tuple[Request, PlacementChoice] | None:
        """Return the first request that can be placed now, and evict unplaceable requests."""
        queue = cell.queue
        request = queue.peek(now)
        looked = repriced = 0
        held: ReplicaBook | None = None
        full: set[str] = set()  # tenants whose next request finds no free KV memory
        while request is not None and looked < _LOOK_AHEAD:
            if request.tenant_id in full:  # further requests of this tenant would not fit either
                looked += 1
                request = queue.skip(request)
                continue
            before = request.uncached_tokens
            matches = cell.look_up(request)
            if request.uncached_tokens > before and repriced < _LOOK_AHEAD:
                repriced += 1
                request = queue.peek(now)  # the cost rose, so another request may be first now
                continue
            readiness = _readiness(cell, request, matches, now)
            if readiness is CellReadiness.PACED:
                return None
            if readiness is CellReadiness.READY:
                choice = self._chosen(cell, request, matches, held, now)
                if choice is not None:
                    return request, choice
            longest = cell.fleet.prompt_tokens_max
            if longest is not None and request.prompt_tokens > longest:
                following = queue.skip(request)
                self._lifecycle.withdraw(request, _too_long(request, longest))
                request = following
                continue
            if cell.is_gathered(request, now):
                return None
            kept = cell.held_for(request)
            if kept is not None:
                full.add(request.tenant_id)
            held = kept if held is None else held
            looked += 1
            request = queue.skip(request)
        return None

    def _chosen(
        self,
        cell: CellBook,
        request: Request,
        matches: Mapping[str, int],
        held: "ReplicaBook | None",
        now: float,
    ) -> PlacementChoice | None:
        """Return the placement of a request, or None if no replica except `held` has room."""
        choice = cell.choose(request, matches, now, held=held)
        return None if choice is None else self._handovers.refine(cell, request, choice, now)

    def _book(
        self,
        cell: CellBook,
        request: Request,
        account: ServiceAccount,
        choice: PlacementChoice,
        now: float,
    ) -> Dispatch | None:
        """Record a dispatch on a replica, and return it if it is to be sent now.

        The result is None if KV blocks must be transferred to the replica first.
        """
        book = choice.book
        self.sequences += 1
        if choice.is_split and request.output is None:
            request.output = []  # the decode replica continues after these tokens
        dispatch = Dispatch(request, account, book.replica_id, sequence=self.sequences, now=now)
        # The gateway was already sent the placement on the prefill replica.
        dispatch.is_placed = bool(request.prefilled_on)
        request.dispatch = dispatch
        request.state = RequestState.RUNNING
        self._decisions.remember(cell, dispatch, choice, now)
        output = 1 if choice.is_split else cell.output_expected(request)
        book.add(dispatch, output, choice.cached_tokens, now)
        if choice.is_split:
            dispatch.is_prefill = True
            dispatch.output_max = 1
        cached = choice.cached_tokens
        cell.dispatched(book, request, cached, now)
        if request.prefilled_on and self._handovers.begin(cell, dispatch, cached, now):
            return None
        return dispatch


def _too_long(request: Request, longest: int) -> Ending:
    text = f"the prompt has {request.prompt_tokens} tokens, {longest} fit; shorten it"
    return Ending(wire.OUTCOME_KIND_EVICTED, ErrorCode.CONTEXT_LENGTH_EXCEEDED, text)


def _opens_at(cell: CellBook, now: float) -> float:
    fleet = cell.fleet
    opens_at = fleet.opens_at(now)
    return min(opens_at, fleet.prefillers_open_at(now)) if fleet.open_prefillers else opens_at


def _readiness(
    cell: CellBook, request: Request, matches: Mapping[str, int], now: float
) -> CellReadiness:
    if cell.fleet.open_prefillers:
        return CellReadiness.READY  # a prefill replica can compute the prompt
    return cell.readiness(request, matches, now)
