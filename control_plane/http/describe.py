"""Parts of the OpenAPI document that handlers describe themselves with; pure."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from control_plane.fields import Body

Json = dict[str, Any]

SCHEMAS = "#/components/schemas/"


def operation(
    summary: str,
    *,
    answer: Json | None = None,
    status: int = 200,
    also: Iterable[int] = (),
    body: type[Body] | None = None,
    query: Iterable[str] = (),
) -> Json:
    """Return the description of one method on one path.

    Args:
        summary: What it does, in one line.
        answer: Schema of what it answers; None: no body (204).
        status: Of success, when there is a body.
        also: Other statuses of success, with the same answer.
        body: What it takes.
        query: Names of query parameters.
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


def listing(summary: str, shown: Json, query: Iterable[str] = ()) -> Json:
    """Return the description of a list that comes in pages of objects like `shown`."""
    schema = {
        "type": "object",
        "required": ["data", "has_more"],
        "properties": {
            "data": {"type": "array", "items": shown},
            "has_more": {"type": "boolean"},
        },
    }
    return operation(summary, answer=schema, query=("limit", "after", *query))


def shown(fields: Iterable[str], body: type[Body] | None = None) -> Json:
    """Return the schema of an object with these fields; those of a body have their types."""
    written: Json = {} if body is None else _schema(body).get("properties", {})
    properties = {str(field): written.get(field, {"type": "string"}) for field in fields}
    return {"type": "object", "properties": properties}


def _schema(body: type[Body]) -> Json:
    """Return the schema of a body; what it refers to is under `$defs`, which `document` moves."""
    return body.model_json_schema(ref_template=SCHEMAS + "{model}")


def _query(name: str) -> Json:
    kind = "integer" if name == "limit" else "string"
    return {"name": name, "in": "query", "schema": {"type": kind}}
