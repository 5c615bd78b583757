"""Reads processes from /proc: groups, memory, marked leftovers. Linux only."""

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

# Every process of a stack carries this variable, so that orphans (a dead server's children) can be
# found and ended.
MARKER = "SLUICE_STACK"


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; OSError when it is gone."""
    text = _read(f"/proc/{pid}/stat")
    return text[text.rindex(")") + 2 :].split()  # the name before may hold anything


def _read(file: str) -> str:
    # Agents read these every second: a `Path` costs several times the system calls.
    with open(file, encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
        return stream.read()


def _all_pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def group_processes(pgid: int) -> list[int]:
    """Return the living processes of a process group; zombies do not count."""
    found: list[int] = []
    for pid in _all_pids():
        with suppress(OSError, ValueError):
            if os.getpgid(pid) == pgid and _stat_fields(pid)[0] not in "ZX":
                found.append(pid)
    return found


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 when it is gone.

    Together with the id, this identifies a process for ever: ids are reused, but not within a tick.
    """
    with suppress(OSError, ValueError):
        return int(_stat_fields(pid)[19])
    return 0


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it is not readable."""
    entries: list[bytes] = []
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def program_name(pid: int) -> str:
    """Return the file name of the program that a process runs; empty when it is gone."""
    with suppress(OSError):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return Path(os.fsdecode(program)).name
    return ""


async def first_end(pids: Sequence[int]) -> int:
    """Wait until the first of these processes ends, and return its id; for ever without any.

    They need not be children of this process.
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
            loop.add_reader(pidfds[-1], note, pid)  # readable when it has ended
        return await ended
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes: proportional set sizes, so shared pages count once."""
    return sum(_pss_bytes(pid) for pid in pids)


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time, in seconds, that processes have used; 0 for those gone."""
    ticks = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            ticks += sum(int(field) for field in _stat_fields(pid)[11:13])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def wants_processor(pids: Iterable[int]) -> bool:
    """Return whether a thread of these processes runs, or waits for a processor or a disk.

    A sleeping or stopped thread does not. Tells a starved process from a frozen one.
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
    """Return the process group of a process; 0 when it is gone."""
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
    """SIGKILL all processes started with `variable=marker`, wait for their end, return their ids.

    Args:
        marker: Marker of the processes.
        variable: The environment variable that holds it.
        spare: Process groups, by id, to leave alone.
        timeout_s: Longest wait.

    Raises:
        TimeoutError: Some processes are still alive after `timeout_s`; the message names them.
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
    """Kill through a pidfd: the id cannot pass to another process between check and signal."""
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
