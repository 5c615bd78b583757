"""The answer to bytes that are no valid HTTP. Pure.

The error texts are the gateway's own, because the parser's texts quote the request's bytes, which
may contain an API key.
"""

from aiohttp import http_exceptions as raw

from gateway.server.errors import HttpError

# The parser's error reports only the value of the exceeded bound, so the two bounds must differ.
LINE_BYTES_MAX = 8192
FIELD_BYTES_MAX = 16384
FIELDS_MAX = 128
# Maximum bytes of an incomplete head. A worker may store one incomplete head per connection.
HEAD_BYTES_MAX = 32768


# The columns are the type of the parser's error, a part of its text, and the gateway's status and
# text. The first matching row is used.
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
