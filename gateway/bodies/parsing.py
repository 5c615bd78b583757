"""From the bytes of a body to a model of it, or one clear 400. Pure.

Hostile bodies cost time in two ways. Millions of small JSON values take half a second to become
Python objects, and the interpreter lock is held all the while: `check_values` bounds them before
anything is parsed. Millions of mistakes take seconds to collect: lists stop at the first one, and
objects with too many fields are refused as a whole.
"""

from collections.abc import Sequence
from typing import Any, LiteralString, TypeVar, cast

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from sluice.errors import BadRequestError, ErrorCode

BODY_BYTES_MAX = 4 << 20
# Larger ones are to be parsed in a thread.
INLINE_BYTES_MAX = 64 << 10
# OpenAI takes 300,000 token ids in one request for embeddings; the rest is room for other fields.
COMMAS_MAX = 320_000
# Objects, arrays and strings cost ten times what numbers do. 4,096 messages have 20,480.
PARTS_MAX = 25_000
_SLICE_BYTES = 512 << 10  # worked on without letting go of the interpreter: 2 ms
_FIELDS_MAX = 64  # of an object whose fields are known
_TOO_MANY_FIELDS: LiteralString = "an object has at most 64 fields here"
_SHOWN_CHARACTERS_MAX = 100  # of a name that the caller chose

UNSUPPORTED: LiteralString = "unsupported_parameter"  # type of such a mistake, for pydantic

_BodyT = TypeVar("_BodyT", bound="Body")


class Body(BaseModel):
    """The body of a request, which may have no other fields than these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def check(self) -> None:
        """Raise BadRequestError when fields, each fine by itself, do not go together."""


class Strict(BaseModel):
    """An object within a body that may have no other fields than these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Refuse what has many unknown fields before each of them becomes a mistake."""
        if isinstance(value, dict) and len(cast("dict[str, Any]", value)) > _FIELDS_MAX:
            raise PydanticCustomError("too_many_fields", _TOO_MANY_FIELDS)
        return value


def parse(kind: type[_BodyT], body: bytes) -> _BodyT:
    """Return the request in `body`; BadRequestError says what is wrong with it."""
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
    try:
        request = kind.__pydantic_validator__.validate_python(document)
    except ValidationError as error:
        raise _bad_field(error, document) from None
    request.check()
    return request


def bad_value(param: str, message: str) -> BadRequestError:
    """Return the error for a value that cannot be; `message` ends without a full stop."""
    return BadRequestError(
        ErrorCode.INVALID_REQUEST, f"Invalid value for '{param}': {message}.", param=param
    )


def unsupported(param: str, message: str) -> BadRequestError:
    """Return the error for what is documented elsewhere and not served here."""
    return BadRequestError(
        ErrorCode.UNSUPPORTED_PARAMETER, f"Unsupported value for '{param}': {message}.", param=param
    )


def check_values(body: bytes) -> None:
    """Refuse a body of very many values before it is parsed; BadRequestError."""
    if _is_small(body):  # wherever they stand
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
    """Return `body` in pieces, none of which ends between a backslash and what it escapes."""
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


def _bad_field(error: ValidationError, document: object) -> BadRequestError:
    """Return the error for the first mistake; of those that a union's members tell, the deepest."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    paths = [_path(detail, document) for detail in details]
    ranks = [
        (len(path), not detail["type"].endswith("_type"))
        for path, detail in zip(paths, details, strict=True)
    ]
    best = max(range(len(details)), key=ranks.__getitem__)
    param, kind, message = _shown(paths[best]), details[best]["type"], details[best]["msg"]
    if kind == UNSUPPORTED:
        return unsupported(param, message)
    if kind == "missing":
        text = f"Missing required parameter: '{param}'."
    elif kind == "extra_forbidden":
        text = f"Unrecognized request argument supplied: {param}"
    else:
        return bad_value(param, message)
    return BadRequestError(ErrorCode.INVALID_REQUEST, text, param=param)


def _path(detail: ErrorDetails, document: object) -> list[str | int]:
    """Return where the mistake is in the document: pydantic's path without names of its types."""
    if detail["type"] == "missing":
        *above, name = detail["loc"]
        return [*_followed(above, document), name]
    return _followed(detail["loc"], document)


def _followed(loc: Sequence[str | int], value: object) -> list[str | int]:
    """Return the parts of `loc` that are keys and indices of `value`.

    A union's member may have the name of a field of it: then what leads to the last part is right.
    """
    for position, part in enumerate(loc):
        rest = loc[position + 1 :]
        if isinstance(value, dict) and part in value:
            within = [part, *_followed(rest, cast("dict[object, object]", value)[part])]
            if rest and within[-1] != rest[-1]:
                beside = _followed(rest, cast("object", value))
                return beside if beside and beside[-1] == rest[-1] else within
            return within
        if isinstance(value, list) and isinstance(part, int):
            return [part, *_followed(rest, cast("list[object]", value)[part])]
    return []


def _shown(path: list[str | int]) -> str:
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        else:
            shown += ("." if shown else "") + part[:_SHOWN_CHARACTERS_MAX]
    return shown
