"""Reads the resources that a node offers, which are processors, memory and accelerators."""

import os
from contextlib import suppress
from pathlib import Path

from sluice.wire.agent.v1 import agent_pb2 as agent

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def node_facts(engines: tuple[str, ...]) -> agent.NodeFacts:
    """Return the resources of this machine, or of the container in which this process runs."""
    return agent.NodeFacts(
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        accelerators=_accelerators(),
        engines=engines,
    )


def _memory_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the text "max" means that there is no limit
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    return machine


def _accelerators() -> list[str]:
    """Return the models of NVIDIA's cards, as the driver names them."""
    found: list[str] = []
    for card in sorted(_NVIDIA.glob("*/information")):
        with suppress(OSError):
            lines = card.read_text().splitlines()
            found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model")]
    return found
