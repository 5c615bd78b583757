"""Child processes that end reliably, because each child's process group is stopped as a whole.

This module is used by the node agent (for Triton), by the local stack (for every server) and by the
tests. A `ChildProcess` is never restarted. `keep_running` restarts children with back-off and
reports every change to its caller. An `AdoptedProcess` was started by an earlier process, which may
have died. The module needs Linux, because it waits for pidfds and finds descendants in /proc.
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

LOG_BYTES_MAX = 16 << 20  # size above which a log is renamed to `<name>.1` at the next start
HEALTHY_S = 30.0  # seconds of readiness after which the back-off starts again at its first value
_KILL_WAIT_S = 5.0  # longest wait for killed processes, as some may hang in the kernel


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The command, environment, stop and clean-up of a child.

    Attributes:
        name: Name of the child, unique within its owner.
        command: Program and arguments.
        env: The child's complete environment. No variable is inherited.
        log_file: File to which stdout and stderr are appended, or None to inherit both.
        ready: Raises an exception until the child can serve.
        uid: User id to run as, which needs root, or None for the user of this process.
        stop_signal: Signal that requests the child to end.
        stop_grace_s: Seconds from `stop_signal` until the group is killed.
        pass_fds: File descriptors that the child inherits under the same numbers.
        cleanup: Called after every end of the child, for example to remove shared memory.
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
    """Raised if a child ended or was not ready in time, with the end of its log in the message."""


class OwnedProcess:
    """The owner of a process group, which watches the group's leader and stops the whole group.

    The caller must call `stop` even after the leader has crashed, because other processes of the
    group may still run. Calling `release` instead leaves the group running for another owner.
    """

    def __init__(self, spec: ProcessSpec, pid: int, pidfd: int) -> None:
        """Start to watch a running leader.

        Args:
            spec: Spec of the process, with its stop and clean-up.
            pid: The leader's process id, which is also the group's id.
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
        """Whether the leader runs. Its descendants may run longer."""
        return not self._ended.is_set()

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal, or None while the leader runs or if unknown."""
        return None

    async def ended(self) -> None:
        """Wait for the end of the leader."""
        await self._ended.wait()

    def release(self) -> None:
        """Stop watching the group, and leave it running."""
        self._close_pidfd()

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Send the stop signal, wait, kill the rest of the group, and clean up.

        The call may be repeated. If the call is cancelled, it kills the group at once, and still
        cleans up.

        Args:
            grace_s: Seconds between the stop signal and the kill, or None for the spec's value.
                With 0 the group is killed without a stop signal.
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
            return  # by now the group's id may have been reused
        kill_group(self.pid)
        await self._ended.wait()
        # Descendants may end later than the leader, and occupy ports and memory until then.
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
        """Return the last lines of the log, for error messages."""
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
    """A child process that this process has started.

    The class does not use asyncio's subprocesses, because uvloop's variant cannot set a user, and
    because their start can be cancelled half-way. Here the start is one synchronous call, so a
    child never exists without an owner.
    """

    def __init__(self, spec: ProcessSpec, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        # Timeout of the readiness check in progress, which is set to now when the child ends. A
        # separate task that waits for the end would need a TaskGroup, which may hide a
        # cancellation of the caller.
        self._ready_limit: asyncio.Timeout | None = None
        super().__init__(spec, process.pid, os.pidfd_open(process.pid))

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ChildProcess":
        """Start the child in its own session, and so in its own process group.

        Raises:
            OSError: The program is missing or not permitted, or a resource is exhausted.
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
        """Stop watching the group, and leave it running for another owner."""
        super().release()
        if self.is_running:
            self._process.returncode = 0  # prevents Popen's warning about a running child

    @property
    def status(self) -> int | None:
        """Exit status of the child, negative for a signal, or None while the child runs."""
        return self._process.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        """Wait until the child ends, and return its exit status, negative for a signal."""
        await self._ended.wait()
        return self._process.returncode

    async def wait_ready(self, timeout_s: float, *, poll_s: float = 0.05) -> None:
        """Wait until `spec.ready` returns without an exception.

        Raises:
            ProcessFailedError: The child ended first, or was not ready within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        problem = "never answered"
        while (rest_s := deadline - time.monotonic()) > 0 and self.is_running:
            try:
                async with asyncio.timeout(rest_s) as limit:
                    self._ready_limit = limit
                    try:
                        await self.spec.ready()
                    finally:  # an expired timeout cannot be rescheduled
                        self._ready_limit = None
            except Exception as error:  # noqa: BLE001 - any driver's error means: not ready yet
                problem = repr(error)
                await asyncio.sleep(poll_s)
            else:
                if self.is_running:  # if not, another process answered on the child's port
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
        """Return an owner of the running group that `pid` leads, or None for another group.

        Args:
            spec: Spec with which the process was started.
            pid: Process id of the leader.
            is_it: Returns whether the process with a given id is the expected process, because the
                system may have reused the id.
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
    """Start a child, wait until it is ready, and restart it at its end, until cancelled.

    A cancellation stops the child. A program that cannot be started, for example for lack of
    memory, is retried like a child that has ended.

    Args:
        spec: The child's program, start, stop and clean-up.
        ready_timeout_s: Seconds after which a child that is not ready is stopped and restarted.
        on_change: Called at every change of state, with (child, "starting"), (child, "ready"), or
            (None, reason) when the child is down.
        backoff_max_s: Longest pause between starts. After 30 s of readiness the pause is reset.
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
    """Kill the process group that `pid` leads. A missing group is ignored."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port, which another process may occupy before the caller does."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket() as probe:
        # Servers set the same option, which ignores old connections in the state TIME_WAIT.
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
    return subprocess.Popen(  # returns after fork and exec, within milliseconds
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
    """Reap orphans of a group that became this process's children, as happens in a container."""
    with suppress(ChildProcessError):
        while os.waitpid(-pgid, os.WNOHANG)[0]:
            pass


def _rotate(log_file: Path) -> None:
    with suppress(FileNotFoundError):
        if log_file.stat().st_size > LOG_BYTES_MAX:
            log_file.replace(log_file.with_name(log_file.name + ".1"))


async def _to_the_end(work: Coroutine[object, object, None]) -> None:
    """Complete `work` even if this call is cancelled, and raise the cancellation afterwards."""
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
