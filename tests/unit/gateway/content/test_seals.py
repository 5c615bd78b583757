"""Contents of tenants: encrypted where there is a key, gone where there was one."""

import pytest

from gateway.content.seals import ContentGoneError, ContentSeals
from gateway.responses.hot_store import Found
from gateway.responses.turn_seals import TurnSeals
from sluice.errors import RejectedError
from sluice.response_ids import created_unix_ms, new_response_id
from sluice.shared_secret import SharedSecret
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.state.v1 import state_pb2 as wire
from tests.support.content import content_keys

SECRET = SharedSecret(["x" * 32])
TEXT = b'{"input":"a falcon"}'


@pytest.fixture(name="state")
def state_fixture() -> ControlState:
    state = ControlState()
    state.content_keys["one"] = content_keys("one", SECRET, 1)
    return state


def test_a_content_opens_at_its_place_for_its_tenant_alone(state: ControlState) -> None:
    state.content_keys["two"] = content_keys("two", SECRET, 1)
    seals = ContentSeals(state, SECRET)
    sealed = seals.sealed("one", "a", TEXT)
    assert b"falcon" not in sealed
    assert seals.sealed("one", "a", TEXT) != sealed
    assert seals.opened("one", "a", sealed) == TEXT
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for tenant, place, content in (
        ("one", "b", sealed),
        ("two", "a", sealed),
        ("none", "a", sealed),
        ("one", "a", changed),
        ("one", "a", sealed[:9]),
    ):
        with pytest.raises(ContentGoneError):
            seals.opened(tenant, place, content)


def test_without_a_key_contents_stay_in_the_clear(state: ControlState) -> None:
    seals = ContentSeals(state, SECRET)
    assert not seals.encrypts("plain")
    assert seals.sealed("plain", "a", TEXT) is TEXT
    assert seals.opened("one", "a", TEXT) is TEXT, "it is from before the first key"
    assert seals.sealed("one", "a", b"") == b""


def test_the_newest_key_encrypts_and_deleted_ones_open_nothing(state: ControlState) -> None:
    seals = ContentSeals(state, SECRET)
    first = seals.sealed("one", "a", TEXT)
    known = state.content_keys["one"].keys[0]
    both = content_keys("one", SECRET, 2)
    both.keys.append(known)
    state.content_keys["one"] = both
    second = seals.sealed("one", "a", TEXT)
    assert [seals.opened("one", "a", it) for it in (first, second)] == [TEXT, TEXT]
    state.content_keys["one"] = content_keys("one", SECRET, 3)
    for content in (first, second):
        with pytest.raises(ContentGoneError):
            seals.opened("one", "a", content)
    # Another key with a number that was used: the tenant was deleted, and made again.
    state.content_keys["one"] = content_keys("one", SECRET, 1)
    with pytest.raises(ContentGoneError):
        seals.opened("one", "a", first)
    del state.content_keys["one"]
    with pytest.raises(ContentGoneError):
        seals.opened("one", "a", first)


def test_nothing_is_stored_in_the_clear_when_a_key_cannot_be_opened(state: ControlState) -> None:
    seals = ContentSeals(state, SharedSecret(["y" * 32]))
    with pytest.raises(RejectedError):
        seals.sealed("one", "a", TEXT)


def test_the_horizon_is_the_later_of_retention_and_erasure() -> None:
    state = ControlState()
    seals, now_ms = ContentSeals(state, SECRET), 10_000_000_000
    assert seals.horizon_unix_ms("one", now_ms) == 0
    state.tenants["one"] = control.Tenant(id="one", retention_hours=2)
    assert seals.horizon_unix_ms("one", now_ms) == now_ms - 7_200_000
    erased = content_keys("one", SECRET, erased_at_unix_ms=now_ms - 1)
    state.content_keys["one"] = erased
    assert seals.horizon_unix_ms("one", now_ms) == now_ms - 1
    assert seals.horizon_unix_ms("one", now_ms + 7_300_000) == now_ms + 100_000


def test_a_turn_is_encrypted_and_found_until_it_is_over(state: ControlState) -> None:
    seals = TurnSeals(ContentSeals(state, SECRET))
    turn = wire.StoredResponse(
        id=new_response_id("one", SECRET),
        tenant_id="one",
        ancestors=["resp_a"],
        input_items=TEXT,
        response=TEXT,
        prompt=TEXT,
        deltas=b"1 falcon",
    )
    sealed = seals.sealed(turn)
    assert b"falcon" not in sealed.SerializeToString()
    assert list(sealed.ancestors) == ["resp_a"]
    assert seals.found("one", turn.id, Found(sealed)).stored == turn
    under_way = seals.under_way("one", turn.id, TEXT)
    assert seals.found("one", turn.id, Found(under_way=under_way)).under_way == TEXT
    blocks = [seals.events("one", turn.id, it) for it in (TEXT, b"")]
    assert seals.events_opened("one", turn.id, blocks) == [TEXT, b""]
    assert not seals.is_over("one", [turn.id])
    after_ms = created_unix_ms(turn.id) + 1
    state.content_keys["one"] = content_keys("one", SECRET, 2, erased_at_unix_ms=after_ms)
    assert seals.is_over("one", [new_response_id("one", SECRET), turn.id])
    assert seals.found("one", turn.id, Found(sealed)) == Found()
    assert seals.found("one", turn.id, Found(under_way=under_way)) == Found()
    assert seals.events_opened("one", turn.id, blocks) == []
    plain = wire.StoredResponse(id=turn.id, tenant_id="two", response=TEXT)
    assert seals.sealed(plain) is plain
    assert seals.opened(plain) is plain
