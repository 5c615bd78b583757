"""Invariants of the router core, which tests and simulations check after every event."""

from collections.abc import KeysView

from router.core.cell import CellBook
from router.core.decide.placement import ROUNDED_S
from router.core.router import RouterCore
from router.core.types.plan import ReplicaRole
from router.core.types.request import RequestState


def check(core: RouterCore) -> None:
    """Assert every invariant of the core, by visiting every cell, replica and request."""
    live = {
        id(request): request
        for gateway in core.gateways.values()
        for request in gateway.requests.values()
    }
    assert len(live) == core.live_requests, "every accepted request is some gateway's, or over"
    queued = sum(_check_cell(core, cell, live.keys()) for cell in core.cells.values())
    running = _check_replicas(core)
    assert queued + running == len(live), "a request waits or runs"


def _check_cell(core: RouterCore, cell: CellBook, live: KeysView[int]) -> int:
    """Assert the invariants of a cell, and return the number of its waiting requests."""
    waiting = cell.queue.waiting()
    assert cell.queue.requests == len(waiting)
    assert cell.queue.tokens == sum(request.prompt_tokens for request in waiting)
    for request in waiting:
        assert request.state is RequestState.QUEUED
        assert request.dispatch is None
        assert id(request) in live
    limits = [book.limits for book in cell.fleet.replicas.values() if book.limits is not None]
    longest = max((entry.prompt_tokens_max for entry in limits), default=None)
    assert cell.fleet.prompt_tokens_max == longest
    assert cell.is_owned or not waiting, "nothing waits for a cell that moved away"
    for replica_id, book in cell.fleet.replicas.items():
        assert core.replicas[replica_id] is book
        is_prefiller = book.role is ReplicaRole.PREFILL
        assert (replica_id in cell.fleet.open_replicas) == (book.may_take and not is_prefiller)
        assert (replica_id in cell.fleet.open_prefillers) == (book.may_take and is_prefiller)
    assert list(cell.fleet.owed_until) == list(cell.fleet.open_replicas)
    for replica_id, owed_until in cell.fleet.owed_until.items():
        engine_model = cell.fleet.open_replicas[replica_id].engine_model
        assert engine_model.is_idle or owed_until <= engine_model.owed_until + ROUNDED_S
    return len(waiting)


def _check_replicas(core: RouterCore) -> int:
    """Assert the invariants of all replicas, and return the number of running live requests."""
    running = 0
    for book in core.replicas.values():
        assert book.limits is not None or not book.dispatches, (
            "only an attached replica holds dispatches"
        )
        if book.limits is not None:
            assert len(book.dispatches) <= book.limits.sequences_max, "more than a replica holds"
        book.check()
        for sequence, dispatch in book.dispatches.items():
            assert dispatch.sequence == sequence
            if dispatch.is_open:
                running += 1
                assert dispatch.request.dispatch is dispatch
                assert dispatch.request.state is RequestState.RUNNING
    return running
