"""Late binding: what waits is bound to a replica when that can start on it soon."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from router.core.cell import CellBook, Readiness
from router.core.decide import disaggregation
from router.core.decide.placement import Choice
from router.core.explain import decisions
from router.core.queue.fair_queue import Tenant
from router.core.types.ending import Ending
from router.core.types.model import Actions, Request, Slot, State
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

if TYPE_CHECKING:
    from router.core.fleet.replica import ReplicaBook
    from router.core.router import RouterCore

_LOOK_AHEAD = 8  # requests behind one that no replica can hold now


def bind(core: "RouterCore", cell: CellBook, actions: Actions, now: float) -> None:
    """Dispatch in the queue's order while some replica's backlog is below its window."""
    queue = cell.queue
    cell.find_usual(now)
    cell.reprice_some()
    while queue.requests and _opens_at(cell, now) <= now:
        found = _next(core, cell, now)
        if found is None:
            break
        _dispatch(core, cell, *found, actions, now)
    if queue.requests:
        _preempt(core, cell, now)


def _preempt(core: "RouterCore", cell: CellBook, now: float) -> None:
    """Interrupt batch work for those that are next, as far as it helps."""
    victims: list[Slot] = []
    request = cell.queue.peek(now)
    for _ in range(_LOOK_AHEAD):
        if request is None:
            break
        found = cell.preemption.victims(cell, request, now)
        if not found and not cell.preemption.has_claim(request):
            break
        victims += found
        request = cell.queue.skip(request)
    for slot in victims:
        core.requests.preempt(slot, now)


def _opens_at(cell: CellBook, now: float) -> float:
    opens_at = cell.opens_at(now)
    return min(opens_at, disaggregation.opens_at(cell, now)) if cell.prefillers else opens_at


def _next(core: "RouterCore", cell: CellBook, now: float) -> tuple[Request, Choice] | None:
    """Return the first request that can be placed now; those that never can are ended."""
    queue = cell.queue
    request = queue.peek(now)
    looked = repriced = 0
    held: ReplicaBook | None = None
    while request is not None and looked < _LOOK_AHEAD:
        before = request.uncached_tokens
        matches = cell.look_up(request)
        if request.uncached_tokens > before and repriced < _LOOK_AHEAD:
            repriced += 1
            request = queue.peek(now)  # it cost more than was thought: another may be first now
            continue
        readiness = _readiness(cell, request, matches, now)
        if readiness is Readiness.PACED:
            return None
        choice = None
        if readiness is Readiness.READY:
            choice = _choose(core, cell, request, matches, held, now)
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
        if cell.is_gathered(request, now):
            return None
        if held is None:
            held = cell.held_for(request)
        looked += 1
        request = queue.skip(request)
    return None


def _readiness(
    cell: CellBook, request: Request, matches: Mapping[str, int], now: float
) -> Readiness:
    if cell.prefillers:
        return Readiness.READY  # its prompt can be computed where nobody decodes
    return cell.readiness(request, matches, now)


def _choose(
    core: "RouterCore",
    cell: CellBook,
    request: Request,
    matches: Mapping[str, int],
    held: "ReplicaBook | None",
    now: float,
) -> Choice | None:
    choice = cell.choose(request, matches, now, held=held)
    if choice is not None and cell.prefillers:
        return disaggregation.refine(core.handovers, cell, request, choice, now)
    return choice


def _dispatch(
    core: "RouterCore",
    cell: CellBook,
    request: Request,
    choice: Choice,
    actions: Actions,
    now: float,
) -> None:
    tenant = cell.queue.take(request, now)
    slot = occupy(core, cell, request, tenant, choice, now)
    if slot is not None:
        actions.dispatches.setdefault(slot.replica_id, []).append(slot)


def occupy(
    core: "RouterCore",
    cell: CellBook,
    request: Request,
    tenant: Tenant,
    choice: Choice,
    now: float,
) -> Slot | None:
    """Book a request on a replica; return what is to be sent there, None: its blocks come first."""
    book = choice.book
    core.sequences += 1
    if choice.is_split and request.output is None:
        request.output = []  # what the second replica goes on behind
    slot = Slot(request, tenant, book.replica_id, sequence=core.sequences, now=now)
    slot.is_placed = bool(request.prefilled_on)  # the gateway was told, and what was cached there
    request.slot = slot
    request.state = State.RUNNING
    decisions.remember(core, cell, slot, choice, now)
    output = 1 if choice.is_split else cell.output_expected(request)
    book.add(slot, output, choice.cached_tokens, now)
    if choice.is_split:
        slot.is_prefill = True
        slot.output_max = 1
    cell.dispatched(book, request, now)
    if request.prefilled_on and core.handovers.begin(cell, slot, choice.cached_tokens, now):
        return None
    return slot


def hand_over(core: "RouterCore", cell: CellBook, slot: Slot, now: float) -> None:
    """Let a request go on behind its first token, on a replica that decodes."""
    request = slot.request
    request.prefilled_on = slot.replica_id
    matches = cell.index.matches(request.hashes)
    choice = cell.choose(request, matches, now) if cell.is_owned else None
    if choice is None:
        core.requests.requeue(slot, now)
        return
    slot.is_open = False
    follower = occupy(core, cell, request, slot.tenant, choice, now)
    if follower is not None:
        core.handovers.ready.append(follower)
