"""Late binding: what waits is bound to a replica when that can start on it soon."""

from typing import TYPE_CHECKING

from router.core import explain
from router.core.cell_book import CellBook
from router.core.model import Actions, Request, Slot, State
from router.core.outcomes import Ending
from router.core.placement import Choice
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

if TYPE_CHECKING:
    from router.core.router import RouterCore

_LOOK_AHEAD = 8  # requests behind one that no replica can hold now


def bind(core: "RouterCore", cell: CellBook, actions: Actions, now: float) -> None:
    """Dispatch in the queue's order while some replica's backlog is below its window."""
    queue = cell.queue
    cell.reprice_some()
    while queue.requests and cell.opens_at(now) <= now:
        found = _next(core, cell, now)
        if found is None:
            break
        _dispatch(core, cell, *found, actions, now)
    if queue.requests:
        head = queue.peek(now)
        if head is not None:
            for slot in cell.preemption.victims(cell, head, now):
                core.requests.preempt(slot, now)


def _next(core: "RouterCore", cell: CellBook, now: float) -> tuple[Request, Choice] | None:
    """Return the first request that can be placed now; those that never can are ended."""
    queue = cell.queue
    request = queue.peek(now)
    looked = repriced = 0
    while request is not None and looked < _LOOK_AHEAD:
        before = request.uncached_tokens
        choice = cell.place(request, now)
        if request.uncached_tokens > before and repriced < _LOOK_AHEAD:
            repriced += 1
            request = queue.peek(now)  # it cost more than was thought: another may be first now
            continue
        if choice is not None:
            return request, choice
        longest = cell.prompt_tokens_max
        if longest is not None and request.prompt_tokens > longest:
            following = queue.skip(request)
            text = f"the prompt has {request.prompt_tokens} tokens, {longest} fit; shorten it"
            code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
            core.requests.withdraw(request, Ending(wire.OUTCOME_KIND_EVICTED, code, text))
            request = following
            continue
        looked += 1
        request = queue.skip(request)
    return None


def _dispatch(
    core: "RouterCore",
    cell: CellBook,
    request: Request,
    choice: Choice,
    actions: Actions,
    now: float,
) -> None:
    book = choice.book
    tenant = cell.queue.take(request, now)
    core.sequences += 1
    slot = Slot(request, tenant, book.replica_id, sequence=core.sequences, now=now)
    request.slot = slot
    request.state = State.RUNNING
    sample = core.config.decision_sample
    if sample and core.sequences % sample == 0:
        slot.decision = explain.decision(cell, request, book, now)
    book.add(slot, cell.output_expected(request), choice.cached_tokens, now)
    cell.dispatched(book, request, now)
    actions.dispatches.setdefault(book.replica_id, []).append(slot)
