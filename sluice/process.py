"""Child processes that can be trusted to end: own process group, bounded stop, nothing left behind.

Used by the node agent (Triton), by the local stack (every server) and by the tests. It never
restarts anything by itself; `keep_running` does, with back-off, and tells its owner.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

# Every process of a stack carries this variable, so that orphans (a dead server's children) can be
# found and ended.
MARKER = "SLUICE_STACK"


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to run one child.

    Attributes:
        name: Unique within its owner; names the log file.
        command: Program and arguments.
        env: The child's whole environment; nothing is inherited.
        log_file: Receives stdout and stderr, appended.
        ready: Raises (OSError, ConnectionError, RuntimeError, ...) until the child can serve.
        uid: User and group id to run as; None keeps ours. Needs root.
        stop_signal: Asks the child to end.
        stop_grace_s: Seconds from `stop_signal` to SIGKILL of the group.
        cleanup: Runs after every end, whatever the reason; e.g. removes shared memory.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log_file: Path
    ready: Callable[[], Awaitable[None]]
    uid: int | None = None
    gid: int | None = None
    cwd: Path | None = None
    stop_signal: int = signal.SIGTERM
    stop_grace_s: float = 10.0
    cleanup: Callable[[], None] = field(default=_nothing)


class ProcessFailedError(RuntimeError):
    """The child ended, or did not become ready in time; the message holds the end of its log."""


class ChildProcess:
    """One run of a spec. Always `stop` it, also after a crash: the group may outlive its leader."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ChildProcess":
        """Start the child in a session (and so a process group) of its own."""
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_file.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                env=dict(spec.env),
                cwd=spec.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                user=spec.uid,
                group=spec.gid,
                extra_groups=None if spec.uid is None else [],
            )
        return cls(spec, process)

    @property
    def is_running(self) -> bool:
        """Whether the child itself (not its descendants) runs."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the end and return the exit status (negative: the signal)."""
        return await self._process.wait()

    async def wait_ready(self, timeout_s: float, *, poll_s: float = 0.05) -> None:
        """Wait until `spec.ready` passes.

        Raises:
            ProcessFailedError: The child ended first, or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        problem = "never answered"
        while time.monotonic() < deadline:
            if not self.is_running:
                raise ProcessFailedError(
                    f"{self.spec.name} ended with status {self._process.returncode} while "
                    f"starting; {self.log_tail()}"
                )
            try:
                async with asyncio.timeout(max(0.01, deadline - time.monotonic())):
                    await self.spec.ready()
            except Exception as error:  # noqa: BLE001 - any driver's error means: not ready yet
                problem = repr(error)
                await asyncio.sleep(poll_s)
            else:
                return
        raise ProcessFailedError(
            f"{self.spec.name} was not ready after {timeout_s:.0f} s ({problem}); {self.log_tail()}"
        )

    async def stop(self) -> None:
        """End the whole group: ask, wait, kill, clean up. Safe to call again."""
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(self.spec.stop_signal)
            try:
                async with asyncio.timeout(self.spec.stop_grace_s):
                    await self._process.wait()
            except TimeoutError:
                log.warning("process_killed", name=self.spec.name, pid=self.pid)
        kill_group(self.pid)
        await self._process.wait()
        self.spec.cleanup()

    def log_tail(self, lines: int = 5) -> str:
        """Return the end of the log, for error messages."""
        try:
            with self.spec.log_file.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                tail = file.read().decode(errors="replace").strip().splitlines()[-lines:]
        except OSError:
            tail = []
        return f"see {self.spec.log_file}" + (": " + " | ".join(tail) if tail else "")


async def keep_running(
    spec: ProcessSpec,
    *,
    ready_timeout_s: float,
    on_change: Callable[[ChildProcess | None, str], None],
    backoff_max_s: float = 30.0,
) -> None:
    """Run a child for ever: start, wait until ready, restart when it ends. Stops it when cancelled.

    Args:
        spec: What to run.
        ready_timeout_s: A child that is not ready by then is stopped and started again.
        on_change: Told about every state: (child, "starting" | "ready"), and (None, reason) when
            it is down.
        backoff_max_s: Longest pause between starts; 30 s of health resets the pause.
    """
    attempt = 0
    while True:
        child = await ChildProcess.start(spec)
        started_at = time.monotonic()
        try:
            on_change(child, "starting")
            try:
                await child.wait_ready(ready_timeout_s)
            except ProcessFailedError as error:
                reason = str(error)
            else:
                on_change(child, "ready")
                status = await child.wait()
                reason = f"{spec.name} ended with status {status}; {child.log_tail()}"
        finally:
            await asyncio.shield(child.stop())
        if time.monotonic() - started_at > 30:
            attempt = 0
        on_change(None, reason)
        await asyncio.sleep(backoff_s(attempt, first_s=0.2, max_s=backoff_max_s))
        attempt += 1


def kill_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads; nothing happens when it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def marked_processes(marker: str) -> list[int]:
    """Return the ids of all processes whose environment holds `MARKER=marker`, except our own."""
    wanted = f"{MARKER}={marker}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on now; somebody else may take it before you do."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def port_answers(host: str, port: int) -> None:
    """Raise OSError until somebody accepts connections on the port."""
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    await writer.wait_closed()
