"""Parses the bytes of a body into a pydantic model, or refuses the body with one clear 400. Pure.

Hostile bodies cost time in two ways. Millions of small JSON values need half a second to become
Python objects, while the interpreter lock is held. So `check_values` bounds their number before
parsing. Millions of mistakes take seconds to collect. So the validation of a list stops at its
first mistake, and an object with too many fields is refused without validating the fields.
"""

from typing import Any, LiteralString, TypeVar, cast

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gateway.bodies.mistakes import first_mistake
from sluice.errors import BadRequestError, ErrorCode

BODY_BYTES_MAX = 4 << 20
# Size of a body above which it is parsed in a thread.
INLINE_BYTES_MAX = 64 << 10
# Maximum number of commas in a body, which bounds its values. OpenAI accepts 300,000 token ids in
# one request for embeddings, and the other 20,000 commas are for further fields.
COMMAS_MAX = 320_000
# Maximum number of objects, arrays and strings in a body. Each of them costs as much time as ten
# numbers. A chat of 4,096 messages has 20,480 of them.
PARTS_MAX = 25_000
_SLICE_BYTES = 512 << 10  # bytes processed at once, so that the interpreter lock is held for 2 ms
_FIELDS_MAX = 64  # maximum number of fields per object of a known type
_TOO_MANY_FIELDS: LiteralString = "an object has at most 64 fields"


_BodyT = TypeVar("_BodyT", bound="Body")


class Body(BaseModel):
    """The body of a request, which refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def translated(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return the body with this API's field names, or raise BadRequestError."""
        return document

    def check(self) -> None:
        """Raise BadRequestError if fields that are valid alone exclude each other."""


class Strict(BaseModel):
    """An object within a body. It refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Refuse an object with too many fields, before a mistake is reported for each of them."""
        if isinstance(value, dict) and len(cast("dict[str, Any]", value)) > _FIELDS_MAX:
            raise PydanticCustomError("too_many_fields", _TOO_MANY_FIELDS)
        return value


def parse(kind: type[_BodyT], body: bytes) -> _BodyT:
    """Return the request in `body`, or raise BadRequestError with the name of the wrong field."""
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
    """Raise BadRequestError if a body has too many values, before it is parsed."""
    if _is_small(body):  # a quick check, which also counts the characters inside strings
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
    """Return the pieces of `body`. No piece ends between a backslash and the escaped character."""
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
