"""Simulated engine hosts under virtual time, behind the router's real attachments."""

import asyncio
from types import TracebackType
from typing import Self

from router.core.types.canary import CanaryAnswer
from router.core.types.plan import EngineLimits
from sim.engine import SimEngine, StepCost
from sluice.detector.consensus import Text
from sluice.errors import ErrorCode, FailedError
from sluice.wire.engine.v1 import engine_pb2 as engine

HEARTBEAT_S = 0.2
ORPHAN_GRACE_S = 1.0
PROBE_PROMPT = list(range(1, 13))
PROBE_TOKENS = 8


class SimHost:
    """A simulated replica whose step loop runs on the event loop, with faults as attributes.

    Attributes:
        is_down: Whether connections are refused and open connections break.
        is_frozen: Whether connections stay open and silent, without steps.
        stream: Stream of the router, while the router is attached.
        frames_sent: Number of sent frames.
        merges: Number of steps that were merged into a later frame because credit was missing.
    """

    def __init__(self, limits: EngineLimits, cost: StepCost) -> None:
        self.limits = limits
        self.engine = SimEngine(limits, cost)
        self.is_down = False
        self.is_frozen = False
        self._moving = asyncio.Event()  # set while the host is neither frozen nor down
        self._moving.set()
        self._is_up = asyncio.Event()
        self._is_up.set()
        self.stream: SimHostStream | None = None
        self._orphan: tuple[int, float] | None = None  # epoch and time of a broken stream
        # Ends of orphaned sequences that the router may not have received.
        self._ended: list[engine.Finished] = []
        self.frames_sent = 0
        self.merges = 0
        self._woken = asyncio.Event()
        self._inbox: list[tuple[SimHostStream, engine.HostRequest]] = []
        self._cost = cost

    def open_stream(self) -> "SimHostStream":
        """Return an unopened stream to this host."""
        return SimHostStream(self)

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the host accepts a connection within a time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_up.wait()
        except TimeoutError:
            return False
        return True

    async def probe(self, timeout_s: float) -> CanaryAnswer:
        """Run a canary inference, and return its answer."""
        await asyncio.sleep(0.001)
        if self.is_down:
            raise FailedError(ErrorCode.UNAVAILABLE, "the host is down")
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def done(tokens: list[int]) -> None:
            if not answer.done():
                answer.set_result(tokens)

        self.engine.probe(PROBE_PROMPT, PROBE_TOKENS, done)
        self._woken.set()
        try:
            async with asyncio.timeout(timeout_s):
                return CanaryAnswer(Text(tuple(await answer)))
        except TimeoutError:
            raise FailedError(ErrorCode.REPLICA_LOST, "no answer") from None

    def kill(self) -> None:
        """Stop like a killed process, so that the stream breaks and the engine's state is lost."""
        self.is_down = True
        self._is_up.clear()
        self._moving.clear()
        self.engine = SimEngine(self.limits, self._cost)
        self._orphan = None
        self._ended.clear()
        self._inbox.clear()
        if self.stream is not None:
            self.stream.break_off()
            self.stream = None

    def freeze(self) -> None:
        """Freeze like a suspended process, with open connections and no steps."""
        self.is_frozen = True
        self._moving.clear()

    def revive(self) -> None:
        """Run again after a kill or a freeze."""
        self.is_down = self.is_frozen = False
        self._is_up.set()
        self._moving.set()
        self._woken.set()

    def cut(self) -> None:
        """Break the stream like a lost connection, while the engine continues to run."""
        if self.stream is not None:
            self.stream.break_off()
            self.forsake(self.stream)

    def forsake(self, stream: "SimHostStream") -> None:
        """Retain the sequences of a broken stream for a time, because the router may re-attach."""
        if stream is self.stream:
            self.stream = None
            self._orphan = stream.epoch, asyncio.get_running_loop().time()
            self._ended = stream.unconfirmed()

    def handle(self, stream: "SimHostStream", request: engine.HostRequest) -> None:
        """Handle a request like the real host, which applies engine requests between steps."""
        if request.HasField("credit"):
            self.engine.confirm(stream.grant(request.credit.frames))
        else:
            self._inbox.append((stream, request))
            self._woken.set()

    def _apply(self, stream: "SimHostStream", request: engine.HostRequest) -> None:
        if not stream.is_open and not request.HasField("detach"):
            return
        kind = request.WhichOneof("kind")
        if kind == "attach":
            self._attach(stream, request.attach)
        elif stream is not self.stream:
            return
        elif kind == "submit":
            self.engine.submit(request.submit.sequences)
        elif kind == "cancel":
            self.engine.cancel(request.cancel.sequences)
        elif kind == "detach":
            self.stream = None
            self._clear()
            stream.end()

    def _attach(self, stream: "SimHostStream", attach: engine.Attach) -> None:
        if self.stream is not None:
            self.stream.end()
        limits = self.limits
        attached = engine.Attached(
            epoch=attach.epoch,
            limits=engine.EngineLimits(
                context_tokens_max=limits.context_tokens_max,
                sequences_max=limits.sequences_max,
                step_tokens_max=limits.step_tokens_max,
                kv_blocks=limits.kv_blocks,
                block_tokens=limits.block_tokens,
            ),
        )
        first = engine.StepFrame()
        if self._orphan is not None and attach.resumed_epoch == self._orphan[0]:
            for sequence, output in self.engine.outputs().items():
                attached.resumed.add(sequence=sequence, output=output)
            first.finished.extend(self._ended)
        else:
            self._clear()
        self._orphan = None
        self._ended = []
        self.stream = stream
        stream.epoch = attach.epoch
        stream.credit = attach.credit_frames
        stream.put(engine.HostFrame(attached=attached))
        if first.finished:
            first.state.CopyFrom(self.engine.state())
            stream.post(first)

    def _clear(self) -> None:
        """Cancel the sequences of the last attachment, without reporting their end."""
        self.engine.cancel(self.engine.held)
        self.engine.confirm(list(self.engine.outputs()))
        self.engine.forget_finished()

    async def run(self) -> None:
        """Run the step loop until cancelled, in a task of a TaskGroup."""
        loop = asyncio.get_running_loop()
        while True:
            await self._moving.wait()
            if self.engine.is_idle and not self._inbox:
                self._woken.clear()
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
            inbox, self._inbox = self._inbox, []
            for stream, request in inbox:
                self._apply(stream, request)
            serving = self.engine
            frame, step_s = serving.step()
            await asyncio.sleep(step_s)
            await self._moving.wait()
            if serving is not self.engine:
                continue
            if self.stream is not None:
                self.stream.post(frame)
            elif self._orphan is not None:
                self._ended.extend(frame.finished)
                if loop.time() - self._orphan[1] >= ORPHAN_GRACE_S:
                    self._orphan = None
                    self._clear()


class SimHostStream:
    """The router's side of an attachment, which implements `router.attach.Stream`."""

    def __init__(self, host: SimHost) -> None:
        self.epoch = 0
        self.credit = 0
        self._host = host
        self._frames: asyncio.Queue[engine.HostFrame | None | FailedError] = asyncio.Queue()
        self._pending: engine.StepFrame | None = None
        # Ends of sequences in each frame that the router has not confirmed.
        self._sent: list[list[engine.Finished]] = []
        self.is_open = False

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

    async def open(self, *, timeout_s: float, is_patient: bool) -> None:
        """Connect, unless the host is down."""
        await asyncio.sleep(0.001)
        if not await self._host.answers(timeout_s if is_patient else 0.0):
            raise FailedError(ErrorCode.UNAVAILABLE, "the host is down")
        self.is_open = True

    async def send(self, request: engine.HostRequest) -> None:
        """Deliver a request after the link's delay, or when a frozen host runs again."""
        await asyncio.sleep(0.0005)
        if self._host.is_down:
            raise FailedError(ErrorCode.REPLICA_LOST, "broken")
        self._host.handle(self, request)

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        """Return the next frame, or None at the end of the stream."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._frames.get()
        except TimeoutError:
            raise FailedError(ErrorCode.REPLICA_LOST, "silent") from None
        if isinstance(item, FailedError):
            raise item
        return item

    async def close(self, *, timeout_s: float) -> None:
        """Detach, so that the host ends the stream."""
        if not self.is_open:
            return
        self.is_open = False
        if timeout_s and not self._host.is_frozen:
            self._host.handle(self, engine.HostRequest(detach=engine.Detach()))
        else:
            self._host.forsake(self)

    def put(self, frame: engine.HostFrame) -> None:
        """Deliver a frame to the router."""
        self._frames.put_nowait(frame)

    def post(self, frame: engine.StepFrame) -> None:
        """Send a step's frame, or merge it into the frame that waits for credit."""
        if self._pending is None:
            self._pending = frame
        else:
            self._host.merges += 1
            self._pending.MergeFrom(frame)  # columns are appended, numbers replaced
        self._flush()

    def grant(self, frames: int) -> list[int]:
        """Add credit for frames, and return the sequences whose end this credit confirms."""
        self.credit += frames
        confirmed = [end.sequence for ends in self._sent[:frames] for end in ends]
        del self._sent[:frames]
        self._flush()
        return confirmed

    def unconfirmed(self) -> list[engine.Finished]:
        """Return the ends of sequences that the router has not confirmed."""
        ends = [end for sent in self._sent for end in sent]
        return ends + (list(self._pending.finished) if self._pending is not None else [])

    def _flush(self) -> None:
        if self._pending is not None and self.credit:
            self.credit -= 1
            self._host.frames_sent += 1
            self._sent.append(list(self._pending.finished))
            self.put(engine.HostFrame(step=self._pending))
            self._pending = None

    def end(self) -> None:
        """End the stream without an error."""
        self._frames.put_nowait(None)

    def break_off(self) -> None:
        """Break the stream, so that messages under way are lost."""
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(FailedError(ErrorCode.REPLICA_LOST, "broken"))
