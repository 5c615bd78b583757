"""Helpers that describe routes for the OpenAPI document. Pure."""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from control_plane.fields import AdminBody

Json = dict[str, Any]

SCHEMAS = "#/components/schemas/"
PAGE_MAX = 1000
TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}
TEXTS: Json = {"type": "array", "items": TEXT}
INTEGERS: Json = {"type": "array", "items": INTEGER}
_NOTHING: Mapping[str, Json] = MappingProxyType({})
_QUERY: Json = {
    "is_needed": BOOLEAN,
    **{name: TEXT | {"format": "date-time"} for name in ("since", "from", "to")},
}


def operation(
    summary: str,
    *,
    answer: Json | None = None,
    status: int = 200,
    body: type[AdminBody] | None = None,
    query: Iterable[str] = (),
    also: Iterable[int] = (),
) -> Json:
    """Return the description of one method on one path.

    Args:
        summary: The operation's effect in one line.
        answer: Schema of the answer, or None if the answer has no body (204).
        status: HTTP status of success, if the answer has a body.
        body: Type of the request body, or None without a body.
        query: Names of query parameters.
        also: Other HTTP statuses of success with the same answer.
    """
    content = {} if answer is None else {"content": {"application/json": {"schema": answer}}}
    statuses = (204 if answer is None else status, *also)
    success = {str(one): {"description": HTTPStatus(one).phrase} | content for one in statuses}
    found: Json = {"summary": summary, "responses": success}
    if body is not None:
        schema = _schema(body)
        found["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    if named := [_query(name) for name in query]:
        found["parameters"] = named
    return found


def listing(
    summary: str, shown: Json, query: Iterable[str] = (), *, limit_max: int = PAGE_MAX
) -> Json:
    """Return the description of a list, whose pages have objects with the schema `shown`."""
    schema = {
        "type": "object",
        "required": ["data", "has_more"],
        "properties": {
            "data": {"type": "array", "items": shown},
            "has_more": {"type": "boolean"},
        },
    }
    found = operation(summary, answer=schema, query=("limit", "after", *query))
    limits = INTEGER | {"minimum": 1, "maximum": limit_max, "default": limit_max}
    found["parameters"][0]["schema"] = limits
    return found


def shown(
    fields: Iterable[str], body: type[AdminBody] | None = None, types: Mapping[str, Json] = _NOTHING
) -> Json:
    """Return the schema of an object with the given fields, all of which are required.

    Args:
        fields: Names of the fields.
        body: Body of the write. Fields with the same names have the same types.
        types: Schemas of further fields, for example `INTEGER` or schemas from
            `control_plane.http.columns`. All other fields are texts.
    """
    found: Json = dict(types)
    found |= {} if body is None else _schema(body).get("properties", {})
    names = [str(field) for field in fields]
    properties = {name: found.get(name, TEXT) for name in names}
    return {"type": "object", "required": names, "properties": properties}


def _schema(body: type[AdminBody]) -> Json:
    """Return the schema of a body.

    Its definitions are under `$defs`, from which `document` moves them.
    """
    return body.model_json_schema(ref_template=SCHEMAS + "{model}")


def nullable(schema: Json) -> Json:
    """Return a schema that also accepts null."""
    return {"anyOf": [schema, {"type": "null"}]}


def _query(name: str) -> Json:
    return {"name": name, "in": "query", "schema": _QUERY.get(name, TEXT)}
