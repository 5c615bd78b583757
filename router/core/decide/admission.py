"""Decides whether a request may enter the queue, and which request it replaces in a full queue.

A refused request was never queued. Overload first affects batch work, then requests whose adapter
is loaded on no replica, then the lowest tiers. A request of the highest tier is refused only if no
lower tier runs on more than its reserved share.
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
_RELOCATION_S = 1.0  # usual seconds until a cell without an owner is assigned to a router
COLD_SHARE = 0.75  # part of queue bounds and deadline that applies if no replica has the adapter
_COLD_ADAPTER = "the adapter is on no replica yet; try again later, or ask for the base model"
_SAMPLE = 4  # one in this many requests is predicted exactly, to measure the forecast's accuracy


class Pressure(NamedTuple):
    """The figures that admission needs for every request.

    Attributes:
        tenant_requests: Waiting requests of the same tenant and tier.
        tenant_tokens: Prompt tokens of these waiting requests.
        prefill_s: Seconds of the request's own prefill on an idle replica.
    """

    tenant_requests: int
    tenant_tokens: int
    prefill_s: float


class FleetLimits(Protocol):
    """The limits of a cell's replicas, as admission reads them from `CellFleet`."""

    prompt_tokens_max: int | None
    has_adapters: bool
    residency: AdapterResidency

    def cold_load_s(self, adapter: str) -> float:
        """Return the seconds to load an adapter, or 0.0 if a replica has already loaded it."""
        ...


class AdmissionCell(Protocol):
    """The state of a cell, as admission reads it from `CellBook`."""

    is_owned: bool
    queue: FairQueue
    forecast: FirstTokenForecast
    adapter_waiters: AdapterWaiters
    uncached_mean: float

    @property
    def fleet(self) -> FleetLimits:
        """The limits of the cell's replicas."""
        ...

    def supply(self, now: float) -> Supply:
        """Return the capacity of the cell's replicas."""
        ...

    def predict(self, request: Request, prefill_s: float, now: float) -> TimedPrediction:
        """Return the TTFT prediction for a request that arrives now."""
        ...

    def runs_below(self, priority: int, now: float) -> bool:
        """Return whether a lower tier has a running request that uses no reserved share."""
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
    """Return the ending of a request that is refused, or None if the request is admitted.

    The ending has a predicted retry time, unless the request alone causes the refusal, so that no
    retry can succeed. The call changes no state except data for later predictions. `pressure` comes
    from `CellBook.price`, and is None if the cell is unknown.
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
    """Yield the queued requests that an admitted request replaces, each with its ending.

    Before the iteration resumes, the caller must end the yielded request. The end of a request
    removes it from the queue.
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
    """Refuse a request that no replica of the cell could serve at any load."""
    longest = cell.fleet.prompt_tokens_max
    if longest is None:
        return None  # before a replica is attached, the limits are unknown
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
    """Return by how many requests and tokens the queue would exceed its bounds, or None."""
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
            return None  # no refusal, because `room_for` evicts enough requests
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
    """Return whether a request of the highest tier is exempt from refusal, as lower tiers run."""
    priority = request.priority
    return cell.forecast.is_top(priority) and cell.runs_below(priority, now)


def _cheapest_to_lose(request: Request, cell: AdmissionCell, now: float) -> Request | None:
    victim = cell.queue.cheapest_to_lose(request.priority, now)
    if victim is None or victim.is_preemptible:
        return victim
    return cell.adapter_waiters.cheapest_cold(request.priority, cell.fleet.residency) or victim


def told(seconds: float) -> str:
    """Return a duration as text for a client, in milliseconds below one second."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def drain_s(cell: AdmissionCell, now: float) -> float:
    """Return the predicted seconds until half of the queue is served, within the retry bounds."""
    queue = cell.queue
    wait_s = queue_wait_s(cell.supply(now), queue.requests, queue.tokens)
    return bounded_retry_s(wait_s / 2)


def _too_late(
    request: Request, cell: AdmissionCell, config: CoreConfig, prefill_s: float, now: float
) -> Ending | None:
    """Refuse a request whose first token is predicted after its deadline."""
    if not cell.queue.requests or request.is_begun:
        return None  # it starts at once or has begun, and its TTFT then corrects the forecast
    forecast = cell.forecast
    supply = cell.supply(now)
    if not supply.replicas:
        return None
    deadline_s = _deadline_s(request, config)
    is_cold = _is_cold(request, cell)
    if not is_cold and request.order % _SAMPLE:
        # The wait behind the whole queue is an upper bound that is cheap to compute. If that
        # bound is within the deadline, no exact prediction is needed.
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
    """Return the longest predicted TTFT with which a request is admitted, in seconds.

    A tier's deadline limits the wait. So the seconds of a long prompt's own prefill on an idle
    replica are added.
    """
    longest_s = request.longest_wait_s(config.deadline_default_s)
    if not request.admission_s:
        return longest_s
    return min(longest_s, request.admission_s + request.objective_s - config.ttft_base_s)


def _cold_limit_s(request: Request, cell: AdmissionCell, deadline_s: float) -> float:
    """Return the longest predicted TTFT for a request whose adapter no replica has loaded.

    The limit is `COLD_SHARE` of the deadline plus the time to load the adapter. If the load time
    counted as waiting, every such request would be refused under a steady load.
    """
    load_s = cell.fleet.cold_load_s(request.adapter) if request.admission_s else 0.0
    return COLD_SHARE * deadline_s + load_s
