"""Builds the JSON of a message of Anthropic's API. Pure."""

from collections.abc import Mapping, Sequence

import orjson

from gateway.text.answer import ChoiceText

_STOPPED = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def stop_reason(reason: str, stop_sequence: str) -> str:
    """Return the stop reason of an answer by its name in Anthropic's API.

    Args:
        reason: OpenAI's finish reason.
        stop_sequence: The stop sequence that ended the answer, or empty if no sequence did.
    """
    if reason == "stop" and stop_sequence:
        return "stop_sequence"
    return _STOPPED.get(reason, "end_turn")


def message(
    message_id: str,
    model: str,
    content: Sequence[object],
    *,
    stopped: str | None,
    stop_sequence: str,
    usage: Mapping[str, object],
) -> bytes:
    """Return a message as JSON.

    Args:
        message_id: Id of the message.
        model: Name of the model that answers.
        content: Content blocks of the message.
        stopped: Stop reason, or None at the start of a stream.
        stop_sequence: The stop sequence that ended the message, or empty if no sequence did.
        usage: Token counts by Anthropic's names.
    """
    return orjson.dumps(
        {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": stopped,
            "stop_sequence": stop_sequence or None,
            "usage": usage,
        }
    )


def blocks_of(answer: ChoiceText) -> list[dict[str, object]]:
    """Return the content blocks of an answer, in the order thinking, text and tool calls."""
    blocks: list[dict[str, object]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not (answer.calls or blocks):
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        function = call["function"]
        assert isinstance(function, dict), "calls are written as OpenAI writes them"
        name, arguments = str(function["name"]), str(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": name, "input": input_of(arguments)}
        )
    return blocks


def input_of(arguments: str) -> object:
    """Return a call's arguments as an object, which is empty if they are not valid JSON."""
    try:
        return orjson.loads(arguments) if arguments else {}
    except orjson.JSONDecodeError:
        return {}
