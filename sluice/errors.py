"""The platform's errors: one closed list of codes for every service, the wire and the metrics.

A code says what happened; the class says which family it belongs to, which decides what may be
retried. Backpressure (`rejected`, `evicted`) is never counted as a failure of anybody.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable machine-readable reasons; clients and dashboards rely on them."""

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


# HTTP status of each code. 429: the caller is over its own limit; 503: the platform is over its
# own.
STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNSUPPORTED_PARAMETER: 400,
    ErrorCode.REQUEST_TOO_LARGE: 413,
    ErrorCode.INVALID_API_KEY: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.ADAPTER_NOT_FOUND: 404,
    ErrorCode.ADAPTER_INVALID: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.CONFLICT: 409,
    ErrorCode.PRECONDITION_FAILED: 412,
    ErrorCode.IDEMPOTENCY_KEY_REUSED: 422,
    ErrorCode.ROLLOUT_UNSUPPORTED: 422,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.RATE_LIMIT_REQUESTS: 429,
    ErrorCode.RATE_LIMIT_TOKENS: 429,
    ErrorCode.RATE_LIMIT_CONCURRENCY: 429,
    ErrorCode.INSUFFICIENT_QUOTA: 429,
    ErrorCode.TENANT_QUEUE_FULL: 429,
    ErrorCode.QUEUE_FULL: 503,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.DEADLINE_EXCEEDED: 503,
    ErrorCode.NO_CAPACITY: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.REPLICA_LOST: 503,
    ErrorCode.ENGINE_BUSY: 503,
    ErrorCode.ENGINE_FAILED: 502,
    ErrorCode.ENGINE_REFUSED: 400,
    ErrorCode.SLOW_READER: 499,
    ErrorCode.CLIENT_CLOSED: 499,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.INTERNAL: 500,
}


class PlatformError(Exception):
    """An error with a code that a caller can act on.

    Attributes:
        code: What happened.
        message: For people; says what to do. Never holds secrets or another tenant's data.
        retry_after_s: When trying again makes sense; None when it never does.
        param: The request field at fault, if one is.
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
        return STATUS[self.code]


class BadRequestError(PlatformError):
    """The request is at fault; sending it again does not help."""


class RejectedError(PlatformError):
    """Refused before any queue: the caller's limit (429) or ours (503)."""


class FailedError(PlatformError):
    """Dispatched, and failed there."""
