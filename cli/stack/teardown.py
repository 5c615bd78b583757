"""Ends the remaining processes of a stack without its supervisor.

The processes are identified by the marker in their environment and by the last state file. So
neither the supervisor nor the cooperation of the processes is needed.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cli.stack.home import Home
from cli.stack.segments import mapped_files, remove_files, remove_orphans
from cli.stack.state import StackState, living, read_state
from sluice.procfs import marked_processes

_GRACE_S = 6.0  # seconds, because Triton needs 2.3 to 4.5 s to end
_POLL_S = 0.05


def end_leftovers(home: Home, *, grace_s: float = _GRACE_S) -> list[str]:
    """End every process of the stack and remove its shared memory. Returns the ended processes.

    Processes are identified by the marker in their environment, or else by the state file.
    Services end before the servers, so that no write is lost. A process that does not end within
    `grace_s` seconds is killed. With 0, all are killed at once.
    """
    from replica.agent.triton import TritonLauncher

    state = read_state(home)
    pids = leftovers(home)
    names = [name_of(pid, state) for pid in pids]
    files, seen = mapped_files(pids), set(pids)
    servers = [p.pid for p in living(state) if p.is_server]
    services = set(pids) - _trees(servers)
    if grace_s > 0:
        _end(home, services, signal.SIGTERM, grace_s)
        _end(home, servers, signal.SIGINT, grace_s)  # SIGINT is PostgreSQL's fast shutdown
    deadline = time.monotonic() + _GRACE_S
    while (left := leftovers(home)) and time.monotonic() < deadline:
        files |= mapped_files(left)
        seen.update(left)
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    agent = TritonLauncher(state_dir=home.service_state("agent"), artifacts_dir=home.artifacts)
    remove_files(files, f"sluice_{agent.owner}_")
    remove_orphans(seen)
    return names


def leftovers(home: Home) -> list[int]:
    """Return the ids of the stack's processes, without its supervisor."""
    known = {process.pid for process in living(read_state(home))}
    return sorted(known.union(marked_processes(home.marker)))


def _end(home: Home, pids: Iterable[int], number: int, grace_s: float) -> None:
    """Send a signal to processes, wait for their end, and kill the remaining ones."""
    wanted = set(pids)
    for pid in wanted:
        _signal(pid, number)
    deadline = time.monotonic() + grace_s
    while (left := wanted.intersection(leftovers(home))) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for pid in left:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _trees(pids: Iterable[int]) -> set[int]:
    import psutil

    found = set(pids)
    for pid in list(found):
        with suppress(psutil.Error):
            found.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    return found


def name_of(pid: int, state: StackState | None) -> str:
    """Return a process's name in the stack, or else its program's name, with its pid."""
    for process in state.processes if state else ():
        if process.pid == pid:
            return f"{process.name} ({pid})"
    try:
        program = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        program = "?"
    return f"{program} ({pid})"
