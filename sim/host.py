"""Simulated engine hosts under virtual time, behind the router's real attachments."""

import asyncio
from types import TracebackType
from typing import Self

from router.core.model import EngineLimits
from sim.engine import SimEngine, StepCost
from sluice.errors import ErrorCode, FailedError
from sluice.wire.engine.v1 import engine_pb2 as engine

_HEARTBEAT_S = 0.25


class SimHost:
    """One replica: an engine whose step loop runs on the event loop; faults are switches.

    Attributes:
        is_down: Connections are refused and open ones break.
        is_frozen: Connections stay open and silent, no step is done.
    """

    def __init__(self, limits: EngineLimits, cost: StepCost) -> None:
        self.limits = limits
        self.engine = SimEngine(limits, cost)
        self.is_down = False
        self.is_frozen = False
        self._moving = asyncio.Event()  # neither frozen nor down
        self._moving.set()
        self.streams: list[SimHostStream] = []
        self.frames_sent = 0
        self.merges = 0
        self._woken = asyncio.Event()
        self._cost = cost

    def open_stream(self) -> "SimHostStream":
        """Return an unopened stream to this host."""
        return SimHostStream(self)

    def kill(self) -> None:
        """End as a killed process does: streams break, the engine's state is gone."""
        self.is_down = True
        self._moving.clear()
        self.engine = SimEngine(self.limits, self._cost)
        for stream in self.streams:
            stream.break_off()
        self.streams.clear()

    def freeze(self) -> None:
        """Stop as a stopped process does."""
        self.is_frozen = True
        self._moving.clear()

    def revive(self) -> None:
        """Be there again."""
        self.is_down = self.is_frozen = False
        self._moving.set()
        self._woken.set()

    def handle(self, stream: "SimHostStream", request: engine.HostRequest) -> None:
        """Take a request as the engine host does."""
        kind = request.WhichOneof("kind")
        if kind == "attach":
            for older in self.streams:
                older.end()
            self.engine.cancel(self.engine.held)
            self.streams = [stream]
            limits = self.limits
            attached = engine.Attached(
                epoch=request.attach.epoch,
                limits=engine.EngineLimits(
                    context_tokens_max=limits.context_tokens_max,
                    sequences_max=limits.sequences_max,
                    step_tokens_max=limits.step_tokens_max,
                    kv_blocks=limits.kv_blocks,
                    block_tokens=limits.block_tokens,
                ),
            )
            stream.credit = request.attach.credit_frames
            stream.put(engine.HostFrame(attached=attached))
        elif stream not in self.streams:
            return
        elif kind == "submit":
            self.engine.submit(request.submit.sequences)
        elif kind == "cancel":
            self.engine.cancel(request.cancel.sequences)
        elif kind == "credit":
            stream.credit += request.credit.frames
            stream.flush()
        elif kind == "detach":
            self.streams.remove(stream)
            self.engine.cancel(self.engine.held)
            stream.end()
        self._woken.set()

    async def run(self) -> None:
        """Do steps, forever; belongs into a TaskGroup."""
        while True:
            await self._moving.wait()
            if self.engine.is_idle:
                self._woken.clear()
                try:
                    async with asyncio.timeout(_HEARTBEAT_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
            serving = self.engine
            frame, step_s = serving.step()
            await asyncio.sleep(step_s)
            await self._moving.wait()
            if serving is self.engine:
                for stream in self.streams:
                    stream.post(frame)


class SimHostStream:
    """The router's side of an attachment; satisfies `router.attach.Stream`."""

    def __init__(self, host: SimHost) -> None:
        self.credit = 0
        self._host = host
        self._frames: asyncio.Queue[engine.HostFrame | None | FailedError] = asyncio.Queue()
        self._pending: engine.StepFrame | None = None
        self._is_open = False

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the stream."""
        await self.close(timeout_s=0.0)

    async def open(self, *, timeout_s: float) -> None:
        """Connect, unless the host is down."""
        await asyncio.sleep(0.001)
        if self._host.is_down:
            await asyncio.sleep(timeout_s)
            raise FailedError(ErrorCode.UNAVAILABLE, "the host is down")
        self._is_open = True

    async def send(self, request: engine.HostRequest) -> None:
        """Hand the request to the host after the link's delay, unless it is frozen or down."""
        await asyncio.sleep(0.0005)
        if self._host.is_down:
            raise FailedError(ErrorCode.REPLICA_LOST, "broken")
        if not self._host.is_frozen:
            self._host.handle(self, request)

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        """Return the next frame; None at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._frames.get()
        except TimeoutError:
            raise FailedError(ErrorCode.REPLICA_LOST, "silent") from None
        if isinstance(item, FailedError):
            raise item
        return item

    async def close(self, *, timeout_s: float) -> None:
        """Detach; the host ends the stream."""
        if self._is_open:
            self._is_open = False
            if self in self._host.streams and timeout_s and not self._host.is_frozen:
                self._host.handle(self, engine.HostRequest(detach=engine.Detach()))
            elif self in self._host.streams:
                self._host.streams.remove(self)
                self._host.engine.cancel(self._host.engine.held)

    def put(self, frame: engine.HostFrame) -> None:
        """Deliver a frame."""
        self._frames.put_nowait(frame)

    def post(self, frame: engine.StepFrame) -> None:
        """Send a step's frame, or merge it into what waits for credit."""
        if self._pending is None:
            self._pending = frame
        else:
            self._host.merges += 1
            self._pending.MergeFrom(frame)  # columns are appended, numbers replaced
        self.flush()

    def flush(self) -> None:
        """Send what waits, if there is credit."""
        if self._pending is not None and self.credit:
            self.credit -= 1
            self._host.frames_sent += 1
            self.put(engine.HostFrame(step=self._pending))
            self._pending = None

    def end(self) -> None:
        """End in order."""
        self._frames.put_nowait(None)

    def break_off(self) -> None:
        """End as a broken connection does."""
        self._frames.put_nowait(FailedError(ErrorCode.REPLICA_LOST, "broken"))
