"""Messages of the Model Context Protocol (MCP), for a client over streamable HTTP. Pure.

Since version 2026-07-28 each request is self-contained. Earlier versions begin with a handshake, in
which the server may open a session.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from gateway.tools.failures import ToolCallError
from gateway.tools.http_messages import OutgoingReply, OutgoingRequest, require_ok

STATELESS = "2026-07-28"
# Versions with a handshake, newest first.
WITH_HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26")
UNSUPPORTED_VERSION = -32022
# Error codes of stateless versions only, for example a missing capability or mismatched headers.
_STATELESS_ERRORS = frozenset({-32020, -32021, -32003})
# Statuses with which servers of older versions refuse a request without a handshake.
_OLDER = frozenset({400, 404, 405, 406, 415, 422})
_LOST = 404  # the status of a request whose session has ended
SESSION = "mcp-session-id"
TOOLS_MAX, _SCHEMA_BYTES_MAX, _NAME_MAX = 128, 64 << 10, 128
_DESCRIPTION_MAX = 4096
_META = "io.modelcontextprotocol/"
_CLIENT = {"name": "sluice", "version": "1"}
_JSON, _EVENTS = "application/json", "text/event-stream"
_PLAIN = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_LINES = re.compile(r"\r\n|\r|\n")
_TTL_MS, _TTL_MS_MAX = 60_000, 3_600_000
_ERROR_CHARACTERS_MAX = 300


class McpRefusalError(ToolCallError):
    """A server answered with a JSON-RPC error.

    Attributes:
        code: Code of the error.
        supported: Protocol versions that the server supports, if the error lists them.
    """

    def __init__(self, code: int, message: str, supported: Sequence[str]) -> None:
        """Set code, message and versions from the server's error."""
        super().__init__(
            f"the server says: {message[:_ERROR_CHARACTERS_MAX]} ({code})", is_fault=False
        )
        self.code, self.supported = code, supported


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool in a server's list."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class McpSession:
    """The protocol version and the session in use with a server.

    Attributes:
        version: Protocol version.
        session_id: Id of the session, empty without a session.
    """

    version: str = STATELESS
    session_id: str = ""

    @property
    def is_stateless(self) -> bool:
        """Whether each request is self-contained, without a session."""
        return self.version == STATELESS


def request_of(
    url: str,
    secrets: Mapping[str, str],
    session: McpSession,
    method: str,
    params: Mapping[str, Any],
    number: int,
) -> OutgoingRequest:
    """Return the request that calls a method, with the headers that the version requires."""
    headers = {"Content-Type": _JSON, "Accept": f"{_JSON}, {_EVENTS}", **secrets}
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": number, "method": method}
    if session.is_stateless:
        headers |= {"MCP-Protocol-Version": STATELESS, "Mcp-Method": method}
        if "name" in params:
            headers["Mcp-Name"] = header_text(str(params["name"]))
        meta = {
            f"{_META}protocolVersion": STATELESS,
            f"{_META}clientInfo": _CLIENT,
            f"{_META}clientCapabilities": {},
        }
        params = {**params, "_meta": meta}
    else:
        headers |= _session_headers(session)
    body["params"] = params
    return OutgoingRequest("POST", url, orjson.dumps(body), headers)


def handshake(url: str, secrets: Mapping[str, str], version: str) -> OutgoingRequest:
    """Return the request that starts a handshake."""
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": _CLIENT}
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    headers = {"Content-Type": _JSON, "Accept": f"{_JSON}, {_EVENTS}", **secrets}
    return OutgoingRequest("POST", url, orjson.dumps(body), headers)


def initialized(url: str, secrets: Mapping[str, str], session: McpSession) -> OutgoingRequest:
    """Return the notification that ends a handshake."""
    headers = {"Content-Type": _JSON, "Accept": f"{_JSON}, {_EVENTS}", **secrets}
    body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    return OutgoingRequest("POST", url, orjson.dumps(body), headers | _session_headers(session))


def session_of(reply: OutgoingReply) -> McpSession:
    """Return the session that a server agreed to.

    Raises ToolCallError if its version is unsupported.
    """
    version = result_of(reply, 0).get("protocolVersion")
    if version not in WITH_HANDSHAKE:
        raise ToolCallError("the server speaks no version of MCP that Sluice supports")
    return McpSession(str(version), reply.headers.get(SESSION, ""))


def version_instead(
    reply: OutgoingReply, session: McpSession, number: int, *, is_known: bool
) -> str:
    """Return the version for a new handshake, or an empty string if the reply can be used.

    Args:
        reply: Server's reply to a request of `session`.
        session: Version and session of the request.
        number: Number of the request.
        is_known: Whether the server has accepted this version before.

    Raises:
        ToolCallError: The server supports no version that this client supports.
    """
    if not session.is_stateless:
        return session.version if session.session_id and reply.status == _LOST else ""
    error = (_message(reply, number) or {}).get("error")
    if isinstance(error, dict):
        refusal = _refusal(cast("dict[str, Any]", error))
        if refusal.code == UNSUPPORTED_VERSION:
            common = [it for it in WITH_HANDSHAKE if it in refusal.supported]
            if not common:
                raise ToolCallError("the server speaks no version of MCP that Sluice supports")
            return common[0]
        is_older = refusal.code not in _STATELESS_ERRORS
    else:
        is_older = reply.status in _OLDER
    return WITH_HANDSHAKE[0] if is_older and not is_known else ""


def header_text(text: str) -> str:
    """Return a text as a header value, in base64 unless all its characters are plain."""
    if _PLAIN.fullmatch(text) and not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def result_of(reply: OutgoingReply, number: int) -> Mapping[str, Any]:
    """Return the result of the request with this number.

    Raises:
        McpRefusalError: The server answers with a JSON-RPC error.
        ToolCallError: The reply has no answer to the request.
    """
    message = _message(reply, number)
    if message is None:
        require_ok(reply)
        raise ToolCallError(f"it answers with {reply.kind or 'no content type'}, not MCP")
    error, result = message.get("error"), message.get("result")
    if isinstance(error, dict):
        raise _refusal(cast("dict[str, Any]", error))
    if not isinstance(result, dict):
        raise ToolCallError("its answer has neither result nor error")
    found = cast("dict[str, Any]", result)
    if found.get("resultType", "complete") != "complete":
        raise ToolCallError(
            "it asks for further input, which Sluice does not support", is_fault=False
        )
    return found


def tools_of(result: Mapping[str, Any]) -> tuple[list[McpTool], str, int]:
    """Return the tools of one page, the cursor of the next page, and the validity in ms."""
    listed = result.get("tools")
    if not isinstance(listed, list):
        raise ToolCallError("it lists no tools")
    tools = [made for it in cast("list[Any]", listed) if (made := _tool(it)) is not None]
    cursor, ttl_ms = result.get("nextCursor"), result.get("ttlMs", _TTL_MS)
    is_time = isinstance(ttl_ms, int | float) and ttl_ms >= 0
    return (
        tools,
        cursor if isinstance(cursor, str) else "",
        min(int(ttl_ms), _TTL_MS_MAX) if is_time else _TTL_MS,
    )


def output_of(result: Mapping[str, Any]) -> str:
    """Return the output of a call as text, or raise ToolCallError if the tool reports a failure."""
    content = result.get("content")
    blocks = cast("list[Any]", content) if isinstance(content, list) else []
    text = "\n".join([_block_text(it) for it in blocks])
    if not text and "structuredContent" in result:
        text = orjson.dumps(result["structuredContent"]).decode()
    if result.get("isError") is True:
        raise ToolCallError(text or "it reports a failure without text", is_fault=False)
    return text


def _session_headers(session: McpSession) -> dict[str, str]:
    headers: dict[str, str] = {}
    if session.version != WITH_HANDSHAKE[-1]:
        headers["MCP-Protocol-Version"] = session.version
    if session.session_id:
        headers["Mcp-Session-Id"] = session.session_id
    return headers


def _message(reply: OutgoingReply, number: int) -> dict[str, Any] | None:
    """Return the JSON-RPC answer to a request, or None if the reply has none."""
    texts: Sequence[str | bytes] = [reply.body]
    if reply.kind == _EVENTS:
        texts = _event_data(reply.body.decode(errors="replace"))
    for text in texts:
        try:
            found: object = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        messages = cast("list[object]", found) if isinstance(found, list) else [found]
        for it in messages:
            if not isinstance(it, dict) or not ({"result", "error"} & it.keys()):
                continue
            if it.get("id") == number or ("error" in it and it.get("id") is None):
                return cast("dict[str, Any]", it)
    return None


def _event_data(text: str) -> list[str]:
    """Return the data of each event of a stream."""
    found: list[str] = []
    lines: list[str] = []
    for line in [*_LINES.split(text), ""]:
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            found.append("\n".join(lines))
            lines = []
    return found


def _refusal(error: Mapping[str, Any]) -> McpRefusalError:
    code, data = error.get("code"), error.get("data")
    versions = cast("dict[str, Any]", data).get("supported") if isinstance(data, dict) else ()
    supported = (
        [str(it) for it in cast("list[Any]", versions)] if isinstance(versions, list) else ()
    )
    number = code if isinstance(code, int) else 0
    return McpRefusalError(number, str(error.get("message", "")), supported)


def _tool(value: object) -> McpTool | None:
    """Return a listed tool, or None if the tool cannot be called."""
    if not isinstance(value, dict):
        return None
    listed = cast("dict[str, Any]", value)
    name, schema = listed.get("name"), listed.get("inputSchema")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_MAX or not isinstance(schema, dict):
        return None
    parameters = cast("dict[str, Any]", schema)
    if len(orjson.dumps(parameters)) > _SCHEMA_BYTES_MAX:
        return None
    text = listed.get("description")
    description = text[:_DESCRIPTION_MAX] if isinstance(text, str) else ""
    return McpTool(name, description, parameters)


def _block_text(block: object) -> str:
    if not isinstance(block, dict):
        return ""
    found = cast("dict[str, Any]", block)
    if isinstance(found.get("text"), str):
        return found["text"]
    resource = found.get("resource")
    if isinstance(resource, dict) and isinstance(text := resource.get("text"), str):
        return text
    if found.get("type") == "resource_link":
        return f"[a link: {found.get('uri', '')}]"
    return f"[{found.get('type', 'something')} is left out]"
