"""Starts the processes of a stack in parallel, restarts dead ones, and stops them in order.

This module has no code for particular processes. `cli.stack.services` describes them.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from cli.stack.plan import users, waves
from cli.stack.state import DONE, DOWN, READY, STARTING, STOPPED, ProcessState, start_ticks
from sluice.process import (
    ChildProcess,
    ProcessSpec,
    keep_running,
)

log = structlog.get_logger(__name__)

# Number of failures of a process that was never ready, after which the supervisor gives up.
_FIRST_STARTS_MAX = 3


@dataclass(frozen=True, slots=True)
class SupervisedService:
    """A process of the stack, with its dependencies and checks.

    Attributes:
        spec: Spec of the process.
        needs: Names of the processes that must be ready before this process starts.
        uses: Names of the processes that this process calls without waiting for their start. They
            stop after this process, like those of `needs`.
        port: Main port, or 0 if it listens on none.
        check: Function that raises if the process cannot do its work. None means `spec.ready`.
        prepare: Function that is called once, before the first start.
        ready_timeout_s: Longest time of a start in seconds.
        is_server: Whether other processes store their data in this process.
        runs_once: Whether the process ends with status 0 after its work, and then counts as ready.
    """

    spec: ProcessSpec
    needs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    port: int = 0
    check: Callable[[], Awaitable[None]] | None = None
    prepare: Callable[[], Awaitable[None]] | None = None
    ready_timeout_s: float = 120.0
    is_server: bool = False
    runs_once: bool = False

    @property
    def name(self) -> str:
        """Name of the process, unique in the stack."""
        return self.spec.name


class Supervisor:
    """Owns the processes of one stack while its task group runs."""

    def __init__(
        self, services: Sequence[SupervisedService], on_change: Callable[[ProcessState], None]
    ) -> None:
        # raises ValueError for cycles and unknown names
        waves({service.name: service.needs for service in services})
        self._users = users({service.name: service.needs | service.uses for service in services})
        waves(self._users)
        self._services = {service.name: service for service in services}
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        self.ready = {service.name: asyncio.Event() for service in services}
        self.failed = asyncio.Event()
        self.failure = ""
        self.states: dict[str, ProcessState] = {
            service.name: ProcessState(
                name=service.name,
                port=service.port,
                since_unix_s=time.time(),
                is_server=service.is_server,
            )
            for service in services
        }

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start all processes, each as soon as its dependencies are ready."""
        for name, service in self._services.items():
            self._tasks[name] = group.create_task(self._run(service), name=name)

    async def stop(self) -> None:
        """Stop each process after all its users have stopped.

        The time is bounded by the sum of the grace times along the longest chain of users.
        """
        self._is_stopping = True
        stopped = {name: asyncio.Event() for name in self._services}

        async def stop_one(name: str) -> None:
            for user in sorted(self._users[name]):
                await stopped[user].wait()
            if task := self._tasks.get(name):
                task.cancel()
                await asyncio.wait([task])
            if self.states[name].state != DONE:
                self._change(name, state=STOPPED, pid=0)
            stopped[name].set()

        async with asyncio.TaskGroup() as group:
            for name in self._services:
                group.create_task(stop_one(name))

    async def _run(self, service: SupervisedService) -> None:
        for name in sorted(service.needs):
            await self.ready[name].wait()
        if service.runs_once:
            await self._run_once(service)
            return
        if service.prepare is not None:
            self._change(service.name, state=STARTING)
            try:
                await service.prepare()
            except (OSError, RuntimeError) as error:
                self._give_up(service.name, str(error))
                return
        await keep_running(
            service.spec,
            ready_timeout_s=service.ready_timeout_s,
            on_change=lambda child, text: self._child_changed(service, child, text),
        )

    async def _run_once(self, service: SupervisedService) -> None:
        try:
            reason = await self._run_to_end(service)
        except OSError as error:
            reason = f"{service.name} could not be started: {error}"
        if reason:
            self._give_up(service.name, reason)
        else:
            self._change(service.name, state=DONE, pid=0)
            self.ready[service.name].set()

    async def _run_to_end(self, service: SupervisedService) -> str:
        """Return the reason of a failure, or an empty string if the process has succeeded."""
        child = await ChildProcess.start(service.spec)
        try:
            self._change(service.name, state=STARTING, pid=child.pid)
            async with asyncio.timeout(service.ready_timeout_s):
                status = await child.wait()
        except TimeoutError:
            return f"{service.name} took over {service.ready_timeout_s:.0f} s; {child.log_tail()}"
        finally:
            await child.stop()
        return f"{service.name} ended with status {status}; {child.log_tail()}" if status else ""

    def _child_changed(
        self, service: SupervisedService, child: ChildProcess | None, text: str
    ) -> None:
        if self._is_stopping:
            return
        seen = self.states[service.name]
        if child is None:
            failures = seen.restarts + 1
            self._change(service.name, state=DOWN, pid=0, restarts=failures, last_error=text)
            if failures >= _FIRST_STARTS_MAX and not self.ready[service.name].is_set():
                self._fail(text)
        elif text == READY:
            self._change(service.name, state=READY)
            self.ready[service.name].set()
        else:
            self._change(service.name, state=STARTING, pid=child.pid)

    def _change(self, name: str, **fields: str | int) -> None:
        state = replace(self.states[name], since_unix_s=time.time(), **fields)  # pyright: ignore[reportArgumentType]
        state = replace(state, started=start_ticks(state.pid) if state.pid else 0)
        self.states[name] = state
        log.info("process_changed", name=name, state=state.state, pid=state.pid, **_why(state))
        self._on_change(state)

    def _give_up(self, name: str, reason: str) -> None:
        self._change(name, state=DOWN, pid=0, last_error=reason)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self.failed.is_set():
            self.failure = reason
            self.failed.set()


def _why(state: ProcessState) -> Mapping[str, str]:
    return {"error": state.last_error} if state.state == DOWN else {}


def watch_signals(
    loop: asyncio.AbstractEventLoop, on_first: Callable[[], None], on_second: Callable[[], None]
) -> Callable[[], None]:
    """Call `on_first` at the first SIGINT, SIGTERM or SIGHUP, `on_second` at each later signal.

    Returns a function that restores the previous handlers.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    is_second = False

    def received() -> None:
        nonlocal is_second
        (on_second if is_second else on_first)()
        is_second = True

    def restore() -> None:
        for number in numbers:
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, received)
    return restore
