"""JSON schemas of a table's columns, for the OpenAPI document."""

from typing import Any

from sqlalchemy import ARRAY, Boolean, Column, Integer, Numeric, Table
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from control_plane.http.describe import BOOLEAN, INTEGER, NUMBER, OBJECT, TEXT, Json, nullable


def columns(table: Table, *, is_null_shown: bool = True) -> dict[str, Json]:
    """Return the JSON schemas of a table's columns by name. Times have the schema of a text.

    Args:
        table: Table whose rows are shown.
        is_null_shown: Whether NULL is shown as null, and not as the empty string.
    """
    return {str(column.name): _schema(column, is_null_shown) for column in table.columns}


def _schema(column: Column[Any], is_null_shown: bool) -> Json:
    found = _of(column)
    if not column.nullable:
        return found
    if is_null_shown:
        return nullable(found)
    return found if found is TEXT else {"anyOf": [found, TEXT | {"maxLength": 0}]}


def _of(column: Column[Any]) -> Json:
    if isinstance(column.type, JSONB):
        default = getattr(column.server_default, "arg", "")
        return {"type": "array"} if str(default).startswith("'[]'") else OBJECT
    if isinstance(column.type, ARRAY):
        item: TypeEngine[Any] = column.type.item_type
        return {"type": "array", "items": _scalar(item)}
    return _scalar(column.type)


def _scalar(kind: TypeEngine[Any]) -> Json:
    for known, schema in ((Boolean, BOOLEAN), (Integer, INTEGER), (Numeric, NUMBER)):
        if isinstance(kind, known):
            return schema
    return TEXT
