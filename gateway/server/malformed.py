"""The answer to bytes that are no valid HTTP. Pure.

The texts are the gateway's own: the parser's texts quote the bytes, which may hold a key.
"""

from aiohttp import http_exceptions as raw

from gateway.server.errors import HttpError

# Different on purpose: the parser's error tells only the bound that was exceeded.
LINE_BYTES_MAX = 8192
FIELD_BYTES_MAX = 16384
FIELDS_MAX = 128
# Bound of an incomplete head; a worker may hold as many of them as it has connections.
HEAD_BYTES_MAX = 32768


# The first that fits: kind of the parser's error, what its text begins with or holds, our answer.
_ANSWERS: tuple[tuple[type[Exception], str, int, str], ...] = (
    (raw.LineTooLong, "", 431, f"A header field is longer than {FIELD_BYTES_MAX} bytes."),
    (raw.BadHttpMethod, "HTTPS", 400, "This port speaks HTTP, not HTTPS; use an http:// address."),
    (raw.BadHttpMethod, "", 400, "The request line has no HTTP method."),
    (raw.BadStatusLine, "Invalid HTTP version", 505, "This server speaks HTTP/1.0 and HTTP/1.1."),
    (raw.BadStatusLine, "", 400, "The request line is not valid HTTP."),
    (raw.InvalidURLError, "", 400, "The request target is not a valid URL."),
    (
        raw.BadHttpMessage,
        "Too many headers",
        431,
        f"The request has more than {FIELDS_MAX} header fields.",
    ),
    (raw.BadHttpMessage, "Missing 'Host'", 400, "The header 'Host' is missing."),
)


def malformed(error: BaseException) -> HttpError:
    """Return the answer to an error of the parser."""
    if isinstance(error, raw.LineTooLong) and LINE_BYTES_MAX in error.args:
        return HttpError(414, f"The request line is longer than {LINE_BYTES_MAX} bytes.")
    given = str(getattr(error, "message", ""))
    for kind, text, status, answer in _ANSWERS:
        if isinstance(error, kind) and text in given:
            return HttpError(status, answer)
    return HttpError(400, "The request is not valid HTTP: its headers or its framing are broken.")
