"""The description of the admin REST (OpenAPI 3.1), made from the resources themselves."""

from collections.abc import Iterable
from typing import Any

from control_plane.fields import Body
from control_plane.http.resources import Resource

Json = dict[str, Any]

_PROBLEM: Json = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "stable, for programs"},
        "detail": {"type": "string", "description": "for people"},
        "param": {"type": "string", "description": "the field at fault"},
    },
}


def document(
    resources: Iterable[Resource],
    views: Iterable[str],
    key_body: type[Body],
    rotation_body: type[Body],
    version: str,
) -> Json:
    """Return the OpenAPI document.

    Args:
        resources: All that can be read, and mostly put.
        views: Paths below /v1/ that can only be listed.
        key_body: What makes an API key.
        rotation_body: What replaces one.
        version: Of this software.
    """
    paths: Json = {}
    for resource in resources:
        paths |= _resource_paths(resource)
    for view in views:
        paths[f"/v1/{view}"] = {"get": _operation(f"List {view}", {"200": _page({})})}
    paths |= _key_paths(key_body, rotation_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice admin REST", "version": version},
        "security": [{"adminKey": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Problem": _PROBLEM},
        },
    }


def _resource_paths(resource: Resource) -> Json:
    name, key = resource.path, resource.key.name
    body: Json = resource.body.model_json_schema() if resource.body is not None else {}
    written: Json = body.get("properties", {})
    shown: Json = {
        "type": "object",
        "properties": {field: written.get(field, {"type": "string"}) for field in resource.shown},
    }
    one = _json(shown)
    single: Json = {
        "parameters": [_parameter(key)],
        "get": _operation(f"Show one of {name}", {"200": one}),
        "delete": _operation(f"Delete one of {name}", {"204": {"description": "deleted"}}),
    }
    if body:
        written_one: Json = {"200": one, "201": one}
        single["put"] = _operation(f"Create or replace one of {name}", written_one, body)
    listed = _operation(f"List {name}", {"200": _page(shown)}, paged=True)
    listed["parameters"] += [_query(column, "string") for column in resource.filters]
    return {f"/v1/{name}": {"get": listed}, f"/v1/{name}/{{{key}}}": single}


def _key_paths(key_body: type[Body], rotation_body: type[Body]) -> Json:
    body = key_body.model_json_schema()
    shown: Json = {
        "type": "object",
        "properties": {"id": {"type": "string"}, **body["properties"]},
    }
    made: Json = {
        "type": "object",
        "required": ["id", "key"],
        "properties": {
            "id": {"type": "string"},
            "key": {"type": "string", "description": "shown here and never again"},
            **body["properties"],
        },
    }
    return {
        "/v1/tenants/{tenant_id}/keys": {
            "parameters": [_parameter("tenant_id")],
            "get": _operation("List a tenant's keys", {"200": _page(shown)}, paged=True),
            "post": _operation("Make a key", {"201": _json(made)}, body),
        },
        "/v1/tenants/{tenant_id}/keys/{id}": {
            "parameters": [_parameter("tenant_id"), _parameter("id")],
            "get": _operation("Show a key", {"200": _json(shown)}),
            "patch": _operation("Change what is given of a key", {"200": _json(shown)}, body),
            "delete": _operation("Revoke a key", {"204": {"description": "revoked"}}),
        },
        "/v1/tenants/{tenant_id}/keys/{id}/rotate": {
            "parameters": [_parameter("tenant_id"), _parameter("id")],
            "post": _operation(
                "Make a key like this one, which ends after a grace",
                {"201": _json(made)},
                rotation_body.model_json_schema(),
            ),
        },
    }


def _operation(
    summary: str, answers: Json, body: Json | None = None, *, paged: bool = False
) -> Json:
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    failure = {"description": "a problem", "content": {"application/problem+json": problem}}
    operation: Json = {"summary": summary, "responses": answers | {"default": failure}}
    if body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    if paged:
        operation["parameters"] = [_query("limit", "integer"), _query("after", "string")]
    return operation


def _parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query(name: str, kind: str) -> Json:
    return {"name": name, "in": "query", "schema": {"type": kind}}


def _json(schema: Json) -> Json:
    return {"description": "ok", "content": {"application/json": {"schema": schema}}}


def _page(schema: Json) -> Json:
    return _json(
        {
            "type": "object",
            "required": ["data", "has_more"],
            "properties": {
                "data": {"type": "array", "items": schema},
                "has_more": {"type": "boolean"},
            },
        }
    )
