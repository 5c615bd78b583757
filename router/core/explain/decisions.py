"""What the router knew when it placed a request, kept as cheaply as it can be until it is wanted.

An explanation looks at every replica, so only some placements are explained in full: a sample,
and as often as `decision_pause_s` allows those of requests that are traced, late, or were placed
before. Of all others three numbers are kept that placement has at hand. They are told at the end of
requests that failed, and as often of those that were slow, evicted or interrupted, which under
overload may be all.
"""

from typing import Protocol

from router.core.cell import CellBook
from router.core.decide.placement import Choice
from router.core.explain import explain
from router.core.types.model import CoreConfig, Slot
from sluice.wire.router.v1 import router_pb2 as wire

_FAILED = (wire.OUTCOME_KIND_FAILED, wire.OUTCOME_KIND_LOST)


class Pause:
    """How often something may be told.

    Attributes:
        now: As of the last tick.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._next_at = float("-inf")
        self.now = 0.0

    def is_over(self) -> bool:
        """Return whether the pause is over; the next one begins then."""
        if self.now < self._next_at:
            return False
        self._next_at = self.now + self._pause_s
        return True


class Core(Protocol):
    """What is looked at of the router's core; `explained_at` is ours."""

    config: CoreConfig
    sequences: int
    explained_at: float


def remember(core: Core, cell: CellBook, slot: Slot, choice: Choice, now: float) -> None:
    """Keep what is known of a request that is about to be sent to a replica."""
    config, request = core.config, slot.request
    if config.decision_sample and core.sequences % config.decision_sample == 0:
        slot.decision = explain.decision(cell, request, choice, now)
        return
    is_notable = request.is_traced or request.is_late or request.attempts or request.preemptions
    if is_notable and now - core.explained_at >= config.decision_pause_s:
        core.explained_at = now
        slot.decision = explain.decision(cell, request, choice, now)
        return
    slot.known = (choice.cost_s, choice.book.backlog_s(now), cell.queue.requests)


def tell(slot: Slot, outcome: wire.Outcome, pause: Pause) -> None:
    """Say with the end of a request what was known of its placement, where that is of interest."""
    if slot.decision is not None:
        if not slot.is_placed:  # else the gateway was told with the placement
            outcome.decision.CopyFrom(slot.decision)
        return
    if slot.known is None:
        return
    request = slot.request
    is_slow = slot.first_at - request.arrived_at > request.objective_s > 0.0
    is_interrupted = request.attempts or request.preemptions
    is_notable = is_slow or is_interrupted or outcome.kind == wire.OUTCOME_KIND_EVICTED
    if outcome.kind in _FAILED or (is_notable and pause.is_over()):
        outcome.decision.CopyFrom(explain.recalled(slot, *slot.known))
