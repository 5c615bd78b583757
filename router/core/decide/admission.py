"""Decides whether a request may enter the queue, and which request it replaces in a full queue.

A refused request was never queued. Overload first affects batch work, then requests whose adapter
is loaded on no replica, then the lowest tiers. A request of the highest tier is refused only if no
lower tier runs on more than its reserved share.

All inputs are the request and plain figures, and no function changes any state.
`router.core.cell_admission` reads the figures, each only when a decision needs it.
"""

from enum import IntEnum
from typing import NamedTuple

from router.core.types.config import CoreConfig
from router.core.types.request import Request
from sluice.errors import ErrorCode

DRAINING_RETRY_S = 0.5
_RELOCATION_S = 1.0  # usual seconds until a cell without an owner is assigned to a router
COLD_SHARE = 0.75  # part of queue bounds and deadline that applies if no replica has the adapter
_COLD_ADAPTER = "the adapter is on no replica yet; try again later, or ask for the base model"
_SAMPLE = 4  # one in this many requests is predicted exactly, to measure the forecast's accuracy


class AdmissionFigures(NamedTuple):
    """The figures that admission needs for every request.

    Attributes:
        tenant_requests: Waiting requests of the same tenant and tier.
        tenant_tokens: Prompt tokens of these waiting requests.
        queue_requests: Waiting requests of the cell.
        queue_tokens: Prompt tokens of these waiting requests.
        prompt_tokens_max: Longest prompt that a replica accepts, or None before an attachment.
        has_adapters: Whether a replica serves adapters.
        idle_prefill_s: Seconds of the request's own prefill on an idle replica.
        adapter_s: Seconds to load the request's adapter if no replica has loaded it, otherwise 0.0.
    """

    tenant_requests: int
    tenant_tokens: int
    queue_requests: int
    queue_tokens: int
    prompt_tokens_max: int | None
    has_adapters: bool
    idle_prefill_s: float
    adapter_s: float

    @property
    def is_cold(self) -> bool:
        """Whether no replica has loaded the request's adapter."""
        return self.adapter_s > 0.0


class RetryTime(IntEnum):
    """How the retry time of a refusal is predicted."""

    NEVER = 0  # the request alone causes the refusal, so that no retry can succeed
    FIXED = 1  # `Refusal.wait_s`
    HALF_OWN_WAIT = 2  # half of the request's own predicted TTFT
    HALF_QUEUE = 3  # the time until half of the queue is served
    PROMISED = 4  # `Refusal.wait_s`, behind the requests that were refused earlier


class Refusal(NamedTuple):
    """The refusal of a request.

    Attributes:
        code: Error code for the client.
        message: Text for the client.
        retry: How the retry time is predicted.
        wait_s: Seconds that `retry` starts from, if it names them.
        spares_top: Whether the highest tier is exempt while a lower tier runs.
    """

    code: ErrorCode
    message: str
    retry: RetryTime = RetryTime.NEVER
    wait_s: float = 0.0
    spares_top: bool = False


def refused_at_the_door(cell_id: str, *, router_is_draining: bool) -> Refusal:
    """Return the refusal of a router that is draining, or does not own the request's cell."""
    if router_is_draining:
        message = "this router is shutting down; try again"
        return Refusal(ErrorCode.DRAINING, message, RetryTime.FIXED, DRAINING_RETRY_S)
    message = f"this router does not own cell {cell_id}; try again"
    return Refusal(ErrorCode.UNAVAILABLE, message, RetryTime.FIXED, _RELOCATION_S)


def over_limits(request: Request, figures: AdmissionFigures, config: CoreConfig) -> Refusal | None:
    """Refuse a request that no replica could serve, or that exceeds its tenant's limits."""
    longest = figures.prompt_tokens_max
    if longest is not None:  # before a replica is attached, the limits are unknown
        if request.prompt_tokens > longest:
            message = f"the prompt has {request.prompt_tokens} tokens, {longest} fit; shorten it"
            return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
        if request.adapter and not figures.has_adapters:
            message = "the engines of this model serve no adapters; ask for the base model"
            return Refusal(ErrorCode.ADAPTER_NOT_FOUND, message)
    requests, tokens = figures.tenant_requests, figures.tenant_tokens
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
    return Refusal(ErrorCode.TENANT_QUEUE_FULL, message, RetryTime.HALF_OWN_WAIT)


def _excess(
    request: Request, queue_requests: int, queue_tokens: int, config: CoreConfig, share: float
) -> tuple[float, float] | None:
    """Return by how many requests and tokens the queue would exceed its bounds, or None."""
    requests = queue_requests + 1 - share * config.queue_requests_max
    tokens = queue_tokens + request.prompt_tokens - share * config.queue_tokens_max
    return (requests, tokens) if requests > 0 or tokens > 0 else None


def is_crowded(request: Request, figures: AdmissionFigures, config: CoreConfig) -> bool:
    """Return whether the queue is so full that `over_queue_limit` must decide."""
    queue = figures.queue_requests, figures.queue_tokens
    return _excess(request, *queue, config, COLD_SHARE) is not None


def is_full(request: Request, queue_requests: int, queue_tokens: int, config: CoreConfig) -> bool:
    """Return whether an admitted request must replace a waiting request."""
    return _excess(request, queue_requests, queue_tokens, config, 1.0) is not None


def over_queue_limit(
    request: Request,
    figures: AdmissionFigures,
    config: CoreConfig,
    below: tuple[int, int],
) -> Refusal | None:
    """Refuse a request for which a crowded queue has no room.

    Args:
        request: The request.
        figures: The figures of every request.
        config: The queue's bounds.
        below: Requests and prompt tokens that wait in lower tiers.
    """
    waiting = figures.queue_requests
    excess = _excess(request, waiting, figures.queue_tokens, config, 1.0)
    if excess is not None:
        if below[0] >= excess[0] and below[1] >= excess[1]:
            return None  # no refusal, because enough waiting requests can be shed
        message = f"{waiting} requests wait for this model; try again later"
        return Refusal(ErrorCode.QUEUE_FULL, message, RetryTime.HALF_QUEUE)
    if below[0] or not figures.is_cold:
        return None
    message = f"{waiting} requests wait, and {_COLD_ADAPTER}"
    return Refusal(ErrorCode.OVERLOADED, message, RetryTime.HALF_QUEUE, spares_top=True)


def may_be_late(request: Request, figures: AdmissionFigures) -> bool:
    """Return whether a request's TTFT must be compared with its deadline.

    A request that starts at once or has begun is admitted, and its TTFT then corrects the forecast.
    """
    return figures.queue_requests > 0 and not request.is_begun


def is_sampled(request: Request, figures: AdmissionFigures) -> bool:
    """Return whether a request is predicted exactly, even if a bound would admit it."""
    return figures.is_cold or request.order % _SAMPLE == 0


def too_late(
    request: Request, figures: AdmissionFigures, config: CoreConfig, ttft_s: float
) -> Refusal | None:
    """Refuse a request whose first token is predicted after its deadline.

    If no replica has loaded the request's adapter, the limit is `COLD_SHARE` of the deadline plus
    the time to load the adapter. If the load time counted as waiting, every such request would be
    refused under a steady load.

    Args:
        request: The request.
        figures: The figures of every request.
        config: The objectives.
        ttft_s: Predicted TTFT in seconds.
    """
    limit_s = latest_s = deadline_s(request, config)
    if figures.is_cold:
        limit_s = COLD_SHARE * latest_s + (figures.adapter_s if request.admission_s else 0.0)
    over_s = ttft_s - limit_s
    if over_s <= 0.0:
        return None
    shown = duration_text(ttft_s), duration_text(latest_s)
    message = f"the first token would take {shown[0]}, the deadline is {shown[1]}"
    message += f", and {_COLD_ADAPTER}" if figures.is_cold else "; try again later"
    return Refusal(ErrorCode.OVERLOADED, message, RetryTime.PROMISED, over_s, spares_top=True)


def deadline_s(request: Request, config: CoreConfig) -> float:
    """Return the longest predicted TTFT with which a request is admitted, in seconds.

    A tier's deadline limits the wait. So the seconds of a long prompt's own prefill on an idle
    replica are added.
    """
    longest_s = request.longest_wait_s(config.deadline_default_s)
    if not request.admission_s:
        return longest_s
    return min(longest_s, request.admission_s + request.objective_s - config.ttft_base_s)


def duration_text(seconds: float) -> str:
    """Return a duration as text for a client, in milliseconds below one second."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
