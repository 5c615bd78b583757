"""The registry of tools on a real PostgreSQL: checked, sealed, audited, told to gateways."""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio

from sluice.sealing import Sealer, SealError
from sluice.server_tools import SEALED_FOR, header_place
from sluice.shared_secret import ours
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

TENANT = "tools-of"
TOOL = "/v1/tools/weather"
URL = "https://tools.example.com/weather"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 50}}}
TOKEN = "Bearer very-secret"


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane) -> Any:
    await shared_control_plane.put("tiers/tools")
    await shared_control_plane.put(f"tenants/{TENANT}", tier_id="tools")
    return shared_control_plane


def _body(**fields: object) -> dict[str, object]:
    known = {"owner_tenant_id": TENANT, "kind": "http", "name": "weather", "url": URL}
    return {**known, "parameters": SCHEMA, **fields}


async def test_a_tool_reaches_gateways_with_its_secrets_sealed(plane, eventually) -> None:
    body = _body(secret_headers={"Authorization": TOKEN}, price_micros=5)
    made = await plane.admin.put(TOOL, json=body)
    assert made.status_code == 201, made.text
    assert made.json()["secret_headers"] == {"Authorization": ""}
    assert made.json()["parameters"] == SCHEMA
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "tools")
    tools = lambda: watcher.state.server_tools  # noqa: E731
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: "weather" in tools(), "the tool is known")
        told = tools()["weather"]
        sealed = told.secret_headers["Authorization"]
        assert "secret" not in sealed
        sealer = Sealer(ours(), SEALED_FOR)
        assert sealer.opened(sealed, header_place("weather", URL, "authorization")) == TOKEN
        with pytest.raises(SealError):
            sealer.opened(sealed, header_place("weather", "https://other.example.com/", "a"))
        assert json.loads(told.parameters) == SCHEMA
        assert (told.timeout_ms, told.approval, told.price_micros) == (10_000, "always", 5)
        # What is shown can be sent back: it changes nothing, and keeps the secret.
        again = await plane.admin.put(TOOL, json=body | {"secret_headers": {"Authorization": ""}})
        assert again.status_code == 200, again.text
        same = await plane.admin.put(TOOL, json=body)
        assert same.status_code == 200
        changed = await plane.admin.put(TOOL, json=body | {"timeout_ms": 500})
        assert changed.status_code == 200
        await eventually(lambda: tools()["weather"].timeout_ms == 500, "the change is known")
        assert tools()["weather"].secret_headers["Authorization"] == sealed
        query = {"kind": "tools", "object_id": "weather"}
        rows = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
        assert len(rows) >= 2
        assert "very-secret" not in json.dumps(rows)
        assert sealed not in json.dumps(rows)
        assert (await plane.admin.delete(TOOL)).status_code == 204
        await eventually(lambda: "weather" not in tools(), "the tool is gone")
        running.cancel()


async def test_a_stored_secret_does_not_follow_to_another_address(plane) -> None:
    path = "/v1/tools/moved"
    body = _body(name="moved", secret_headers={"Authorization": TOKEN})
    assert (await plane.admin.put(path, json=body)).status_code == 201
    elsewhere = {"url": "https://evil.example.com/", "secret_headers": {"Authorization": ""}}
    moved = await plane.admin.put(path, json=body | elsewhere)
    assert moved.status_code == 400, moved.text
    assert "send its text" in moved.json()["detail"]


async def test_a_tenant_may_name_addresses_of_servers_only_if_it_is_allowed_to(
    plane, eventually
) -> None:
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "tools-urls")
    tenants = lambda: watcher.state.tenants  # noqa: E731
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: TENANT in tenants(), "the tenant is known")
        assert not tenants()[TENANT].allows_server_urls
        await plane.put(f"tenants/{TENANT}", tier_id="tools", allows_server_urls=True)
        await eventually(lambda: tenants()[TENANT].allows_server_urls, "the change is known")
        running.cancel()


async def test_two_tools_of_a_tenant_have_two_names(plane) -> None:
    assert (await plane.admin.put("/v1/tools/one", json=_body(name="same"))).status_code == 201
    other = await plane.admin.put("/v1/tools/two", json=_body(name="same"))
    assert other.status_code == 409, other.text
    assert "tool one of this tenant has it" in other.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "ftp://a/"}, "https://host/path"),
        ({"url": "https://user:secret@a/"}, "secrets as headers"),
        ({"name": "a b"}, "A-Z a-z 0-9"),
        ({"secret_headers": {"Host": "x"}}, "set by the gateway"),
        ({"secret_headers": {"A": "x\r\nB: y"}}, "printable ASCII"),
        ({"secret_headers": {"A": ""}}, "send its text"),
        ({"parameters": {"type": "array"}}, '"type": "object"'),
        ({"allowed_tools": ["a"]}, "allowed_tools"),
        ({"kind": "mcp"}, "lists its tools itself"),
        ({"timeout_ms": 1}, "100"),
        ({"result_bytes_max": 1 << 30}, "1048576"),
        ({"owner_tenant_id": "nobody-of-ours"}, "does not exist"),
    ],
)
async def test_invalid_tools_are_refused(plane, changes, message: str) -> None:
    answer = await plane.admin.put("/v1/tools/bad", json=_body(name="bad") | changes)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["detail"]
    assert "secret@" not in answer.text
