"""Reads the groups, memory and environment of processes from /proc. Linux only."""

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

# Environment variable of every process of a local stack. It identifies orphans (children of a dead
# server), which are then ended.
MARKER = "SLUICE_STACK"


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on, or raise OSError."""
    text = _read(f"/proc/{pid}/stat")
    return text[text.rindex(")") + 2 :].split()  # the name in parentheses may have any characters


def _read(file: str) -> str:
    # Agents read these files every second, and a `Path` would be several times as slow.
    with open(file, encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
        return stream.read()


def _all_pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def group_processes(pgid: int) -> list[int]:
    """Return the ids of the processes of a process group, without zombies."""
    found: list[int] = []
    for pid in _all_pids():
        with suppress(OSError, ValueError):
            if os.getpgid(pid) == pgid and _stat_fields(pid)[0] not in "ZX":
                found.append(pid)
    return found


def start_ticks(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot, or 0 without a process.

    Process id and start time together identify a process, because an id is not reused within one
    tick.
    """
    with suppress(OSError, ValueError):
        return int(_stat_fields(pid)[19])
    return 0


def environment(pid: int) -> dict[str, str]:
    """Return the initial environment of a process, or empty if it is not readable."""
    entries: list[bytes] = []
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def program_name(pid: int) -> str:
    """Return the file name of a process's program, or empty if there is no process."""
    with suppress(OSError):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return Path(os.fsdecode(program)).name
    return ""


async def first_end(pids: Sequence[int]) -> int:
    """Wait until one of the processes ends, and return its id. Without processes, wait for ever.

    The processes need not be children of this process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def note(pid: int) -> None:
        if not ended.done():
            ended.set_result(pid)

    pidfds: list[int] = []
    try:
        for pid in pids:
            try:
                pidfds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return pid
            loop.add_reader(pidfds[-1], note, pid)  # readable when its process has ended
        return await ended
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes as the sum of proportional set sizes (PSS).

    In this sum, pages that the processes share are included only once.
    """
    return sum(_pss_bytes(pid) for pid in pids)


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes, in seconds. Ended processes are ignored."""
    ticks = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            ticks += sum(int(field) for field in _stat_fields(pid)[11:13])  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


def wants_processor(pids: Iterable[int]) -> bool:
    """Return whether a thread of the processes runs, or waits for a CPU or a disk.

    Sleeping and stopped threads are ignored, so the result distinguishes a process that lacks CPU
    time from a frozen process.
    """
    for pid in pids:
        with suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                text = _read(f"/proc/{pid}/task/{thread}/stat")
                if text[text.rindex(")") + 2] in "RD":
                    return True
    return False


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _group(pid: int) -> int:
    """Return the process group of a process, or 0 if the process has ended."""
    with suppress(OSError):
        return os.getpgid(pid)
    return 0


def _has_mark(pid: int, mark: bytes) -> bool:
    with suppress(OSError):
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def marked_processes(marker: str, *, variable: str = MARKER) -> list[int]:
    """Return the ids of all processes started with `variable=marker`, except our own."""
    mark = f"{variable}={marker}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and _has_mark(pid, mark)]


async def kill_marked(
    marker: str,
    *,
    variable: str = MARKER,
    spare: Collection[int] = (),
    timeout_s: float = 5.0,
) -> list[int]:
    """Kill all processes started with `variable=marker`, wait, and return their ids.

    Args:
        marker: Marker of the processes.
        variable: Name of the environment variable with the marker.
        spare: Process groups, by id, that are not killed.
        timeout_s: Longest wait.

    Raises:
        TimeoutError: Some processes are still alive after `timeout_s`. The message names them.
    """
    mark = f"{variable}={marker}".encode()
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while living := [
        pid for pid in marked_processes(marker, variable=variable) if _group(pid) not in spare
    ]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {living} survive SIGKILL; are they stuck in the kernel?")
        for pid in living:
            if _kill_if_marked(pid, mark):
                killed.add(pid)
        await asyncio.sleep(0.02)
    return sorted(killed)


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kill through a pidfd, so that no other process can have the id at the time of the signal."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has_mark(pid, mark):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(pidfd)
