"""Separates the keywords of a JSON schema that no grammar can enforce from the others. Pure.

The list of keywords matches the engine's compiler, llguidance. A test compiles each keyword.
"""

from collections.abc import Iterable
from typing import Any, cast

UNENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
    }
)
ENFORCED_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri", "unknown"),
    }
)
_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_CONSTANTS = frozenset({"const", "enum", "default", "examples"})


def enforceable(schema: Any) -> tuple[Any, frozenset[str]]:
    """Return a schema without keywords that no grammar can enforce, and the removed keywords.

    Args:
        schema: A schema whose depth `guides.schema_text` has checked.
    """
    left_out: set[str] = set()
    return _kept(schema, left_out), frozenset(left_out)


def left_out(schemas: Iterable[Any]) -> frozenset[str]:
    """Return all keywords of these schemas that no grammar can enforce."""
    return frozenset[str]().union(*(enforceable(schema)[1] for schema in schemas))


def _kept(schema: Any, left_out: set[str]) -> Any:
    if isinstance(schema, list):
        return [_kept(item, left_out) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", schema).items():
        if key in UNENFORCED:
            left_out.add(key)
        elif key == "format" and isinstance(value, str) and value not in ENFORCED_FORMATS:
            left_out.add("format")
        elif key in _CONSTANTS:
            kept[key] = value
        elif key in _NAMES and isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            kept[key] = {name: _kept(below, left_out) for name, below in named.items()}
        else:
            kept[key] = _kept(value, left_out)
    return kept
