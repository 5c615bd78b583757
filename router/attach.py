"""One attachment to one replica: kept up with back-off until it is stopped."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import structlog

from router.core.model import EngineLimits
from router.hub import HostOutbox, Hub
from sluice.errors import ErrorCode, FailedError
from sluice.lifecycle import backoff_s
from sluice.wire.engine.v1 import engine_pb2 as engine

log = structlog.get_logger(__name__)

CREDIT_FRAMES = 64  # frames on their way at once; granted again by halves
_OPEN_TIMEOUT_S = 2.0
_ATTACHED_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0


class Stream(Protocol):
    """What an attachment needs of `sluice.kserve.HostStream`; simulations bring their own."""

    async def __aenter__(self) -> Self:
        """Return the stream."""
        ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the stream."""
        ...

    async def open(self, *, timeout_s: float) -> None:
        """Connect."""
        ...

    async def send(self, request: engine.HostRequest) -> None:
        """Write one request."""
        ...

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        """Return the next frame; None at the end."""
        ...

    async def close(self, *, timeout_s: float) -> None:
        """Detach and end the stream in order."""
        ...


class Attachment:
    """Keeps one replica attached. `run` belongs into a TaskGroup; `stop` ends it in order."""

    def __init__(
        self,
        hub: Hub,
        replica_id: str,
        open_stream: Callable[[], Stream],
        *,
        router_id: str,
        silence_s: float,
    ) -> None:
        """Prepare; `open_stream` makes an unopened stream to the replica."""
        self.replica_id = replica_id
        self._hub = hub
        self._open_stream = open_stream
        self._router_id = router_id
        self._silence_s = silence_s
        self._stopped = asyncio.Event()
        self.is_attached = False
        self._attempt = 0

    def stop(self) -> None:
        """Detach and end `run`; one that is not attached may be cancelled as well."""
        self._stopped.set()

    async def run(self) -> None:
        """Attach, and attach again, until stopped."""
        while not self._stopped.is_set():
            reason = "ended"
            try:
                async with self._open_stream() as stream:
                    await self._session(stream)
            except* FailedError as errors:
                reason = "; ".join(str(error) for error in errors.exceptions)
            if self._stopped.is_set():
                return
            if self._attempt in (0, 10):  # told once, and again when it lasts
                log.warning("replica_detached", replica_id=self.replica_id, reason=reason)
            pause_s = backoff_s(self._attempt, first_s=0.1, max_s=2.0)
            self._attempt += 1
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopped.wait()
            except TimeoutError:
                pass

    async def _session(self, stream: Stream) -> None:
        await stream.open(timeout_s=_OPEN_TIMEOUT_S)
        outbox = HostOutbox(self._hub.next_epoch())
        limits = await self._attach(stream, outbox.epoch)
        self._attempt = 0
        log.info("replica_attached", replica_id=self.replica_id, epoch=outbox.epoch)
        self._hub.attached(self.replica_id, outbox, limits)
        self.is_attached = True
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(stream, outbox))
                closer = tasks.create_task(self._close_when_stopped(stream))
                await self._read(stream, outbox)
                writer.cancel()
                if not self._stopped.is_set():
                    closer.cancel()
        finally:
            self.is_attached = False
            if not self._stopped.is_set():
                self._hub.metrics.replicas_lost.inc()
            self._hub.lost(self.replica_id, outbox)

    async def _attach(self, stream: Stream, epoch: int) -> EngineLimits:
        attach = engine.Attach(router_id=self._router_id, epoch=epoch, credit_frames=CREDIT_FRAMES)
        await stream.send(engine.HostRequest(attach=attach))
        frame = await stream.receive(_ATTACHED_TIMEOUT_S)
        if frame is None or not frame.HasField("attached"):
            refusal = frame.refused.message if frame is not None else "the stream ended"
            raise FailedError(ErrorCode.REPLICA_LOST, f"not attached: {refusal}")
        limits = frame.attached.limits
        numbers = (
            *(limits.context_tokens_max, limits.sequences_max, limits.step_tokens_max),
            *(limits.kv_blocks, limits.block_tokens),
        )
        if not all(numbers):
            raise FailedError(ErrorCode.ENGINE_FAILED, f"an engine without room: {numbers}")
        return EngineLimits(
            context_tokens_max=limits.context_tokens_max,
            sequences_max=limits.sequences_max,
            step_tokens_max=limits.step_tokens_max,
            kv_blocks=limits.kv_blocks,
            block_tokens=limits.block_tokens,
        )

    async def _read(self, stream: Stream, outbox: HostOutbox) -> None:
        """Take frames until the attachment ends; a silent or broken one raises FailedError."""
        hub, replica_id, epoch = self._hub, self.replica_id, outbox.epoch
        taken = 0
        while (frame := await stream.receive(self._silence_s)) is not None:
            kind = frame.WhichOneof("kind")
            if kind == "step":
                try:
                    hub.frame(replica_id, epoch, frame.step)
                except ValueError as error:
                    raise FailedError(ErrorCode.ENGINE_FAILED, str(error)) from None
                taken += 1
                if taken >= CREDIT_FRAMES // 2:
                    outbox.credit(taken)
                    taken = 0
            elif kind == "refused":  # an answer to a submit or cancel: the host cannot serve us
                raise FailedError(ErrorCode.ENGINE_FAILED, frame.refused.message)
        if not self._stopped.is_set():
            raise FailedError(ErrorCode.REPLICA_LOST, "the host ended the attachment")

    async def _write(self, stream: Stream, outbox: HostOutbox) -> None:
        while True:
            await outbox.ready.wait()
            for message in outbox.take():
                await stream.send(message)

    async def _close_when_stopped(self, stream: Stream) -> None:
        await self._stopped.wait()
        await stream.close(timeout_s=_CLOSE_TIMEOUT_S)
