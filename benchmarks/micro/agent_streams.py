"""Measures the CPU time of agents' streams, for 1,000 nodes, 10,000 replicas and 100 pools.

One operation of "change" begins the drain of one replica. The control plane applies the delta,
wakes the streams of the affected nodes, computes their new messages, and compares them with the
last ones. One operation of "change_of_pool" changes the base of a pool. One operation of "repeat"
serializes the state that every node receives every 5 s. Two implementations are compared. "index"
uses an index of replicas by node, which each change updates. "scan" reads all replicas for each
node at every change, and wakes all streams. The scan is timed for 20 nodes, and its time is
multiplied for all nodes. Figures are CPU time of one core in the best of five rounds. Not measured:
reading the delta from PostgreSQL, golden prompts, gRPC and the event loop.
Run: `python -m benchmarks.micro.agent_streams`.
"""

import time
import timeit
from collections.abc import Callable
from itertools import count

from benchmarks.results import write_result
from control_plane.fleet.desired import DesiredIndex
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.control.v1 import control_pb2 as wire

NODES, REPLICAS, POOLS = 1_000, 10_000, 100
_ROUNDS = 5
_SCANNED_NODES = 20
_VERSIONS = count(2)


def base(number: int) -> str:
    """Return the digest of a base."""
    return f"{number:064x}"


def pool(number: int, base_number: int) -> wire.Pool:
    """Return a pool as the control plane sends it."""
    options = {"max_batch": "64", "kv_gib": "40"}
    return wire.Pool(
        id=f"pool-{number}",
        base_digest=base(base_number),
        engine="trtllm",
        engine_options=options,
    )


def replica(number: int, state: int) -> wire.Replica:
    """Return a replica as the control plane sends it."""
    return wire.Replica(
        id=f"replica_{number:026}",
        pool_id=f"pool-{number % POOLS}",
        node_id=f"node-{number % NODES}",
        state=state,  # pyright: ignore[reportArgumentType] - an enum's number
        accelerators=[number // NODES],
    )


def large_state() -> ControlState:
    """Return the simulated fleet of pools and replicas."""
    objects = wire.Objects(
        pools=[pool(number, number) for number in range(POOLS)],
        replicas=[replica(number, wire.REPLICA_STATE_READY) for number in range(REPLICAS)],
    )
    state = ControlState()
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    return state


def scan(state: ControlState, node_id: str) -> agent.SyncResponse:
    """Return the desired state of a node, from a scan of all replicas."""
    response = agent.SyncResponse(version=state.version)
    for found in sorted(state.replicas.values(), key=lambda found: found.id):
        its_pool = state.pools.get(found.pool_id)
        if found.node_id == node_id and its_pool is not None:
            response.replicas.add(
                replica_id=found.id,
                pool_id=its_pool.id,
                base_digest=its_pool.base_digest,
                engine=its_pool.engine,
                is_draining=found.state == wire.REPLICA_STATE_DRAINING,
                engine_options=its_pool.engine_options,
                accelerators=found.accelerators,
            )
    return response


def cost_us(call: Callable[[], object], number: int) -> float:
    """Return the CPU time of one call in µs, best of the rounds."""
    rounds = timeit.repeat(call, timer=time.process_time, number=number, repeat=_ROUNDS)
    return round(min(rounds) / number * 1e6, 1)


def measure_index(state: ControlState) -> dict[str, float]:
    """Return the costs with the index, in µs."""
    index = DesiredIndex(state)
    nodes = [f"node-{number}" for number in range(NODES)]
    last = {node: index.of(node, 1) for node in nodes}
    numbers = count()

    def tell(delta: wire.WatchResponse) -> None:
        state.apply(delta)
        for node in index.apply(delta):
            told = index.of(node, state.version)
            if list(told.replicas) != list(last[node].replicas):
                last[node] = told

    def change() -> None:
        number = next(numbers)
        kind = (wire.REPLICA_STATE_READY, wire.REPLICA_STATE_DRAINING)[number // REPLICAS % 2 == 0]
        upserts = wire.Objects(replicas=[replica(number % REPLICAS, kind)])
        tell(wire.WatchResponse(version=next(_VERSIONS), upserts=upserts))

    def change_of_pool() -> None:
        number = next(numbers)
        upserts = wire.Objects(pools=[pool(number % POOLS, number)])
        tell(wire.WatchResponse(version=next(_VERSIONS), upserts=upserts))

    def repeat() -> None:
        for node in nodes:
            index.of(node, state.version).SerializeToString()

    return {
        "change": cost_us(change, 2000),
        "change_of_pool": cost_us(change_of_pool, 200),
        "repeat_of_all_nodes": cost_us(repeat, 5),
        "begin_anew": cost_us(lambda: index.restart(state), 5),
    }


def measure_scan(state: ControlState) -> dict[str, float]:
    """Return the cost of a scan of all replicas for each node, in µs."""
    nodes = [f"node-{number}" for number in range(_SCANNED_NODES)]
    last = {node: scan(state, node) for node in nodes}

    def change() -> None:
        for node in nodes:
            if list(scan(state, node).replicas) != list(last[node].replicas):
                raise AssertionError

    def repeat() -> None:
        for node in nodes:
            scan(state, node).SerializeToString()

    times = NODES / _SCANNED_NODES
    return {
        "change": round(cost_us(change, 1) * times),
        "repeat_of_all_nodes": round(cost_us(repeat, 1) * times),
    }


def main() -> None:
    """Run all cases and write `benchmarks/results/agent_streams.json`."""
    state = large_state()
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    figures = {
        "parameters": {"nodes": NODES, "replicas": REPLICAS, "pools": POOLS},
        "cost_us": {"scan": measure_scan(state), "index": measure_index(state)},
    }
    print(write_result("agent_streams", operation, figures).read_text())


if __name__ == "__main__":
    main()
