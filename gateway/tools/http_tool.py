"""Requests to HTTP tools and their results, with JSON in both directions. Pure.

The arguments of GET and DELETE are sent in the query.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import orjson

from gateway.tools.failures import ToolCallError
from gateway.tools.http_messages import OutgoingReply, OutgoingRequest, require_ok

_IN_QUERY = frozenset({"GET", "DELETE"})
_ERROR_CHARACTERS_MAX = 500
_JSON = "application/json"


def request_of(
    method: str, url: str, arguments: Mapping[str, Any], secrets: Mapping[str, str]
) -> OutgoingRequest:
    """Return the HTTP request of a call, with `arguments` in the query or the body."""
    headers = {"Accept": _JSON, **secrets}
    if method not in _IN_QUERY:
        headers["Content-Type"] = _JSON
        return OutgoingRequest(method, url, orjson.dumps(arguments), headers)
    parts = urlsplit(url)
    pairs = urlencode({name: _in_query(value) for name, value in arguments.items()})
    query = "&".join([it for it in (parts.query, pairs) if it])
    return OutgoingRequest(method, urlunsplit(parts._replace(query=query)), None, headers)


def result_of(reply: OutgoingReply) -> str:
    """Return a tool's result, as JSON text.

    Raises:
        ToolCallError: The tool reports a failure, or its reply is not JSON.
    """
    is_json = reply.kind == _JSON or reply.kind.endswith("+json")
    said = reply.body[: 4 * _ERROR_CHARACTERS_MAX].decode(errors="replace") if is_json else ""
    require_ok(reply, said[:_ERROR_CHARACTERS_MAX])
    if not reply.body:
        return "null"
    if not is_json:
        raise ToolCallError(f"it answers with {reply.kind or 'no content type'}, not JSON")
    try:
        return orjson.dumps(orjson.loads(reply.body)).decode()
    except orjson.JSONDecodeError:
        raise ToolCallError("its answer is not JSON, despite its content type") from None


def _in_query(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
