"""Distribution in simulation: how long an artifact takes to a fleet, and what planning costs.

One operation: an artifact from the store to every node, planned by the real planner over simulated
links (see docs/distribution.md): a 100 MB adapter to 1,000 nodes and a 140 GB base to 200, also
with 5 % of the nodes killed and two that spoil what they serve, and with the stores away. Figures:
virtual seconds, copies by where they came from, the planner's processor time of a round and of a
report. Not measured: agents, disks, hashing, the wire. Run:
`python -m benchmarks.load.distribution`; about three minutes of one core.
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
