"""Simulates an artifact's distribution: `python -m sim.distribution --scenario base --seeds 3`.

The real planner (`control_plane.distribution`) receives the lists of chunks that simulated nodes
have, and answers with orders to fetch. Transfers are modelled as flows of bytes over the links of
nodes, racks, regions and the store. Each node reports at its own times. Some nodes are killed and
restart with a part of their chunks, and some nodes serve corrupt chunks. Seconds are virtual,
except the planner's CPU time. The results are in docs/distribution.md.
"""

import argparse
import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from control_plane.distribution.model import (
    STORE,
    Artifact,
    Failure,
    FetchPlan,
    NodePlace,
    NodeReport,
    Order,
    PlannerLimits,
    Priority,
    Trouble,
)
from control_plane.distribution.planner import Planner
from sim.distribution_links import Links, Widths
from sim.percentiles import percentile

CHUNK_BYTES = 4 * 1024 * 1024
_ROUND_S = 0.1  # seconds in which the planner gathers reports
_CONNECT_S = 1.0  # seconds until a node abandons a dead source
_FETCHES = 32  # most fetches of one node at once, including queued fetches
_SERVES = 8  # most transfers that one node serves at once, above which requests wait in a queue
_RESTART_S = 10.0  # seconds from the kill of a node to its restart


@dataclass(frozen=True, slots=True)
class DistributionScenario:
    """A fleet, an artifact, and faults.

    Attributes:
        nodes: Number of nodes. At second 0 all nodes want the artifact and have no chunk.
        size_bytes: Size of the artifact.
        step_s: Step of the fluid model, in seconds. A transfer that ends within a step ends with
            that step.
        regions: Number of regions, over which the nodes are spread evenly.
        rack_nodes: Number of nodes per rack.
        report_s: Seconds between two reports of a node.
        one_way_s: Latency of a message between a node and the control plane, in seconds.
        killed_ratio: Share of nodes that are killed during the run. Every second killed node
            restarts.
        corrupt: Number of nodes that corrupt every chunk they serve.
        store_down_s: Begin and end of the time in which the stores do not answer, in virtual
            seconds.
    """

    nodes: int
    size_bytes: float
    step_s: float
    regions: int = 2
    rack_nodes: int = 20
    report_s: float = 0.5
    one_way_s: float = 0.02
    killed_ratio: float = 0.0
    corrupt: int = 0
    store_down_s: tuple[float, float] = (0.0, 0.0)


_ADAPTER = DistributionScenario(nodes=1000, size_bytes=100e6, step_s=0.01)
_BASE = DistributionScenario(nodes=200, size_bytes=140e9, step_s=0.025)
SCENARIOS = {
    "adapter": _ADAPTER,
    "adapter-faults": replace(_ADAPTER, killed_ratio=0.05, corrupt=2),
    "base": _BASE,
    "base-faults": replace(_BASE, killed_ratio=0.05, corrupt=2),
    "base-store-away": replace(_BASE, store_down_s=(5.0, 20.0)),
}


def bound_s(scenario: DistributionScenario, widths: Widths) -> float:
    """Return a lower bound of the fetch time, in seconds, from the links of nodes and stores."""
    store = widths.store * scenario.regions
    every = scenario.nodes * scenario.size_bytes
    return max(
        scenario.size_bytes / widths.node,
        every / (scenario.nodes * widths.node + store),
        scenario.size_bytes / store,
    )


@dataclass(slots=True)
class _Transfer:
    order: Order
    slot: int | None = None  # slot in `Links`, or None while queued or if the source is dead
    source: int | None = None
    size: int = 0  # bytes that the node still lacks
    ends_s: float = 0.0  # time at which the node abandons the source
    is_corrupt: bool = False


class _Node:
    """The agent of a node, which fetches by the planner's orders and records failed sources."""

    def __init__(self, number: int, place: NodePlace, first_s: float) -> None:
        self.number = number
        self.node_id = f"node-{number:04d}"
        self.place = place
        self.boot = 0
        self.is_up = True
        self.is_full_due = True
        self.held = 0
        self.told = -1
        self.report_at_s = first_s
        self.failures: list[Failure] = []
        self.failed_at: dict[Order, float] = {}
        self.queue: deque[Order] = deque()
        self.running: dict[tuple[int, str], _Transfer] = {}
        self.serves = 0
        self.line: deque[tuple[_Node, _Transfer]] = deque()
        self.done_s: float | None = None


class DistributionWorld:
    """Nodes, links and the planner, stepped together. The seed determines the run."""

    def __init__(
        self, scenario: DistributionScenario, seed: int, limits: PlannerLimits, widths: Widths
    ) -> None:
        self.scenario, self._rng = scenario, Random(seed)  # noqa: S311 - a simulation's
        self.now_s = 0.0
        self.chunks = -(-int(scenario.size_bytes) // CHUNK_BYTES)
        self._all = (1 << self.chunks) - 1
        self.artifact = Artifact("artifact", self.chunks, CHUNK_BYTES)
        self.planner = Planner(limits, seed)
        self.planner.add(self.artifact)
        regions = [i % scenario.regions for i in range(scenario.nodes)]
        in_rack = scenario.rack_nodes * scenario.regions
        racks = [i // in_rack * scenario.regions + regions[i] for i in range(scenario.nodes)]
        self.nodes = [
            _Node(
                i,
                NodePlace(f"r{regions[i]}", f"k{racks[i]}"),
                self._rng.random() * scenario.report_s,
            )
            for i in range(scenario.nodes)
        ]
        for node in self.nodes:
            self.planner.want(node.node_id, self.artifact.digest, Priority.WARMING)
        self._by_id = {node.node_id: node for node in self.nodes}
        self._links = Links(regions, racks, widths)
        self._slots: dict[int, tuple[_Node, _Transfer]] = {}
        self._waiting: list[tuple[_Node, _Transfer]] = []
        self._inbox: deque[tuple[float, _Node, NodeReport]] = deque()
        self._outbox: deque[tuple[float, float, _Node, int, FetchPlan]] = deque()
        self._round_at_s = 0.0
        self._faults(bound_s(scenario, widths))
        self.cpu_s: list[float] = []
        self.reports = self.orders = 0
        self.bytes_from: Counter[str] = Counter()
        self.spoiled = 0

    def _faults(self, about_s: float) -> None:
        drawn = self._rng.sample(self.nodes, self.scenario.corrupt + self._kills())
        self._corrupt = {node.number for node in drawn[: self.scenario.corrupt]}
        self._events: list[tuple[float, _Node, bool]] = []
        for i, node in enumerate(drawn[self.scenario.corrupt :]):
            at_s = self._rng.uniform(0.1, 1.0) * about_s
            self._events.append((at_s, node, False))
            if i % 2:
                self._events.append((at_s + _RESTART_S, node, True))
        self._events.sort(key=lambda event: event[0])

    def _kills(self) -> int:
        return round(self.scenario.nodes * self.scenario.killed_ratio)

    def run(self, at_most_s: float) -> None:
        """Step until every node that is up or will restart has the whole artifact."""
        while self.now_s < at_most_s and not self._is_over():
            self.now_s += self.scenario.step_s
            while self._events and self._events[0][0] <= self.now_s:
                _, node, is_back = self._events.pop(0)
                if is_back:
                    self._restart(node)
                else:
                    self._kill(node)
            self._move()
            self._exchange()

    def _is_over(self) -> bool:
        if any(is_back for _, _, is_back in self._events):
            return False
        return all(node.done_s is not None for node in self.nodes if node.is_up)

    def _kill(self, node: _Node) -> None:
        node.is_up = False
        for transfer in node.running.values():
            if transfer.slot is not None:
                order = transfer.order
                done = int((transfer.size - self._links.left[transfer.slot]) // CHUNK_BYTES)
                if not transfer.is_corrupt and done > 0:
                    node.held |= ((1 << done) - 1) << order.start
                self._stop(transfer)
        node.running.clear()
        node.queue.clear()
        served = [(n, t) for n, t in self._slots.values() if t.source == node.number]
        for other, transfer in [*served, *node.line]:
            self._stop(transfer)
            transfer.ends_s = self.now_s + _CONNECT_S
            self._waiting.append((other, transfer))
        node.line.clear()

    def _restart(self, node: _Node) -> None:
        node.is_up = node.is_full_due = True
        node.boot += 1
        node.told = -1
        node.failures.clear()
        node.failed_at.clear()
        node.report_at_s = self.now_s

    def _stop(self, transfer: _Transfer) -> None:
        if transfer.slot is not None:
            self._links.end(transfer.slot)
            del self._slots[transfer.slot]
            transfer.slot = None
            if transfer.source is not None:
                self.nodes[transfer.source].serves -= 1
                self._serve(self.nodes[transfer.source])

    def _move(self) -> None:
        """Advance transfers by a step, end finished or failed transfers, and begin queued ones."""
        for slot in self._links.step(self.scenario.step_s):
            node, transfer = self._slots[slot]
            self._stop(transfer)
            self._finish(node, transfer)
        waiting, self._waiting = self._waiting, []
        for node, transfer in waiting:
            key = (transfer.order.start, transfer.order.source)
            if node.running.get(key) is not transfer:
                continue
            if transfer.ends_s <= self.now_s:
                self._fail(node, transfer, Trouble.TIMEOUT)
            else:
                self._waiting.append((node, transfer))

    def _finish(self, node: _Node, transfer: _Transfer) -> None:
        if transfer.is_corrupt:
            self.spoiled += 1
            self._fail(node, transfer, Trouble.CORRUPT)
            return
        order = transfer.order
        del node.running[order.start, order.source]
        node.held |= ((1 << (order.stop - order.start)) - 1) << order.start
        self.bytes_from[self._distance(node, transfer.source)] += transfer.size
        if node.held == self._all and node.done_s is None:
            node.done_s = self.now_s
        self._begin(node)

    def _distance(self, node: _Node, source: int | None) -> str:
        if source is None:
            return "store"
        place = self.nodes[source].place
        if place == node.place:
            return "rack"
        return "region" if place.region == node.place.region else "elsewhere"

    def _fail(self, node: _Node, transfer: _Transfer, trouble: Trouble) -> None:
        order = transfer.order
        del node.running[order.start, order.source]
        node.failures.append(Failure(order.digest, order.start, order.source, trouble))
        node.failed_at[order] = self.now_s
        self._begin(node)

    def _begin(self, node: _Node) -> None:
        while node.is_up and node.queue and len(node.running) < _FETCHES:
            order = node.queue.popleft()
            mask = ((1 << (order.stop - order.start)) - 1) << order.start
            missing = (mask & ~node.held).bit_count()
            if not missing:
                continue
            transfer = _Transfer(order)
            node.running[order.start, order.source] = transfer
            since, until = self.scenario.store_down_s
            is_dead = order.source == STORE and since <= self.now_s < until
            if order.source != STORE:
                peer = self._by_id[order.source]
                transfer.source = peer.number
                transfer.is_corrupt = peer.number in self._corrupt
                is_dead = not peer.is_up
                has_all = mask & peer.held == mask
                assert is_dead or has_all, "nobody is sent to a peer that does not have it"
            if is_dead:
                transfer.ends_s = self.now_s + _CONNECT_S
                self._waiting.append((node, transfer))
                continue
            transfer.size = (1 if transfer.is_corrupt else missing) * CHUNK_BYTES
            if transfer.source is not None:
                self.nodes[transfer.source].line.append((node, transfer))
                self._serve(self.nodes[transfer.source])
            else:
                self._flow(node, transfer)

    def _serve(self, peer: _Node) -> None:
        while peer.is_up and peer.line and peer.serves < _SERVES:
            node, transfer = peer.line.popleft()
            if node.running.get((transfer.order.start, transfer.order.source)) is transfer:
                peer.serves += 1
                self._flow(node, transfer)

    def _flow(self, node: _Node, transfer: _Transfer) -> None:
        transfer.slot = self._links.begin(transfer.source, node.number, transfer.size)
        self._slots[transfer.slot] = node, transfer

    def _exchange(self) -> None:
        """Send due reports to the planner, and deliver the planner's answers to the nodes."""
        for node in self.nodes:
            if node.is_up and node.report_at_s <= self.now_s:
                node.report_at_s += self.scenario.report_s
                self._inbox.append((self.now_s, node, self._report(node)))
        if self.now_s >= self._round_at_s:
            self._round_at_s += _ROUND_S
            self._plan()
        while self._outbox and self._outbox[0][0] <= self.now_s:
            _, sent_s, node, boot, answer = self._outbox.popleft()
            if node.is_up and node.boot == boot:
                self._obey(node, answer, sent_s)

    def _report(self, node: _Node) -> NodeReport:
        held = (
            {self.artifact.digest: node.held} if node.is_full_due or node.held != node.told else {}
        )
        report = NodeReport(
            node.node_id, node.place, str(node.boot), held, tuple(node.failures), node.is_full_due
        )
        node.told = node.held
        node.is_full_due = False
        node.failures.clear()
        return report

    def _plan(self) -> None:
        arrived: dict[str, tuple[float, _Node, NodeReport]] = {}
        while self._inbox and self._inbox[0][0] + self.scenario.one_way_s <= self.now_s:
            if self._inbox[0][1].node_id in arrived:
                break  # the planner handles one report per node in a round
            sent_s, node, report = self._inbox.popleft()
            arrived[node.node_id] = sent_s, node, report
        begun_s = process_time()
        answers = self.planner.plan([report for _, _, report in arrived.values()], self.now_s)
        self.cpu_s.append(process_time() - begun_s)
        self.reports += len(answers)
        at_s = self.now_s + self.scenario.one_way_s
        for node_id, answer in answers.items():
            sent_s, node, report = arrived[node_id]
            self._outbox.append((at_s, sent_s, node, int(report.boot_id), answer))

    def _obey(self, node: _Node, answer: FetchPlan, sent_s: float) -> None:
        if answer.wants_full:
            node.is_full_due = True
        node.failed_at = {o: at_s for o, at_s in node.failed_at.items() if at_s > sent_s}
        wanted = {(o.start, o.source): o for o in answer.orders if o not in node.failed_at}
        for key in [key for key in node.running if key not in wanted]:
            self._stop(node.running.pop(key))
        self.orders += len(wanted.keys() - node.running.keys())
        node.queue = deque(order for key, order in wanted.items() if key not in node.running)
        self._begin(node)


def simulate(
    scenario: DistributionScenario,
    seed: int,
    *,
    limits: PlannerLimits | None = None,
    widths: Widths | None = None,
    at_most_s: float = 1200.0,
) -> dict[str, Any]:
    """Return the figures of one run. `done` is the number of nodes with the whole artifact."""
    limits, widths = limits or PlannerLimits(), widths or Widths()
    world = DistributionWorld(scenario, seed, limits, widths)
    world.run(at_most_s)
    done = sorted(node.done_s for node in world.nodes if node.done_s is not None)
    bound = bound_s(scenario, widths)
    whole = scenario.nodes * world.chunks * CHUNK_BYTES
    cpu_s = sum(world.cpu_s)
    return {
        "seed": seed,
        "done": len(done),
        "up": sum(node.is_up for node in world.nodes),
        "median_s": round(percentile(done, 50), 2) if done else None,
        "last_s": round(done[-1], 2) if done else None,
        "bound_s": round(bound, 2),
        "times_bound": round(done[-1] / bound, 2) if done else None,
        "spoiled_chunks": world.spoiled,
        "copies_from": {
            k: round(v / whole * scenario.nodes, 2) for k, v in world.bytes_from.items()
        },
        "planner_cpu_s": round(cpu_s, 2),
        "planner_round_ms": round(1000 * cpu_s / len(world.cpu_s), 2),
        "planner_round_max_ms": round(1000 * max(world.cpu_s), 1),
        "planner_report_us": round(1e6 * cpu_s / max(world.reports, 1), 1),
        "reports": world.reports,
    }


def run(scenarios: dict[str, DistributionScenario], seeds: int) -> dict[str, Any]:
    """Simulate scenarios, print the figures, and return them with the scenarios' parameters."""
    runs: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        figures = [simulate(scenario, seed) for seed in range(seeds)]
        for figure in figures:
            print(f"{name}: {json.dumps(figure)}", flush=True)
        runs[name] = {"scenario": asdict(scenario), "figures": figures}
    return {"links": asdict(Widths()), "limits": asdict(PlannerLimits()), "runs": runs}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the scenarios that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.distribution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--scenario", default=",".join(SCENARIOS), help="by comma, default %(default)s")
    add("--seeds", type=int, default=1, help="of each, default %(default)s")
    add("--nodes", type=int, help="instead of the scenario's")
    add("--gigabytes", type=float, help="of the artifact, instead of the scenario's")
    add("--report-s", type=float, help="between two reports of a node, default 0.5")
    add("--regions", type=int, help="default 2")
    add("--json", type=Path, metavar="OUT", help="write the figures, with their parameters")
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.scenario.split(",")]
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SCENARIOS)}")
    changes: dict[str, Any] = {
        "nodes": arguments.nodes,
        "size_bytes": arguments.gigabytes and arguments.gigabytes * 1e9,
        "report_s": arguments.report_s,
        "regions": arguments.regions,
    }
    given = {name: value for name, value in changes.items() if value}
    record = run({name: replace(SCENARIOS[name], **given) for name in names}, arguments.seeds)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
