"""Parses the lines of a batch's input file, and writes the lines of its output files. Pure."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

LINES_MAX = 50_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_LINE_BYTES_MAX = 1 << 20
_MISTAKES_MAX = 100  # largest number of mistakes that the caller receives
_FIELDS = {"custom_id", "method", "url", "body"}
_ID_CHARACTERS_MAX = 512


class ParsedLine(NamedTuple):
    """A request of a batch. `body` is its JSON."""

    number: int
    custom_id: str
    body: bytes


class ParsedFile(NamedTuple):
    """The parsed lines of a batch's file. A file with `mistakes` is refused.

    Attributes:
        lines: Requests, with their line numbers in the file from 1.
        mistakes: Mistakes in OpenAI's form, with code, line, message and param.
    """

    lines: list[ParsedLine]
    mistakes: list[dict[str, object]]


def parsed(content: bytes, endpoint: str) -> ParsedFile:
    """Return the requests of a JSONL file, or its mistakes."""
    lines, mistakes, seen = list[ParsedLine](), list[dict[str, object]](), set[str]()
    for number, text in enumerate(content.split(b"\n"), 1):
        if not text.strip():
            continue
        if len(lines) >= LINES_MAX:
            mistakes.append(_mistake(number, "too_many_lines", f"at most {LINES_MAX} lines"))
            break
        found = _line(number, text, endpoint)
        if isinstance(found, ParsedLine) and found.custom_id in seen:
            found = _mistake(number, "duplicate_custom_id", "custom_id is taken", "custom_id")
        if isinstance(found, ParsedLine):
            seen.add(found.custom_id)
            lines.append(found)
        elif len(mistakes) < _MISTAKES_MAX:
            mistakes.append(found)
    if not lines and not mistakes:
        mistakes.append(_mistake(None, "empty_file", "the file has no requests"))
    return ParsedFile(lines, mistakes)


def _line(number: int, text: bytes, endpoint: str) -> ParsedLine | dict[str, object]:
    document: Any = None
    why = "a line is a JSON object of at most 1 MiB"
    if len(text) <= _LINE_BYTES_MAX:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = f"this is no JSON: {error}"
    if not isinstance(document, dict):
        return _mistake(number, "invalid_json_line", why)
    fields = cast("dict[str, Any]", document)
    if fields.keys() != _FIELDS:
        names = ", ".join(sorted(_FIELDS))
        return _mistake(number, "invalid_request", f"a line has these fields: {names}")
    for is_wrong, code, param, why in _checks(fields, endpoint):
        if is_wrong:
            return _mistake(number, code, f"{param} {why}", param)
    return ParsedLine(number, fields["custom_id"], json.dumps(fields["body"]).encode())


def _checks(fields: dict[str, Any], endpoint: str) -> Iterator[tuple[bool, str, str, str]]:
    """Yield the checks of a line, each as (fails, code, field, reason)."""
    custom_id, body = fields["custom_id"], fields["body"]
    is_name = isinstance(custom_id, str) and 0 < len(custom_id) <= _ID_CHARACTERS_MAX
    why = f"is a text of at most {_ID_CHARACTERS_MAX} characters"
    yield not is_name, "invalid_request", "custom_id", why
    yield fields["method"] != "POST", "invalid_method", "method", "is 'POST'"
    yield fields["url"] != endpoint, "mismatched_url", "url", f"is the batch's, '{endpoint}'"
    yield not isinstance(body, dict), "invalid_request", "body", "is an object"
    for name in ("stream", "background"):
        yield bool(body.get(name)), "invalid_request", f"body.{name}", "is not for batches"


def _mistake(
    line: int | None, code: str, message: str, param: str | None = None
) -> dict[str, object]:
    return {"code": code, "line": line, "message": message, "param": param}


def answered(line_id: str, custom_id: str, status: int, request_id: str, result: bytes) -> bytes:
    """Return the output line of an answered request, whose `result` is JSON."""
    head = json.dumps({"id": line_id, "custom_id": custom_id}).encode()[:-1]
    told = json.dumps({"status_code": status, "request_id": request_id}).encode()[:-1]
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head, told, result)


def unanswered(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the output line of a request that was not answered, with an error."""
    error = {"code": code, "message": message}
    told = {"id": line_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(told).encode() + b"\n"
