"""Child processes that can be trusted to end: own process group, bounded stop, nothing left behind.

Used by the node agent (Triton), by the local stack (every server) and by the tests. A
`ChildProcess` never restarts anything by itself; `keep_running` does, with back-off, and tells its
owner. An `AdoptedProcess` was started by an earlier owner, who may have died. Linux only: ends are
noticed through pidfds, and descendants are found in /proc.
"""

import asyncio
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog

from sluice.lifecycle import backoff_s
from sluice.procfs import MARKER, group_processes, marked_processes

__all__ = [
    "MARKER",
    "AdoptedProcess",
    "ChildProcess",
    "OwnedProcess",
    "ProcessFailedError",
    "ProcessSpec",
    "free_port",
    "keep_running",
    "kill_group",
    "marked_processes",
    "port_answers",
    "port_is_free",
]

log = structlog.get_logger(__name__)

LOG_BYTES_MAX = 16 << 20  # a longer log becomes `<name>.1` when its process starts again
HEALTHY_S = 30.0  # readiness that long makes the next failure the first one
_KILL_WAIT_S = 5.0  # a killed process that lives longer hangs in the kernel


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The command, environment, stop and clean-up of a child.

    Attributes:
        name: Name, unique within its owner; also of the log file.
        command: Program and arguments.
        env: The child's whole environment; nothing is inherited.
        log_file: File for stdout and stderr, appended. None: this process's own.
        ready: Raises (OSError, ConnectionError, RuntimeError, ...) until the child can serve.
        uid: User and group id to run as; None: this process's. Needs root.
        stop_signal: Asks the child to end.
        stop_grace_s: Seconds from `stop_signal` to SIGKILL of the group.
        pass_fds: File handles that the child inherits under the same numbers.
        cleanup: Runs after every end, whatever the reason; e.g. removes shared memory.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log_file: Path | None
    ready: Callable[[], Awaitable[None]]
    uid: int | None = None
    gid: int | None = None
    cwd: Path | None = None
    stop_signal: int = signal.SIGTERM
    stop_grace_s: float = 10.0
    pass_fds: Sequence[int] = ()
    cleanup: Callable[[], None] = field(default=_nothing)


class ProcessFailedError(RuntimeError):
    """The child ended, or did not become ready in time; the message holds the end of its log."""


class OwnedProcess:
    """The owner of a process group: watches its leader, and ends the whole group.

    Always call `stop`, also after a crash: the group may outlive its leader. `release` instead
    leaves the group running, for the next owner.
    """

    def __init__(self, spec: ProcessSpec, pid: int, pidfd: int) -> None:
        """Watch a running leader.

        Args:
            spec: Spec of the process: its start, stop and clean-up.
            pid: The leader's id, which is also that of the group.
            pidfd: Pidfd of the leader, owned by this object from now on.
        """
        self.spec = spec
        self.pid = pid
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        self._is_clean = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._note_end)  # readable when the process has ended

    def _note_end(self) -> None:
        self._close_pidfd()
        self._ended.set()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def is_running(self) -> bool:
        """Whether the leader itself (not its descendants) runs."""
        return not self._ended.is_set()

    @property
    def status(self) -> int | None:
        """Exit status (negative: the signal); None while it runs, or when only others know it."""
        return None

    async def ended(self) -> None:
        """Wait for the end of the leader."""
        await self._ended.wait()

    def release(self) -> None:
        """Give up the ownership: the group goes on, unwatched."""
        self._close_pidfd()

    async def stop(self, *, grace_s: float | None = None) -> None:
        """End the whole group: ask, wait, kill, clean up. Safe to call again, and to cancel.

        A call that is cancelled kills at once instead of waiting on, and still leaves nothing.

        Args:
            grace_s: Seconds from asking to killing; None is the spec's. 0 kills without asking.
        """
        grace_s = self.spec.stop_grace_s if grace_s is None else grace_s
        try:
            if self.is_running and grace_s > 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, self.spec.stop_signal)
                async with asyncio.timeout(grace_s):
                    await self._ended.wait()
        except TimeoutError:
            log.warning("process_killed", name=self.spec.name, pid=self.pid)
        finally:
            await _to_the_end(self._kill())

    async def _kill(self) -> None:
        if self._is_clean:
            return  # the group's id may belong to another process by now
        kill_group(self.pid)
        await self._ended.wait()
        # Descendants end a moment after the leader; until then they hold ports and memory.
        deadline = time.monotonic() + _KILL_WAIT_S
        while left := group_processes(self.pid):
            if time.monotonic() > deadline:
                log.error("process_group_survived", name=self.spec.name, pids=left)
                break
            kill_group(self.pid)
            await asyncio.sleep(0.01)
        _reap_group(self.pid)
        if not self._is_clean:
            self._is_clean = True
            self.spec.cleanup()

    def log_tail(self, lines: int = 5) -> str:
        """Return the end of the log, for error messages."""
        if self.spec.log_file is None:
            return "see the log"
        try:
            with self.spec.log_file.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                tail = file.read().decode(errors="replace").strip().splitlines()[-lines:]
        except OSError:
            tail = []
        return f"see {self.spec.log_file}" + (": " + " | ".join(tail) if tail else "")


class ChildProcess(OwnedProcess):
    """A running child of a spec, started by this process.

    Not asyncio's own subprocess: uvloop's takes no user, and both can be cancelled half-way. Here
    starting is one synchronous call, so a child either exists with an owner or does not exist.
    """

    def __init__(self, spec: ProcessSpec, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        # Of a `wait_ready` that asks now: brought forward when the child ends. A task that watched
        # the end beside it would need a group, which can swallow a cancellation of ours.
        self._ready_limit: asyncio.Timeout | None = None
        super().__init__(spec, process.pid, os.pidfd_open(process.pid))

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ChildProcess":
        """Start the child in a session (and so a process group) of its own.

        Raises:
            OSError: No such program, no permission, no process or file handle left, disk full.
        """
        if spec.log_file is None:
            return cls(spec, _popen(spec, None))
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        _rotate(spec.log_file)
        with spec.log_file.open("ab") as log_file:
            return cls(spec, _popen(spec, log_file))

    def _note_end(self) -> None:
        self._process.wait()
        super()._note_end()
        if self._ready_limit is not None and not self._ready_limit.expired():
            self._ready_limit.reschedule(self._loop.time())

    def release(self) -> None:
        """Give up the ownership; see `OwnedProcess`."""
        super().release()
        if self.is_running:
            self._process.returncode = 0  # else it warns of a running child when it is collected

    @property
    def status(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs."""
        return self._process.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        """Wait for the end and return the exit status (negative: the signal)."""
        await self._ended.wait()
        return self._process.returncode

    async def wait_ready(self, timeout_s: float, *, poll_s: float = 0.05) -> None:
        """Wait until `spec.ready` passes.

        Raises:
            ProcessFailedError: The child ended first, or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        problem = "never answered"
        while (rest_s := deadline - time.monotonic()) > 0 and self.is_running:
            try:
                async with asyncio.timeout(rest_s) as limit:
                    self._ready_limit = limit
                    try:
                        await self.spec.ready()
                    finally:  # an ended deadline cannot be rescheduled
                        self._ready_limit = None
            except Exception as error:  # noqa: BLE001 - any driver's error means: not ready yet
                problem = repr(error)
                await asyncio.sleep(poll_s)
            else:
                if self.is_running:  # else another process answered on its port
                    return
        if not self.is_running:
            raise ProcessFailedError(
                f"{self.spec.name} ended with status {self.status} while starting; "
                f"{self.log_tail()}"
            )
        raise ProcessFailedError(
            f"{self.spec.name} was not ready after {timeout_s:.0f} s ({problem}); {self.log_tail()}"
        )


class AdoptedProcess(OwnedProcess):
    """A process group that an earlier process started and left running."""

    @classmethod
    def adopt(
        cls, spec: ProcessSpec, pid: int, is_it: Callable[[int], bool]
    ) -> "AdoptedProcess | None":
        """Return the owner of the running group that `pid` leads; None when it is not that group.

        Args:
            spec: Spec that the process was started with.
            pid: Process id of the leader.
            is_it: Returns whether the process with this id now is the right one. Ids are reused;
                during the call this one cannot be, unless the leader has ended.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if not is_it(pid) or _has_ended(pidfd):
            os.close(pidfd)
            return None
        return cls(spec, pid, pidfd)


async def keep_running(
    spec: ProcessSpec,
    *,
    ready_timeout_s: float,
    on_change: Callable[[ChildProcess | None, str], None],
    backoff_max_s: float = 30.0,
) -> None:
    """Run a child for ever: start, wait until ready, restart when it ends. Stops it when cancelled.

    A program that cannot be started at all (missing, no memory) is tried again like one that ended.

    Args:
        spec: Program, and how to start, stop and clean up after it.
        ready_timeout_s: A child that is not ready by then is stopped and started again.
        on_change: Called with every state: (child, "starting" | "ready"), and (None, reason) when
            it is down.
        backoff_max_s: Longest pause between starts; 30 s of readiness reset the pause.
    """
    attempt = 0
    while True:
        child: ChildProcess | None = None
        ready_at: float | None = None
        try:
            child = await ChildProcess.start(spec)
            on_change(child, "starting")
            await child.wait_ready(ready_timeout_s)
            ready_at = time.monotonic()
            on_change(child, "ready")
            status = await child.wait()
            reason = f"{spec.name} ended with status {status}; {child.log_tail()}"
        except ProcessFailedError as error:
            reason = str(error)
        except OSError as error:
            reason = f"{spec.name} could not be started: {error}"
        finally:
            if child is not None:
                await child.stop()
        if ready_at is not None and time.monotonic() - ready_at > HEALTHY_S:
            attempt = 0
        on_change(None, reason)
        await asyncio.sleep(backoff_s(attempt, first_s=0.2, max_s=backoff_max_s))
        attempt += 1


def kill_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads; nothing happens when it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port; another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket() as probe:
        # As servers do: connections of an earlier server that linger in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)  # with SO_REUSEADDR two sockets may bind, but only one may listen
        except OSError:
            return False
    return True


async def port_answers(host: str, port: int) -> None:
    """Raise OSError until a process accepts connections on the port."""
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    await writer.wait_closed()


def _popen(spec: ProcessSpec, output: IO[bytes] | None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # returns after fork and exec: milliseconds
        list(spec.command),
        env=dict(spec.env),
        cwd=spec.cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=spec.pass_fds,
        user=spec.uid,
        group=spec.gid,
        extra_groups=None if spec.uid is None else [],
    )


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _reap_group(pgid: int) -> None:
    """Collect orphans of a group that have become this process's children, as in a container."""
    with suppress(ChildProcessError):
        while os.waitpid(-pgid, os.WNOHANG)[0]:
            pass


def _rotate(log_file: Path) -> None:
    with suppress(FileNotFoundError):
        if log_file.stat().st_size > LOG_BYTES_MAX:
            log_file.replace(log_file.with_name(log_file.name + ".1"))


async def _to_the_end(work: Coroutine[object, object, None]) -> None:
    """Finish `work` even when cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
