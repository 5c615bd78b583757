"""Opens one of the agent's streams to the control plane, and reopens it whenever it ends."""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Generic, TypeVar

import grpc.aio
import structlog

from sluice.channels import channel_to
from sluice.identity import CertificateRole
from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

Sent = TypeVar("Sent")
Received = TypeVar("Received")

OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
CALL_S = 5.0  # seconds to connect, and to send one message
# Seconds of silence after which a stream is closed. The control plane sends every few seconds.
_SILENCE_S = 15.0
# Seconds after which a session counts as steady. The end of a steady session is retried at once.
_STEADY_S = 1.0
_FIRST_PAUSE_S = 0.1
_ERRORS = (
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ConnectionError,
    TimeoutError,
)


class Link(ABC, Generic[Sent, Received]):
    """Opens one bidirectional stream, and reopens it until cancelled."""

    def __init__(
        self, address: str, name: str, answers: type[Received], pause_max_s: float
    ) -> None:
        """Create a link, which `run` connects.

        Args:
            address: host:port of the control plane.
            name: Name of the stream in log lines.
            answers: Type of the messages that the control plane sends.
            pause_max_s: Longest pause before a reconnect, in seconds.
        """
        self._address = address
        self._events = {"lost": f"{name}_lost", "connected": f"{name}_connected"}
        self._answers = answers
        self._pause_max_s = pause_max_s
        self.is_connected = False

    async def run(self) -> None:
        """Connect, and reconnect after every end, until cancelled."""
        attempt = 0
        while True:
            begin_s = time.monotonic()
            error = await self._end_of_session()
            if error and (self.is_connected or attempt == 0):
                log.warning(self._events["lost"], address=self._address, error=error)
            is_steady = self.is_connected and time.monotonic() - begin_s > _STEADY_S
            attempt = 0 if is_steady else attempt + 1
            self.is_connected = False
            self._lost()
            pause_s = backoff_s(attempt, first_s=_FIRST_PAUSE_S, max_s=self._pause_max_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load

    async def _end_of_session(self) -> str:
        """Run one session, and return why it ended. Empty if that has already been logged."""
        try:
            await self._session()
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        except _ERRORS as error:
            return repr(error)
        raise AssertionError("a session ended without an error")

    @abstractmethod
    def _open(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Sent, Received]:
        """Begin a call without sending the first message."""

    @abstractmethod
    async def _speak(self, call: grpc.aio.StreamStreamCall[Sent, Received]) -> None:
        """Send messages until cancelled. `_write` sends one message with a deadline."""

    @abstractmethod
    async def _take(self, received: Received) -> None:
        """Handle a received message. It must be quick, because further messages wait for it."""

    def _lost(self) -> None:
        """Handle the end of a session, by default without any action."""

    async def _write(self, call: grpc.aio.StreamStreamCall[Sent, Received], message: Sent) -> None:
        async with asyncio.timeout(CALL_S):
            await call.write(message)

    async def _session(self) -> None:
        async with channel_to(
            self._address, CertificateRole.CONTROL_PLANE, options=OPTIONS
        ) as channel:
            async with asyncio.timeout(CALL_S):
                await channel.channel_ready()
            call = self._open(channel)
            # The two tasks return their errors instead of raising them. A raised error would make
            # the task group hide a cancellation of this task that arrives at the same time.
            async with asyncio.TaskGroup() as group:
                halves = [
                    group.create_task(_outcome(half))
                    for half in (self._speak(call), self._listen(call))
                ]
                await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
                ended = [half for half in halves if half.done()]
                for half in halves:
                    half.cancel()
            raise ended[0].result()

    async def _listen(self, call: grpc.aio.StreamStreamCall[Sent, Received]) -> None:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                received = await call.read()
            if not isinstance(received, self._answers):  # grpc.aio.EOF
                raise ConnectionError("the control plane ended the stream")
            if not self.is_connected:
                log.info(self._events["connected"], address=self._address)
            self.is_connected = True
            await self._take(received)


async def _outcome(half: Coroutine[object, object, None]) -> Exception:
    """Run one direction of the stream, and return the error that ends it."""
    try:
        await half
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return error
    raise AssertionError("a direction of the stream ended without an error")
