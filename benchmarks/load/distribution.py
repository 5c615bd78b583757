"""Simulates the distribution of artifacts to a fleet, and measures its time and the planning cost.

One operation is one artifact from the store to every node, planned by the real planner over
simulated links (see docs/distribution.md). One case is a 100 MB adapter for 1,000 nodes, another a
140 GB base for 200 nodes. Both also run with 5 % of the nodes killed and two nodes that serve
corrupt chunks, and with the stores unreachable. Figures are virtual seconds, copies by their
source, and the planner's CPU time of a round and of a report. Not measured: agents, disks, hashing,
the wire. The run needs about three minutes of one core. Run: `python -m
benchmarks.load.distribution`.
"""

from benchmarks.results import write_result
from sim.distribution import SCENARIOS, run

SEEDS = 3


def main() -> None:
    """Simulate every scenario and write the figures."""
    write_result(
        "distribution",
        "a simulated distribution to a whole fleet; agents, disks and the wire not measured",
        run(SCENARIOS, SEEDS),
    )


if __name__ == "__main__":
    main()
