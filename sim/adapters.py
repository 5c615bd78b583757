"""Measures how many requests wait for an adapter's load: `python -m sim.adapters --adapters 500`.

Requests choose adapters of one base by Zipf's law. Each replica has adapter slots, and host memory
for further adapters. A copy from host memory into a slot lasts 50 ms, a read from the disk one
second. The router core places requests. In the mode `plan` it also loads copies ahead of requests,
as the product does. In the mode `none` an adapter is loaded only when a request needs it. `--shift`
changes the popularity of half of the adapters in the middle of the run, which is the hardest case.
The results are in docs/adapters.md.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path

from replica.drivers.sim_costs import MODELS_BY_NAME
from router.core.types.plan import EngineLimits
from router.prefetch import PLAN_S
from sim.engines import Engine, Job
from sim.metrics import measure
from sim.policies.sluice import RouterSettings, Sluice, SluiceLink
from sim.pool import SimPool, SimPoolPlan
from sim.workload import Trace, TraceRequest
from sluice.hashing import BLOCK_TOKENS
from sluice.wire.engine.v1 import engine_pb2 as engine

COPY_S, READ_S = 0.05, 1.0
_PROMPT, _OUTPUT = 400.0, 120.0  # median tokens of prompts and of answers
_SIGMA = 0.8


@dataclass(frozen=True, slots=True)
class AdapterCase:
    """The settings of one simulated run.

    Attributes:
        is_planned: Whether the router core loads copies of adapters ahead.
        adapters: Number of adapters.
        zipf: Exponent of Zipf's law for the adapters' popularity.
        replicas: Number of replicas.
        cells: Number of cells.
        slots: Number of adapters that one batch of a replica may mix.
        memory: Number of adapters in a replica's host memory, not counting adapters in slots.
        load: Requests per second and replica.
        duration_s: Seconds of arrivals. Only requests after `warm_s` enter the figures.
        warm_s: Seconds at the start in which caches fill.
        is_shifted: Whether half of the adapters change their popularity in the middle of the run.
        is_settled: Whether the run starts with host memories as the plan fills them within hours.
        seed: Seed of the arrivals.
    """

    is_planned: bool
    adapters: int
    zipf: float
    replicas: int
    cells: int
    slots: int
    memory: int
    load: float
    duration_s: float
    warm_s: float
    is_shifted: bool
    is_settled: bool
    seed: int


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """The figures of a run.

    Attributes:
        requests: Number of requests that arrived after the warm-up.
        read_share: Share of these requests that waited for a read from the disk.
        copy_share: Share of these requests that waited only for a copy from host memory.
        wait_mean_ms: Mean wait of a request for its adapter.
        loads: Number of loads that the plan ordered.
        ttft_p50_s: Median of the time to the first token.
        ttft_p99_s: 99th percentile of the time to the first token.
        took_s: Processor seconds of the run.
    """

    requests: int
    read_share: float
    copy_share: float
    wait_mean_ms: float
    loads: int
    ttft_p50_s: float
    ttft_p99_s: float
    took_s: float


class HeldAdapters:
    """The adapters of a simulated replica, in slots and host memory with LRU eviction."""

    def __init__(self, slots: int, memory: int) -> None:
        self._slots_max = slots
        self._room = slots + memory
        self.slots: OrderedDict[str, None] = OrderedDict()
        self.memory: OrderedDict[str, None] = OrderedDict()  # including the adapters in slots
        self.used: Counter[str] = Counter()

    def use(self, adapter: str) -> float:
        """Begin a sequence of an adapter, and return the seconds until the adapter is in a slot."""
        wait_s = 0.0 if adapter in self.slots else COPY_S if adapter in self.memory else READ_S
        self.put(adapter)
        self.slots[adapter] = None
        self.slots.move_to_end(adapter)
        self.used[adapter] += 1
        _trim(self.slots, self._slots_max, self.used)
        return wait_s

    def put(self, adapter: str) -> None:
        """Add an adapter to host memory, as the most recently used adapter."""
        self.memory[adapter] = None
        self.memory.move_to_end(adapter)
        _trim(self.memory, self._room, self.used)

    def leave(self, adapter: str) -> None:
        """End a sequence of an adapter."""
        self.used[adapter] -= 1
        if not self.used[adapter]:
            del self.used[adapter]


def _trim(held: OrderedDict[str, None], room: int, used: Counter[str]) -> None:
    while len(held) > room:
        oldest = next((it for it in held if it not in used), None)
        if oldest is None:
            return
        del held[oldest]


class AdapterSluice(Sluice):
    """The router core with simulated engines that serve adapters.

    Attributes:
        waits_s: Virtual seconds that each job waited for its adapter, by the job's number.
        loads: Number of loads that the plan ordered.
    """

    def __init__(
        self, settings: RouterSettings, case: AdapterCase, adapters: Sequence[str]
    ) -> None:
        super().__init__(settings)
        self._case = case
        self._adapters = adapters  # adapter of each job
        self.waits_s: dict[int, float] = {}
        self.loads = 0

    def bind(self, pool: SimPool) -> None:
        """Implement `Policy.bind` with empty adapter slots and host memories."""
        case = self._case
        self._shelves = [HeldAdapters(case.slots, case.memory) for _ in range(pool.replicas_max)]
        names = [f"adapter-{number}" for number in range(case.adapters)]
        self._known = {f"cell-{number}": names for number in range(case.cells)}
        self._loading = [0.0] * pool.replicas_max  # end of the load by replica, in virtual seconds
        super().bind(pool)
        if case.is_settled:
            self.settle(names, case.zipf)
        if case.is_planned:
            self._after(PLAN_S, self._plan_loads)

    def adapter_of(self, job: Job) -> str:
        """Return the adapter of a job by its number."""
        return self._adapters[job.number]

    def engine_limits(self, replica: Engine) -> EngineLimits:
        """Return the limits of an engine, with the adapter slots of the case."""
        known = super().engine_limits(replica)
        return EngineLimits(
            context_tokens_max=known.context_tokens_max,
            sequences_max=known.sequences_max,
            step_tokens_max=known.step_tokens_max,
            kv_blocks=known.kv_blocks,
            block_tokens=known.block_tokens,
            adapter_slots=self._case.slots,
        )

    def deliver_job(self, link: SluiceLink, sequence: int, job: Job) -> None:
        """Deliver a job to the engine once its adapter is in a slot."""
        wait_s = self._shelves[link.number].use(self.adapter_of(job))
        self.waits_s[job.number] = wait_s
        if wait_s:
            self._after(wait_s, super().deliver_job, link, sequence, job)
        else:
            super().deliver_job(link, sequence, job)

    def done(self, job: Job) -> None:
        """Release the adapter of an ended job."""
        self._shelves[job.replica].leave(self.adapter_of(job))

    def send_frame(self, link: SluiceLink, frame: engine.StepFrame) -> None:
        """Send a frame that also reports the adapters in slots and the waits for adapters."""
        frame.state.adapters_changed = True
        frame.state.adapters_resident.extend(self._shelves[link.number].slots)
        for entry in frame.admitted:
            job = link.jobs.get(entry.sequence)
            if job is not None:
                wait_s = self.waits_s[job.number]
                entry.queue_us += int(1e6 * wait_s)
                entry.load_us = int(1e6 * wait_s) if wait_s >= READ_S else 0
        super().send_frame(link, frame)

    def settle(self, adapters: Sequence[str], zipf: float) -> None:
        """Fill the host memories with the copies that the plan orders for this popularity."""
        homes = [self.home_of(adapter) for adapter in adapters]
        for number, core in enumerate(self.cores):
            for cell in core.cells.values():
                demand = cell.fleet.adapter_demand
                for rank, adapter in enumerate(adapters):
                    if homes[rank] == number:
                        demand.came(adapter, self.pool.now, (rank + 1) ** -zipf)
            while loads := core.adapter_loads(self._known):
                for replica_id, wanted in loads.items():
                    shelf = self._shelves[int(replica_id.rpartition("-")[2])]
                    for adapter in wanted:
                        shelf.put(adapter)
                    self._report_held(replica_id, int(replica_id.rpartition("-")[2]))

    def _plan_loads(self) -> None:
        for core in self.cores:
            for replica_id, adapters in core.adapter_loads(self._known).items():
                number = int(replica_id.rpartition("-")[2])
                at_s = self.pool.now
                if at_s < self._loading[number]:  # as in `Prefetch`, one order at a time
                    continue
                for adapter in adapters:
                    at_s += READ_S
                    self.loads += 1
                    self.pool.timeline.at(at_s, self._shelves[number].put, adapter)
                self._loading[number] = at_s
                self.pool.timeline.at(at_s, self._report_held, replica_id, number)
        if self.pool.jobs and self.pool.now < self.pool.jobs[-1].arrived_at:
            self._after(PLAN_S, self._plan_loads)

    def _report_held(self, replica_id: str, number: int) -> None:
        for core in self.cores:
            if (book := core.replicas.get(replica_id)) is not None:
                residency = core.cells[book.cell_id].fleet.residency
                residency.reported(replica_id, self._shelves[number].memory)


def workload(case: AdapterCase) -> tuple[Trace, list[str]]:
    """Return the requests of a case, and the adapter of each."""
    draw = random.Random(f"adapters {case.seed}")  # noqa: S311 - repeatable on purpose
    weights = list(accumulate((rank + 1) ** -case.zipf for rank in range(case.adapters)))
    names = [f"adapter-{number}" for number in range(case.adapters)]
    later = names[:]
    if case.is_shifted:
        moved = later[::2]
        draw.shuffle(moved)
        later[::2] = moved
    requests: list[TraceRequest] = []
    adapters: list[str] = []
    at_s, block = 0.0, 0
    while at_s < case.duration_s:
        ranked = names if at_s < case.duration_s / 2 else later
        adapters.append(draw.choices(ranked, cum_weights=weights)[0])
        prompt = max(1, round(_PROMPT * draw.lognormvariate(0.0, _SIGMA)))
        output = max(1, round(_OUTPUT * draw.lognormvariate(0.0, _SIGMA)))
        count = -(-prompt // BLOCK_TOKENS)
        blocks = tuple(range(block, block + count))
        block += count
        requests.append(TraceRequest(at_s, prompt, output, blocks, -1, f"tenant-{block % 50}"))
        at_s += draw.expovariate(case.load * case.replicas)
    return Trace("adapters", BLOCK_TOKENS, tuple(requests)), adapters


def figures_of(case: AdapterCase) -> AdapterFigures:
    """Simulate a case to its end, and return its figures."""
    began_s = time.process_time()
    trace, adapters = workload(case)
    policy = AdapterSluice(RouterSettings(cells=case.cells), case, adapters)
    plan = SimPoolPlan(case.replicas, seed=case.seed)
    pool = SimPool(policy, MODELS_BY_NAME["h70"], plan, block_tokens=BLOCK_TOKENS)
    pool.run(trace)
    found = measure(pool)
    waits = [policy.waits_s[job.number] for job in pool.jobs if job.arrived_at >= case.warm_s]
    return AdapterFigures(
        requests=len(waits),
        read_share=sum(wait_s >= READ_S for wait_s in waits) / len(waits),
        copy_share=sum(0 < wait_s < READ_S for wait_s in waits) / len(waits),
        wait_mean_ms=1e3 * sum(waits) / len(waits),
        loads=policy.loads,
        ttft_p50_s=found.ttft_p50_s,
        ttft_p99_s=found.ttft_p99_s,
        took_s=time.process_time() - began_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.adapters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--adapters", type=int, default=500, help="default %(default)s")
    add("--zipf", type=float, default=1.0, help="exponent; default %(default)s")
    add("--replicas", type=int, default=16, help="default %(default)s")
    add("--cells", type=int, default=2, help="default %(default)s")
    add("--slots", type=int, default=32, help="per replica; default %(default)s")
    add("--memory", type=int, default=256, help="adapters beside the slots; default %(default)s")
    add("--load", type=float, default=2.0, help="requests/s and replica; default %(default)s")
    add("--duration-s", type=float, default=600.0, help="default %(default)s")
    add("--warm-s", type=float, default=120.0, help="not counted; default %(default)s")
    add("--shift", action="store_true", help="half of the adapters change ranks in the middle")
    add("--settled", action="store_true", help="start with host memories as the plan fills them")
    add("--seeds", default="0", help="by comma; default 0")
    add("--plans", default="plan,none", help="plan, none or both; default %(default)s")
    add("--jobs", type=int, default=1, help="processes; default %(default)s")
    add("--json", type=Path, metavar="OUT", help="file for the figures of all runs")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the cases of the command line, and print their figures."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.warm_s >= options.duration_s:
        parser.error("--duration-s is above --warm-s")
    cases = [
        AdapterCase(
            *(plan == "plan", options.adapters, options.zipf, options.replicas, options.cells),
            *(options.slots, options.memory, options.load, options.duration_s, options.warm_s),
            *(options.shift, options.settled, seed),
        )
        for plan, seed in product(options.plans.split(","), map(int, options.seeds.split(",")))
    ]
    found: list[dict[str, object]] = []
    with ProcessPoolExecutor(options.jobs) as executor:
        for case, figures in zip(cases, executor.map(figures_of, cases), strict=True):
            found.append(asdict(case) | asdict(figures))
            print(json.dumps(asdict(figures)), file=sys.stderr, flush=True)
            name = "plan" if case.is_planned else "none"
            print(
                f"{name}: {figures.read_share:.2%} wait for a read,"
                f" {figures.copy_share:.2%} for a copy; {figures.wait_mean_ms:.1f} ms on average"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
