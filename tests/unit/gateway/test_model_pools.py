"""A model that several pools serve: which of them may, and what a request then is."""

import hashlib

from gateway.directory import Directory
from gateway.model_pools import PoolChooser, WakeablePools, served_by
from gateway.pool_choice import PoolReason
from sluice.hashing import cache_root
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

BASE, SMALL = "ab" * 32, "cd" * 32
POOLS = [
    wire.Pool(id="own", base_digest=BASE, engine="trtllm"),
    wire.Pool(id="twin", base_digest=BASE, engine="trtllm"),
    wire.Pool(id="small", base_digest=SMALL, engine="trtllm"),
    wire.Pool(id="vectors", base_digest=BASE, engine="embed"),
]
MODEL = wire.Model(id="m", base_digest=BASE, release="one", pool_id="own")


def entry(pool_id: str, weight: float = 1.0, **fields: object) -> wire.ModelPool:
    return wire.ModelPool(pool_id=pool_id, weight=weight, price=1.0, **fields)


def directory(*entries: wire.ModelPool, model: wire.Model = MODEL) -> Directory:
    state = ControlState()
    objects = wire.Objects(
        tiers=[wire.Tier(id="t")],
        tenants=[wire.Tenant(id="n", tier_id="t", cache_salt=b"salt")],
        keys=[wire.ApiKey(id="k", tenant_id="n", secret_sha256=SECRET_SHA256)],
        bases=[
            wire.Base(digest=BASE, context_tokens_max=4000),
            wire.Base(digest=SMALL, context_tokens_max=2000),
        ],
        pools=POOLS,
        models=[model],
        releases=[
            wire.Release(id="m@one", model_id="m", base_digest=BASE, pool_id="own"),
            wire.Release(id="m@two", model_id="m", base_digest=BASE, pool_id="twin"),
            wire.Release(id="m@apart", model_id="m", base_digest=BASE, pool_id="elsewhere"),
        ],
        model_pools=[wire.ModelPools(id="m", pools=entries)] if entries else [],
    )
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    return Directory(state)


SECRET = "sk-" + "a" * 40
SECRET_SHA256 = hashlib.sha256(SECRET.encode()).digest()


def _uncounted(*_: object) -> None: ...


def resolve(made: Directory, name: str = "m"):
    return made.resolve(made.authenticate(SECRET, 0), name)


def pool_ids(*entries: wire.ModelPool, model: wire.Model = MODEL) -> list[str]:
    pools = {pool.id: pool for pool in POOLS}
    return [it.pool_id for it, _ in served_by(wire.ModelPools(pools=entries), model, pools)]


def test_one_pool_is_no_choice_and_nothing_is_made_for_a_request() -> None:
    found = resolve(directory())
    assert found.options is None
    assert found.pool_ids == ["own"]
    assert PoolChooser(lambda _: 1 / 0, lambda _: True, _uncounted).place(found, "s", "r") is found


def test_a_pool_that_cannot_serve_the_model_is_left_out() -> None:
    own, twin = entry("own"), entry("twin")
    assert pool_ids(twin, own) == ["own", "twin"]
    assert pool_ids(own, entry("gone")) == []
    assert pool_ids(own, entry("vectors")) == []
    assert pool_ids(own, entry("small")) == [], "nobody said that it is a quantisation"
    small = entry("small", is_other_base=True)
    assert pool_ids(own, small) == ["own", "small"]
    adapted = wire.Model(id="m", base_digest=BASE, adapter_digest="ef" * 32, pool_id="own")
    assert pool_ids(own, small, twin, model=adapted) == ["own", "twin"]


def test_a_release_with_an_unlisted_pool_stays_there() -> None:
    made = directory(entry("own"), entry("twin"))
    assert resolve(made).pool_ids == ["own", "twin"]
    assert resolve(made, "m@two").pool_ids == ["twin", "own"]
    assert resolve(made, "m@apart").options is None


def test_a_request_is_that_of_its_pool_with_base_context_and_cache() -> None:
    made = directory(entry("own"), entry("small", is_other_base=True))
    waits = {"own": None, "small": 5.0}
    counted: list[tuple[str, PoolReason]] = []
    chooser = PoolChooser(waits.get, lambda _: True, lambda *it: counted.append(it))
    found = resolve(made)
    placed = chooser.place(found, "", "req_1")
    assert (placed.model.pool_id, placed.model.base_digest) == ("small", SMALL)
    assert (placed.model.id, placed.model.release, placed.name) == ("m", "one", "m")
    assert placed.context_tokens_max == 2000
    assert placed.cache_root == cache_root(SMALL, "", b"salt")
    assert counted == [("small", PoolReason.WAIT)]
    assert placed.model is chooser.place(found, "", "req_2").model, "events are headed by object"
    waits["own"] = 1.0
    waits["small"] = None
    assert chooser.place(found, "", "req_1") is found


def test_a_base_that_is_not_here_yet_gets_nothing() -> None:
    found = resolve(directory(entry("own"), entry("small", 1000.0, is_other_base=True)))
    here: set[str] = set()
    chooser = PoolChooser(lambda _: 0.0, here.__contains__, _uncounted)
    placed = [chooser.place(found, "", f"req_{n}").model.pool_id for n in range(50)]
    assert set(placed) == {"own"}
    here.add(SMALL)
    placed = [chooser.place(found, "", f"req_{n}").model.pool_id for n in range(50)]
    assert placed.count("small") > 40


def test_a_session_keeps_its_pool_and_bases_of_all_pools_are_fetched() -> None:
    made = directory(entry("own"), entry("twin"), entry("small", is_other_base=True))
    found, chooser = resolve(made), PoolChooser(lambda _: 0.0, lambda _: True, _uncounted)
    for session in map(str, range(40)):
        placed = {chooser.place(found, session, f"req_{n}").model.pool_id for n in range(5)}
        assert len(placed) == 1
    assert {it.base_digest for it in made.served()} == {BASE, SMALL}
    assert made.pool_ids(MODEL) == ["own", "small", "twin"]


def test_a_request_goes_to_the_pool_that_it_can_wake() -> None:
    state = ControlState()

    def see(observed: wire.ReplicaState) -> None:
        replicas = [wire.Replica(id="r", pool_id="small", state=observed)]
        told = wire.WatchResponse(version=1, is_snapshot=True)
        told.upserts.replicas.extend(replicas)
        state.apply(told)

    found, here = resolve(directory(entry("own"), entry("small", is_other_base=True))), {SMALL}
    counted: list[tuple[str, PoolReason]] = []
    chooser = PoolChooser(
        lambda _: None,
        here.__contains__,
        lambda *it: counted.append(it),
        WakeablePools(state).has,
    )
    for observed, pool_id in (
        (wire.REPLICA_STATE_STARTING, "own"),
        (wire.REPLICA_STATE_SLEEPING, "small"),
        (wire.REPLICA_STATE_READY, "small"),
    ):
        see(observed)
        assert chooser.place(found, "session", "req_1").model.pool_id == pool_id
    here.clear()
    assert chooser.place(found, "session", "req_1").model.pool_id == "own", "its base is not here"
    assert [reason for _, reason in counted] == ["none", "wake", "wake", "none"]
