"""Turns every failure into problem details (RFC 9457) with the platform's error code."""

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from control_plane.http.routes import REQUEST_ID
from sluice.errors import ErrorCode, PlatformError

log = structlog.get_logger(__name__)

_CODES = {
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    413: ErrorCode.REQUEST_TOO_LARGE,
}


def problem(error: PlatformError, request_id: str) -> web.Response:
    """Return the HTTP answer for an error."""
    body: dict[str, object] = {
        "type": f"urn:sluice:problem:{error.code}",
        "title": error.code.replace("_", " "),
        "status": error.status,
        "code": error.code,
        "detail": error.message,
        "request_id": request_id,
    }
    if error.param:
        body["param"] = error.param
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.code is ErrorCode.INVALID_API_KEY:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(
        body, status=error.status, headers=headers, content_type="application/problem+json"
    )


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into problem details.

    Unexpected errors are logged, and their text is not sent.
    """
    request_id = request[REQUEST_ID]
    try:
        return await handler(request)
    except PlatformError as error:
        return problem(error, request_id)
    except web.HTTPException as error:
        if error.status < web.HTTPBadRequest.status_code:
            raise
        code = _CODES.get(error.status, ErrorCode.INVALID_REQUEST)
        message = f"{request.method} {request.path}: {error.reason}"
        answer = problem(PlatformError(code, message), request_id)
        answer.set_status(error.status)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception:
        log.exception(
            "admin_request_failed", method=request.method, path=request.path, request_id=request_id
        )
        message = "an unexpected error; try again, or look for this request's id in the log"
        return problem(PlatformError(ErrorCode.INTERNAL, message), request_id)
