"""Messages of MCP: headers of each version, replies whole and as events, and what is none."""

import json
from typing import Any

import pytest

from gateway.tools.failures import ToolCallError
from gateway.tools.http_messages import OutgoingReply
from gateway.tools.mcp_protocol import (
    STATELESS,
    WITH_HANDSHAKE,
    McpRefusalError,
    McpSession,
    header_text,
    output_of,
    request_of,
    result_of,
    session_of,
    tools_of,
    version_instead,
)

SECRETS = {"Authorization": "Bearer x"}


def reply(said: Any, status: int = 200, kind: str = "application/json", **headers: str) -> Any:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    return OutgoingReply(status, kind, headers, body)


def answer(result: Any, number: int = 7) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def error(code: int, number: int | None = 7, **data: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": "no", "data": data}}


def test_a_stateless_request_says_all_that_a_server_needs() -> None:
    params = {"name": "get", "arguments": {"a": 1}}
    asked = request_of("https://a/mcp", SECRETS, McpSession(), "tools/call", params, 7)
    assert asked.headers["MCP-Protocol-Version"] == STATELESS
    assert (asked.headers["Mcp-Method"], asked.headers["Mcp-Name"]) == ("tools/call", "get")
    assert asked.headers["Authorization"] == "Bearer x"
    assert "Bearer" not in repr(asked)
    body = json.loads(asked.body or b"")
    assert body["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == STATELESS
    assert body["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"] == {}
    assert (body["id"], body["method"], body["params"]["arguments"]) == (7, "tools/call", {"a": 1})


def test_a_session_is_in_the_headers_of_older_versions() -> None:
    for version in WITH_HANDSHAKE:
        asked = request_of("https://a", {}, McpSession(version, "s1"), "tools/list", {}, 1)
        assert asked.headers["Mcp-Session-Id"] == "s1"
        assert "Mcp-Method" not in asked.headers
        assert "_meta" not in json.loads(asked.body or b"")["params"]
        known = asked.headers.get("MCP-Protocol-Version")
        assert known == (None if version == "2025-03-26" else version)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("add", "add"),
        ("café", "=?base64?Y2Fmw6k=?="),
        (" a", "=?base64?IGE=?="),
        ("=?base64?eA==?=", "=?base64?PT9iYXNlNjQ/ZUE9PT89?="),
    ],
)
def test_names_that_no_header_may_hold_are_written_in_base64(text: str, written: str) -> None:
    assert header_text(text) == written


def test_replies_come_whole_or_as_events() -> None:
    assert result_of(reply(answer({"a": 1})), 7) == {"a": 1}
    note = b'event: message\r\ndata: {"jsonrpc":"2.0","method":"notifications/progress"}\r\n\r\n'
    said = b'data: {"jsonrpc":"2.0","id":7,\r\ndata: "result":{"a":1}}\r\n\r\n'
    for events in (note + said, said, said.rstrip()):
        assert result_of(reply(events, kind="text/event-stream"), 7) == {"a": 1}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (reply(error(-32602)), "the server says: no"),
        (reply(answer({}, number=8)), "not MCP"),
        (reply(b"<html>", kind="text/html"), "it answers with text/html, not MCP"),
        (reply(b"", status=502, kind=""), "status 502"),
        (reply({"jsonrpc": "2.0", "id": 7, "result": 5}), "neither result nor error"),
        (reply(answer({"resultType": "input_required"})), "further input"),
        (reply(b"[" * 100_000), "not MCP"),
    ],
)
def test_a_malformed_result_is_a_failure(said: OutgoingReply, message: str) -> None:
    with pytest.raises(ToolCallError, match=message):
        result_of(said, 7)


@pytest.mark.parametrize(
    ("said", "session", "is_known", "version"),
    [
        (reply(answer({})), McpSession(), False, ""),
        (reply(error(-32022, supported=["2025-06-18"]), 400), McpSession(), True, "2025-06-18"),
        (reply(b"no session", 400, "text/plain"), McpSession(), False, "2025-11-25"),
        (reply(error(-32600), 400), McpSession(), False, "2025-11-25"),
        (reply(error(-32600), 400), McpSession(), True, ""),
        (reply(error(-32020), 400), McpSession(), False, ""),
        (reply(b"", 500, ""), McpSession(), False, ""),
        (reply(b"", 404, ""), McpSession("2025-06-18", "s"), True, "2025-06-18"),
        (reply(b"", 404, ""), McpSession("2025-06-18"), True, ""),
    ],
)
def test_the_version_that_a_server_speaks(
    said: OutgoingReply, session: McpSession, is_known: bool, version: str
) -> None:
    assert version_instead(said, session, 7, is_known=is_known) == version


def test_versions_that_are_not_known_here() -> None:
    with pytest.raises(ToolCallError, match="no version"):
        version_instead(
            reply(error(-32022, supported=["2099-01-01"]), 400), McpSession(), 7, is_known=False
        )
    with pytest.raises(ToolCallError, match="no version"):
        session_of(reply(answer({"protocolVersion": "1.0"}, number=0)))
    made = session_of(
        reply(answer({"protocolVersion": "2025-03-26"}, number=0), **{"mcp-session-id": "s"})
    )
    assert made == McpSession("2025-03-26", "s")


def test_uncallable_tools_are_not_listed() -> None:
    schema = {"type": "object"}
    good = {"name": "a", "description": "d" * 9000, "inputSchema": schema}
    bad = [5, {"name": ""}, {"name": "b"}, {"name": "c", "inputSchema": {"x": "y" * (65 << 10)}}]
    tools, cursor, ttl_ms = tools_of({"tools": [good, *bad], "nextCursor": "n", "ttlMs": 1e12})
    assert [(it.name, len(it.description)) for it in tools] == [("a", 4096)]
    assert (cursor, ttl_ms) == ("n", 3_600_000)
    assert tools_of({"tools": [], "ttlMs": "x"})[2] == 60_000
    with pytest.raises(ToolCallError, match="no tools"):
        tools_of({})


def test_outputs_are_text() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "image", "data": "AAAA"},
        {"type": "resource", "resource": {"text": "b"}},
        {"type": "resource_link", "uri": "file:///c"},
        7,
    ]
    said = output_of({"content": blocks})
    assert said.splitlines() == ["a", "[image is left out]", "b", "[a link: file:///c]"]
    assert output_of({"content": [], "structuredContent": {"a": 1}}) == '{"a":1}'
    with pytest.raises(ToolCallError, match="no such file") as failure:
        output_of({"content": [{"type": "text", "text": "no such file"}], "isError": True})
    assert not failure.value.is_fault


def test_a_refusal_has_bounded_words() -> None:
    said = {"jsonrpc": "2.0", "id": 7, "error": {"code": 1, "message": "x" * 10_000}}
    with pytest.raises(McpRefusalError) as refusal:
        result_of(reply(said), 7)
    assert len(refusal.value.message) < 400
