"""Decides whether a request may wait, and which request it replaces when there is no room.

A request refused here was never queued. Under pressure requests are refused or shed in this order:
batch work, requests whose adapter no replica has, the lowest tiers. The highest tier is refused
only when no lower tier runs on more than its reserved share.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from router.core.decide.forecast import (
    HIGHER_TIERS_MAX_S,
    FirstTokenForecast,
    Supply,
    TimedPrediction,
    bounded_retry_s,
    queue_wait_s,
    service_s,
)
from router.core.fleet.adapters import AdapterResidency
from router.core.queue.adapter_waiters import AdapterWaiters
from router.core.queue.fair_queue import FairQueue
from router.core.types.config import CoreConfig
from router.core.types.ending import Ending
from router.core.types.request import Request
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

DRAINING_RETRY_S = 0.5
_RELOCATION_S = 1.0  # a cell without owner here: about the time until one is assigned
COLD_SHARE = 0.75  # of the queue's bounds or of the deadline; beyond it cold adapters are refused
_COLD_ADAPTER = "the adapter is on no replica yet; try again later, or ask for the base model"
_SAMPLE = 4  # one of so many predictions is made although nothing depends on it, to learn from it


class Pressure(NamedTuple):
    """The numbers of a cell that admission needs for every request.

    Attributes:
        tenant_requests: Requests of its tenant that wait in its tier.
        tenant_tokens: Prompt tokens of these requests.
        prefill_s: Seconds of the request's own prefill on an idle replica.
    """

    tenant_requests: int
    tenant_tokens: int
    prefill_s: float


class FleetLimits(Protocol):
    """The limits of a cell's replicas that admission reads; see `CellFleet`."""

    prompt_tokens_max: int | None
    has_adapters: bool
    residency: AdapterResidency

    def cold_load_s(self, adapter: str) -> float:
        """Return the seconds until an adapter could be loaded anywhere; 0.0: it is warm."""
        ...


class AdmissionCell(Protocol):
    """The numbers of a cell that admission reads; see `CellBook`."""

    is_owned: bool
    queue: FairQueue
    forecast: FirstTokenForecast
    adapter_waiters: AdapterWaiters
    uncached_mean: float

    @property
    def fleet(self) -> FleetLimits:
        """The limits of its replicas."""
        ...

    def supply(self, now: float) -> Supply:
        """Return the supply of its replicas."""
        ...

    def predict(self, request: Request, prefill_s: float, now: float) -> TimedPrediction:
        """Return the predicted first token of a request that came now."""
        ...

    def runs_below(self, priority: int, now: float) -> bool:
        """Return whether lower tiers run on more than their reserved share."""
        ...


def rejection(
    request: Request,
    cell: AdmissionCell | None,
    config: CoreConfig,
    now: float,
    *,
    pressure: Pressure | None,
    router_is_draining: bool,
) -> Ending | None:
    """Return why a request is refused, with a realistic time for a retry, or None.

    A refusal without a time depends on the request alone: a retry does not help. Only data for
    later predictions is changed. `pressure` comes from `CellBook.price`; None: there is no cell.
    """
    if router_is_draining:
        message = "this router is shutting down; try again"
        return _rejected(ErrorCode.DRAINING, message, DRAINING_RETRY_S)
    if cell is None or not cell.is_owned:
        message = f"this router does not own cell {request.cell_id}; try again"
        return _rejected(ErrorCode.UNAVAILABLE, message, _RELOCATION_S)
    assert pressure is not None, "a request of a known cell has its price"
    cell.forecast.seen(request.priority, now)
    ending = (
        _unservable(request, cell)
        or _over_tenant_limit(request, cell, config, pressure, now)
        or _over_queue_limit(request, cell, config, now)
        or _too_late(request, cell, config, pressure.prefill_s, now)
    )
    if ending is None:
        cell.forecast.arrivals.add(request.priority, request.uncached_tokens, now)
    return ending


def room_for(
    request: Request, cell: AdmissionCell, config: CoreConfig, now: float
) -> Iterator[tuple[Request, Ending]]:
    """Yield the requests that an admitted one replaces in the queue, each with its ending.

    The caller ends each one, which removes it from the queue, before it asks for the next.
    """
    while _excess(request, cell, config) is not None:
        victim = _cheapest_to_lose(request, cell, now)
        assert victim is not None, "admission saw that there is room to be made"
        message = "work of a higher tier took the room; try again later"
        wait_s = drain_s(cell, now)
        yield (
            victim,
            Ending(wire.OUTCOME_KIND_EVICTED, ErrorCode.OVERLOADED, message, retry_after_s=wait_s),
        )


def _rejected(code: ErrorCode, message: str, retry_after_s: float = 0.0) -> Ending:
    return Ending(wire.OUTCOME_KIND_REJECTED, code, message, retry_after_s=retry_after_s)


def _unservable(request: Request, cell: AdmissionCell) -> Ending | None:
    """Refuse a request that no replica of the cell could serve, whatever the load."""
    longest = cell.fleet.prompt_tokens_max
    if longest is None:
        return None  # nothing is attached: not known yet
    if request.prompt_tokens > longest:
        message = f"the prompt has {request.prompt_tokens} tokens, {longest} fit; shorten it"
        return _rejected(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
    if request.adapter and not cell.fleet.has_adapters:
        message = "the engines of this model serve no adapters; ask for the base model"
        return _rejected(ErrorCode.ADAPTER_NOT_FOUND, message)
    return None


def _over_tenant_limit(
    request: Request, cell: AdmissionCell, config: CoreConfig, pressure: Pressure, now: float
) -> Ending | None:
    requests, tokens = pressure.tenant_requests, pressure.tenant_tokens
    is_over = (
        requests >= config.tenant_requests_max
        or tokens + request.prompt_tokens > config.tenant_tokens_max
    )
    if not is_over or not requests or request.is_begun:
        return None
    message = (
        f"{requests} requests with {tokens} tokens of this tenant wait; at most"
        f" {config.tenant_requests_max} with {config.tenant_tokens_max} may: wait for answers"
    )
    wait_s = cell.predict(request, pressure.prefill_s, now).ttft_s() / 2
    return _rejected(ErrorCode.TENANT_QUEUE_FULL, message, bounded_retry_s(wait_s))


def _excess(
    request: Request, cell: AdmissionCell, config: CoreConfig, *, share: float = 1.0
) -> tuple[float, float] | None:
    """Return the requests and tokens above the queue's bounds; None: it is within them."""
    queue = cell.queue
    requests = queue.requests + 1 - share * config.queue_requests_max
    tokens = queue.tokens + request.prompt_tokens - share * config.queue_tokens_max
    return (requests, tokens) if requests > 0 or tokens > 0 else None


def _over_queue_limit(
    request: Request, cell: AdmissionCell, config: CoreConfig, now: float
) -> Ending | None:
    if _excess(request, cell, config, share=COLD_SHARE) is None:
        return None
    requests, tokens = cell.queue.waiting_below(request.priority)
    excess = _excess(request, cell, config)
    if excess is not None:
        if requests >= excess[0] and tokens >= excess[1]:
            return None  # `room_for` will make room
        message = f"{cell.queue.requests} requests wait for this model; try again later"
        return _rejected(ErrorCode.QUEUE_FULL, message, drain_s(cell, now))
    if requests or not _is_cold(request, cell) or _is_kept(request, cell, now):
        return None
    message = f"{cell.queue.requests} requests wait, and {_COLD_ADAPTER}"
    return _rejected(ErrorCode.OVERLOADED, message, drain_s(cell, now))


def _is_cold(request: Request, cell: AdmissionCell) -> bool:
    return (
        bool(request.adapter)
        and cell.fleet.residency.is_cold(request.adapter)
        and not request.is_begun
    )


def _is_kept(request: Request, cell: AdmissionCell, now: float) -> bool:
    """Return whether a request of the highest tier waits, because lower tiers still run."""
    priority = request.priority
    return cell.forecast.is_top(priority) and cell.runs_below(priority, now)


def _cheapest_to_lose(request: Request, cell: AdmissionCell, now: float) -> Request | None:
    victim = cell.queue.cheapest_to_lose(request.priority, now)
    if victim is None or victim.is_preemptible:
        return victim
    return cell.adapter_waiters.cheapest_cold(request.priority, cell.fleet.residency) or victim


def told(seconds: float) -> str:
    """Return a time in the form for callers: in the unit of their setting, if it is short."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def drain_s(cell: AdmissionCell, now: float) -> float:
    """Return the predicted time until half of the queue is served, in the form for callers."""
    queue = cell.queue
    wait_s = queue_wait_s(cell.supply(now), queue.requests, queue.tokens)
    return bounded_retry_s(wait_s / 2)


def _too_late(
    request: Request, cell: AdmissionCell, config: CoreConfig, prefill_s: float, now: float
) -> Ending | None:
    """Refuse a request that would miss the deadline of its first token, however long it waited."""
    if not cell.queue.requests or request.is_begun:
        return None  # with an empty queue only a try shows how long it takes
    forecast = cell.forecast
    supply = cell.supply(now)
    if not supply.replicas:
        return None
    deadline_s = _deadline_s(request, config)
    is_cold = _is_cold(request, cell)
    if not is_cold and request.order % _SAMPLE:
        # Behind all that waits it would wait longest: cheap to see, and mostly enough.
        everything = cell.queue.requests, cell.queue.tokens
        accuracy = forecast.accuracy(request.uncached_tokens, cell.uncached_mean)
        correction = accuracy.correction()
        longest_s = queue_wait_s(supply, *everything) + HIGHER_TIERS_MAX_S
        if longest_s * correction + prefill_s <= deadline_s:
            return None
        longest_s = forecast.wait_s(
            supply,
            everything,
            priority=request.priority,
            reserved_permille=request.reserved_permille,
            now=now,
        )
        if longest_s * correction + prefill_s <= deadline_s:
            return None
    prediction = cell.predict(request, prefill_s, now)
    wait_s = prediction.ttft_s()
    over_s = wait_s - (_cold_limit_s(request, cell, deadline_s) if is_cold else deadline_s)
    if over_s <= 0.0 or _is_kept(request, cell, now):
        request.prediction = prediction
        return None
    message = f"the first token would take {told(wait_s)}, the deadline is {told(deadline_s)}"
    message += f", and {_COLD_ADAPTER}" if is_cold else "; try again later"
    taken_s = service_s(supply, request.uncached_tokens)
    retry_s = forecast.promises.retry_after_s(request.priority, over_s, taken_s, now)
    return _rejected(ErrorCode.OVERLOADED, message, retry_s)


def _deadline_s(request: Request, config: CoreConfig) -> float:
    """Return the seconds within which the first token must be predicted.

    The deadline of a tier is for waiting: a request's own prefill on an idle replica is no reason
    for a refusal.
    """
    longest_s = request.longest_wait_s(config.deadline_default_s)
    if not request.admission_s:
        return longest_s
    return min(longest_s, request.admission_s + request.objective_s - config.ttft_base_s)


def _cold_limit_s(request: Request, cell: AdmissionCell, deadline_s: float) -> float:
    """Return the limit for a request whose adapter no replica has: a margin within its deadline.

    The load of the adapter itself does not count as a wait: under a steady load no adapter would
    ever be loaded.
    """
    load_s = cell.fleet.cold_load_s(request.adapter) if request.admission_s else 0.0
    return COLD_SHARE * deadline_s + load_s
