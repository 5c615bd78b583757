"""The state file of a running stack, which the supervisor writes and other commands read."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.stack.home import Home, write_atomic

# States of a process: waiting (for dependencies) -> starting -> ready -> stopped. After a crash
# it is down, then starting again. A process that runs once ends in done.
WAITING, STARTING, READY, DOWN, STOPPED, DONE = (
    "waiting",
    "starting",
    "ready",
    "down",
    "stopped",
    "done",
)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of the stack.

    Attributes:
        started: Start time of `pid` in clock ticks, like `StackState.supervisor_started`.
        port: Main port, or 0 if the process listens on none.
        restarts: Number of starts after the first.
        last_error: Reason of the last failure.
        since_unix_s: Unix seconds when `state` began.
        is_server: Whether other processes store data in this process, so that it stops last.
    """

    name: str
    state: str = WAITING
    pid: int = 0
    started: int = 0
    port: int = 0
    restarts: int = 0
    last_error: str = ""
    since_unix_s: float = 0.0
    is_server: bool = False


@dataclass(frozen=True, slots=True)
class StackState:
    """The whole stack with its supervisor.

    Attributes:
        supervisor_started: Start time of the supervisor in clock ticks after boot. Together with
            the pid it identifies the process, even if the pid is reused later.
        phase: starting, ready, stopping, or failed.
        embeddings: Name of the embedding model, or the reason why there is none.
        first_token_unix_s: Unix seconds of the first token, or 0 before.
    """

    supervisor_pid: int
    supervisor_started: int
    started_unix_s: float
    phase: str
    engine: str
    port: int
    admin_port: int
    replicas: int
    processes: Sequence[ProcessState] = ()
    embeddings: str = ""
    first_token_unix_s: float = 0.0
    has_tls: bool = False

    def process(self, name: str) -> ProcessState | None:
        """Return a process by name."""
        return next((p for p in self.processes if p.name == name), None)


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks after boot, or 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])  # a zombie has ended


def is_supervised(state: StackState) -> bool:
    """Return whether the supervisor that wrote the state is still running."""
    return state.supervisor_started != 0 and (
        start_ticks(state.supervisor_pid) == state.supervisor_started
    )


def living(state: StackState | None) -> list[ProcessState]:
    """Return the recorded processes that still run, without other processes of reused pids."""
    known = state.processes if state else ()
    return [p for p in known if p.pid and p.started and start_ticks(p.pid) == p.started]


def parse_state(text: str) -> StackState | None:
    """Return the state, or None if the text is not a state of this version."""
    try:
        fields: dict[str, Any] = json.loads(text)
        processes = tuple(ProcessState(**item) for item in fields.pop("processes"))
        return StackState(**fields, processes=processes)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_state(home: Home) -> StackState | None:
    """Return the state that the last supervisor wrote, or None if there is none."""
    try:
        return parse_state(home.state_file.read_text())
    except OSError:
        return None


def write_state(home: Home, state: StackState) -> None:
    """Replace the state file."""
    write_atomic(home.state_file, json.dumps(asdict(state), indent=1) + "\n")


def own_identity() -> tuple[int, int]:
    """Return (pid, start ticks) of this process."""
    return os.getpid(), start_ticks(os.getpid())
