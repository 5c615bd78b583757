"""What the admin REST takes, and which objects agents are told to run."""

import hashlib

import pytest
from pydantic import ValidationError

from control_plane.access.keys import NewKey, expiry_after_grace, is_expired
from control_plane.fleet.bodies import PoolBody
from control_plane.models.model import AliasBody, ModelBody, release_id, release_of_digests
from control_plane.tenants.model import (
    KeyBody,
    TenantBody,
    TierBody,
)
from control_plane.watch.rows import KINDS, wire_state
from sluice.watch import KINDS as WIRE_KINDS

_DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (TierBody, {"rpm": -1}),
        (TierBody, {"rpm": 2**31}),
        (TierBody, {"rpm": "5"}),
        (TierBody, {"rpm": 1.5}),
        (TierBody, {"unknown": 1}),
        (TierBody, {"reserved_percent": 100.1}),
        (TierBody, {"reserved_percent": 0.25}),
        (TierBody, {"reserved_percent": -1}),
        (TierBody, {"is_preemptible": 1}),
        (TierBody, {"model_limits": {"m": {"rpm": -1}}}),
        (TierBody, {"model_limits": {"m": {"priority": 1}}}),
        (TierBody, {"model_limits": {"*": {"rpm": 1}}}),
        (TierBody, {"model_limits": {f"m{n}": {} for n in range(257)}}),
        (TenantBody, {"tier_id": "t", "limits": {"tpm": 2**31}}),
        (TenantBody, {"tier_id": "t", "fallbacks": {"": "m"}}),
        (TenantBody, {"tier_id": "t", "fallbacks": {"m": "*"}}),
        (TenantBody, {"tier_id": "t", "fallbacks": {f"m{n}": "m" for n in range(257)}}),
        (TenantBody, {"tier_id": "t", "pins": {"": "1"}}),
        (TenantBody, {"tier_id": "t", "pins": {"m": ""}}),
        (TenantBody, {"tier_id": "t", "pins": {"m": "m@1"}}),
        (TenantBody, {"tier_id": "t", "pins": {"*": "1"}}),
        (TenantBody, {}),
        (TenantBody, {"tier_id": ""}),
        (TenantBody, {"tier_id": "t", "name": "a\u0000b"}),
        (TenantBody, {"tier_id": "t", "name": "x" * 257}),
        (TenantBody, {"tier_id": "t", "weight": 0}),
        (TenantBody, {"tier_id": "t", "cache_salt": "00"}),
        (ModelBody, {"base_digest": "short", "pool_id": "p"}),
        (ModelBody, {"base_digest": _DIGEST, "pool_id": "p", "adapter_digest": "x"}),
        (ModelBody, {"base_digest": _DIGEST, "pool_id": "p", "release": "a@b"}),
        (ModelBody, {"base_digest": _DIGEST, "pool_id": "p", "release": "a/b"}),
        (ModelBody, {"base_digest": _DIGEST, "pool_id": "p", "release": "x" * 65}),
        (AliasBody, {}),
        (AliasBody, {"target": ""}),
        (PoolBody, {"base_digest": _DIGEST, "engine": "sim", "engine_options": {"": "1"}}),
        (PoolBody, {"base_digest": _DIGEST, "engine": "sim", "engine_options": {"a": 1}}),
        (PoolBody, {"base_digest": _DIGEST, "engine": "sim", "cell_replicas_max": -1}),
        (PoolBody, {"base_digest": _DIGEST, "engine": "sim", "roles": {"both": 1}}),
        (PoolBody, {"base_digest": _DIGEST, "engine": "sim", "roles": {"prefill": -1}}),
        (TenantBody, {"tier_id": "t", "gather_ms": 51}),
        (TenantBody, {"tier_id": "t", "retention_hours": -1}),
        (TenantBody, {"tier_id": "t", "retention_hours": 87_601}),
        (KeyBody, {"interval_ms": 5001}),
    ],
)
def test_bad_bodies_are_refused(kind, body) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(body)


def test_an_empty_owner_is_stored_as_null() -> None:
    body = ModelBody.model_validate({"base_digest": _DIGEST, "pool_id": "p"})
    assert body.owner_tenant_id is None
    given_empty = {"base_digest": _DIGEST, "pool_id": "p", "owner_tenant_id": ""}
    assert ModelBody.model_validate(given_empty).owner_tenant_id is None


def test_a_key_is_stored_as_its_hash() -> None:
    key = NewKey("key_1", "sk-sluice-text")
    assert key.sha256 == hashlib.sha256(b"sk-sluice-text").digest()


def test_limits_that_are_none_are_not_kept() -> None:
    """Most tenants have none, and there are many tenants."""
    given = {"tier_id": "t", "limits": {"rpm": 5, "tpm": 0}}
    assert TenantBody.model_validate(given).model_dump()["limits"] == {"rpm": 5}
    assert TenantBody.model_validate({"tier_id": "t"}).model_dump()["limits"] == {}
    limited = TierBody.model_validate({"model_limits": {"m": {"rpm": 0, "requests_max": 2}}})
    assert limited.model_dump()["model_limits"] == {"m": {"requests_max": 2}}


def test_repeated_values_of_a_key_are_kept_once() -> None:
    body = '{"scopes": ["chat", "models", "chat"], "models": ["b", "a*", "b"]}'
    key = KeyBody.model_validate_json(body).model_dump()
    assert (key["scopes"], key["models"]) == (["chat", "models"], ["b", "a*"])


def test_a_release_without_a_name_is_named_by_its_content() -> None:
    names = {
        release_of_digests(base, tuned) for base in ("a" * 64, "b" * 64) for tuned in ("", "c" * 64)
    }
    assert len(names) == 4
    for name in names:
        body = {"base_digest": _DIGEST, "pool_id": "p", "release": name}
        assert ModelBody.model_validate(body).release == name
    assert release_id("org/m", "1") == "org/m@1"


def test_the_end_of_a_replaced_key_is_never_moved_away() -> None:
    assert expiry_after_grace(0, 1000, 5) == 6000
    assert expiry_after_grace(7000, 1000, 5) == 6000
    assert expiry_after_grace(5000, 1000, 5) == 5000
    ended_now = expiry_after_grace(0, 1000, 0)
    assert ended_now == 1000
    assert not is_expired(ended_now, 1000), "the same rotation may have to run again"
    assert is_expired(ended_now, 1001)
    assert not is_expired(0, 1000)


def test_every_kind_has_a_table_with_its_fields_as_columns() -> None:
    assert tuple(KINDS) == WIRE_KINDS
    for kind in KINDS.values():
        fields = {field.name for field in kind.message.DESCRIPTOR.fields}
        assert {column.name for column in kind.columns} | {"is_draining"} == fields | {
            "is_draining"
        }


def test_a_draining_replica_is_seen_as_draining_until_it_ended() -> None:
    draining = {state: wire_state(state, is_draining=True) for state in range(7)}
    assert draining == {0: 3, 1: 3, 2: 3, 3: 3, 4: 4, 5: 5, 6: 6}
    assert all(wire_state(state, is_draining=False) == state for state in range(7))


def test_a_ready_replica_that_is_about_to_sleep_is_seen_as_sleeping() -> None:
    asleep = {state: wire_state(state, is_draining=False, sleeps=True) for state in range(8)}
    assert asleep == {0: 0, 1: 1, 2: 7, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    assert wire_state(2, is_draining=True, sleeps=True) == 3
