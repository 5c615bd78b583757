"""Collects the rows of `sluice status`, one per process, with its memory and health."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from cli.api import ApiClient, ApiError
from cli.stack.state import DONE, DOWN, READY, ProcessState, StackState
from cli.stack.supervisor import SupervisedService
from sluice.procfs import MARKER, environment, marked_processes, program_name, start_ticks
from sluice.profiles import EMBED

_TIMEOUT_S = 3.0
_AGENT = "agent"


@dataclass(frozen=True, slots=True)
class HealthRow:
    """A process of the stack, as a row of `sluice status`.

    Attributes:
        memory_mib: Proportional set size with all descendants, or else their resident size if the
            kernel does not report the former.
        health: `ok`, or a description of the problem.
    """

    name: str
    pid: int
    port: int
    memory_mib: float
    state: str
    health: str
    restarts: int
    uptime_s: float

    @property
    def is_healthy(self) -> bool:
        """Whether the process works."""
        return self.health == "ok"


async def collect(
    state: StackState, services: Sequence[SupervisedService], admin_url: str, admin_key: str
) -> list[HealthRow]:
    """Return a row for the supervisor, for each running child, and for each Triton server.

    Args:
        state: State file of the supervisor.
        services: Plan of this stack, with a check for each process.
        admin_url: URL of the control plane, for the state of the replicas.
        admin_key: Key for the control plane.
    """
    how = {service.name: service.check or service.spec.ready for service in services}
    async with asyncio.TaskGroup() as group:
        checks = [
            (process, group.create_task(_health(process, how[process.name])))
            for process in state.processes
            if process.state != DONE and process.name in how
        ]
        replicas = group.create_task(_replicas(admin_url, admin_key))
    return build_rows(
        state, {process.name: check.result() for process, check in checks}, replicas.result()
    )


def build_rows(
    state: StackState, healths: Mapping[str, str], replicas: Mapping[int, str]
) -> list[HealthRow]:
    """Return the rows, from the health by name and the replicas' states by port."""
    now_s = time.time()
    rows = [_supervisor_row(state, now_s)]
    for process in state.processes:
        if process.state == DONE:
            continue
        engines = find_engines(process.pid) if process.name == _AGENT and process.pid else []
        memory = tree_memory_mib(process.pid, [e.pid for e in engines]) if process.pid else 0.0
        rows.append(
            HealthRow(
                name=process.name,
                pid=process.pid,
                port=process.port,
                memory_mib=memory,
                state=process.state,
                health=healths.get(process.name, process.state),
                restarts=process.restarts,
                uptime_s=max(0.0, now_s - process.since_unix_s) if process.pid else 0.0,
            )
        )
        rows += [_engine_row(engine, replicas, now_s) for engine in engines]
    return rows


def _supervisor_row(state: StackState, now_s: float) -> HealthRow:
    return HealthRow(
        name="supervisor",
        pid=state.supervisor_pid,
        port=0,
        memory_mib=own_memory_mib(state.supervisor_pid),
        state=state.phase,
        health="ok" if state.phase == READY else state.phase,
        restarts=0,
        uptime_s=max(0.0, now_s - state.started_unix_s),
    )


async def _health(process: ProcessState, check: Callable[[], Awaitable[None]]) -> str:
    """Return `ok`, or a description of the process's problem."""
    if process.state != READY:
        why = f" ({process.last_error[:80]})" if process.state == DOWN else ""
        return f"{process.state}{why}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await check()
    except TimeoutError:
        return f"silent for {_TIMEOUT_S:g} s"
    except Exception as error:  # noqa: BLE001 - any driver's error means: not healthy, and says why
        return str(error) or type(error).__name__
    return "ok"


async def _replicas(admin_url: str, admin_key: str) -> dict[int, str]:
    """Return each replica's state by its Triton's port, empty without a control plane."""
    try:
        async with asyncio.timeout(_TIMEOUT_S), ApiClient(admin_url, admin_key) as api:
            return replica_states(await api.list("/v1/replicas"))
    except (ApiError, TimeoutError):
        return {}


def replica_states(replicas: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the replicas' states by port."""
    states: dict[int, str] = {}
    for replica in replicas:
        port = urlsplit(f"//{replica.get('grpc_address') or ''}").port
        if port:
            states[port] = str(replica["state"]).lower().removeprefix("replica_state_")
    return states


def find_engines(agent_pid: int) -> list[psutil.Process]:
    """Return the Triton servers of the agent's stack, oldest first.

    An engine need not be the agent's child, because an agent adopts its predecessor's engines.
    """
    marker = environment(agent_pid).get(MARKER)
    engines: list[psutil.Process] = []
    for pid in marked_processes(marker) if marker else []:
        if program_name(pid) == "tritonserver":
            with suppress(psutil.Error):
                engines.append(psutil.Process(pid))
    return sorted(engines, key=lambda engine: start_ticks(engine.pid))


def _engine_row(engine: psutil.Process, states: Mapping[int, str], now_s: float) -> HealthRow:
    """Return the row of a Triton server, whose health is its replica's state."""
    port, uptime_s, name = 0, 0.0, "triton"
    with suppress(psutil.Error):
        command = " ".join(engine.cmdline())
        found = re.search(r"--grpc-port=(\d+)", command)
        port = int(found[1]) if found else 0
        name = f"triton-{EMBED.name}" if f"={EMBED.triton_model} " in command else name
        uptime_s = max(0.0, now_s - engine.create_time())
    state = states.get(port, "unknown")
    health = "ok" if state == READY else f"replica {state}"
    return HealthRow(
        name, engine.pid, port, tree_memory_mib(engine.pid), state, health, 0, uptime_s
    )


def own_memory_mib(pid: int) -> float:
    """Return the proportional (or else resident) memory of a process, or 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        try:
            return process.memory_full_info().pss / 2**20
        except psutil.AccessDenied:
            return process.memory_info().rss / 2**20
    except psutil.Error:
        return 0.0


def tree_memory_mib(pid: int, apart: Sequence[int] = ()) -> float:
    """Return the memory of a process and its descendants, without the trees of `apart`."""
    total = own_memory_mib(pid)
    try:
        children = psutil.Process(pid).children()
    except psutil.Error:
        return total
    return total + sum(tree_memory_mib(c.pid, apart) for c in children if c.pid not in apart)
