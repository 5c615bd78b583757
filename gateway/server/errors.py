"""Errors as HTTP answers in OpenAI's form, with JSON body, status and headers. Pure."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Protocol, runtime_checkable

import orjson

from sluice.errors import BadRequestError, ErrorCode, PlatformError

# Seconds in Retry-After for overload errors that set no time themselves.
_RETRY_AFTER_S = 1.0


@runtime_checkable
class BringsHeaders(Protocol):
    """An error with further headers of its answer, for example the headers of a rate limit."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""
        ...


class AnsweredError(PlatformError):
    """A failure with further headers of its answer.

    Attributes:
        headers: Headers of the answer.
    """

    def __init__(self, error: PlatformError, headers: Mapping[str, str]) -> None:
        """Copy code and message of `error`."""
        super().__init__(
            error.code, error.message, retry_after_s=error.retry_after_s, param=error.param
        )
        self.headers = headers


class HttpError(BadRequestError):
    """The error for a request that breaks this server's rules of HTTP. Any status is possible.

    Attributes:
        ends_connection: Whether no further bytes of the connection can be trusted.
    """

    ends_connection = True

    def __init__(self, status: int, message: str, *, headers: dict[str, str] | None = None) -> None:
        """Describe the error, whose code is `invalid_request` for every status."""
        super().__init__(ErrorCode.INVALID_REQUEST, message)
        self._status = status
        self.headers = headers or {}

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._status


def error_body(code: ErrorCode, message: str, *, param: str | None = None) -> bytes:
    """Return the JSON body of an error with this code and message."""
    error = {"message": message, "type": code.policy.kind, "param": param, "code": code}
    return orjson.dumps({"error": error})


def body_of(error: PlatformError) -> bytes:
    """Return the JSON body of an error."""
    return error_body(error.code, error.message, param=error.param)


def headers_of(error: PlatformError) -> dict[str, str]:
    """Return the headers of an error, with the error's own `headers`.

    A response with status 429 or 503 always has Retry-After.
    """
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        wait_s = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    elif error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BringsHeaders):
        headers.update(error.headers)
    return headers


def raw_response(error: PlatformError, request_id: str, server: str) -> bytes:
    """Return a complete error answer that closes the connection.

    The Server header of the answer is `server`.
    """
    body = body_of(error)
    reason = HTTPStatus(error.status).phrase
    retry = "Retry-After: 1\r\n" if error.status == 503 else ""
    head = (
        f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\n{retry}"
        f"Server: {server}\r\nx-request-id: {request_id}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
