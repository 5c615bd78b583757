"""The platform's errors, as one closed list of codes for all services, messages and metrics.

The code of an error is its reason. The class of an error is its family, which decides whether to
retry. Backpressure (`rejected`, `evicted`) is never treated as a failure.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable machine-readable reasons, on which clients and dashboards rely."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    REQUEST_TOO_LARGE = "request_too_large"
    INVALID_API_KEY = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    MODEL_NOT_FOUND = "model_not_found"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    ADAPTER_INVALID = "adapter_invalid"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    PRECONDITION_FAILED = "precondition_failed"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    ROLLOUT_UNSUPPORTED = "rollout_unsupported"
    CONTENT_FILTER = "content_filter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    RATE_LIMIT_REQUESTS = "rate_limit_requests"
    RATE_LIMIT_TOKENS = "rate_limit_tokens"
    RATE_LIMIT_CONCURRENCY = "rate_limit_concurrency"
    INSUFFICIENT_QUOTA = "insufficient_quota"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NO_CAPACITY = "no_capacity"
    DRAINING = "draining"
    REPLICA_LOST = "replica_lost"
    ENGINE_BUSY = "engine_busy"
    ENGINE_FAILED = "engine_failed"
    ENGINE_REFUSED = "engine_refused"
    SLOW_READER = "slow_reader"
    CLIENT_CLOSED = "client_closed"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"

    @property
    def policy(self) -> "ErrorPolicy":
        """The policy of the code."""
        return POLICIES[self]


class ErrorEvidence(StrEnum):
    """Whether an error is evidence against the release that served the request."""

    NONE = "none"
    FAULT = "fault"  # the release may have caused the error by its weights, settings or engine
    LATE = "late"  # the release did not produce a first token before the deadline


class EngineRefusal(StrEnum):
    """The meaning of an engine's refusal of a request, for the engine and for its routers."""

    REQUEST = "request"  # every engine would refuse the request
    BUSY = "busy"  # another engine may accept the request, or this engine may accept it soon
    DRAINING = "draining"  # another engine may accept the request, and this engine will stop
    FAILED = "failed"  # another engine may accept the request, and this engine may be ill


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPolicy:
    """How all parts of the platform treat an error of one code.

    Attributes:
        status: HTTP status, for example 429 if the caller exceeds its own limit, and 503 if the
            platform is at its limit.
        moves: Whether a request without output is submitted again to the cell's next owner, and an
            answer that has begun waits for that owner.
        is_asked_again: Whether an answer that has begun is retried, until the time for retries is
            over.
        is_costly_again: Whether a retry costs engine time and may crash another engine. It takes
            from the tenant's budget of retries, and no line of a batch is retried.
        is_tried_elsewhere: Whether a text to embed is sent to another replica.
        ends_absence: Whether the code ends a request's wait for a pool without replicas. An answer
            that has begun continues to wait, because no fallback model can answer then.
        lets_stand_in: Whether a fallback model may answer, because the requested model is saturated
            or down.
        is_passed_over: Whether a fallback model's refusal with this code is hidden, so that the
            client receives the refusal of the requested model.
        goes_to_control: Whether the control release answers instead, because no engine can load the
            canary's adapter.
        is_charged: Whether the request is charged to the caller's limits, because it may have
            caused work although the request was not served.
        is_failure: Whether traces and alerts treat the request as failed. A disconnect of the
            client is no failure.
        is_abort: Whether the request ended without its whole answer, so that it is no part of
            goodput, of measured speeds and of scores. A disconnect of the client is an abort.
        is_of_engine: Whether an engine may refuse a request with this code. Any other code becomes
            `engine_refused`.
        from_engine: The meaning of an engine's refusal with this code.
        is_of_health: Whether a probe with this result is evidence against the engine's health.
        is_demand: Whether a router's refusal is demand for replicas, because the pool lacked
            capacity.
        spares_adapter: Whether a node repeats its trial of an adapter without limit, because the
            adapter may still arrive, or the engine is busy or away.
        release: Evidence against the release in a rollout.
        own_kind: OpenAI's `type`, if it does not follow from the status.
    """

    status: int
    moves: bool = False
    is_asked_again: bool = False
    is_costly_again: bool = False
    is_tried_elsewhere: bool = False
    ends_absence: bool = False
    lets_stand_in: bool = False
    is_passed_over: bool = False
    goes_to_control: bool = False
    is_charged: bool = False
    is_failure: bool = True
    is_abort: bool = True
    is_of_engine: bool = False
    from_engine: EngineRefusal = EngineRefusal.REQUEST
    is_of_health: bool = True
    is_demand: bool = False
    spares_adapter: bool = False
    release: ErrorEvidence = ErrorEvidence.NONE
    own_kind: str = ""

    @property
    def kind(self) -> str:
        """OpenAI's `type` of errors with this code."""
        of_status = {401: "authentication_error", 429: "rate_limit_error"}
        rest = "server_error" if self.status >= 500 else "invalid_request_error"
        return self.own_kind or of_status.get(self.status, rest)


_Policy = ErrorPolicy
# The policy of every code. A new code needs one entry here.
POLICIES: dict[ErrorCode, ErrorPolicy] = {
    ErrorCode.INVALID_REQUEST: _Policy(status=400, is_charged=True, is_of_engine=True),
    ErrorCode.UNSUPPORTED_PARAMETER: _Policy(status=400),
    ErrorCode.REQUEST_TOO_LARGE: _Policy(status=413),
    ErrorCode.INVALID_API_KEY: _Policy(status=401),
    ErrorCode.PERMISSION_DENIED: _Policy(status=403),
    ErrorCode.MODEL_NOT_FOUND: _Policy(status=404),
    ErrorCode.ADAPTER_NOT_FOUND: _Policy(
        status=404,
        is_passed_over=True,
        goes_to_control=True,
        is_of_engine=True,
        spares_adapter=True,
        release=ErrorEvidence.FAULT,
    ),
    ErrorCode.ADAPTER_INVALID: _Policy(
        status=400,
        is_passed_over=True,
        goes_to_control=True,
        is_of_engine=True,
        release=ErrorEvidence.FAULT,
    ),
    ErrorCode.NOT_FOUND: _Policy(status=404),
    ErrorCode.METHOD_NOT_ALLOWED: _Policy(status=405),
    ErrorCode.CONFLICT: _Policy(status=409),
    ErrorCode.PRECONDITION_FAILED: _Policy(status=412),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: _Policy(status=422),
    ErrorCode.ROLLOUT_UNSUPPORTED: _Policy(status=422),
    # The tenant's own rule refused the text, which is no failure of the platform.
    ErrorCode.CONTENT_FILTER: _Policy(status=400, is_failure=False, is_abort=False),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: _Policy(status=400, is_passed_over=True, is_of_engine=True),
    ErrorCode.RATE_LIMIT_REQUESTS: _Policy(status=429),
    ErrorCode.RATE_LIMIT_TOKENS: _Policy(status=429),
    ErrorCode.RATE_LIMIT_CONCURRENCY: _Policy(status=429),
    ErrorCode.INSUFFICIENT_QUOTA: _Policy(status=429, own_kind="insufficient_quota"),
    ErrorCode.TENANT_QUEUE_FULL: _Policy(status=429, is_passed_over=True),
    ErrorCode.QUEUE_FULL: _Policy(
        status=503, is_asked_again=True, lets_stand_in=True, is_demand=True
    ),
    ErrorCode.OVERLOADED: _Policy(
        status=503, is_asked_again=True, lets_stand_in=True, is_demand=True
    ),
    ErrorCode.DEADLINE_EXCEEDED: _Policy(
        status=503, lets_stand_in=True, release=ErrorEvidence.LATE
    ),
    ErrorCode.NO_CAPACITY: _Policy(
        status=503, is_asked_again=True, lets_stand_in=True, ends_absence=True
    ),
    ErrorCode.DRAINING: _Policy(
        status=503,
        moves=True,
        is_asked_again=True,
        is_passed_over=True,
        from_engine=EngineRefusal.DRAINING,
        is_of_health=False,
    ),
    ErrorCode.REPLICA_LOST: _Policy(
        status=503,
        is_asked_again=True,
        is_costly_again=True,
        is_tried_elsewhere=True,
        lets_stand_in=True,
        release=ErrorEvidence.FAULT,
    ),
    ErrorCode.ENGINE_BUSY: _Policy(
        status=503,
        is_asked_again=True,
        lets_stand_in=True,
        from_engine=EngineRefusal.BUSY,
        is_of_health=False,
        spares_adapter=True,
    ),
    ErrorCode.ENGINE_FAILED: _Policy(
        status=502,
        is_tried_elsewhere=True,
        from_engine=EngineRefusal.FAILED,
        release=ErrorEvidence.FAULT,
    ),
    ErrorCode.ENGINE_REFUSED: _Policy(
        status=400, is_charged=True, is_passed_over=True, release=ErrorEvidence.FAULT
    ),
    ErrorCode.SLOW_READER: _Policy(status=499),
    ErrorCode.CLIENT_CLOSED: _Policy(status=499, is_charged=True, is_failure=False),
    ErrorCode.UNAVAILABLE: _Policy(
        status=503,
        moves=True,
        is_asked_again=True,
        is_tried_elsewhere=True,
        lets_stand_in=True,
        spares_adapter=True,
    ),
    ErrorCode.INTERNAL: _Policy(status=500, release=ErrorEvidence.FAULT),
}


def policy_of(outcome: str) -> ErrorPolicy | None:
    """Return the policy of an event's outcome, or None if the outcome is no error code."""
    return _OF_OUTCOME.get(outcome)


_OF_OUTCOME = {str(code): policy for code, policy in POLICIES.items()}


class PlatformError(Exception):
    """An error whose code determines the caller's reaction.

    Attributes:
        code: Code of the error.
        message: Text for people, with the fix, and without secrets or data of other tenants.
        retry_after_s: Seconds after which to retry, or None if a retry is useless.
        param: Name of the invalid request field, if any.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param

    @property
    def status(self) -> int:
        """HTTP status of the code."""
        return self.code.policy.status


class BadRequestError(PlatformError):
    """Raised for an invalid request, so that a retry cannot succeed."""


class RejectedError(PlatformError):
    """A refusal before queuing, at the caller's limit (429) or the platform's limit (503)."""


class FailedError(PlatformError):
    """A failure after the request was dispatched."""
