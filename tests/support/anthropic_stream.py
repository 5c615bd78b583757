"""Reads the events of a message's stream as Anthropic documents them; strict about their order."""

import json
from typing import Any

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def events_of(stream: str) -> list[dict[str, Any]]:
    """Return the events; each is named as its type says."""
    found: list[dict[str, Any]] = []
    for event in stream.split("\n\n"):
        if not event or event.startswith(":"):
            continue
        name, _, data = event.partition("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream adds up to; AssertionError where its order is wrong."""
    first, *middle, delta, last = events
    assert first["type"] == "message_start"
    assert (delta["type"], last["type"]) == ("message_delta", "message_stop")
    message = first["message"]
    blocks: list[dict[str, Any]] = message["content"]
    assert blocks == []
    is_open, arguments = False, ""
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                piece, block = event["delta"], blocks[-1]
                if block["type"] == "tool_use":
                    assert piece["type"] == "input_json_delta"
                    arguments += piece["partial_json"]
                else:
                    kind, field = _DELTAS[block["type"]]
                    assert piece["type"] == kind
                    block[field] += piece[field]
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(arguments or "{}")
            case other:
                raise AssertionError(f"unexpected event {other}")
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}
