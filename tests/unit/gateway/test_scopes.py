"""Which limits hold for whom, and that they are looked up once."""

import random
import weakref
from typing import cast

import pytest

from gateway.directory import Principal
from gateway.limits import scopes as scopes_module
from gateway.limits.buckets import BucketScope
from gateway.limits.scopes import Scopes
from sluice.wire.control.v1 import control_pb2 as control


def shown(scopes: tuple[BucketScope, ...]) -> list[tuple[str | int, ...]]:
    kinds = ("rpm", "tpm", "requests_max")
    return [(s.name, *(s.limits.get(kind, 0) for kind in kinds)) for s in scopes]


KEY = control.ApiKey(id="k", rpm=1)
TENANT = control.Tenant(id="t")
TIER = control.Tier(rpm=10, tpm=100, requests_max=4)
TIER.model_limits["big"].CopyFrom(control.Limits(tpm=50))


def test_account_key_and_model() -> None:
    scopes = Scopes().of(Principal(KEY, TENANT, TIER), "big").scopes
    assert shown(scopes) == [
        ("limits:{t}", 10, 100, 4),
        ("limits:{t}:key:k", 1, 0, 0),
        ("limits:{t}:model:big", 0, 50, 0),
    ]


def test_only_limited_scopes_are_checked() -> None:
    free = Principal(control.ApiKey(id="k"), TENANT, control.Tier())
    assert Scopes().of(free, "big").scopes == ()
    assert len(Scopes().of(Principal(KEY, TENANT, TIER), "small").scopes) == 2
    assert "small" not in TIER.model_limits, "asking does not add"


def test_a_tenants_own_limits_replace_its_tiers() -> None:
    own = control.Tenant(id="t", limits=control.Limits(tpm=7, requests_max=9))
    scopes = Scopes().of(Principal(control.ApiKey(id="k"), own, TIER), "small").scopes
    assert shown(scopes) == [("limits:{t}", 10, 7, 9)]


def test_bound_once_until_something_changes() -> None:
    scopes = Scopes()
    caller = Principal(KEY, TENANT, TIER)
    first = scopes.of(caller, "big")
    assert scopes.of(caller, "big") is first
    first.scopes[0].held = 3
    tier = control.Tier(rpm=20)
    second = scopes.of(Principal(KEY, TENANT, tier), "big")
    assert shown(second.scopes)[0] == ("limits:{t}", 20, 0, 0)
    assert second.scopes[0] is first.scopes[0], "what is open stays counted"
    assert second.forecast is first.forecast


def test_a_caller_admitted_before_a_change_does_not_undo_it() -> None:
    """Such a caller may ask late: after a slow body, or when another model stands in."""
    scopes = Scopes()
    before = Principal(KEY, TENANT, control.Tier(rpm=1000))
    after = Principal(control.ApiKey(id="other"), TENANT, control.Tier(rpm=10))
    account = scopes.of(after, "big").scopes[0]
    late = scopes.of(before, "small")
    assert late.scopes[0] is account
    assert account.limits["rpm"] == 10
    account_again = scopes.of(Principal(KEY, TENANT, control.Tier(rpm=20)), "small").scopes[0]
    assert account_again is account
    assert account.limits["rpm"] == 20


class CountedKey:
    """A key that counts how often its id is read."""

    rpm, tpm, requests_max = 1, 0, 0

    def __init__(self) -> None:
        self.reads = 0

    @property
    def id(self) -> str:
        self.reads += 1
        return "k"


def test_a_bound_caller_is_found_without_its_messages() -> None:
    """Reading a field of a message costs a quarter of the look-up."""
    key, scopes = CountedKey(), Scopes()
    caller = Principal(cast("control.ApiKey", key), TENANT, TIER)
    first, reads = scopes.of(caller, "big"), key.reads
    assert scopes.of(caller, "big") is first
    assert key.reads == reads


@pytest.mark.parametrize("seed", range(20))
def test_callers_come_are_replaced_and_leave(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks gets the limits of its own messages, or of who came later for the same key."""
    monkeypatch.setattr(scopes_module, "_BINDINGS_MAX", 4)
    rng, scopes = random.Random(seed), Scopes()
    callers: dict[str, Principal] = {}
    for step in range(300):
        key_id, model_id = rng.choice("abc"), rng.choice("mno")
        if key_id not in callers or rng.random() < 0.2:
            limits = control.ApiKey(id=key_id, rpm=1 + step)
            callers[key_id] = Principal(limits, control.Tenant(id=key_id), control.Tier())
        caller = callers[key_id]
        binding = scopes.of(caller, model_id)
        assert binding.principal() is caller
        assert binding.tenant_id == key_id
        assert shown(binding.scopes) == [
            (f"limits:{{{key_id}}}:key:{key_id}", caller.key.rpm, 0, 0)
        ]
        assert scopes.of(caller, model_id) is binding


def test_the_oldest_bindings_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes_module, "_BINDINGS_MAX", 2)
    scopes, caller = Scopes(), Principal(KEY, TENANT, TIER)
    first, second = scopes.of(caller, "a"), scopes.of(caller, "b")
    assert scopes.of(caller, "a") is first
    scopes.of(caller, "c")
    assert scopes.of(caller, "b") is second
    assert scopes.of(caller, "a") is not first


def test_a_replaced_caller_is_not_kept() -> None:
    scopes, caller = Scopes(), Principal(KEY, TENANT, TIER)
    binding = scopes.of(caller, "big")
    gone = weakref.ref(caller)
    del caller
    assert gone() is None, "a message keeps alive all that came with it"
    again = scopes.of(Principal(KEY, TENANT, TIER), "big")
    assert again.scopes == binding.scopes


def test_keys_share_their_account() -> None:
    scopes = Scopes()
    one = scopes.of(Principal(KEY, TENANT, TIER), "m")
    other = scopes.of(Principal(control.ApiKey(id="other"), TENANT, TIER), "m")
    assert one.scopes[0] is other.scopes[0]
    assert one.forecast is other.forecast
