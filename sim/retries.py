"""Measures the effect of spread retry times: `python -m sim.retries --seeds 0,1,2`.

More requests arrive than two replicas can serve, which is about 55 per second. The router refuses
the surplus with a retry time, and each client retries as often as an official SDK does by default.
With `spread`, the router's retry times leave room for the earlier refused requests. With `equal`,
each retry time is only the request's own wait. Clients add up to a tenth to the retry time. The
results are in docs/overload.md.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from router.core.decide.forecast import Promises, bounded_retry_s
from sim.ablation import AblatedRule, switched_off
from sim.router_world import RouterWorld, Workload, WorldClient
from sluice.wire.router.v1 import router_pb2 as wire

_RETRIES_MAX = 2  # default of the official SDKs
_JITTER = 0.1
_UNTIL_S = 3600.0
_DEADLINE_MS = 2000


class OverloadCase(NamedTuple):
    """Arrivals at the first rate, followed by arrivals at the second rate."""

    name: str
    requests: int
    rate_per_s: float
    later_requests: int = 0
    later_rate_per_s: float = 1.0


CASES = (
    OverloadCase("200/s for 6 s", 1200, 200),
    OverloadCase("200/s for 3 s, 50/s for 40 s", 600, 200, 2000, 50),
    OverloadCase("90/s for 33 s", 3000, 90),
)


class RetryFigures(NamedTuple):
    """Figures of one run.

    Attributes:
        served_share: Share of the clients that received an answer.
        refusals: Refusals per client.
        p95_s: Seconds from a client's first request to its first token, 95th percentile.
    """

    served_share: float
    refusals: float
    p95_s: float


class RetryingWorld(RouterWorld):
    """A world whose clients send a refused request again, after the time in the refusal.

    Attributes:
        refusals: Number of refused requests.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.refusals = 0
        self._retries: dict[int, int] = {}  # by the `id()` of the client
        self._jitter = random.Random(seed)  # noqa: S311 - a simulation is to be repeatable

    def _end(self, client: WorldClient, outcome: wire.Outcome) -> None:
        retries = self._retries.get(id(client), 0)
        self.refusals += bool(outcome.code)
        if not outcome.code or retries == _RETRIES_MAX:
            super()._end(client, outcome)
            return
        self._retries[id(client)] = retries + 1
        wait_s = outcome.retry_after_ms / 1000 * self._jitter.uniform(1.0, 1.0 + _JITTER)
        self._plan(self.now + wait_s, partial(self._submit, client))


def _own_wait_s(
    _promises: Promises, _priority: int, wait_s: float, _service_s: float, _now: float
) -> float:
    return bounded_retry_s(wait_s)


SPREADING = AblatedRule(
    "a refused request returns when earlier refused requests have been served",
    Promises,
    "retry_after_s",
    _own_wait_s,
)


def play(case: OverloadCase, seed: int, *, is_spread: bool) -> RetryFigures:
    """Return the figures of one run, with spread or equal retry times."""
    world = RetryingWorld(seed)
    load = partial(Workload, deadline_ms=_DEADLINE_MS, cancel_share=0.0, batch_share=0.0)
    world.load(load(requests=case.requests, rate_per_s=case.rate_per_s))
    if case.later_requests:
        later = load(requests=case.later_requests, rate_per_s=case.later_rate_per_s)
        world.load(later, begin_s=case.requests / case.rate_per_s)
    with switched_off(() if is_spread else (SPREADING,)):
        world.run(until_s=_UNTIL_S)
    world.verify()
    waits = sorted(it.first_at - it.arrived_at for it in world.clients if it.first_at is not None)
    count = len(world.clients)
    return RetryFigures(len(waits) / count, world.refusals / count, waits[len(waits) * 95 // 100])


def main(argv: Sequence[str] | None = None) -> None:
    """Play all cases with both kinds of retry times, and print a table for the docs."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.retries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="0,1,2", help="by comma; default %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for the means")
    arguments = parser.parse_args(argv)
    seeds = [int(word) for word in arguments.seeds.split(",")]
    rows: list[dict[str, object]] = []
    print("| load | retry times | served | refusals per request | first token p95 |")
    print("| --- " * 5 + "|")
    for case, is_spread in product(CASES, (True, False)):
        figures = [play(case, seed, is_spread=is_spread) for seed in seeds]
        served, refusals, p95_s = map(mean, zip(*figures, strict=True))
        kind = "spread" if is_spread else "equal"
        print(f"| {case.name} | {kind} | {served:.1%} | {refusals:.2f} | {p95_s:.0f} s |")
        sys.stdout.flush()
        means = RetryFigures(served, refusals, p95_s)
        rows.append({"case": case.name, "retry_times": kind, **means._asdict(), "seeds": seeds})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
