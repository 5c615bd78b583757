"""Who may do what; and that every route says what it takes."""

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from control_plane.access.roles import Action, Actor, Reach, Role, may, reach, roles_for
from control_plane.app import admin_routes
from control_plane.database import Database
from control_plane.http.openapi import document
from control_plane.http.routes import AdminRoute
from control_plane.http.server import make_application
from control_plane.http.writes import forbidden
from control_plane.texts.routes import POLICIES

OWNERS = st.sampled_from((None, "", "acme", "acme2", "globex"))
ACTIONS = st.sampled_from(Action)
WRITES = [action for action in Action if not action.startswith("read_")]
ROUTES = admin_routes(Database("postgresql+asyncpg://nobody@/nothing"))


@given(ACTIONS, OWNERS)
def test_no_role_may_do_more_than_the_next_one(action: Action, owner: str | None) -> None:
    allowed = [may(r, "", action, owner) for r in (Role.VIEWER, Role.OPERATOR, Role.ADMIN)]
    assert allowed == sorted(allowed)
    assert allowed[-1], "an admin may do everything"
    assert may(Role.PUBLISHER, "acme", action, owner) <= allowed[-1]


@given(ACTIONS, OWNERS, st.sampled_from(("acme", "globex")))
def test_a_publisher_never_touches_another_tenant(
    action: Action, owner: str | None, tenant: str
) -> None:
    if owner and owner != tenant:
        assert not may(Role.PUBLISHER, tenant, action, owner)
    if not owner:
        assert may(Role.PUBLISHER, tenant, action, owner) <= action.startswith("read_")


@given(ACTIONS, OWNERS, st.sampled_from(("acme", "globex")))
def test_a_reader_reads_the_usage_of_its_tenant_and_nothing_else(
    action: Action, owner: str | None, tenant: str
) -> None:
    may_it = may(Role.READER, tenant, action, owner)
    assert may_it == (action is Action.READ_USAGE and owner == tenant)
    assert may_it <= may(Role.PUBLISHER, tenant, action, owner)


@given(ACTIONS, OWNERS)
def test_a_publisher_without_a_tenant_owns_nothing(action: Action, owner: str | None) -> None:
    """There is no such key; if there were one, it could not write what is nobody's."""
    assert may(Role.PUBLISHER, "", action, owner) <= action.startswith("read_")


def test_a_viewer_writes_nothing_and_an_operator_only_the_fleet() -> None:
    assert all(reach(Role.VIEWER, action) is Reach.NOTHING for action in WRITES)
    can = {action for action in WRITES if reach(Role.OPERATOR, action) is Reach.ALL}
    assert can == {Action.WRITE_FLEET, Action.CONTROL_ROLLOUTS}
    reads = set(Action) - set(WRITES) - {Action.READ_TEXT_POLICIES}
    assert all(reach(Role.VIEWER, action) is Reach.ALL for action in reads)


def test_the_table_has_every_action_and_role() -> None:
    for action in Action:
        assert Role.ADMIN in roles_for(action)
        for role in Role:
            assert reach(role, action) in Reach


def test_an_actor_is_described_in_words() -> None:
    assert Actor("k", Role.VIEWER).words == "viewer"
    assert Actor("k", Role.PUBLISHER, "acme").words == "publisher of tenant acme"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.public_path}")
def test_every_route_lists_its_parameters(route) -> None:
    assert isinstance(route.action, Action)
    assert route.path.startswith("/v1/")
    assert route.kind
    assert (route.is_write or route.is_noted) == (route.action in WRITES)
    assert route.operation["summary"]


async def test_a_route_that_says_nothing_cannot_be_served() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response()

    database = Database("postgresql+asyncpg://nobody@/nothing")
    for route in (
        AdminRoute("GET", "/v1/things", handler, None),
        AdminRoute("GET", "/healthz", handler, Action.READ_PLATFORM),
    ):
        with pytest.raises(AssertionError, match="need an action"):
            make_application([route], database, "00", lambda path, status: None)


def test_routes_are_described_once() -> None:
    paths = document(ROUTES, "1")["paths"]
    described = [
        (method.upper(), path)
        for path, operations in paths.items()
        for method in operations
        if method != "parameters"
    ]
    assert sorted(described) == sorted((route.method, route.public_path) for route in ROUTES)
    put = paths["/v1/models/{id}"]["put"]
    headers = {parameter["name"] for parameter in put["parameters"]}
    assert headers == {"Idempotency-Key", "If-Match", "If-None-Match"}
    assert {"401", "403", "409", "412", "422"} <= put["responses"].keys()
    assert "ETag" in put["responses"]["200"]["headers"]
    repeated = "The body may repeat created_at_unix_s, id, previous_release as GET shows it."
    assert put["description"] == f"Roles: publisher, admin. {repeated}"


@pytest.mark.parametrize(
    ("actor", "action", "said"),
    [
        (Actor("k", Role.VIEWER), Action.WRITE_TENANTS, "the role admin; your key is a viewer"),
        (
            Actor("k", Role.OPERATOR),
            Action.WRITE_MODELS,
            "the role publisher or admin; your key is an operator",
        ),
        (
            Actor("k", Role.PUBLISHER, "acme"),
            Action.READ_PLATFORM,
            "the role viewer, operator or admin; your key is a publisher of tenant acme",
        ),
        (
            Actor("k", Role.PUBLISHER, "acme"),
            Action.WRITE_MODELS,
            "the role admin, or publisher of the tenant that it belongs to; "
            "your key is a publisher of tenant acme",
        ),
    ],
)
def test_a_forbidden_caller_is_told_the_needed_roles(
    actor: Actor, action: Action, said: str
) -> None:
    route = next(route for route in ROUTES if route.action is action)
    error = forbidden(actor, route)
    assert (error.status, error.message) == (403, f"this needs {said}")


def test_words_of_tenants_are_hidden_from_roles_without_texts() -> None:
    for role in Role:
        assert reach(role, POLICIES.read) == reach(role, Action.SEE_TEXTS)
    policy = {"id": "acme", "words": ["falcon", "eagle"], "redacted": ["ip"]}
    # The audit log is open to viewers and operators.
    assert POLICIES.noted(policy) == {"id": "acme", "words": 2, "redacted": ["ip"]}
