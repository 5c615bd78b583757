"""The description of the admin REST: valid, whole, and the same for every route."""

from typing import Any

import pytest

from control_plane.app import admin_routes
from control_plane.database import Database
from control_plane.http.describe import SCHEMAS
from control_plane.http.openapi import document

DOCUMENT = document(admin_routes(Database("postgresql+asyncpg://nobody@/nothing")), "1")
OPERATIONS = {
    (method, path): operation
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    if method != "parameters"
}


def nodes(node: Any) -> list[dict[str, Any]]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node] if isinstance(node, dict) else []
    return own + [found for part in inner for found in nodes(part)]


def test_it_is_valid() -> None:
    from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

    OPENAPI_31_VALIDATOR.validate(DOCUMENT)


def test_every_reference_exists() -> None:
    found = {node["$ref"] for node in nodes(DOCUMENT) if isinstance(node.get("$ref"), str)}
    assert f"{SCHEMAS}LimitsBody" in found
    assert {name.removeprefix(SCHEMAS) for name in found} == set(DOCUMENT["components"]["schemas"])
    assert not any("$defs" in node for node in nodes(DOCUMENT))


@pytest.mark.parametrize(
    "operation", OPERATIONS.values(), ids=(" ".join(name) for name in OPERATIONS)
)
def test_every_operation_names_its_roles_and_errors(operation) -> None:
    assert operation["description"].startswith("Roles: ")
    assert "admin" in operation["description"]
    assert {"401", "403", "default"} <= operation["responses"].keys()
    assert operation["x-sluice-action"]


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)
    assert {"list_tiers", "get_tiers", "put_tiers", "post_admin_keys_rotate"} <= set(names)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name[0] != "get"], ids=" ".join)
def test_every_write_takes_an_idempotency_key(name: tuple[str, str]) -> None:
    headers = {p["name"] for p in OPERATIONS[name]["parameters"] if p["in"] == "header"}
    assert {"Idempotency-Key", "If-Match", "If-None-Match"} <= headers
    assert {"409", "412", "422"} <= OPERATIONS[name]["responses"].keys()
