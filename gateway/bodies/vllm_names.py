"""Translates field names of vLLM's server into the names of this API. Pure.

Clients that switch from vLLM need to change only their base URL. `GenerationFields` refuses names
without an equivalent. docs/coming-from.md lists both kinds of names.
"""

from collections.abc import Mapping
from typing import Any, cast

import orjson

from gateway.bodies.mistakes import bad_value, unsupported

_GUIDES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_NAMES = _GUIDES.keys() | {"structured_outputs"}


def translated(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the names of this API, or the same object if it needs no change.

    Raises:
        BadRequestError: Two names set the same field, or a value is not supported here.
    """
    if _NAMES.isdisjoint(body):
        return body
    wishes = {name: (_GUIDES[name], body[name]) for name in _GUIDES if body.get(name) is not None}
    outputs = body.get("structured_outputs")
    if outputs is not None:
        wishes |= _structured_outputs(outputs)
    ours = {name: value for name, value in body.items() if name not in _NAMES}
    for param, (kind, value) in wishes.items():
        name, made = _guide(param, kind, value)
        if ours.get(name) is not None:
            raise bad_value(param, f"it is another name of '{name}'; send one")
        ours[name] = made
    return ours


def _structured_outputs(outputs: object) -> dict[str, tuple[str, object]]:
    if not isinstance(outputs, Mapping):
        raise bad_value("structured_outputs", "it must be an object")
    options = cast("Mapping[str, object]", outputs)
    return {
        f"structured_outputs.{kind}": (kind, value)
        for kind, value in options.items()
        if value is not None and value is not False
    }


def _guide(param: str, kind: str, value: object) -> tuple[str, object]:
    """Return this API's field name and value for vLLM's form of a guide."""
    match kind:
        case "regex" | "choice" | "grammar":
            return kind, value
        case "json_object":
            return "response_format", {"type": "json_object"}
        case "json":
            schema = {"name": "answer", "schema": _schema(param, value)}
            return "response_format", {"type": "json_schema", "json_schema": schema}
        case _:
            text = "not supported; use 'response_format', 'regex', 'choice' or 'grammar'"
            raise unsupported(param, text)


def _schema(param: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise bad_value(param, f"it is no JSON: {error}") from None
