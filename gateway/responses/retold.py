"""Rebuilds the stream of an ended response, with the same events and one delta for each text."""

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.responses.events import written_event
from gateway.text.sse import DONE

_UNFINISHED: dict[str, Any] = {
    "status": "in_progress",
    "output": [],
    "usage": None,
    "completed_at": None,
    "incomplete_details": None,
    "error": None,
}
_EMPTY: dict[str, dict[str, Any]] = {
    "function_call": {"arguments": ""},
    "compaction": {"encrypted_content": ""},
}
_TEXTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}
_Event = tuple[str, dict[str, Any]]


def retold(response: bytes) -> bytes:
    """Return all events of a response from its JSON."""
    document: dict[str, Any] = orjson.loads(response)
    begun = {"response": document | _UNFINISHED}
    events: list[_Event] = [("response.created", begun), ("response.in_progress", begun)]
    for index, item in enumerate(document["output"]):
        events += _item(item, index)
    events.append((f"response.{document['status']}", {"response": document}))
    return b"".join([_written(number, *event) for number, event in enumerate(events)]) + DONE


def _written(number: int, name: str, fields: dict[str, Any]) -> bytes:
    return written_event(name, number, orjson.dumps(fields)[1:-1])


def _item(item: dict[str, Any], index: int) -> Iterator[_Event]:
    at = {"item_id": item["id"], "output_index": index}
    if item["type"].startswith("mcp_"):
        yield from _server_item(item, index, at)
        return
    is_call = item["type"] == "function_call"
    empty = _EMPTY.get(item["type"], {"content": []})
    opened = item | empty | {"status": "in_progress"}
    yield "response.output_item.added", {"item": opened, "output_index": index}
    if is_call:
        name, arguments = "response.function_call_arguments", item["arguments"]
        if arguments:
            yield f"{name}.delta", at | {"delta": arguments}
        yield f"{name}.done", at | {"name": item["name"], "arguments": arguments}
    for number, part in enumerate(item.get("content", ())):
        yield from _part(at | {"content_index": number}, part)
    yield "response.output_item.done", {"item": item, "output_index": index}


def _server_item(item: dict[str, Any], index: int, at: dict[str, Any]) -> Iterator[_Event]:
    name = item["type"]
    is_failed = item.get("error") is not None
    begun = {"output": None, "error": None, "status": "in_progress", "tools": []}
    opened = item | {key: value for key, value in begun.items() if key in item}
    if name == "mcp_call":
        opened["arguments"] = ""
    yield "response.output_item.added", {"item": opened, "output_index": index}
    if name != "mcp_approval_request":
        yield f"response.{name}.in_progress", at
    if name == "mcp_call":
        if item["arguments"]:
            yield "response.mcp_call_arguments.delta", at | {"delta": item["arguments"]}
        yield "response.mcp_call_arguments.done", at | {"arguments": item["arguments"]}
    if name != "mcp_approval_request":
        yield f"response.{name}.{'failed' if is_failed else 'completed'}", at
    yield "response.output_item.done", {"item": item, "output_index": index}


def _part(at: dict[str, Any], part: dict[str, Any]) -> Iterator[_Event]:
    name, text = _TEXTS[part["type"]], part["text"]
    lists = {key: [] for key in ("logprobs", "annotations") if key in part}
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", at | {"part": part | {"text": ""} | lists}
    if text:
        yield f"{name}.delta", at | {"delta": text} | more
    yield f"{name}.done", at | {"text": text} | more
    yield "response.content_part.done", at | {"part": part}
