"""Writes the JSON of a response and its items. Fields that all events share are encoded once."""

from collections.abc import Mapping, Sequence

import orjson

from gateway.bodies.response_items import CompactionItem
from gateway.tools.loop import LoopEnd

# `incomplete_details.reason` by the finish reason of a completion.
_INCOMPLETE = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
    **{str(end): str(end) for end in LoopEnd},
}


class ResponseFrame:
    """The fields of a response that do not depend on its outcome.

    Attributes:
        response_id: Id of the response.
        stem: Common part of the ids of the response's items.
    """

    __slots__ = ("_opening", "_rest", "response_id", "stem")

    def __init__(
        self,
        response_id: str,
        stem: str,
        echo: Mapping[str, object],
        *,
        model: str,
        created_unix_s: int,
    ) -> None:
        """The arguments are encoded once, for all events of the response.

        Args:
            response_id: Id of the response.
            stem: Common part of the ids of the response's items.
            echo: Fields that repeat the request.
            model: Name of the model that answers.
            created_unix_s: Time of the request's arrival.
        """
        self.response_id, self.stem = response_id, stem
        opening: dict[str, object] = {
            "id": response_id,
            "object": "response",
            "created_at": created_unix_s,
            "model": model,
        }
        self._opening = orjson.dumps(opening)[:-1]
        self._rest = orjson.dumps(dict(echo))[1:]

    def item_id(self, prefix: str, index: int) -> str:
        """Return the id of the output item at this index of the output."""
        return f"{prefix}_{self.stem}{index:02x}"

    def written(
        self,
        status: str,
        output: Sequence[bytes] = (),
        *,
        is_stored: bool = False,
        usage: Mapping[str, object] | None = None,
        completed_unix_s: int | None = None,
        incomplete: str | None = None,
        error: Mapping[str, object] | None = None,
    ) -> bytes:
        """Return the response as JSON.

        Args:
            status: Status in the terms of OpenAI's API.
            output: Items of the output, as JSON.
            is_stored: Whether later requests can read the response.
            usage: Usage of the response, or None before its end.
            completed_unix_s: Time of completion, or None unless the response is complete.
            incomplete: Reason why the response is incomplete, or None if it is complete.
            error: Error of a failed response.
        """
        state: dict[str, object] = {
            "status": status,
            "completed_at": completed_unix_s,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "error": error,
            "usage": usage,
            "store": is_stored,
        }
        return b'%b,%b,"output":[%b],%b' % (
            self._opening,
            orjson.dumps(state)[1:-1],
            b",".join(output),
            self._rest,
        )


def ended_as(reason: str) -> tuple[str, str | None]:
    """Return the status of a response, and the reason if it is incomplete.

    The argument is the finish reason of a completion.
    """
    details = _INCOMPLETE.get(reason)
    return ("completed" if details is None else "incomplete"), details


def text_part(text: bytes = b"", logprobs: bytes = b"") -> bytes:
    """Return a text part of a message. The `text` is already escaped for a JSON string."""
    form = b'{"type":"output_text","text":"%b","annotations":[],"logprobs":[%b]}'
    return form % (text, logprobs)


def message_item(item_id: str, status: str, parts: bytes = b"") -> bytes:
    """Return a message item of the assistant. The `parts` are its content parts as JSON."""
    form = b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[%b]}'
    return form % (item_id.encode(), status.encode(), parts)


def reasoning_part(text: bytes = b"") -> bytes:
    """Return a reasoning part. The `text` is already escaped for a JSON string."""
    return b'{"type":"reasoning_text","text":"%b"}' % text


def reasoning_item(item_id: str, status: str, parts: bytes = b"") -> bytes:
    """Return a reasoning item. The `parts` are its content parts as JSON."""
    form = b'{"id":"%b","type":"reasoning","status":"%b","summary":[],"content":[%b]}'
    return form % (item_id.encode(), status.encode(), parts)


def compaction_item(item: CompactionItem, status: str = "completed") -> bytes:
    """Return the JSON of a compaction item, which replaces all items before it."""
    told = {"id": item.id, "type": item.type, "status": status}
    sealed = item.encrypted_content if status == "completed" else ""
    return orjson.dumps(told | {"encrypted_content": sealed})


def call_item(item_id: str, status: str, call_id: str, name: str, arguments: str = "") -> bytes:
    """Return the item of a function call."""
    return orjson.dumps(
        {
            "id": item_id,
            "type": "function_call",
            "status": status,
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
        }
    )
