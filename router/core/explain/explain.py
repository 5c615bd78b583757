"""Explains the state of a request, or the decision on a hypothetical request.

Explanations call the same functions as the decisions, and change no state. Functions that update
predictions run on a copy of the cell.
"""

from collections.abc import Sequence
from typing import Protocol

from router.core import cell_admission
from router.core.cell import CellBook
from router.core.decide import placement
from router.core.decide.placement import PlacementChoice
from router.core.fleet.replica import ReplicaBook
from router.core.handovers import Handovers
from router.core.types.config import CoreConfig
from router.core.types.request import ConnectedGateway, Dispatch, Request
from sluice.wire.router.v1 import router_pb2 as wire

_LONGEST_S = 4e6  # longest duration in 32-bit milliseconds, which also represents infinity


class ExplainedCore(Protocol):
    """The state of the router core that an explanation reads."""

    config: CoreConfig
    cells: dict[str, CellBook]
    gateways: dict[int, ConnectedGateway]
    handovers: Handovers
    is_draining: bool


def explain(core: ExplainedCore, what: str | Request, now: float) -> wire.Explanation:
    """Return the explanation of a request.

    Args:
        core: The router core's state, which is not changed.
        what: Id of a waiting or running request, or a hypothetical request. The hypothetical
            request is changed as if it arrived now, and must not be submitted.
        now: Time, in seconds.
    """
    if isinstance(what, Request):
        return _new(core, what, now)
    for gateway in core.gateways.values():
        for request in gateway.requests.values():
            if request.request_id == what:
                return _known(core, core.cells[request.cell_id], request, now)
    reason = "no request of this id waits or runs here; it may have ended"
    return wire.Explanation(request_id=what, state="unknown", reason=reason)


def decision(
    cell: CellBook, request: Request, choice: PlacementChoice, now: float
) -> wire.Explanation:
    """Return the full explanation of a placement before the dispatch is sent."""
    explanation = _outline(request, "placed", now)
    explanation.candidates.extend(candidates(cell, request, now))
    _tell_choice(explanation, request, choice)
    waiting = cell.queue.requests
    history = "; ".join(_history(request))
    explanation.reason = f"{history}; {explanation.reason}" if history else explanation.reason
    explanation.reason += f"; {waiting} other requests waited in its cell" if waiting else ""
    explanation.predicted_ttft_ms = _ms(_start_s(explanation))
    return explanation


def recalled(dispatch: Dispatch, cost_s: float, backlog_s: float, waiting: int) -> wire.Explanation:
    """Return a short explanation of a past placement, from its three recorded figures.

    Args:
        dispatch: The request's dispatch.
        cost_s: Predicted cost of the chosen replica, in seconds.
        backlog_s: Seconds of owed prefill on the chosen replica.
        waiting: Number of requests that remained in the cell's queue.
    """
    request = dispatch.request
    words = [
        *_history(request),
        f"least cost: {_shown(_us(cost_s))}; costs of the other replicas were not kept",
        f"{waiting} other requests waited in its cell",
    ]
    chosen = wire.Candidate(
        replica_id=dispatch.replica_id,
        cost_us=_us(cost_s),
        backlog_us=_us(backlog_s),
        cached_tokens=dispatch.cached_tokens,
    )
    return wire.Explanation(
        cell_id=request.cell_id,
        request_id=request.request_id,
        state="placed",
        chosen=dispatch.replica_id,
        candidates=[chosen],
        reason="; ".join(words),
    )


def candidates(cell: CellBook, request: Request, now: float) -> list[wire.Candidate]:
    """Return all replicas of a cell with their costs for a request, the best replica first.

    Replicas that can be sent the request precede excluded replicas. Among replicas of equal cost,
    placement chooses the first.
    """
    matches = cell.fleet.index.matches(request.hashes) if request.hashes else {}
    home = cell.fleet.sessions.home(request.session, now) if request.session else None
    waits_s = cell.fleet.adapter_waits_s(request.adapter) if request.adapter else {}
    output = cell.output_expected(request)
    is_shut = cell.fleet.opens_at(now) > now  # the next steps of all replicas are full
    rows: list[tuple[bool, float, wire.Candidate]] = []
    for book in (cell.fleet.open_replicas | cell.fleet.replicas).values():
        candidate = _candidate(cell, book)
        if book.limits is None:
            candidate.excluded_by = "not attached"
            rows.append((True, float("inf"), candidate))
            continue
        cached = placement.cached_tokens(book, request, matches)
        uncached = request.prompt_tokens - cached
        wait_s = waits_s.get(book.replica_id, 0.0)
        has_slot = wait_s < float("inf")
        wait_s = wait_s if has_slot else 0.0
        is_home = home == book.replica_id
        cost_s = placement.cost_s(
            book, cell.fleet.mean_speed, uncached, cached, wait_s, now, is_home=is_home
        )
        reason = placement.excluded_by(
            book, request, output, cached, is_only=len(cell.fleet.open_replicas) == 1
        )
        candidate.excluded_by = (
            reason or ("" if has_slot else "adapter") or ("window" if is_shut else "")
        )
        candidate.cost_us = _us(cost_s)
        candidate.backlog_us = _us(book.backlog_s(now))
        candidate.prefill_us = _us(book.prefill_s(uncached, cached))
        candidate.adapter_us = _us(wait_s)
        candidate.cached_tokens = cached
        candidate.is_session_home = is_home
        rows.append((bool(candidate.excluded_by), cost_s, candidate))
    rows.sort(key=lambda row: row[:2])
    return [candidate for _, _, candidate in rows]


def _candidate(cell: CellBook, book: ReplicaBook) -> wire.Candidate:
    state = cell.fleet.health.state(book.replica_id)
    words = [state.name.lower().replace("_", " "), cell.fleet.health.reason(book.replica_id)]
    return wire.Candidate(
        replica_id=book.replica_id,
        active=len(book.dispatches),
        kv_free_blocks=max(0, book.kv_free_blocks()),
        health=": ".join(word for word in words if word),
    )


def _outline(request: Request, state: str, now: float) -> wire.Explanation:
    return wire.Explanation(
        cell_id=request.cell_id,
        request_id=request.request_id,
        state=state,
        deadline_left_ms=_ms(request.deadline_at - now),
    )


def _known(core: ExplainedCore, cell: CellBook, request: Request, now: float) -> wire.Explanation:
    dispatch = request.dispatch
    if dispatch is None:
        explanation = _outline(request, "queued", now)
        explanation.candidates.extend(candidates(cell, request, now))
        own_s = cell.idle_prefill_s(request), cell.fleet.cold_load_s(request.adapter)
        _predict(explanation, cell, request, own_s, now)
        may_go = _choice(core, cell, request, now) is not None
        explanation.reason = _why_queued(explanation, cell, request, now, may_go=may_go)
        return explanation
    explanation = _outline(request, "running" if dispatch.emitted else "placed", now)
    explanation.chosen = dispatch.replica_id
    seen = "as they are now"
    if dispatch.decision is not None:
        explanation.candidates.extend(dispatch.decision.candidates)
        seen = "as they were when it was placed"
    else:
        explanation.candidates.extend(candidates(cell, request, now))
    if dispatch.emitted:
        explanation.deadline_left_ms = 0
    else:
        book = cell.fleet.replicas.get(dispatch.replica_id)
        explanation.predicted_ttft_ms = _ms(book.backlog_s(now) if book is not None else 0.0)
    explanation.reason = f"{_why_running(dispatch, now)}; replicas {seen}"
    return explanation


def _new(core: ExplainedCore, request: Request, now: float) -> wire.Explanation:
    """Explain the decision on a hypothetical request as if it arrived now."""
    request.arrived_at = now
    request.deadline_at = now + request.longest_wait_s(core.config.deadline_default_s)
    found = core.cells.get(request.cell_id)
    cell = None if found is None else found.aside()
    figures = None if cell is None else cell.price(request)
    rejection = cell_admission.rejection(
        request,
        cell,
        core.config,
        now,
        figures=figures,
        router_is_draining=core.is_draining,
    )
    explanation = _outline(request, "admitted" if rejection is None else "rejected", now)
    if cell is not None and figures is not None:
        explanation.candidates.extend(candidates(cell, request, now))
        own_s = figures.idle_prefill_s, figures.adapter_s
        _predict(explanation, cell, request, own_s, now)
    if rejection is not None:
        explanation.code = rejection.code or ""
        explanation.reason = rejection.message
        explanation.retry_after_ms = _ms(rejection.retry_after_s)
        return explanation
    assert cell is not None, "without a cell it is rejected"
    choice = None if explanation.requests_ahead else _choice(core, cell, request, now)
    if choice is None:
        explanation.reason = _why_queued(explanation, cell, request, now, may_go=False)
    else:
        _tell_choice(explanation, request, choice)
    return explanation


def _choice(
    core: ExplainedCore, cell: CellBook, request: Request, now: float
) -> PlacementChoice | None:
    """Return the placement of the request if it were next in the queue, or None if it must wait."""
    matches = cell.fleet.index.matches(request.hashes) if request.hashes else {}
    choice = cell.choose(request, matches, now)
    if choice is not None and cell.fleet.open_prefillers:
        return core.handovers.refine(cell, request, choice, now)
    return choice if cell.fleet.opens_at(now) <= now else None


def _predict(
    explanation: wire.Explanation,
    cell: CellBook,
    request: Request,
    own_s: tuple[float, float],
    now: float,
) -> None:
    demand = cell.demand(request, own_s, now)
    prediction = cell.predict(request, own_s, now)
    explanation.predicted_queue_ms = _ms(prediction.wait_s())
    explanation.predicted_ttft_ms = _ms(prediction.ttft_s())
    explanation.requests_ahead = demand.requests_ahead
    explanation.tokens_ahead = int(demand.tokens_ahead)


# --- explanations in words --------------------------------------------------------------------


def _may_start(found: Sequence[wire.Candidate]) -> bool:
    return bool(found) and not found[0].excluded_by


def _start_s(explanation: wire.Explanation) -> float:
    """Return the predicted seconds until the first token on the chosen replica."""
    chosen = _chosen(explanation)
    return (chosen.backlog_us + chosen.prefill_us + chosen.adapter_us) * 1e-6


def _chosen(explanation: wire.Explanation) -> wire.Candidate:
    return next(c for c in explanation.candidates if c.replica_id == explanation.chosen)


def _tell_choice(explanation: wire.Explanation, request: Request, choice: PlacementChoice) -> None:
    """Write the chosen replica, and the reason for the choice, into an explanation."""
    explanation.chosen = choice.book.replica_id
    chosen = _chosen(explanation)
    if choice.is_split:
        best = explanation.candidates[0].replica_id
        explanation.reason = (
            f"cheaper on two replicas: {explanation.chosen} computes the prompt,"
            f" the best of the others, now {best}, the answer"
        )
        return
    words = [f"least cost: {_shown(chosen.cost_us)}"]
    if request.prefilled_on:
        words.append(f"its prompt was computed on {request.prefilled_on}")
    if chosen.cached_tokens:
        words.append(f"{chosen.cached_tokens} prompt tokens are cached there")
    if chosen.is_session_home:
        words.append("its session was there")
    others = [
        other
        for other in explanation.candidates
        if not other.excluded_by and other.replica_id != explanation.chosen
    ]
    if others:
        words.append(f"next is {others[0].replica_id} with {_shown(others[0].cost_us)}")
    else:
        words.append("no other replica may take it")
    explanation.reason = "; ".join(words)


def _why_queued(
    explanation: wire.Explanation, cell: CellBook, request: Request, now: float, *, may_go: bool
) -> str:
    words = _history(request)
    if explanation.requests_ahead:
        words.append(
            f"about {explanation.requests_ahead} requests with {explanation.tokens_ahead} prompt"
            " tokens to compute are served before it"
        )
    if not _may_start(explanation.candidates):
        words.append(_why_none(explanation.candidates, cell, now))
    elif not (may_go or explanation.requests_ahead):
        words.append("the replicas that can take it are reserved for others at the moment")
    return "; ".join(words) or "it is next, and will be placed at once"


def _history(request: Request) -> list[str]:
    """Return sentences about earlier failures and preemptions of a request."""
    words: list[str] = []
    if request.attempts:
        words.append(f"{request.attempts} attempts failed, the last on {request.avoid}")
    if request.preemptions:
        words.append(f"it was interrupted {request.preemptions} times for a higher tier")
    return words


def _why_none(found: Sequence[wire.Candidate], cell: CellBook, now: float) -> str:
    """Return the reason why no replica can be sent a request now."""
    reasons = [candidate.excluded_by for candidate in found]
    if not reasons:
        return "its cell has no replicas"
    if "window" in reasons:
        opens_s = cell.fleet.opens_at(now) - now
        return f"all replicas are busy; the next takes more in {opens_s * 1000:.0f} ms"
    counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
    return f"no replica can take it: {counted}"


def _why_running(dispatch: Dispatch, now: float) -> str:
    waited_s = dispatch.dispatched_at - dispatch.request.arrived_at
    text = (
        f"sent to {dispatch.replica_id} {_shown(int(waited_s * 1e6))} after it came, with"
        f" {dispatch.cached_tokens} of {dispatch.prompt_tokens} prompt tokens cached"
    )
    if dispatch.emitted:
        return f"{text}; {dispatch.emitted} tokens so far"
    return f"{text}; its prefill takes {_shown(int((now - dispatch.dispatched_at) * 1e6))} already"


def _shown(micros: int) -> str:
    return f"{micros / 1e6:.2f} s" if micros >= 1_000_000 else f"{micros / 1e3:.1f} ms"


def _ms(seconds: float) -> int:
    return round(max(0.0, min(seconds, _LONGEST_S)) * 1000)


def _us(seconds: float) -> int:
    return round(max(0.0, min(seconds, _LONGEST_S)) * 1e6)
