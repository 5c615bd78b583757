"""Records the reasons of placements at a bounded rate.

A full explanation visits every replica. So only two kinds of placements are explained in full. The
first kind is a sample of all placements. The second kind is a placement of a traced, late or
retried request, at most one per `decision_pause_s`. For every other placement the router records
the predicted cost, the backlog and the queue length. These three figures are sent with the outcome
of every failed request. The outcomes of slow, evicted or interrupted requests also have these
figures, but only one per `decision_pause_s`, because under overload all requests may be slow.
"""

from router.core.cell import CellBook
from router.core.decide.placement import PlacementChoice
from router.core.explain import explain
from router.core.types.config import CoreConfig
from router.core.types.request import Dispatch
from sluice.wire.router.v1 import router_pb2 as wire

_FAILED = (wire.OUTCOME_KIND_FAILED, wire.OUTCOME_KIND_LOST)


class DecisionLog:
    """Explains placements at a bounded rate."""

    def __init__(self, config: CoreConfig) -> None:
        self._sample = config.decision_sample
        self._pause_s = config.decision_pause_s
        self._explained_at = float("-inf")
        self._told_at = float("-inf")

    def remember(
        self, cell: CellBook, dispatch: Dispatch, choice: PlacementChoice, now: float
    ) -> None:
        """Explain a placement before the dispatch is sent, or record its three figures."""
        request = dispatch.request
        if self._sample and dispatch.sequence % self._sample == 0:
            dispatch.decision = explain.decision(cell, request, choice, now)
            return
        is_notable = request.is_traced or request.is_late or request.attempts or request.preemptions
        if is_notable and now - self._explained_at >= self._pause_s:
            self._explained_at = now
            dispatch.decision = explain.decision(cell, request, choice, now)
            return
        dispatch.known = (choice.cost_s, choice.book.backlog_s(now), cell.queue.requests)

    def tell(self, dispatch: Dispatch, outcome: wire.Outcome, now: float) -> None:
        """Add the explanation of a placement to a failed, slow or interrupted request's outcome."""
        if dispatch.decision is not None:
            if not dispatch.is_placed:  # a placement already sent contains the explanation
                outcome.decision.CopyFrom(dispatch.decision)
            return
        if dispatch.known is None:
            return
        request = dispatch.request
        is_slow = dispatch.first_at - request.arrived_at > request.objective_s > 0.0
        is_interrupted = request.attempts or request.preemptions
        is_notable = is_slow or is_interrupted or outcome.kind == wire.OUTCOME_KIND_EVICTED
        if outcome.kind in _FAILED or (is_notable and self._may_log(now)):
            outcome.decision.CopyFrom(explain.recalled(dispatch, *dispatch.known))

    def _may_log(self, now: float) -> bool:
        if now - self._told_at < self._pause_s:
            return False
        self._told_at = now
        return True
