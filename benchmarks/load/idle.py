"""Measures the CPU time of an unused stack: `python -m benchmarks.load.idle`.

One operation is a minute without requests of a running `sluice up`, which serves a chat and an
embedding model on the CPU engine. The first minute after the start is not measured, because the
stack is not idle yet. One figure is the CPU time of each process and its children, in percent of
one core. Another figure is the number of voluntary context switches (sleeps) of its threads per
second. Not measured: memory, and the cost of requests. Other work on the machine affects CPU time
less than wall time, but makes each wake-up of a thread more expensive.
"""

import os
import time
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.load.stack import started
from benchmarks.results import write_result
from cli.stack.home import Home
from cli.stack.state import read_state
from sluice.procfs import cpu_s, marked_processes
from sluice.profiles import EMBED

REST_S = 60.0
MEASURED_S = 60.0
_TRITON = "tritonserver"


def sleeps(pid: int) -> int:
    """Return the voluntary context switches of a process' threads, or 0 if it has ended."""
    count = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for line in (thread / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    count += int(line.split()[1])
    except OSError:
        return count
    return count


def groups(home: Path) -> dict[str, list[int]]:
    """Return the processes of a stack, by the name of their process group's leader."""
    state = read_state(Home(home))
    assert state is not None, "the stack runs"
    names = {process.pid: process.name for process in state.processes}
    found: dict[str, list[int]] = defaultdict(list)
    for pid in marked_processes(Home(home.resolve()).marker):
        try:
            group = os.getpgid(pid)
        except ProcessLookupError:
            continue
        found[names.get(pid) or names.get(group) or _engine_process(pid)].append(pid)
    return found


def _engine_process(pid: int) -> str:
    """Return the name of a process of an engine, which is Triton or its child."""
    process = psutil.Process(pid)
    server = process if process.name() == _TRITON else process.parent()
    command = " ".join(server.cmdline()) if server is not None else ""
    kind = "embeddings" if f"={EMBED.triton_model} " in command else "chat"
    return f"{process.name()} of {kind}"


def measure(home: Path, for_s: float) -> dict[str, dict[str, float]]:
    """Return percent of a core and sleeps per second, by process."""
    pids = groups(home)
    before = {name: (cpu_s(ids), sum(map(sleeps, ids))) for name, ids in pids.items()}
    began_s = time.monotonic()
    time.sleep(for_s)
    took_s = time.monotonic() - began_s
    return {
        name: {
            "core_percent": round(100 * (cpu_s(ids) - before[name][0]) / took_s, 2),
            "sleeps_s": round((sum(map(sleeps, ids)) - before[name][1]) / took_s, 1),
        }
        for name, ids in sorted(pids.items())
    }


def main() -> None:
    """Start a stack, wait until it is idle, and measure."""
    with started("openvino", "--embeddings") as stack:
        time.sleep(REST_S)
        figures = measure(stack.home, MEASURED_S)
    path = write_result(
        "idle",
        "a minute of a stack on the CPU engine without requests, by process",
        {"rest_s": REST_S, "measured_s": MEASURED_S, "processes": figures},
    )
    for name, figure in figures.items():
        print(f"{name:24} {figure['core_percent']:6.2f} % {figure['sleeps_s']:8.1f}/s")
    print(path)


if __name__ == "__main__":
    main()
