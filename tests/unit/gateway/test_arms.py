"""Which release answers: pins first, then the split of a rollout, then what the name stands for."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.directory import Directory, Principal
from gateway.resolved import ResolvedModel
from gateway.rollouts.decision import ReleaseDecision
from sluice.split import SHARE_MAX, ReleaseSplit
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.telemetry.v1 import telemetry_pb2 as telemetry

CONTROL = ReleaseDecision("rollout", telemetry.ARM_CONTROL)
CANARY = ReleaseDecision("rollout", telemetry.ARM_CANARY)
PINNED = ReleaseDecision(is_pinned=True)
sessions = st.text(min_size=1, max_size=12)
shares = st.integers(0, SHARE_MAX)


def split(share: int = 0, **fields: object) -> wire.Split:
    names = {"control": "old", "canary": "new", "salt": "s", "rollout_id": "rollout"}
    return wire.Split(id="m", share=share, **(names | fields))


def directory(
    *splits: wire.Split,
    pins: Mapping[str, str] | None = None,
    engine: str = "sim",
    more: Sequence[wire.Release] = (),
    has_base: Callable[[str], bool] = lambda _: True,
) -> tuple[Directory, Principal]:
    """Return a directory, and the one caller that it knows."""
    state = ControlState()
    secret = hashlib.sha256(b"key").digest()
    objects = wire.Objects(
        tenants=[wire.Tenant(id="t", pins=pins, fallbacks={"n": "m"})],
        keys=[wire.ApiKey(id="k", tenant_id="t", secret_sha256=secret)],
        models=[
            wire.Model(id="m", release="old", base_digest="d", adapter_digest="o", pool_id="p"),
            wire.Model(id="n", release="1", base_digest="d", pool_id="p"),
        ],
        releases=[
            wire.Release(
                id="m@old", model_id="m", base_digest="d", adapter_digest="o", pool_id="p"
            ),
            wire.Release(
                id="m@new", model_id="m", base_digest="d", adapter_digest="n", pool_id="p"
            ),
            wire.Release(id="m@far", model_id="m", base_digest="e", pool_id="q"),
            wire.Release(id="m@gone", model_id="m", base_digest="f"),
            *more,
        ],
        aliases=[wire.Alias(id="any", target="m"), wire.Alias(id="fixed", target="m@old")],
        pools=[wire.Pool(id="p", engine=engine), wire.Pool(id="q", engine="embed")],
        splits=splits,
    )
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    made = Directory(state, has_base)
    return made, made.authenticate("key", 0)


def told(found: ResolvedModel) -> tuple[str, str, ReleaseDecision | None]:
    return found.model.release, found.model.adapter_digest, found.decision


@pytest.mark.parametrize("name", ["m", "any"])
@pytest.mark.parametrize(
    ("share", "expected"), [(0, ("old", "o", CONTROL)), (SHARE_MAX, ("new", "n", CANARY))]
)
def test_models_and_their_aliases_are_split(name: str, share: int, expected: object) -> None:
    made, caller = directory(split(share))
    found = made.resolve(caller, name, "session")
    assert told(found) == expected
    assert found.name == name
    assert found is made.resolve(caller, name, "session"), "nothing is made for a request"


@pytest.mark.parametrize(
    ("name", "release"), [("m@old", "old"), ("m@new", "new"), ("fixed", "old")]
)
def test_a_release_by_its_name_is_neither_split_nor_pinned(name: str, release: str) -> None:
    made, caller = directory(split(5000), pins={"m": "far"})
    found = made.resolve(caller, name, "session")
    assert (found.model.release, found.decision, found.fork) == (release, None, None)


def test_others_are_not_split() -> None:
    made, caller = directory(split(SHARE_MAX))
    assert made.resolve(caller, "n").decision is None


@given(shares, sessions)
def test_every_gateway_decides_as_the_split_does(share: int, session: str) -> None:
    (one, caller), (other, same_caller) = directory(split(share)), directory(split(share))
    found = one.resolve(caller, "m", session, "request")
    choice = ReleaseSplit("m", "old", "new", share, "s").choose("t", session, "other request")
    assert (found.model.release, found.decision == CANARY) == (choice.release, choice.is_canary)
    assert told(other.resolve(same_caller, "m", session, "third")) == told(found)


@given(shares, shares, sessions)
def test_a_session_in_canary_stays_while_the_share_grows(a: int, b: int, session: str) -> None:
    less, more = (directory(split(share)) for share in sorted((a, b)))
    if less[0].resolve(less[1], "m", session).decision == CANARY:
        assert more[0].resolve(more[1], "m", session).decision == CANARY


def test_without_a_session_every_request_is_its_own() -> None:
    made, caller = directory(split(5000))
    kinds = [made.resolve(caller, "m", "", f"req_{n}").decision for n in range(200)]
    assert 60 < kinds.count(CANARY) < 140


@pytest.mark.parametrize("splits", [(), (split(0),), (split(SHARE_MAX),)])
def test_pins_come_first_with_or_without_a_split(splits: tuple[wire.Split, ...]) -> None:
    made, caller = directory(*splits, pins={"m": "new"})
    for name in ("m", "any"):
        assert told(made.resolve(caller, name, "session")) == ("new", "n", PINNED)
    assert {it.name: it.model.release for it in made.models(caller)} == {
        "any": "new",
        "fixed": "old",
        "m": "new",
        "n": "1",
    }


def test_a_pin_to_the_current_release_is_a_pin_too() -> None:
    made, caller = directory(split(SHARE_MAX), pins={"m": "old"})
    assert told(made.resolve(caller, "m", "session")) == ("old", "o", PINNED)


@pytest.mark.parametrize("release", ["gone", "never"])
def test_an_unserved_pin_leaves_the_models_current_release(release: str) -> None:
    for splits in ((), (split(SHARE_MAX),)):
        made, caller = directory(*splits, pins={"m": release})
        found = made.resolve(caller, "m", "session")
        assert told(found) == ("old", "o", ReleaseDecision(missed=release))
        assert found.decision is not None
        assert found.decision.kind == "unserved"


@pytest.mark.parametrize("fields", [{"canary": "gone"}, {"canary": "far"}, {"control": "never"}])
def test_a_split_with_an_unserved_release_does_not_count(fields: dict[str, str]) -> None:
    """`far` makes embeddings, which is as good as nobody."""
    made, caller = directory(split(SHARE_MAX, **fields))
    (missed,) = fields.values()
    assert told(made.resolve(caller, "m", "session")) == (
        "old",
        "o",
        ReleaseDecision(missed=missed),
    )


def test_clients_see_the_release_that_goes_on() -> None:
    made, caller = directory(split(SHARE_MAX))
    assert made.model(caller, "m").release == "old"
    assert made.resolve_any(caller, "any").model.release == "old"
    assert {it.model.release for it in made.models(caller)} == {"old", "1"}


@pytest.mark.parametrize(
    ("splits", "bases"),
    [((), []), ((split(0, canary="far"),), ["e"]), ((split(0, canary="gone"),), [])],
)
def test_the_bases_of_canaries_are_known_before_their_first_request(
    splits: tuple[wire.Split, ...], bases: list[str]
) -> None:
    made, _ = directory(*splits)
    assert [it.base_digest for it in made.canaries()] == bases


def test_vectors_of_two_releases_are_not_mixed() -> None:
    made, caller = directory(split(SHARE_MAX), engine="embed")
    assert made.resolve_any(caller, "m").fork is None


def test_a_fallback_model_is_split_as_well() -> None:
    made, caller = directory(split(SHARE_MAX))
    name = made.fallback(caller, "n")
    assert name == "m"
    assert made.resolve(caller, name, "session").decision == CANARY


@given(shares, shares, sessions)
def test_copies_are_made_of_control_only(share: int, mirrored: int, session: str) -> None:
    made, caller = directory(split(share, mirrored=mirrored))
    found = made.resolve(caller, "m", session)
    is_copied = ReleaseSplit("m", "old", "new", mirrored, "s").choose("t", session, "").is_canary
    assert (found.shadow is not None) == (is_copied and found.decision == CONTROL)
    if found.shadow is not None:
        assert told(found.shadow) == ("new", "n", CANARY)
        assert found.shadow.shadow is None


def test_a_share_beyond_everything_is_everything() -> None:
    made, caller = directory(split(SHARE_MAX + 1))
    assert made.resolve(caller, "m", "session").decision == CANARY


def test_no_request_goes_to_a_canary_with_an_untokenizable_base() -> None:
    """Those drawn for canary get control, which the rollout does not count; nothing is copied."""
    loaded: set[str] = set()
    rebased = wire.Release(id="m@rebased", model_id="m", base_digest="b", pool_id="p")
    told_split = split(5000, canary="rebased", mirrored=SHARE_MAX)
    made, caller = directory(told_split, more=[rebased], has_base=loaded.__contains__)
    names = [f"session {n}" for n in range(50)]
    before = [made.resolve(caller, "m", name) for name in names]
    assert {it.model.release for it in before} == {"old"}
    assert {it.decision for it in before} == {CONTROL, ReleaseDecision(unready="rebased")}
    assert not any(it.shadow for it in before)
    loaded.add("b")
    after = [made.resolve(caller, "m", name) for name in names]
    assert {(it.model.release, it.decision) for it in after} == {
        ("old", CONTROL),
        ("rebased", CANARY),
    }
    assert all(it.shadow for it in after if it.decision == CONTROL)
    assert [it.decision == CONTROL for it in before] == [it.decision == CONTROL for it in after]


def test_a_canary_on_the_same_base_is_as_ready_as_control() -> None:
    made, caller = directory(split(SHARE_MAX), has_base=lambda _: False)
    assert made.resolve(caller, "m", "s").decision == CANARY
