"""What nodes are told is always what the whole state says, and who is not told has nothing new."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet.agents import repeat_at_s
from control_plane.fleet.desired import DesiredIndex
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2
from sluice.wire.control.v1 import control_pb2 as wire

NODES = ("", "a", "b", "c")
BASES = ("ab" * 32, "cd" * 32)

pools = st.builds(
    lambda name, base, slots: wire.Pool(
        id=name, base_digest=base, engine="sim", engine_options={"slots": slots}
    ),
    st.sampled_from("pqr"),
    st.sampled_from(BASES),
    st.sampled_from("48"),
)
replicas = st.builds(
    lambda number, pool, node, state, accelerators: wire.Replica(
        id=f"r{number}", pool_id=pool, node_id=node, state=state, accelerators=accelerators
    ),
    st.integers(0, 6),
    st.sampled_from("pqr"),
    st.sampled_from(NODES),
    st.integers(1, 6),
    st.lists(st.integers(0, 3), unique=True),
)
changes = st.tuples(
    st.lists(pools, max_size=3, unique_by=lambda pool: pool.id),
    st.lists(replicas, max_size=4, unique_by=lambda replica: replica.id),
    st.lists(st.sampled_from("pqr"), max_size=1),
    st.lists(st.sampled_from(("r0", "r1", "r2")), max_size=1),
)


def scan(state: ControlState, node_id: str) -> list[agent_pb2.DesiredReplica]:
    """Return the desired state of a node, from a scan of all replicas."""
    found: list[agent_pb2.DesiredReplica] = []
    for replica in sorted(state.replicas.values(), key=lambda replica: replica.id):
        pool = state.pools.get(replica.pool_id)
        if replica.node_id == node_id and pool is not None:
            found.append(
                agent_pb2.DesiredReplica(
                    replica_id=replica.id,
                    pool_id=pool.id,
                    base_digest=pool.base_digest,
                    engine=pool.engine,
                    is_draining=replica.state == wire.REPLICA_STATE_DRAINING,
                    engine_options=pool.engine_options,
                    accelerators=replica.accelerators,
                )
            )
    return found


@given(st.lists(changes, max_size=8), st.booleans())
def test_an_index_equals_a_full_scan(history, restarts) -> None:
    state = ControlState()
    index = DesiredIndex(state)
    for version, (upserted_pools, upserted, no_pools, no_replicas) in enumerate(history, 1):
        delta = wire.WatchResponse(
            version=version,
            upserts=wire.Objects(pools=upserted_pools, replicas=upserted),
            removals=wire.Removals(pools=no_pools, replicas=no_replicas),
        )
        before = {node: scan(state, node) for node in NODES[1:]}
        state.apply(delta)
        touched = index.apply(delta)
        if restarts:
            index.restart(state)
        for node in NODES[1:]:
            told = index.of(node, state.version)
            assert told.version == version
            assert list(told.replicas) == scan(state, node)
            assert node in touched or list(told.replicas) == before[node]
        assert "" not in touched


def test_a_change_touches_its_nodes_alone() -> None:
    objects = wire.Objects(
        pools=[wire.Pool(id=name, base_digest=BASES[0], engine="sim") for name in "pq"],
        replicas=[
            wire.Replica(id=f"r{n}", pool_id="pq"[n % 2], node_id="abc"[n % 3]) for n in range(4)
        ],
    )
    state = ControlState()
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    index = DesiredIndex(state)

    def touched(version: int, **kinds: list) -> set[str]:
        return index.apply(wire.WatchResponse(version=version, upserts=wire.Objects(**kinds)))

    assert touched(2, replicas=[wire.Replica(id="r0", pool_id="p", node_id="b")]) == {"a", "b"}
    wanted = wire.Pool(id="p", base_digest=BASES[0], engine="sim", replicas_wanted=9)
    assert touched(3, pools=[wanted]) == set(), "agents are told nothing of it"
    assert touched(4, pools=[wire.Pool(id="q", base_digest=BASES[1], engine="sim")]) == {"a", "b"}
    assert touched(5, models=[wire.Model(id="m")]) == set()


@given(st.floats(0, 1e6))
def test_nodes_take_turns_to_be_told_again(now_s: float) -> None:
    moments = {f"n{n}": repeat_at_s(f"n{n}", now_s) for n in range(1000)}
    assert all(now_s < at_s <= now_s + 5.0 for at_s in moments.values())
    for second in range(5):
        due = sum(now_s + second <= at_s <= now_s + second + 1 for at_s in moments.values())
        assert 100 <= due <= 300, (second, due)
    for node, at_s in list(moments.items())[:20]:
        assert 4.99 < repeat_at_s(node, at_s + 0.001) - at_s < 5.01
