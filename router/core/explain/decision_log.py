"""Keeps the reasons of placements, as far as they are of interest.

A full explanation looks at every replica. So only some placements are explained in full: a sample,
and, as often as `decision_pause_s` allows, those of requests that are traced, late, or were placed
before. Of every other placement three numbers are kept. The gateway gets them at the end of failed
requests, and as often as the pause allows of slow, evicted or interrupted ones, which under
overload may be all.
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
        """Keep the figures of a request's placement before it is sent."""
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
        """Add the placement's figures to a request's end, where they are of interest."""
        if dispatch.decision is not None:
            if not dispatch.is_placed:  # else the gateway heard it with the placement
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
