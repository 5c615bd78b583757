"""The OpenAPI 3.1 description of the admin REST, which is generated from the routes."""

import re
from collections.abc import Iterable
from typing import Any, cast

from control_plane.access.roles import roles_for
from control_plane.http.describe import SCHEMAS
from control_plane.http.routes import AdminRoute
from sluice.ids import ID_PATTERN

Json = dict[str, Any]

_PROBLEM: Json = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "description": "urn:sluice:problem: and the code"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "stable, for programs"},
        "detail": {"type": "string", "description": "for people"},
        "param": {"type": "string", "description": "the field, header or parameter at fault"},
        "request_id": {"type": "string", "description": "as in x-request-id, logs and audit"},
    },
}
_ETAG: Json = {
    "ETag": {"description": "the object's present version", "schema": {"type": "string"}},
}
_REPLAYED: Json = {
    "Idempotency-Replayed": {
        "description": "true: the answer of an earlier request with the same key",
        "schema": {"type": "string"},
    },
}
_DIGEST: Json = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_IDS: Json = {
    **dict.fromkeys(("digest", "chunk"), _DIGEST),
    "cordon": {"type": "string", "minLength": 1},
}
_ID: Json = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_HEADERS: Json = {"Idempotency-Key": {"type": "string", "pattern": "^[!-~]{1,128}$"}}
_FAILURES = {
    "401": "no such key, or it was revoked, is disabled or has expired",
    "403": "the key's role may not do this; the detail names the role that may",
}
_WRITE_FAILURES = {
    "409": "another object prevents it, or the first request with the key is under way",
    "412": "the object does not match If-Match or If-None-Match",
    "422": "the Idempotency-Key came with another request before, or this cannot be rolled out",
}


def document(routes: Iterable[AdminRoute], version: str) -> Json:
    """Return the OpenAPI document of the admin REST.

    Args:
        routes: All routes. Routes that need no key are left out of the document.
        version: Version of this software.
    """
    paths: Json = {}
    for route in routes:
        if route.action is None:
            continue
        path = paths.setdefault(route.public_path, {})
        if names := re.findall(r"\{(\w+)\}", route.public_path):
            path["parameters"] = [_path_parameter(name) for name in names]
        path[route.method.lower()] = _operation(route)
    schemas: Json = {"Problem": _PROBLEM}
    paths = _moved(paths, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice admin REST", "version": version},
        "security": [{"adminKey": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
        },
    }


def operation_id(route: AdminRoute) -> str:
    """Return a route's operation id, which is the method and the path without its parameters."""
    words = [part for part in route.public_path.split("/")[2:] if not part.startswith("{")]
    verb = route.method.lower()
    if any(parameter["name"] == "limit" for parameter in route.operation.get("parameters", ())):
        verb = "list"
    return "_".join((verb, *words)).replace("-", "_")


def _moved(node: Any, schemas: Json) -> Any:
    """Return a part of the document without the definitions (`$defs`) of its bodies.

    The definitions are added to `schemas`, where references in the document point to.
    """
    if isinstance(node, list):
        return [_moved(part, schemas) for part in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    parts = cast("Json", node)
    schemas |= parts.get("$defs", {})
    return {name: _moved(part, schemas) for name, part in parts.items() if name != "$defs"}


def _operation(route: AdminRoute) -> Json:
    """Return a route's description, completed by the parts that are common to all routes."""
    assert route.action is not None, "what is open to all is not described"
    assert "summary" in route.operation, f"{route.method} {route.path} is not described"
    roles = ", ".join(roles_for(route.action))
    found = route.operation | {
        "operationId": operation_id(route),
        "tags": [route.kind],
        "description": f"Roles: {roles}.{_repeatable(route)}",
        "x-sluice-action": str(route.action),
    }
    failures = _FAILURES | (_WRITE_FAILURES if route.is_write else {})
    headers = _ETAG | (_REPLAYED if route.is_write else {})
    found["responses"] = {
        **{
            status: success | {"headers": headers}
            for status, success in route.operation["responses"].items()
        },
        **({} if route.is_write else {"304": {"description": "the object has not changed"}}),
        **{status: _problem(text) for status, text in failures.items()},
        "default": _problem("a problem"),
    }
    found["parameters"] = [
        *route.operation.get("parameters", []),
        *(_header(name, text) for name, text in _request_headers(route).items()),
    ]
    return found


def _repeatable(route: AdminRoute) -> str:
    names = ", ".join(sorted(route.read_only))
    return f" The body may repeat {names} as GET shows it." if names else ""


def _request_headers(route: AdminRoute) -> dict[str, str]:
    if not route.is_write:
        return {"If-None-Match": "a known tag: 304 when the object has not changed"}
    return {
        "Idempotency-Key": "the same request with the same key within 24 h is answered as before",
        "If-Match": "the ETag that the object must have",
        "If-None-Match": "*: only if the object does not exist yet",
    }


def _problem(description: str) -> Json:
    schema = {"$ref": f"{SCHEMAS}Problem"}
    content = {"application/problem+json": {"schema": schema}}
    return {"description": description, "content": content}


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": _IDS.get(name, _ID)}


def _header(name: str, description: str) -> Json:
    schema = _HEADERS.get(name, {"type": "string"})
    return {"name": name, "in": "header", "description": description, "schema": schema}
