"""Reads the figures of a cell for admission, and records what admission decided.

`router.core.decide.admission` decides. Most requests are settled by the figures of
`CellBook.price`, so a costlier figure is only read when a decision needs it.
"""

from router.core.cell import CellBook
from router.core.decide import admission
from router.core.decide.admission import AdmissionFigures, Refusal, RetryTime
from router.core.decide.forecast import bounded_retry_s, queue_wait_s, service_s
from router.core.types.config import CoreConfig
from router.core.types.ending import Ending
from router.core.types.request import Request
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

_REJECTED = wire.OUTCOME_KIND_REJECTED


def rejection(
    request: Request,
    cell: CellBook | None,
    config: CoreConfig,
    now: float,
    *,
    figures: AdmissionFigures | None,
    router_is_draining: bool,
) -> Ending | None:
    """Return the ending of a request that is refused, or None if the request is admitted.

    The ending has a predicted retry time, unless the request alone causes the refusal, so that no
    retry can succeed. The call changes no state except data for later predictions. `figures` come
    from `CellBook.price`, and are None if the cell is unknown.
    """
    if router_is_draining or cell is None or not cell.is_owned:
        door = admission.refused_at_the_door(request.cell_id, router_is_draining=router_is_draining)
        return Ending(_REJECTED, door.code, door.message, retry_after_s=door.wait_s)
    assert figures is not None, "a request of a known cell has its price"
    forecast, priority, prediction = cell.forecast, request.priority, None
    forecast.seen(priority, now)
    refusal = admission.over_limits(request, figures, config)
    if refusal is None and admission.is_crowded(request, figures, config):
        refusal = _over_queue_limit(request, cell, figures, config, now)
    if refusal is None and admission.may_be_late(request, figures):
        supply = cell.supply(now)
        limit_s = admission.deadline_s(request, config)
        is_settled = not supply.replicas or (
            not admission.is_sampled(request, figures)
            and forecast.is_surely_in_time(
                request,
                supply,
                (figures.queue_requests, figures.queue_tokens),
                figures.idle_prefill_s,
                limit_s,
                uncached_mean=cell.uncached_mean,
                now=now,
            )
        )
        if not is_settled:
            own_s = figures.idle_prefill_s, figures.adapter_s
            prediction = cell.predict(request, own_s, now)
            refusal = admission.too_late(request, figures, config, prediction.ttft_s())
            is_spared = refusal and forecast.is_top(priority) and cell.runs_below(priority, now)
            if refusal is not None and not is_spared:
                taken_s = service_s(supply, request.uncached_tokens)
                wait_s = forecast.promises.retry_after_s(priority, refusal.wait_s, taken_s, now)
                return Ending(_REJECTED, refusal.code, refusal.message, retry_after_s=wait_s)
            refusal = None
    if refusal is None:
        request.prediction = prediction
        forecast.arrivals.add(priority, request.uncached_tokens, now)
        return None
    wait_s = _retry_after_s(refusal, request, cell, figures, now)
    return Ending(_REJECTED, refusal.code, refusal.message, retry_after_s=wait_s)


def _over_queue_limit(
    request: Request, cell: CellBook, figures: AdmissionFigures, config: CoreConfig, now: float
) -> Refusal | None:
    below = cell.queue.waiting_below(request.priority)
    refusal = admission.over_queue_limit(request, figures, config, below)
    if refusal is None or not refusal.spares_top or not cell.forecast.is_top(request.priority):
        return refusal
    return None if cell.runs_below(request.priority, now) else refusal


def _retry_after_s(
    refusal: Refusal, request: Request, cell: CellBook, figures: AdmissionFigures, now: float
) -> float:
    """Return the retry time in seconds of a refusal that promises no place in the queue."""
    if refusal.retry is RetryTime.HALF_QUEUE:
        return half_queue_s(cell, now)
    if refusal.retry is RetryTime.HALF_OWN_WAIT:
        own_s = figures.idle_prefill_s, figures.adapter_s
        return bounded_retry_s(cell.predict(request, own_s, now).ttft_s() / 2)
    return refusal.wait_s


def shed_for(request: Request, cell: CellBook, now: float) -> tuple[Request, Ending]:
    """Return the waiting request that an admitted request replaces in a full queue, and its ending.

    Preemptible requests go first, then requests whose adapter no replica has loaded.
    """
    victim = cell.queue.cheapest_to_lose(request.priority, now)
    assert victim is not None, "admission saw that there is room to be made"
    if not victim.is_preemptible:
        residency = cell.fleet.residency
        victim = cell.adapter_waiters.cheapest_cold(request.priority, residency) or victim
    ending = Ending(
        wire.OUTCOME_KIND_EVICTED,
        ErrorCode.OVERLOADED,
        "work of a higher tier took the room; try again later",
        retry_after_s=half_queue_s(cell, now),
    )
    return victim, ending


def half_queue_s(cell: CellBook, now: float) -> float:
    """Return the predicted seconds until half of the queue is served, within the retry bounds."""
    queue = cell.queue
    wait_s = queue_wait_s(cell.supply(now), queue.requests, queue.tokens)
    return bounded_retry_s(wait_s / 2)
