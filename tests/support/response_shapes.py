"""The events of a response's stream as clients of the Responses API expect them: strict shapes.

Written from the published description of Open Responses: what is required, what is never null.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gateway.endpoints.answers import ContentLogprob
from gateway.endpoints.response_answers import (
    OutputItem,
    OutputTextPart,
    ReasoningTextPart,
    ResponseObject,
)


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    sequence_number: int


class Whole(_Event):
    type: Literal[
        "response.queued",
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_Event):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: Annotated[OutputTextPart | ReasoningTextPart, Field(discriminator="type")]


class TextDelta(_Event):
    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ContentLogprob]


class TextDone(_Event):
    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ContentLogprob]


class ReasoningDelta(_Event):
    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(_Event):
    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(_Event):
    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class ServerArgumentsDelta(_Event):
    type: Literal["response.mcp_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ServerArgumentsDone(_Event):
    type: Literal["response.mcp_call_arguments.done"]
    item_id: str
    output_index: int
    arguments: str


class ServerState(_Event):
    type: Literal[
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
        "response.mcp_call.failed",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.mcp_list_tools.failed",
    ]
    item_id: str
    output_index: int


Event = (
    ServerArgumentsDelta
    | ServerArgumentsDone
    | ServerState
    | Whole
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
ENDS = ("response.completed", "response.incomplete", "response.failed")


def events_of(stream: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream, each of the right shape, and all in a right order."""
    *written, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events: list[dict[str, Any]] = []
    for text in written:
        if text.startswith(":"):
            continue
        name, _, data = text.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    checked_events(events)
    return events


def checked_events(events: list[dict[str, Any]]) -> None:
    """Look at all events of one response, however they came."""
    for event in events:
        _EVENT.validate_python(event)
    _check_lifecycle(events)


def _check_lifecycle(events: list[dict[str, Any]]) -> None:
    names = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[:2] == ["response.created", "response.in_progress"]
    assert [name for name in names if name in ENDS] == names[-1:]
    wholes = [event["response"] for event in events if "response" in event]
    assert len({whole["id"] for whole in wholes}) == 1
    items: list[dict[str, Any]] = []
    open_ids: dict[int, str] = {}
    for event in events[2:-1]:
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            # Items come one after the other; calls that run here may wait beside each other.
            assert all(items[it]["type"] == "mcp_call" for it in open_ids)
            assert index == len(items)
            assert event["item"].get("status", "in_progress") == "in_progress"
            items.append(event["item"])
            open_ids[index] = event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == open_ids.pop(index)
            items[index] = event["item"]
        else:
            assert event["item_id"] == open_ids[index]
    if names[-1] != "response.failed":
        assert not open_ids
        assert wholes[-1]["output"] == items
        assert items
    assert len({item["id"] for item in items}) == len(items)
    _check_text(events, {it: item for it, item in enumerate(items) if it not in open_ids})


def _check_text(events: list[dict[str, Any]], items: dict[int, dict[str, Any]]) -> None:
    for index, item in items.items():
        mine = [event for event in events if event.get("output_index") == index]
        pieces = "".join([event["delta"] for event in mine if "delta" in event])
        if item["type"] in ("function_call", "mcp_call"):
            assert item["arguments"] == pieces
        elif item["type"].startswith("mcp_"):
            assert not pieces
        elif item["type"] == "compaction":
            assert (pieces, bool(item["encrypted_content"])) == ("", True)
        else:
            (part,) = item["content"]
            assert part["text"] == pieces
            ends = [e for e in mine if e["type"].endswith("_text.done")]
            assert [e["text"] for e in ends] == [pieces]
            assert [e["part"] for e in mine if e["type"] == "response.content_part.done"] == [part]
