"""The attachment of the router to one replica, resumed or renewed after its stream breaks.

After a broken stream a live host keeps the sequences for a grace time. So the router makes one
immediate and short attempt to resume the attachment over a new stream. A dead host refuses the
connection within a millisecond. Then the sequences are lost, and the router attaches again with
back-off.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import structlog

from router.core.types.canary import CanaryAnswer
from router.core.types.plan import EngineLimits
from router.hub import Hub
from router.outgoing import HostOutbox
from router.sent_spans import SentSpans
from router.wire import PROMPT_IDS
from sluice.errors import ErrorCode, FailedError
from sluice.lifecycle import backoff_s
from sluice.prompt_spans import PROMPT_SPANS
from sluice.wire.engine.v1 import engine_pb2 as engine

log = structlog.get_logger(__name__)

CREDIT_FRAMES = 64  # most unacknowledged frames, with a new credit after every 32 frames
# Longest interval between credits while the engine computes steps, in seconds. A host without
# messages for longer would treat this router as frozen.
CREDIT_EVERY_S = 0.25
RESUME_S = 0.3  # longest attempt to resume, in seconds, during which clients receive no tokens
PROBE_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 2.0
_ATTACHED_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_LOOKS = 8  # number of checks for silence within `silence_s`
# An engine with long steps, as on a shared processor, sends no frame during a step. So the silence
# limit is `_GAP_FACTOR` times its longest recent gap between frames, and at most `_LIMIT_FACTOR`
# times the usual limit.
_GAP_FACTOR = 4.0
_GAP_DECAY = 0.98  # factor by which each frame shrinks the longest recent gap
_LIMIT_FACTOR = 5.0


class Stream(Protocol):
    """The part of `sluice.kserve.HostStream` that attachments use and simulations implement."""

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

    async def open(self, *, timeout_s: float, is_patient: bool) -> None:
        """Connect, or fail at the first refused connection if `is_patient` is false."""
        ...

    async def send(self, request: engine.HostRequest) -> None:
        """Write one request."""
        ...

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        """Return the next frame, or None at the end of the stream."""
        ...

    async def close(self, *, timeout_s: float) -> None:
        """Detach from the host, and end the stream."""
        ...


class Attachment:
    """Keeps one replica attached while `run` runs in a TaskGroup, until `stop` is called.

    Attributes:
        is_attached: Whether the core uses the replica, including while its stream is resumed.
    """

    def __init__(
        self,
        hub: Hub,
        replica_id: str,
        open_stream: Callable[[], Stream],
        probe: Callable[[float], Awaitable[CanaryAnswer]],
        *,
        router_id: str,
        silence_s: float,
    ) -> None:
        """Store the arguments. The first stream is opened by `run`.

        Args:
            hub: Receives the replica's messages.
            replica_id: Id of the replica.
            open_stream: Returns an unopened stream to the replica.
            probe: Runs a canary inference on the replica within the given seconds, and returns the
                answer.
            router_id: Id of this router.
            silence_s: Seconds without a frame after which the replica is lost. A replica with long
                steps has a longer limit.
        """
        self.replica_id = replica_id
        self._hub = hub
        self._open_stream = open_stream
        self._run_probe = probe
        self._router_id = router_id
        self._silence_s = silence_s
        self._stopped = asyncio.Event()
        self.is_attached = False
        self._limits: EngineLimits | None = None
        self._attempt = 0
        self._heard_at = 0.0
        self._gap_s = 0.0  # longest recent gap between two frames, in seconds

    def stop(self) -> None:
        """Detach and end `run`. While the replica is not attached, cancelling `run` is enough."""
        self._stopped.set()

    async def run(self) -> None:
        """Attach, and attach again after each loss, until `stop` is called."""
        while not self._stopped.is_set():
            outbox = HostOutbox(self._hub.next_epoch())
            try:
                reason = await self._keep(outbox)
            finally:
                if self.is_attached:
                    self.is_attached = False
                    self._hub.lost(self.replica_id, outbox)
            if self._stopped.is_set():
                return
            if self._attempt in (0, 10):  # logged at the first failure, and again at the eleventh
                log.warning("replica_detached", replica_id=self.replica_id, reason=reason)
            pause_s = backoff_s(self._attempt, first_s=0.1, max_s=2.0)
            self._attempt += 1
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopped.wait()
            except TimeoutError:
                pass

    async def _keep(self, outbox: HostOutbox) -> str:
        """Serve one attachment over one or more streams, and return the reason for its end."""
        reason, is_resumable = await self._stream(outbox)
        while is_resumable and not self._stopped.is_set():
            broken_at = asyncio.get_running_loop().time()
            self._hub.broken(self.replica_id, outbox)
            reason, is_resumable = await self._stream(outbox)
            took_s = asyncio.get_running_loop().time() - broken_at
            log.info(
                "attach_stream_broken", replica_id=self.replica_id, reason=reason, took_s=took_s
            )
        if self.is_attached and not self._stopped.is_set():
            self._hub.metrics.replicas_lost.inc()
        return reason

    async def _stream(self, outbox: HostOutbox) -> tuple[str, bool]:
        """Attach or resume over a new stream, and serve the stream until it ends.

        Returns:
            The reason for the stream's end, and whether the host may still have the sequences.
        """
        reason, is_resumable, has_served = "ended", False, False
        try:
            async with self._open_stream() as stream:
                if self.is_attached:
                    attached = await self._resume(stream, outbox)
                else:
                    attached = await self._attach(stream, outbox)
                has_served = True
                await self._serve(stream, outbox, attached)
        except* FailedError as errors:
            failures = [error for error in errors.exceptions if isinstance(error, FailedError)]
            reason = "; ".join(str(error) for error in failures)
            broke = all(error.code is ErrorCode.REPLICA_LOST for error in failures)
            is_resumable = has_served and broke
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a failure had hidden the cancellation
            raise asyncio.CancelledError
        return reason, is_resumable

    async def _attach(self, stream: Stream, outbox: HostOutbox) -> engine.Attached:
        await stream.open(timeout_s=_OPEN_TIMEOUT_S, is_patient=True)
        attached = await self._request_attach(stream, outbox.epoch, _ATTACHED_TIMEOUT_S)
        self._limits = _limits(attached.limits)
        outbox.reads_prompt_ids = PROMPT_IDS in self._limits.features
        if PROMPT_SPANS in self._limits.features:
            outbox.sent = SentSpans(self._limits.kv_blocks)
        self._attempt = 0
        log.info("replica_attached", replica_id=self.replica_id, epoch=outbox.epoch)
        self._hub.attached(self.replica_id, outbox, self._limits)
        self.is_attached = True
        return attached

    async def _resume(self, stream: Stream, outbox: HostOutbox) -> engine.Attached:
        epoch = self._hub.next_epoch()
        try:
            async with asyncio.timeout(RESUME_S):
                await stream.open(timeout_s=RESUME_S, is_patient=False)
                attached = await self._request_attach(
                    stream, epoch, None, resumed_epoch=outbox.epoch
                )
        except TimeoutError:
            message = f"not back within {RESUME_S} s"
            raise FailedError(ErrorCode.UNAVAILABLE, message) from None
        if _limits(attached.limits) != self._limits:
            raise FailedError(ErrorCode.UNAVAILABLE, "another engine answers at its address")
        try:
            self._hub.resumed(self.replica_id, outbox, epoch, attached.resumed)
        except ValueError as error:
            raise FailedError(ErrorCode.ENGINE_FAILED, str(error)) from None
        return attached

    async def _request_attach(
        self, stream: Stream, epoch: int, timeout_s: float | None, *, resumed_epoch: int = 0
    ) -> engine.Attached:
        attach = engine.Attach(
            router_id=self._router_id,
            epoch=epoch,
            credit_frames=CREDIT_FRAMES,
            credit_every_ms=round(CREDIT_EVERY_S * 1000),
            resumed_epoch=resumed_epoch,
        )
        await stream.send(engine.HostRequest(attach=attach))
        frame = await stream.receive(timeout_s)
        if frame is None or not frame.HasField("attached"):
            refusal = frame.refused.message if frame is not None else "the stream ended"
            raise FailedError(ErrorCode.UNAVAILABLE, f"not attached: {refusal}")
        return frame.attached

    async def _serve(self, stream: Stream, outbox: HostOutbox, attached: engine.Attached) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._gap_s = 0.0
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._write(stream, outbox)),
                tasks.create_task(self._watch()),
                tasks.create_task(self._probe(outbox)),
            ]
            closer = tasks.create_task(self._close_when_stopped(stream))
            await self._read(stream, outbox, attached.state)
            for other in others:
                other.cancel()
            if not self._stopped.is_set():
                closer.cancel()

    async def _read(self, stream: Stream, outbox: HostOutbox, first: engine.EngineState) -> None:
        """Pass frames to the hub until the attachment is stopped.

        Raises:
            FailedError: The attachment broke.
        """
        hub, replica_id, epoch = self._hub, self.replica_id, outbox.epoch
        now = asyncio.get_running_loop().time
        taken = steps = 0
        granted_at = now()
        while (frame := await stream.receive(None)) is not None:
            heard_at = now()
            self._gap_s = max(heard_at - self._heard_at, _GAP_DECAY * self._gap_s)
            self._heard_at = heard_at
            if frame.HasField("step"):
                step = frame.step
                if first.adapters_changed:  # later frames only report changes of adapters
                    if not step.state.adapters_changed:
                        step.state.adapters_changed = True
                        step.state.adapters_resident.extend(first.adapters_resident)
                    first.adapters_changed = False
                try:
                    has_news = hub.frame(replica_id, epoch, step)
                except ValueError as error:
                    raise FailedError(ErrorCode.ENGINE_FAILED, str(error)) from None
                taken += 1
                # Hosts watch for confirmations only while sequences of this router run.
                steps += step.steps if has_news else 0
                is_due = steps and heard_at - granted_at >= CREDIT_EVERY_S / 2
                if is_due or taken >= CREDIT_FRAMES // 2:
                    outbox.credit(taken)
                    taken = steps = 0
                    granted_at = heard_at
            elif frame.HasField("refused"):  # the host refused a submit or a cancel
                raise FailedError(ErrorCode.ENGINE_FAILED, frame.refused.message)
        if not self._stopped.is_set():
            raise FailedError(ErrorCode.UNAVAILABLE, "the host ended the attachment")

    async def _write(self, stream: Stream, outbox: HostOutbox) -> None:
        while True:
            await outbox.ready.wait()
            for message in outbox.take():
                await stream.send(message)

    async def _watch(self) -> None:
        """Fail if the host is silent for too long. Pauses of this process do not count."""
        now = asyncio.get_running_loop().time
        pause_s = wait_s = self._silence_s / _LOOKS
        looked_at = now()
        while True:
            # A replica that was heard since the last check is not silent within two checks.
            wait_s = 2 * pause_s if self._heard_at > looked_at - wait_s else pause_s
            await asyncio.sleep(wait_s)
            late_s = now() - looked_at - wait_s
            looked_at += wait_s + late_s
            self._heard_at = min(self._heard_at + late_s, looked_at)
            limit_s = min(_GAP_FACTOR * self._gap_s, _LIMIT_FACTOR * self._silence_s)
            limit_s = max(limit_s, self._silence_s)
            if looked_at - self._heard_at >= limit_s:
                raise FailedError(ErrorCode.UNAVAILABLE, f"silent for {limit_s:.1f} s")

    async def _probe(self, outbox: HostOutbox) -> None:
        """Run the canary inferences that the core requests, one at a time."""
        while True:
            await outbox.probe_wanted.wait()
            outbox.probe_wanted.clear()
            try:
                answer = await self._run_probe(PROBE_TIMEOUT_S)
            except FailedError as error:
                if error.code.policy.is_of_health:
                    log.info("probe_failed", replica_id=self.replica_id, reason=str(error))
                    self._hub.probe_failed(self.replica_id)
            else:
                self._hub.probed(self.replica_id, answer)

    async def _close_when_stopped(self, stream: Stream) -> None:
        await self._stopped.wait()
        await stream.close(timeout_s=_CLOSE_TIMEOUT_S)


def _limits(limits: engine.EngineLimits) -> EngineLimits:
    """Return the limits of an engine in the core's form.

    Raises:
        FailedError: The engine reports a limit of zero.
    """
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
        adapter_slots=limits.adapter_slots,
        features=frozenset(limits.features),
    )
