"""Keys, visibility and context limits follow the snapshot and its deltas."""

import hashlib

import pytest

from gateway import directory
from gateway.directory import Directory, Principal
from gateway.names import matches
from sluice.errors import ErrorCode, PlatformError
from sluice.scopes import Scope
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Peer:
    """A state with a directory that follows it."""

    def __init__(self) -> None:
        self.state = ControlState()
        self.directory = Directory(self.state)
        self.version = 0

    def send(self, *, is_snapshot: bool = False, removals=None, **upserts) -> None:
        self.version += 1
        response = wire.WatchResponse(
            version=self.version,
            is_snapshot=is_snapshot,
            upserts=wire.Objects(**upserts),
            removals=removals,
        )
        assert self.state.apply(response)
        self.directory.update(response)

    def status(self, secret: str, now_ms: int = 1000) -> int:
        try:
            self.directory.authenticate(secret, now_ms)
        except PlatformError as error:
            return error.status
        return 200

    def names(self, caller: Principal) -> list[str]:
        return [model.name for model in self.directory.models(caller)]

    def caller(self, **key: object) -> Principal:
        """Send another key of tenant `a`, and let it in."""
        self.send(keys=[wire.ApiKey(id="other", tenant_id="a", secret_sha256=sha("other"), **key)])
        return self.directory.authenticate("other", 0)


@pytest.fixture
def peer() -> Peer:
    peer = Peer()
    peer.send(
        is_snapshot=True,
        tiers=[wire.Tier(id="t", context_tokens_max=50)],
        tenants=[wire.Tenant(id="a", tier_id="t"), wire.Tenant(id="b")],
        keys=[wire.ApiKey(id="k", tenant_id="a", secret_sha256=sha("one"))],
        bases=[wire.Base(digest="d", context_tokens_max=100)],
        models=[wire.Model(id="m", base_digest="d", owner_tenant_id="a", pool_id="p")],
    )
    return peer


def test_keys_come_change_and_go(peer: Peer) -> None:
    assert (peer.status("one"), peer.status("two"), peer.status("\udcff")) == (200, 401, 401)
    peer.send(keys=[wire.ApiKey(id="k", tenant_id="a", secret_sha256=sha("two"))])
    assert (peer.status("one"), peer.status("two")) == (401, 200)
    peer.send(keys=[wire.ApiKey(id="k", tenant_id="a", secret_sha256=sha("two"), is_disabled=True)])
    assert peer.status("two") == 401
    peer.send(
        keys=[
            wire.ApiKey(id="k", tenant_id="a", secret_sha256=sha("x"), expires_at_unix_ms=500),
            wire.ApiKey(id="l", tenant_id="nobody", secret_sha256=sha("y")),
        ]
    )
    assert (peer.status("x", 499), peer.status("x", 500), peer.status("y")) == (200, 401, 401)
    peer.send(removals=wire.Removals(keys=["k"]))
    assert peer.status("x", 499) == 401
    peer.send(tenants=[wire.Tenant(id="a", is_disabled=True)])
    peer.send(is_snapshot=True)
    assert peer.status("one") == 401


def test_a_prepared_snapshot_counts_from_its_update_on(peer: Peer) -> None:
    def steps(coming: ControlState, **objects) -> wire.WatchResponse:
        response = wire.WatchResponse(version=9, is_snapshot=True, upserts=wire.Objects(**objects))
        for _ in coming.fill(response):
            pass
        for _ in peer.directory.prepare(coming):
            assert (peer.status("one"), peer.status("new")) == (200, 401)
        return response

    coming = ControlState()
    response = steps(
        coming,
        tenants=[wire.Tenant(id="c")],
        keys=[wire.ApiKey(id="n", tenant_id="c", secret_sha256=sha("new"))],
        models=[wire.Model(id="of-c", owner_tenant_id="c")],
    )
    assert (peer.status("one"), peer.status("new")) == (200, 401)
    peer.state.become(coming)
    peer.directory.update(response)
    assert (peer.status("one"), peer.status("new")) == (401, 200)
    assert peer.names(peer.directory.authenticate("new", 0)) == ["of-c"]
    peer.version = 9
    peer.send(
        keys=[wire.ApiKey(id="n", tenant_id="c", secret_sha256=sha("newer"))],
        aliases=[wire.Alias(id="c/x", owner_tenant_id="c", target="of-c")],
    )
    assert (peer.status("new"), peer.status("newer")) == (401, 200)
    assert peer.names(peer.directory.authenticate("newer", 0)) == ["c/x", "of-c"]
    peer.send(is_snapshot=True)
    assert peer.status("newer") == 401, "what was prepared is used once"


def test_a_model_that_makes_embeddings_is_listed_but_does_not_chat(peer: Peer) -> None:
    peer.send(
        pools=[wire.Pool(id="e", engine="embed"), wire.Pool(id="p", engine="sim")],
        models=[wire.Model(id="vectors", base_digest="d", pool_id="e")],
    )
    caller = peer.directory.authenticate("one", 0)
    assert peer.names(caller) == ["m", "vectors"]
    assert peer.directory.resolve(caller, "m").model.id == "m"
    with pytest.raises(PlatformError, match="'vectors' makes embeddings") as caught:
        peer.directory.resolve(caller, "vectors")
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert not peer.directory.resolve_any(caller, "vectors").generates_text


def test_models_of_others_are_unknown(peer: Peer) -> None:
    peer.send(keys=[wire.ApiKey(id="kb", tenant_id="b", secret_sha256=sha("b"))])
    mine = peer.directory.authenticate("one", 0)
    theirs = peer.directory.authenticate("b", 0)
    assert peer.names(mine) == ["m"]
    assert peer.names(theirs) == []
    assert peer.directory.resolve(mine, "m").context_tokens_max == 50
    with pytest.raises(PlatformError) as caught:
        peer.directory.resolve(theirs, "m")
    assert caught.value.status == 404


def test_every_refused_key_gets_the_same_answer(peer: Peer) -> None:
    peer.send(
        tenants=[wire.Tenant(id="off", is_disabled=True)],
        keys=[
            wire.ApiKey(id="1", tenant_id="a", secret_sha256=sha("1"), is_disabled=True),
            wire.ApiKey(id="2", tenant_id="a", secret_sha256=sha("2"), expires_at_unix_ms=5),
            wire.ApiKey(id="3", tenant_id="off", secret_sha256=sha("3")),
            wire.ApiKey(id="4", tenant_id="nobody", secret_sha256=sha("4")),
        ],
    )
    told = set()
    for secret in ("1", "2", "3", "4", "unknown"):
        with pytest.raises(PlatformError) as caught:
            peer.directory.authenticate(secret, 5)
        told.add((caught.value.code, caught.value.message))
    assert [code for code, _ in told] == [ErrorCode.INVALID_API_KEY]


def test_a_key_that_was_let_in_is_still_looked_at(peer: Peer) -> None:
    """What is remembered of a caller ends with each change of key, tenant or tier."""
    peer.send(keys=[wire.ApiKey(id="k", tenant_id="a", secret_sha256=sha("one"), rpm=1)])
    assert peer.directory.authenticate("one", 0) is peer.directory.authenticate("one", 0)
    peer.send(keys=[wire.ApiKey(id="k", tenant_id="a", secret_sha256=sha("one"), rpm=2)])
    assert peer.directory.authenticate("one", 0).key.rpm == 2
    peer.send(tiers=[wire.Tier(id="t", rpm=3)])
    assert peer.directory.authenticate("one", 0).tier.rpm == 3
    peer.send(tenants=[wire.Tenant(id="a", tier_id="t", is_disabled=True)])
    assert peer.status("one") == 401
    peer.send(tenants=[wire.Tenant(id="a", tier_id="t")])
    assert peer.status("one") == 200
    peer.send(removals=wire.Removals(tenants=["a"]))
    assert peer.status("one") == 401


def test_a_scope_limits_a_key_to_its_endpoints(peer: Peer) -> None:
    for scope in Scope:
        peer.directory.require_scope(peer.caller(), scope)
    caller = peer.caller(scopes=["chat", "models"])
    peer.directory.require_scope(caller, Scope.CHAT)
    peer.directory.require_scope(caller, Scope.MODELS)
    with pytest.raises(PlatformError, match="may not use 'embeddings', only: chat, models") as told:
        peer.directory.require_scope(caller, Scope.EMBEDDINGS)
    assert (told.value.status, told.value.code) == (403, ErrorCode.PERMISSION_DENIED)


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("m", "m", True),
        ("m", "m2", False),
        ("m*", "m2", True),
        ("m*", "m", True),
        ("*", "anything", True),
        ("a/*", "a", False),
        ("a*b", "a*b", True),
        ("a*b", "axb", False),
    ],
)
def test_patterns(pattern: str, name: str, is_match: bool) -> None:
    assert matches(pattern, name) == is_match


def model(name: str, owner: str = "", **fields: object) -> wire.Model:
    return wire.Model(id=name, owner_tenant_id=owner, base_digest="d", pool_id="p", **fields)


def test_a_key_with_a_list_of_models_knows_no_others(peer: Peer) -> None:
    peer.send(
        models=[model("x/one"), model("x/two"), model("y", release="2")],
        releases=[wire.Release(id="y@1", model_id="y", base_digest="d", pool_id="p")],
        aliases=[wire.Alias(id="best", target="y"), wire.Alias(id="old", target="y@1")],
    )
    assert peer.names(peer.caller()) == ["best", "m", "old", "x/one", "x/two", "y"]
    for listed, names, more in (
        (["x/*"], ["x/one", "x/two"], []),
        (["y"], ["best", "old", "y"], ["y@1"]),  # a model stands for all of its names
        (["best"], ["best"], []),
        (["y@1"], [], ["y@1"]),
        (["none"], [], []),
    ):
        caller = peer.caller(models=listed)
        assert peer.names(caller) == names
        for name in ("m", "x/one", "y", "y@1", "best", "none"):
            if name in (*names, *more):
                assert peer.directory.resolve(caller, name).name == name
            else:
                with pytest.raises(PlatformError) as caught:
                    peer.directory.resolve(caller, name)
                assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_a_hidden_model_answers_like_a_missing_one(peer: Peer) -> None:
    peer.send(
        models=[model("b/own", "b", release="2")],
        releases=[wire.Release(id="b/own@1", model_id="b/own", base_digest="d", pool_id="p")],
        aliases=[
            wire.Alias(id="theirs", target="m", owner_tenant_id="b"),
            wire.Alias(id="to-theirs", target="b/own"),
            wire.Alias(id="to-nothing", target="gone"),
        ],
    )
    caller = peer.caller()
    told = set()
    for name in ("missing", "b/own", "b/own@1", "theirs", "to-theirs", "to-nothing"):
        with pytest.raises(PlatformError) as caught:
            peer.directory.resolve(caller, name)
        error = caught.value
        told.add((error.code, error.param, error.status, error.message.replace(name, "N")))
    assert len(told) == 1
    assert peer.names(caller) == ["m"]


def test_the_list_of_names_follows_their_owners(peer: Peer) -> None:
    caller = peer.caller()
    peer.send(models=[model("x", "b"), model("y")], aliases=[wire.Alias(id="z", target="y")])
    assert peer.names(caller) == ["m", "y", "z"]
    peer.send(models=[model("x", "a"), model("y", "b")])
    assert peer.names(caller) == ["m", "x"], "an alias of what is not seen is not seen"
    peer.send(
        models=[model("z")], removals=wire.Removals(aliases=["z", "never"], models=["x", "never"])
    )
    assert peer.names(caller) == ["m", "z"], "a name may change its kind"
    peer.send(is_snapshot=True, models=[model("w")])
    assert [found.name for found in peer.directory.models(caller)] == ["w"]


def test_a_release_is_named_independently_of_its_models_target(peer: Peer) -> None:
    first, second = "1" * 64, "2" * 64
    peer.send(
        bases=[wire.Base(digest="e", context_tokens_max=10)],
        models=[model("y", adapter_digest=second, release="2")],
        releases=[
            wire.Release(
                id="y@1", model_id="y", base_digest="e", adapter_digest=first, pool_id="q"
            ),
            wire.Release(
                id="y@2", model_id="y", base_digest="d", adapter_digest=second, pool_id="p"
            ),
            wire.Release(id="y@0", model_id="y", base_digest="d"),
            wire.Release(id="z@0", model_id="z", base_digest="d", pool_id="p"),
        ],
        aliases=[wire.Alias(id="latest", target="y"), wire.Alias(id="stable", target="y@1")],
    )
    caller = peer.caller()
    found = {name: peer.directory.resolve(caller, name) for name in ("y", "y@2", "y@1", "stable")}
    assert {name: resolved.name for name, resolved in found.items()} == {n: n for n in found}
    assert {resolved.model.id for resolved in found.values()} == {"y"}
    assert found["y"].cache_root == found["y@2"].cache_root != found["y@1"].cache_root
    stable = found["stable"]
    assert (stable.model, stable.cache_root) == (found["y@1"].model, found["y@1"].cache_root)
    assert (stable.model.release, stable.model.pool_id, stable.context_tokens_max) == ("1", "q", 10)
    for name in ("y@0", "z@0"):  # nobody serves it; of no model
        with pytest.raises(PlatformError):
            peer.directory.resolve(caller, name)
    peer.send(aliases=[wire.Alias(id="stable", target="y@2")])
    assert peer.directory.resolve(caller, "stable").model.release == "2"
    peer.send(removals=wire.Removals(releases=["y@2"], aliases=["latest"]))
    assert peer.names(caller) == ["m", "y"]
    with pytest.raises(PlatformError):
        peer.directory.resolve(caller, "stable")


def test_the_context_is_the_smallest_limit_and_the_tenant_has_its_own(peer: Peer) -> None:
    def context() -> int:
        return peer.directory.resolve(peer.directory.authenticate("one", 0), "m").context_tokens_max

    assert context() == 50
    peer.send(tenants=[wire.Tenant(id="a", tier_id="t", limits=wire.Limits(context_tokens_max=80))])
    assert context() == 80, "instead of the tier's"
    limited = {"m": wire.Limits(context_tokens_max=70), "other": wire.Limits(context_tokens_max=1)}
    peer.send(tiers=[wire.Tier(id="t", context_tokens_max=50, model_limits=limited)])
    assert context() == 70
    peer.send(bases=[wire.Base(digest="d", context_tokens_max=60)])
    assert context() == 60
    peer.send(removals=wire.Removals(tiers=["t"], bases=["d"], tenants=["a"]))
    peer.send(tenants=[wire.Tenant(id="a")])
    assert context() == 0, "nobody has said"


def test_a_fallback_is_another_model_that_the_caller_may_use(peer: Peer) -> None:
    peer.send(
        pools=[wire.Pool(id="e", engine="embed")],
        models=[
            *(model(name) for name in ("small", "mid")),
            model("b/own", "b"),
            wire.Model(id="vectors", base_digest="d", pool_id="e"),
        ],
        aliases=[wire.Alias(id="best", target="m")],
    )

    def fallback(name: str, wanted: dict[str, str], **key: object) -> str | None:
        peer.send(tenants=[wire.Tenant(id="a", tier_id="t", fallbacks=wanted)])
        return peer.directory.fallback(peer.caller(**key), name)

    assert fallback("m", {}) is None
    assert fallback("m", {"m": "small"}) == "small"
    assert fallback("m", {"*": "small"}) == "small"
    assert fallback("m", {"m": "mid", "*": "small"}) == "mid"
    assert fallback("best", {"m": "mid", "*": "small"}) == "mid"
    assert fallback("best", {"best": "mid", "m": "small"}) == "mid"
    assert fallback("small", {"*": "small"}) is None
    assert fallback("m", {"m": "best"}) is None, "the same under another name"
    assert fallback("m", {"m": "b/own"}) is None
    assert fallback("m", {"m": "gone"}) is None
    assert fallback("m", {"m": "vectors"}) is None
    assert fallback("vectors", {"*": "small"}) is None
    assert fallback("m", {"m": "small"}, models=["m"]) is None
    assert fallback("m", {"m": "small"}, models=["m", "s*"]) == "small"
    assert fallback("gone", {"*": "small"}) is None


def test_answers_are_kept_until_the_state_changes_and_in_bounds(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_RESOLVED_MAX", 2)
    caller = peer.directory.authenticate("one", 0)
    kept = peer.directory.resolve(caller, "m")
    assert peer.directory.resolve(caller, "m") is kept
    peer.send(cells=[wire.Cell(id="c", pool_id="p", router_address="x:1")])
    assert peer.directory.resolve(caller, "m") is kept, "cells are not part of the answer"
    peer.send(models=[model("n"), model("o")])
    assert peer.directory.resolve(caller, "m") is not kept
    for name in ("m", "n", "o"):
        assert peer.directory.resolve(caller, name).model.id == name
        assert len(peer.directory._resolved) <= 2


def test_a_caller_without_the_right_finds_no_cached_answer_of_an_earlier_one(peer: Peer) -> None:
    before = peer.caller()
    assert peer.directory.resolve(before, "m").name == "m"
    after = peer.caller(models=["none"])
    assert peer.directory.resolve(before, "m").name == "m", "a request goes on as it began"
    with pytest.raises(PlatformError):
        peer.directory.resolve(after, "m")


def test_cells_without_an_owner_are_left_out(peer: Peer) -> None:
    peer.send(
        cells=[wire.Cell(id="c", pool_id="p"), wire.Cell(id="b", pool_id="p", router_address="x:1")]
    )
    assert [cell.id for cell in peer.directory.cells("p")] == ["b"]
    assert peer.directory.router_addresses() == {"x:1"}
    peer.send(removals=wire.Removals(cells=["b"]))
    assert peer.directory.cells("p") == ()


def test_callers_know_whether_their_texts_are_kept(peer: Peer) -> None:
    assert peer.caller().text_policy is None
    policy = wire.TextPolicy(id="a", is_on=True, share=10_000, retention_days=7)
    peer.send(text_policies=[policy])
    assert peer.directory.authenticate("other", 0).text_policy == policy
    for off in ({"is_on": False, "share": 10_000}, {"is_on": True, "share": 0}):
        peer.send(text_policies=[wire.TextPolicy(id="a", **off)])
        assert peer.directory.authenticate("other", 0).text_policy is None
    peer.send(text_policies=[policy])
    peer.send(removals=wire.Removals(text_policies=["a"]))
    assert peer.directory.authenticate("other", 0).text_policy is None
