"""Finds the engines that an earlier agent of this state directory left running."""

import asyncio
import os
import time

import structlog

from replica.agent.runner import Leftover
from replica.agent.triton import TritonLauncher
from sluice.process import AdoptedProcess

log = structlog.get_logger(__name__)


async def find_leftovers(launcher: TritonLauncher) -> dict[str, Leftover]:
    """Return the engines to adopt, by replica id, after killing all other leftover processes.

    An engine is adopted if the process of its record still runs, and its environment names the same
    replica and spec. The engine's health is not checked here, because its canary will check it.
    """
    leftovers: dict[str, Leftover] = {}
    for record, launch in await asyncio.to_thread(launcher.recorded):
        process = AdoptedProcess.adopt(
            launch.process, record.pid, lambda pid, record=record: launcher.is_engine(record, pid)
        )
        if process is None:
            launch.run_file.remove()
            continue
        leftovers[record.replica_id] = Leftover(record, launch, process, _age_s(record.start_ticks))
    spared = {replica_id: leftover.record.pid for replica_id, leftover in leftovers.items()}
    if killed := await launcher.remove_leftovers(spared):
        log.warning("leftovers_killed", pids=killed)
    if spared:
        log.info("engines_found", pids=spared)
    return leftovers


def _age_s(start_ticks: int) -> float:
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, up_s - start_ticks / os.sysconf("SC_CLK_TCK"))
