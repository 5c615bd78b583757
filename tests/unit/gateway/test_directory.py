"""Keys, visibility and context limits follow the snapshot and its deltas."""

import hashlib

import pytest

from gateway.directory import Directory
from sluice.errors import PlatformError
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


def test_a_model_that_makes_embeddings_is_listed_but_does_not_chat(peer: Peer) -> None:
    peer.send(
        pools=[wire.Pool(id="e", engine="embed"), wire.Pool(id="p", engine="sim")],
        models=[wire.Model(id="vectors", base_digest="d", pool_id="e")],
    )
    caller = peer.directory.authenticate("one", 0)
    assert [model.id for model in peer.directory.models(caller)] == ["m", "vectors"]
    assert peer.directory.resolve(caller, "m").model.id == "m"
    with pytest.raises(PlatformError, match="'vectors' makes embeddings") as caught:
        peer.directory.resolve(caller, "vectors")
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_models_of_others_are_unknown(peer: Peer) -> None:
    peer.send(keys=[wire.ApiKey(id="kb", tenant_id="b", secret_sha256=sha("b"))])
    mine = peer.directory.authenticate("one", 0)
    theirs = peer.directory.authenticate("b", 0)
    assert [m.id for m in peer.directory.models(mine)] == ["m"]
    assert peer.directory.models(theirs) == []
    assert peer.directory.resolve(mine, "m").context_tokens_max == 50
    with pytest.raises(PlatformError) as caught:
        peer.directory.resolve(theirs, "m")
    assert caught.value.status == 404


def test_cells_without_an_owner_are_left_out(peer: Peer) -> None:
    peer.send(
        cells=[wire.Cell(id="c", pool_id="p"), wire.Cell(id="b", pool_id="p", router_address="x:1")]
    )
    assert [cell.id for cell in peer.directory.cells("p")] == ["b"]
    assert peer.directory.router_addresses() == {"x:1"}
    peer.send(removals=wire.Removals(cells=["b"]))
    assert peer.directory.cells("p") == ()
