"""Errors as OpenAI's clients expect them: one JSON body for all, the status, the headers. Pure."""

import math

import orjson

from sluice.errors import ErrorCode, PlatformError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}

# Overload without a better idea: long enough to matter, short enough not to idle.
_RETRY_AFTER_S = 1.0


def error_body(code: ErrorCode, message: str, *, status: int, param: str | None = None) -> bytes:
    """Return the envelope; `type` follows from the status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return orjson.dumps({"error": error})


def body_of(error: PlatformError) -> bytes:
    """Return the envelope of an error."""
    return error_body(error.code, error.message, status=error.status, param=error.param)


def headers_of(error: PlatformError) -> dict[str, str]:
    """Return the headers that go with an error: 429 and 503 always say when to come back."""
    if error.status in (429, 503):
        wait_s = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        return {"Retry-After": str(max(1, math.ceil(wait_s)))}
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}
