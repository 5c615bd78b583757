"""Rebuilds the events of a response's stream from its JSON and the sizes of its deltas. Pure."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import orjson

from gateway.responses.delta_sizes import StoredSizes
from gateway.responses.events import written_event
from gateway.text.detokenizer import json_fragment
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


def retold(response: bytes, deltas: bytes = b"") -> bytes:
    """Return all events of an ended response.

    Args:
        response: The response as JSON.
        deltas: Sizes of the deltas that its stream sent. The events are then the same, with the
            same numbers. If it is empty, each text is one delta.
    """
    return b"".join(_events(response, deltas)) + DONE


def retold_until(response: bytes, deltas: bytes, number: int) -> bytes:
    """Return the events before a number, of a response that has not ended.

    Raises ValueError if the events are not those that were sent.
    """
    events = [*islice(_events(response, deltas), number)]
    if not deltas or len(events) != number:
        raise ValueError("the sizes do not describe these events")
    return b"".join(events)


def _events(response: bytes, deltas: bytes) -> Iterator[bytes]:
    document: dict[str, Any] = orjson.loads(response)
    begun, sizes = {"response": document | _UNFINISHED}, StoredSizes(deltas)
    yield _written(0, "response.created", begun)
    yield _written(1, "response.in_progress", begun)
    number = 2
    for index, item in enumerate(document["output"]):
        for name, fields in _item(item, index, sizes):
            yield _written(number, name, fields)
            number += 1
    yield _written(number, f"response.{document['status']}", {"response": document})


def _written(number: int, name: str, fields: dict[str, Any]) -> bytes:
    return written_event(name, number, orjson.dumps(fields)[1:-1])


def _item(item: dict[str, Any], index: int, sizes: StoredSizes) -> Iterator[_Event]:
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
        begin = 0
        for size, _ in sizes.next(len(arguments), 0):
            yield f"{name}.delta", at | {"delta": arguments[begin : begin + size]}
            begin += size
        yield f"{name}.done", at | {"name": item["name"], "arguments": arguments}
    for number, part in enumerate(item.get("content", ())):
        yield from _part(at | {"content_index": number}, part, sizes)
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


def _part(at: dict[str, Any], part: dict[str, Any], sizes: StoredSizes) -> Iterator[_Event]:
    name, text = _TEXTS[part["type"]], part["text"]
    has_logprobs, told = "logprobs" in part, part.get("logprobs", [])
    lists = {key: [] for key in ("logprobs", "annotations") if key in part}
    yield "response.content_part.added", at | {"part": part | {"text": ""} | lists}
    written, begin, first = json_fragment(text), 0, 0
    for size, count in sizes.next(len(written), len(told)):
        piece = orjson.Fragment(b'"%b"' % written[begin : begin + size])
        more = {"logprobs": told[first : first + count]} if has_logprobs else {}
        yield f"{name}.delta", at | {"delta": piece} | more
        begin, first = begin + size, first + count
    yield f"{name}.done", at | {"text": text} | ({"logprobs": told} if has_logprobs else {})
    yield "response.content_part.done", at | {"part": part}
