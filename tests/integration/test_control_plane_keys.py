"""Keys on a real PostgreSQL: what they may do, changing and rotating them."""

import asyncio
import time

import pytest
import pytest_asyncio

from gateway.directory import Directory
from sluice.errors import PlatformError
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

KEYS = "/v1/tenants/keys-of/keys"
PROPERTIES = {
    "expires_at_unix_ms": 0,
    "is_disabled": False,
    "rpm": 5,
    "tpm": 600,
    "requests_max": 7,
    "scopes": ["chat", "models"],
    "models": ["a/*", "b"],
}
NOTHING = {name: [] if isinstance(value, list) else 0 for name, value in PROPERTIES.items()}


@pytest_asyncio.fixture(loop_scope="session")
async def admin(shared_control_plane):
    await shared_control_plane.put("tiers/keys-of")
    await shared_control_plane.put("tenants/keys-of", tier_id="keys-of")
    return shared_control_plane.admin


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def made(admin, **body: object) -> dict[str, object]:
    answer = await admin.post(KEYS, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_key_has_its_given_settings_and_can_be_changed(admin) -> None:
    plain = await made(admin)
    assert {name: plain[name] for name in NOTHING} == NOTHING | {"is_disabled": False}
    key = await made(admin, **PROPERTIES | {"scopes": ["chat", "models", "chat"]})
    assert {name: key[name] for name in PROPERTIES} == PROPERTIES
    one = f"{KEYS}/{key['id']}"
    assert PROPERTIES.items() <= (await admin.get(one)).json().items()
    changed = (await admin.patch(one, json={"rpm": 1, "is_disabled": True})).json()
    assert {name: changed[name] for name in PROPERTIES} == PROPERTIES | {
        "rpm": 1,
        "is_disabled": True,
    }
    assert (await admin.patch(one, json={})).json() == changed
    assert (await admin.patch(one, json={"scopes": []})).json()["scopes"] == []
    assert (await admin.patch(f"{KEYS}/none", json={})).status_code == 404
    assert (await admin.patch(f"{KEYS}/none", json={"rpm": 1})).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": ["admin"]}, "scopes.0"),
        ({"scopes": "chat"}, "scopes"),
        ({"scopes": ["chat"] * 65}, "scopes"),
        ({"models": [""]}, "models.0"),
        ({"models": ["a", "a*b"]}, "models.1"),
        ({"models": ["a\u0000"]}, "models.0"),
        ({"models": ["m" * 130]}, "models.0"),
        ({"requests_max": -1}, "requests_max"),
        ({"expires_at_unix_ms": -1}, "expires_at_unix_ms"),
        ({"secret_sha256": "00"}, "secret_sha256"),
    ],
)
async def test_an_invalid_key_is_refused(admin, body: dict[str, object], param: str) -> None:
    for answer in (
        await admin.post(KEYS, json=body),
        await admin.patch(f"{KEYS}/none", json=body),
    ):
        problem = answer.json()
        assert (answer.status_code, problem["param"]) == (400, param), problem


async def test_a_rotated_key_is_replaced_by_one_like_it(admin) -> None:
    key = await made(admin, **PROPERTIES)
    before = now_ms()
    answer = await admin.post(f"{KEYS}/{key['id']}/rotate", json={"grace_s": 60})
    new = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    assert {name: new[name] for name in PROPERTIES} == PROPERTIES
    assert new["key"].startswith("sk-sluice-")
    assert (new["id"] != key["id"], new["key"] != key["key"]) == (True, True)
    old = (await admin.get(f"{KEYS}/{key['id']}")).json()
    assert new["replaces"] == {"id": old["id"], "expires_at_unix_ms": old["expires_at_unix_ms"]}
    assert before + 60_000 <= old["expires_at_unix_ms"] <= now_ms() + 60_000
    # Once more: the end that it has is not moved away.
    again = (await admin.post(f"{KEYS}/{key['id']}/rotate")).json()
    assert again["replaces"]["expires_at_unix_ms"] == old["expires_at_unix_ms"]
    assert again["expires_at_unix_ms"] == old["expires_at_unix_ms"]


async def test_an_unrotatable_key_is_refused(admin) -> None:
    expired = await made(admin, expires_at_unix_ms=1)
    disabled = await made(admin, is_disabled=True)
    for key in (expired, disabled):
        answer = await admin.post(f"{KEYS}/{key['id']}/rotate")
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await admin.post(f"{KEYS}/none/rotate")).status_code == 404
    valid = await made(admin)
    for grace_s in (-1, 10**9, "1", 1.5):
        answer = await admin.post(f"{KEYS}/{valid['id']}/rotate", json={"grace_s": grace_s})
        assert (answer.status_code, answer.json()["param"]) == (400, "grace_s")
    assert (await admin.get(f"{KEYS}/{valid['id']}")).json()["expires_at_unix_ms"] == 0


async def test_a_gateway_follows_the_changes_of_a_key(
    admin, shared_control_plane, eventually
) -> None:
    watcher = ControlWatcher(shared_control_plane.grpc_address, wire.ROLE_GATEWAY, "g")
    directory = Directory(watcher.state)
    watcher.on_change(directory.update)

    def is_let_in(secret: object) -> bool:
        try:
            directory.authenticate(str(secret), now_ms())
        except PlatformError:
            return False
        return True

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        assert await watcher.wait_synced(20)
        key = await made(admin, scopes=["chat"], models=["m"])
        await eventually(lambda: is_let_in(key["key"]), "the key works")
        principal = directory.authenticate(str(key["key"]), now_ms())
        assert (list(principal.key.scopes), list(principal.key.models)) == (["chat"], ["m"])
        one = f"{KEYS}/{key['id']}"
        await admin.patch(one, json={"is_disabled": True})
        await eventually(lambda: not is_let_in(key["key"]), "the key is refused")
        await admin.patch(one, json={"is_disabled": False})
        await eventually(lambda: is_let_in(key["key"]), "the key works again")
        new = (await admin.post(f"{one}/rotate", json={"grace_s": 3600})).json()
        await eventually(lambda: is_let_in(new["key"]), "the new key works")
        assert is_let_in(key["key"]), "and the old one for an hour"
        newer = (await admin.post(f"{KEYS}/{new['id']}/rotate", json={"grace_s": 0})).json()
        await eventually(lambda: is_let_in(newer["key"]), "the newest key works")
        assert not is_let_in(new["key"]), "its predecessor ended in the same change"
        running.cancel()
