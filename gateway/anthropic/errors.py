"""Formats errors as Anthropic's clients expect them. Pure."""

import orjson

from sluice.errors import PlatformError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: PlatformError) -> bytes:
    """Return the JSON of an error. The fields `code` and `param` extend Anthropic's form."""
    status = error.status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return orjson.dumps({"type": "error", "error": detail})
