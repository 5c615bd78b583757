"""A directory that followed changes answers as one that was made from where they led."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from gateway.directory import Directory
from sluice.errors import PlatformError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

OWNERS, NAMES, SECRETS = ("", "a", "b"), ("x", "y", "a/z"), ("1", "2", "3")
_owner, _name = st.sampled_from(OWNERS), st.sampled_from(NAMES)
_names = st.lists(st.sampled_from([*NAMES, "x@1", "a*"]), max_size=2)

_model = st.builds(wire.Model, id=_name, owner_tenant_id=_owner, pool_id=st.just("p"))
_alias = st.builds(
    wire.Alias, id=_name, owner_tenant_id=_owner, target=st.sampled_from([*NAMES, "x@1"])
)
_release = st.builds(
    wire.Release,
    id=st.just("x@1"),
    model_id=_name,
    base_digest=st.sampled_from(["d", "e"]),
    pool_id=st.sampled_from(["", "p"]),
)
_tenant = st.builds(
    wire.Tenant,
    id=st.sampled_from(["a", "b"]),
    tier_id=st.just("t"),
    is_disabled=st.booleans(),
    cache_salt=st.sampled_from([b"1", b"2"]),
    fallbacks=st.dictionaries(st.sampled_from([*NAMES, "*"]), _name, max_size=2),
    pins=st.dictionaries(_name, st.sampled_from(["1", "2"]), max_size=1),
)
_split = st.builds(
    wire.Split,
    id=_name,
    rollout_id=st.just("r"),
    control=st.sampled_from(["", "1"]),
    canary=st.sampled_from(["1", "2"]),
    share=st.sampled_from([0, 5000, 10_000]),
    mirrored=st.sampled_from([0, 10_000]),
)
_tier = st.builds(wire.Tier, id=st.just("t"), context_tokens_max=st.integers(0, 3))
_base = st.builds(
    wire.Base, digest=st.sampled_from(["", "d", "e"]), context_tokens_max=st.integers(0, 3)
)
_pool = st.builds(wire.Pool, id=st.just("p"), engine=st.sampled_from(["sim", "embed"]))


def _keys(key_id: str, secrets: tuple[str, ...]) -> st.SearchStrategy[wire.ApiKey]:
    return st.builds(
        wire.ApiKey,
        id=st.just(key_id),
        tenant_id=st.sampled_from(["a", "b", "none"]),
        secret_sha256=st.sampled_from([hashlib.sha256(s.encode()).digest() for s in secrets]),
        is_disabled=st.booleans(),
        models=_names,
    )


_key = _keys("k", ("1", "2")) | _keys("l", ("3",))  # no two keys have one secret


def _few(of: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(of, max_size=2)


_objects = st.builds(
    wire.Objects,
    tiers=_few(_tier),
    tenants=_few(_tenant),
    keys=_few(_key),
    bases=_few(_base),
    models=_few(_model),
    pools=_few(_pool),
    aliases=_few(_alias),
    releases=_few(_release),
    splits=_few(_split),
)
_removals = st.builds(
    wire.Removals,
    tiers=_few(st.just("t")),
    tenants=_few(st.sampled_from(["a", "b"])),
    keys=_few(st.sampled_from(["k", "l"])),
    models=_few(_name),
    aliases=_few(_name),
    releases=_few(st.just("x@1")),
    splits=_few(_name),
)


def answers(directory: Directory) -> dict[object, object]:
    """Return all that a directory says."""
    told: dict[object, object] = {}
    for secret in SECRETS:
        try:
            caller = directory.authenticate(secret, 1)
        except PlatformError as error:
            told[secret] = error.code
            continue
        told[secret] = (caller.key, caller.tenant, caller.tier)
        told[secret, "models"] = directory.models(caller)
        for name in (*NAMES, "x@1"):
            told[secret, name, "fallback"] = directory.fallback(caller, name)
            try:
                told[secret, name] = directory.resolve_any(caller, name)
                told[secret, name, "text"] = directory.resolve(caller, name, "session")
            except PlatformError as error:
                told[secret, name] = error.code
    return told


@given(st.lists(st.tuples(_objects, _removals, st.booleans()), min_size=1, max_size=4))
def test_following_leads_to_the_same_answers(
    changes: list[tuple[wire.Objects, wire.Removals, bool]],
) -> None:
    state = ControlState()
    followed = Directory(state)
    for version, (upserts, removals, is_snapshot) in enumerate(changes, 1):
        response = wire.WatchResponse(
            version=version, upserts=upserts, removals=removals, is_snapshot=is_snapshot
        )
        assert state.apply(response)
        followed.update(response)
        assert answers(followed) == answers(Directory(state))


@given(_objects)
def test_listed_models_can_be_requested(objects: wire.Objects) -> None:
    state = ControlState()
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    directory = Directory(state)
    for secret in SECRETS:
        try:
            caller = directory.authenticate(secret, 1)
        except PlatformError:
            continue
        for found in directory.models(caller):
            resolved = directory.resolve_any(caller, found.name)
            assert resolved.model == found.model
            assert resolved.model.owner_tenant_id in {"", caller.tenant.id}
            other = directory.fallback(caller, found.name)
            assert other is None or directory.resolve_any(caller, other).model != found.model
