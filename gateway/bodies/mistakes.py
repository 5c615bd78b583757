"""Builds errors about a body, with the path of the wrong field and the reason. Pure."""

import re
from collections.abc import Sequence
from typing import Any, LiteralString, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sluice.errors import BadRequestError, ErrorCode

# Type of pydantic errors about values that this server does not support.
UNSUPPORTED: LiteralString = "unsupported_parameter"
_NAME_CHARACTERS_MAX = 100  # shown characters of a name or value that the client sent
_TEXT_CHARACTERS_MAX = 500
# Bound of 64-bit integers. JSON parsers convert larger integers to floats.
_INTEGER_MAX = 2.0**63
_PYDANTIC_S = re.compile(r"\b(?:Input|String|List|Dictionary|Data) should")
# Kinds of content that only multimodal models accept, with the word for an error.
_MEDIA = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}


def bad_value(param: str, message: str) -> BadRequestError:
    """Return the error for an invalid value. `message` must not end with a full stop."""
    return BadRequestError(
        ErrorCode.INVALID_REQUEST, f"Invalid value for '{param}': {message}.", param=param
    )


def unsupported(param: str, message: str) -> BadRequestError:
    """Return the error for a feature that other servers document and this server lacks."""
    return BadRequestError(
        ErrorCode.UNSUPPORTED_PARAMETER, f"Unsupported value for '{param}': {message}.", param=param
    )


def too_long(param: str, characters: int, context_tokens: int, fits: int) -> BadRequestError:
    """Return the error for a text with more characters than the context's tokens can encode.

    Args:
        param: Name of the body's field for the text.
        characters: Number of characters of the text.
        context_tokens: Context of the model, in tokens.
        fits: Maximum number of characters that `context_tokens` tokens can encode.
    """
    return BadRequestError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {context_tokens} tokens, which hold at most {fits}"
        f" characters. However, your {param} has {characters}. Please reduce its length.",
        param=param,
    )


def first_mistake(error: ValidationError, document: object) -> BadRequestError:
    """Return the error for a body's first mistake. For a union, the deepest mistake counts."""
    details = error.errors(include_url=False, include_input=False)
    paths = [_path(detail, document) for detail in details]
    ranks = [
        (len(path), not detail["type"].endswith("_type"))
        for path, detail in zip(paths, details, strict=True)
    ]
    best = max(range(len(details)), key=ranks.__getitem__)
    path = paths[best]
    return _field_error(details[best], _shown(path), _value_at(path, document))


def _value_at(path: Sequence[str | int], value: Any) -> object:
    for part in path:
        is_there = part in value if isinstance(value, dict) else isinstance(part, int)
        value = value[part] if is_there else None
    return value


def _field_error(detail: ErrorDetails, param: str, value: object) -> BadRequestError:
    message = _PYDANTIC_S.sub("it must", detail["msg"]).replace(" after validation", "")
    message = message[:_TEXT_CHARACTERS_MAX]
    match detail["type"]:
        case "int_type" if isinstance(value, float) and abs(value) >= _INTEGER_MAX:
            return bad_value(param, "integers have at most 64 bits")
        case "missing" | "union_tag_not_found":
            text = f"Missing required parameter: '{param}'."
            return BadRequestError(ErrorCode.INVALID_REQUEST, text, param=param)
        case "extra_forbidden":
            text = f"Unrecognized request argument supplied: {param}"
            return BadRequestError(ErrorCode.INVALID_REQUEST, text, param=param)
        case "union_tag_invalid":
            context: dict[str, Any] = detail.get("ctx", {})
            kind, known = str(context.get("tag")), context.get("expected_tags")
            return _unknown_kind(param, kind[:_NAME_CHARACTERS_MAX], str(known))
        case kind if kind == UNSUPPORTED:
            return unsupported(param, message)
        case _:
            return bad_value(param, message)


def _unknown_kind(param: str, kind: str, known: str) -> BadRequestError:
    if (name := _MEDIA.get(kind)) is not None:
        return unsupported(param, f"{name} are not served here ('{kind}'), only text")
    return unsupported(param, f"the type '{kind}' is not one of {known}")


def _path(detail: ErrorDetails, document: object) -> list[str | int]:
    """Return the path of the mistake in the document, without pydantic's type names."""
    match detail["type"]:
        case "missing":
            *above, name = detail["loc"]
            return [*_followed(above, document), name]
        case "union_tag_not_found":
            return [*_followed(detail["loc"], document), "type"]
        case _:
            return _followed(detail["loc"], document)


def _followed(loc: Sequence[str | int], value: object) -> list[str | int]:
    """Return the parts of `loc` that are keys and indices of `value`.

    `loc` also has names of union members, which are left out. If a member's name is also a key of
    `value`, both readings are tried, and the one that reaches the end of `loc` is returned.
    """
    for position, part in enumerate(loc):
        rest = loc[position + 1 :]
        if isinstance(value, dict) and part in value:
            within = [part, *_followed(rest, cast("dict[object, object]", value)[part])]
            if rest and within[-1] != rest[-1]:
                beside = _followed(rest, cast("object", value))
                is_right = len(beside) >= len(within) and beside[-1] == rest[-1]
                return beside if is_right else within
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
            shown += ("." if shown else "") + part[:_NAME_CHARACTERS_MAX]
    return shown
