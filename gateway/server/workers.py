"""The parent of several workers, which runs one per slot and replaces them without lost requests.

Each slot has a listening socket that belongs to the parent. SO_REUSEPORT spreads connections over
the slots. A worker inherits the socket of its slot. When the worker ends, the slot's next worker
accepts the connections in the socket's queue, so that no connection is refused or reset.
"""

import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

import structlog

from gateway.server.worker_link import ParentEnd
from gateway.settings import GatewaySettings
from sluice.lifecycle import backoff_s
from sluice.process import HEALTHY_S, ChildProcess, ProcessSpec

log = structlog.get_logger(__name__)

_START_S = 60.0  # Seconds until a worker's first message. The worker imports its modules meanwhile.
_LOOK_S = 0.5
READY_S = 60.0  # Seconds until a worker that replaces a running worker must be ready.
_END_S = 5.0  # Seconds from a worker's last message to the end of its process.
_STOP_MARGIN_S = 10.0


class GatewayWorker:
    """A worker process, from its start to its end.

    Attributes:
        name: Worker's `instance_id`.
        ready: Set when the worker can serve, and also when it will never serve because it stops or
            has ended.
        link: Link to the worker, or None before the start.
        ended_because: Reason of the worker's end, `ended` (without a command), `frozen` or
            `retired`, and empty while the worker runs.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        link: tuple[socket.socket, socket.socket],
        note_left: Callable[["GatewayWorker"], object],
    ) -> None:
        """The process is started by `run`.

        Args:
            spec: Spec of the process, which inherits the second socket of `link`.
            link: Pair of connected sockets.
            note_left: Called when the worker stops, for each of its later messages, and when it has
                ended.
        """
        self.name = spec.name
        self.ready = asyncio.Event()
        self.link: ParentEnd | None = None
        self.ended_because = ""
        self.is_retired = False
        self._spec = spec
        self._sockets = link
        self._note_left = note_left
        self._child: ChildProcess | None = None

    @property
    def not_ready_because(self) -> str:
        """Reason why the worker cannot serve, empty if it can."""
        if self.ended_because or self.link is None or not self.link.is_serving:
            return f"worker {self.name} is starting"
        return self.link.not_ready_because

    @property
    def is_stopping(self) -> bool:
        """Whether the worker has a command to stop and accepts no more connections."""
        return self.link is not None and self.link.is_stopping

    async def run(self, freeze_s: float) -> None:
        """Run the process until its end, and kill it after `freeze_s` seconds without a message."""
        ours, theirs = self._sockets
        try:
            child = self._child = await ChildProcess.start(self._spec)
        except OSError as error:
            log.warning("worker_not_started", worker=self.name, error=str(error))
            self.ended_because = "ended"
            ours.close()
            self.ready.set()
            self._note_left(self)
            return
        finally:
            theirs.close()
        link = self.link = await ParentEnd.open(ours)
        if self.is_retired:  # the worker was retired before the link existed
            link.retire()
        log.info("worker_started", worker=self.name, pid=child.pid)
        try:
            self.ended_because = await self._follow(link, child, freeze_s)
        finally:
            link.close()
            self.ended_because = self.ended_because or "ended"
            await child.stop(grace_s=0 if self.ended_because == "frozen" else None)
            self.ready.set()
            log.info(
                "worker_ended",
                worker=self.name,
                pid=child.pid,
                status=child.status,
                because=self.ended_because,
            )
            self._note_left(self)

    async def _follow(self, link: ParentEnd, child: ChildProcess, freeze_s: float) -> str:
        patience_s = _START_S
        try:
            while await _next_word(link, patience_s):
                patience_s = freeze_s
                if link.is_stopping:
                    self._note_left(self)
                if link.is_stopping or not self.not_ready_because:
                    self.ready.set()
        except TimeoutError:
            log.warning("worker_frozen", worker=self.name, pid=child.pid, silent_s=patience_s)
            return "frozen"
        try:
            async with asyncio.timeout(_END_S):
                await child.wait()
        except TimeoutError:
            log.warning("worker_hung", worker=self.name, pid=child.pid)
        return "retired" if self.is_retired else "ended"

    def retire(self) -> None:
        """Command the worker to finish its requests and end."""
        self.is_retired = True
        if self.link is not None:
            self.link.retire()

    async def stop(self) -> None:
        """Stop the process with a drain, and kill it if the drain exceeds its deadline."""
        if self._child is not None:
            await self._child.stop()


async def _next_word(link: ParentEnd, patience_s: float) -> bool:
    """Read a worker's next message, or raise TimeoutError after a silence of `patience_s`.

    Polls measure the silence, not the clock. If this process was suspended or had no processor
    time, the worker is therefore not mistaken for a silent one.
    """
    for _ in range(math.ceil(patience_s / _LOOK_S)):
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                return await link.next_word()
    raise TimeoutError


class Slot:
    """The socket and the current worker of one slot.

    Retired workers of the slot may still finish their requests.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        index: int,
        sock: socket.socket,
        begin: Callable[["GatewayWorker"], object],
    ) -> None:
        """The first worker is started by `run`.

        Args:
            settings: Settings of the parent.
            index: Index of this slot.
            sock: Bound socket, which is open as long as the slot.
            begin: Runs a worker in the background.
        """
        self._settings = settings
        self._index = index
        self._sock = sock
        self._begin = begin
        self._starts = 0
        self._empty = asyncio.Event()
        self.current: GatewayWorker | None = None

    async def run(self) -> None:
        """Run a worker at all times, until cancelled."""
        attempt = 0
        while True:
            self._empty.clear()
            if self.current is None:  # otherwise a roll has filled the slot meanwhile
                self.current = self._start(ready_wait_s=0.0)
            started_at_s = time.monotonic()
            await self._empty.wait()
            attempt = 0 if time.monotonic() - started_at_s > HEALTHY_S else attempt + 1
            await asyncio.sleep(backoff_s(attempt, first_s=0.1, max_s=30.0))

    def note_left(self, worker: GatewayWorker) -> None:
        """Replace the worker if it is still this slot's current worker."""
        if self.current is worker:
            self.current = None
            self._empty.set()

    async def replace(self) -> bool:
        """Start a new worker and retire the current worker once the new worker is ready.

        The current worker accepts connections until the new worker can serve.

        Returns:
            Whether the new worker became ready.
        """
        worker = self._start(ready_wait_s=2 * READY_S)
        try:
            async with asyncio.timeout(READY_S):
                await worker.ready.wait()
        except TimeoutError:
            log.warning("worker_not_ready", worker=worker.name, because=worker.not_ready_because)
            # Retired instead of killed, because it may have been ready briefly and have accepted
            # requests.
            worker.retire()
            return False
        if worker.ended_because or worker.is_stopping:
            return False
        before, self.current = self.current, worker
        if before is not None:
            before.retire()
        return True

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _start(self, *, ready_wait_s: float) -> GatewayWorker:
        name = f"{self._settings.instance_id}-{self._index}"
        if self._starts:
            name += f".{self._starts}"
        self._starts += 1
        ours, theirs = socket.socketpair()
        fds = (self._sock.fileno(), theirs.fileno())
        arguments = ("worker", *map(str, fds), str(ready_wait_s))
        settings = self._settings
        drain_s = 2 * settings.drain_s  # a retired worker may be in its drain already
        stop_s = settings.unready_s + settings.idle_grace_s + drain_s + settings.flush_s

        async def ready() -> None:
            """Return at once, because the worker's link reports its readiness."""

        spec = ProcessSpec(
            name=name,
            command=[sys.executable, "-m", "gateway", *arguments],
            env={**os.environ, "GATEWAY__INSTANCE_ID": name},
            # The worker inherits the parent's output. The collector of that output rotates the
            # lines of parent and worker.
            log_file=None,
            ready=ready,
            stop_grace_s=stop_s + _STOP_MARGIN_S,
            pass_fds=fds,
        )
        worker = GatewayWorker(spec, (ours, theirs), self.note_left)
        self._begin(worker)
        return worker


class GatewayWorkers:
    """The slots of all workers, created by `running_workers`."""

    def __init__(
        self, settings: GatewaySettings, sockets: list[socket.socket], tasks: asyncio.TaskGroup
    ) -> None:
        """Start a worker for each socket, which belongs to the worker's slot from now on."""
        self._freeze_s = settings.freeze_s
        self._tasks = tasks
        self._running: dict[asyncio.Task[None], GatewayWorker] = {}
        self.ends: dict[str, int] = {"ended": 0, "frozen": 0, "retired": 0}
        self.is_stopping = False
        self._slots = [
            Slot(settings, index, sock, self._begin) for index, sock in enumerate(sockets)
        ]
        self._keepers = [tasks.create_task(slot.run()) for slot in self._slots]

    @property
    def live(self) -> list[GatewayWorker]:
        """All running workers, including retired workers that finish their requests."""
        return list(self._running.values())

    def not_ready_because(self) -> str:
        """Return why a load balancer should send no new connections here, or an empty string.

        All slots have to be ready, because connections of a slot without a ready worker would wait.
        """
        if self.is_stopping:
            return "the server is stopping"
        for slot in self._slots:
            if slot.current is None:
                return "a worker has ended and is being replaced"
            if reason := slot.current.not_ready_because:
                return reason
        return ""

    async def roll(self) -> None:
        """Replace all workers sequentially, and stop at the first that is not ready in time."""
        if self.is_stopping:
            return
        log.info("rolling_restart_started")
        for slot in self._slots:
            if not await slot.replace() or self.is_stopping:
                log.error("rolling_restart_failed")
                return
        log.info("rolling_restart_ended")

    async def stop(self) -> None:
        """Stop all workers with a drain, and read their messages until they end."""
        self.is_stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.live))
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*self._keepers, *running, return_exceptions=True)
        for slot in self._slots:
            slot.close()

    def _begin(self, worker: GatewayWorker) -> None:
        task = self._tasks.create_task(worker.run(self._freeze_s))
        self._running[task] = worker
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        worker = self._running.pop(task)
        self.ends[worker.ended_because or "ended"] += 1


@asynccontextmanager
async def running_workers(
    settings: GatewaySettings, sockets: list[socket.socket]
) -> AsyncGenerator[GatewayWorkers]:
    """Run a worker for each socket until the block ends. SIGHUP replaces all workers."""
    loop = asyncio.get_running_loop()
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    async with asyncio.TaskGroup() as tasks:
        workers = GatewayWorkers(settings, sockets, tasks)

        async def roll() -> None:
            while True:
                await hangup.wait()
                hangup.clear()
                await workers.roll()

        roller = tasks.create_task(roll())
        try:
            yield workers
        finally:
            roller.cancel()
            await workers.stop()
            loop.remove_signal_handler(signal.SIGHUP)
