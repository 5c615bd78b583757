"""Simulates the distribution of artifacts to a fleet, and measures its time and the planning cost.

One operation distributes one artifact from the store to every node. The real planner plans it over
simulated links (see docs/distribution.md). One case is an adapter of 100 MB for 1,000 nodes,
another a base of 140 GB for 200 nodes. Both cases also run with faults. In one, 5 % of the nodes
are killed and two nodes serve corrupt chunks. In the other, the stores are unreachable. Figures are
simulated seconds, the number of copies by their source, and the planner's CPU time per round and
per report. Not measured: agents, disks, hashing, the network. The run needs about three minutes of
one core. Run: `python -m benchmarks.load.distribution`.
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
