"""Messages that clients send on a WebSocket, each of which requests a response. Pure."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from gateway.bodies.fields import Only
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import parse
from gateway.bodies.responses import ResponseRequest
from sluice.errors import BadRequestError, ErrorCode

CREATE = "response.create"
_OTHERS = "the only message here is 'response.create'; to end a response, close its socket"


class CreateMessage(ResponseRequest):
    """A response to be generated, which is always streamed."""

    type: Literal["response.create"]
    stream_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    generate: Annotated[
        Any, Only(True, instead="a response has at least one token; leave it out")
    ] = None
    background: Annotated[Any, Only(False, instead="use POST /v1/responses")] = None
    stream_options: Annotated[Any, Only({}, {"include_obfuscation": False})] = None

    @classmethod
    def translated(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Refuse a message of another type because of its type, before its fields are validated."""
        if document.get("type") != CREATE:
            raise bad_value("type", _OTHERS)
        return document


def read_message(message: bytes) -> CreateMessage:
    """Return the request in a message, or raise BadRequestError if it is not valid."""
    wanted = parse(CreateMessage, message)
    return wanted.model_copy(update={"stream": True, "stream_options": None})


def stream_of(message: bytes) -> str | None:
    """Return the stream that an invalid message names, so that the error names it, or None."""
    try:
        document = orjson.loads(message)
    except orjson.JSONDecodeError:
        return None
    name = document.get("stream_id") if isinstance(document, dict) else None
    return name if isinstance(name, str) and len(name) <= 128 else None


def no_text() -> BadRequestError:
    """Return the error for a binary WebSocket message."""
    return BadRequestError(ErrorCode.INVALID_REQUEST, f"Send messages as text: {_OTHERS}.")
