"""Parses the bytes of a body into a pydantic model, or refuses it with one clear 400. Pure.

Hostile bodies cost time in two ways. Millions of small JSON values take half a second to become
Python objects, during which the interpreter lock is held. So `check_values` bounds them before
parsing. Millions of mistakes take seconds to collect. So lists stop at the first mistake, and
objects with too many fields are refused as a whole.
"""

from typing import Any, LiteralString, TypeVar, cast

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gateway.bodies.mistakes import first_mistake
from sluice.errors import BadRequestError, ErrorCode

BODY_BYTES_MAX = 4 << 20
# Bytes above which a body is parsed in a thread.
INLINE_BYTES_MAX = 64 << 10
# Maximum number of commas in a body, which bounds its values. OpenAI accepts 300,000 token ids in
# one request for embeddings. The difference is reserved for other fields.
COMMAS_MAX = 320_000
# Maximum number of objects, arrays and strings in a body, since each costs as much as ten numbers.
# A chat of 4,096 messages has 20,480.
PARTS_MAX = 25_000
_SLICE_BYTES = 512 << 10  # bytes processed at once, for 2 ms under the interpreter lock
_FIELDS_MAX = 64  # maximum number of fields per object with known fields
_TOO_MANY_FIELDS: LiteralString = "an object has at most 64 fields"


_BodyT = TypeVar("_BodyT", bound="Body")


class Body(BaseModel):
    """The body of a request, which refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def translated(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return a body whose fields have the names of this API, or raise BadRequestError."""
        return document

    def check(self) -> None:
        """Raise BadRequestError if valid fields exclude each other."""


class Strict(BaseModel):
    """An object within a body, which refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Refuse an object with too many fields before each unknown field is reported."""
        if isinstance(value, dict) and len(cast("dict[str, Any]", value)) > _FIELDS_MAX:
            raise PydanticCustomError("too_many_fields", _TOO_MANY_FIELDS)
        return value


def parse(kind: type[_BodyT], body: bytes) -> _BodyT:
    """Return the request in `body`, or raise a BadRequestError that names the mistake."""
    if len(body) > INLINE_BYTES_MAX:
        check_values(body)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST, f"We could not parse the JSON body of your request: {error}."
        ) from None
    if not isinstance(document, dict):
        raise BadRequestError(ErrorCode.INVALID_REQUEST, "The request body must be a JSON object.")
    if len(document) > _FIELDS_MAX:
        text = f"The request body has {len(document)} fields: {_TOO_MANY_FIELDS}."
        raise BadRequestError(ErrorCode.INVALID_REQUEST, text)
    document = kind.translated(cast("dict[str, Any]", document))
    try:
        request = kind.__pydantic_validator__.validate_python(document)
    except ValidationError as error:
        raise first_mistake(error, document) from None
    request.check()
    return request


def check_values(body: bytes) -> None:
    """Refuse a body of too many values before it is parsed, by a BadRequestError."""
    if _is_small(body):  # quick check that also counts commas and brackets inside strings
        return
    plain = b"".join(map(_without_escapes, _slices(body)))
    quotes = plain.count(b'"')
    if quotes <= 2 * PARTS_MAX and _is_small(b'""'.join(plain.split(b'"')[::2])):
        return
    raise BadRequestError(
        ErrorCode.INVALID_REQUEST,
        f"The request body has more than {PARTS_MAX} strings, objects and arrays, or more than"
        f" {COMMAS_MAX} values in all. Send several smaller requests.",
    )


def _is_small(text: bytes) -> bool:
    return (
        text.count(b",") <= COMMAS_MAX
        and text.count(b'"') // 2 + text.count(b"[") + text.count(b"{") <= PARTS_MAX
    )


def _slices(body: bytes) -> list[bytes]:
    """Return `body` in pieces, none of which separates a backslash from the escaped character."""
    pieces: list[bytes] = []
    start = 0
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + _SLICE_BYTES + 1]
        pieces.append(piece)
        start += len(piece)
    return pieces


def _without_escapes(piece: bytes) -> bytes:
    return piece.replace(b"\\\\", b"").replace(b'\\"', b"")
