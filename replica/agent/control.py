"""The agent's stream to the control plane: observed state up, desired state down.

The control plane may be away for any time: nothing here stops an engine because of that. Every
desired state is kept on disk, so that an agent that starts without a control plane still starts
what was desired last.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import grpc
import grpc.aio
import structlog
from google.protobuf import json_format

from sluice.lifecycle import backoff_s
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1 import agent_pb2_grpc

log = structlog.get_logger(__name__)

HEARTBEAT_S = 5.0
_CALL_TIMEOUT_S = 5.0
_SILENCE_S = 15.0  # the control plane repeats the desired state every 5 s
_SETTLE_S = 0.02  # changes of one moment go up as one message
_BACKOFF_MAX_S = 5.0
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_Call = grpc.aio.StreamStreamCall[agent.SyncRequest, agent.SyncResponse]
_Errors = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ConnectionError,
    TimeoutError,
)


class ControlLink:
    """Keeps one `Sync` stream open, for ever."""

    def __init__(
        self,
        address: str,
        observe: Callable[[], agent.SyncRequest],
        on_desired: Callable[[agent.SyncResponse], None],
    ) -> None:
        """Take the control plane's address (host:port) and both directions.

        Args:
            address: Where to connect.
            observe: Returns the whole observed state of the node.
            on_desired: Told about every desired state, also when it is the same again.
        """
        self._address = address
        self._observe = observe
        self._on_desired = on_desired
        self._changed = asyncio.Event()
        self.is_connected = False

    def note_change(self) -> None:
        """Send the observed state soon, instead of with the next heartbeat."""
        self._changed.set()

    async def run(self) -> None:
        """Connect, and again after every end, until cancelled."""
        attempt = 0
        while True:
            begin_s = time.monotonic()
            try:
                await self._session()
            except _Errors as cause:
                text = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else repr(cause)
                if self.is_connected or attempt == 0:
                    log.warning("control_plane_lost", address=self._address, error=text)
            attempt = 0 if self.is_connected and time.monotonic() - begin_s > 1 else attempt + 1
            self.is_connected = False
            pause_s = backoff_s(attempt, first_s=0.1, max_s=_BACKOFF_MAX_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load

    async def _session(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await channel.channel_ready()
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            call: _Call = stub.Sync()  # pyright: ignore[reportAssignmentType] - sync stub's types
            # The halves return their errors: raised, they would make the group swallow a
            # cancellation of ours that comes at the same time.
            async with asyncio.TaskGroup() as group:
                halves = [
                    group.create_task(_outcome(half))
                    for half in (self._send(call), self._receive(call))
                ]
                await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
                ended = [half for half in halves if half.done()]
                for half in halves:
                    half.cancel()
            raise ended[0].result()

    async def _send(self, call: _Call) -> None:
        while True:
            self._changed.clear()
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await call.write(self._observe())
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_SETTLE_S)

    async def _receive(self, call: _Call) -> None:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                response = await call.read()
            if not isinstance(response, agent.SyncResponse):
                raise ConnectionError("the control plane ended the stream")
            if not self.is_connected:
                log.info("control_plane_connected", address=self._address)
            self.is_connected = True
            self._on_desired(response)


async def _outcome(half: Coroutine[object, object, None]) -> Exception:
    """Return the expected error that ends one direction of the stream."""
    try:
        await half
    except _Errors as error:
        return error
    raise AssertionError("a direction of the stream ended without an error")


class DesiredFile:
    """The last desired state on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: list[agent.DesiredReplica] | None = None

    def load(self) -> agent.SyncResponse | None:
        """Return what was saved last; None when there is nothing that can be read."""
        try:
            text = self._path.read_text()
            desired = json_format.Parse(text, agent.SyncResponse(), ignore_unknown_fields=True)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, json_format.ParseError) as error:
            log.warning("desired_state_unreadable", path=str(self._path), error=str(error))
            return None
        return desired

    def save(self, desired: agent.SyncResponse) -> None:
        """Write it, whole or not at all; nothing happens when the replicas are those written last.

        An unwritable disk is logged, not raised: serving does not depend on it.
        """
        replicas = list(desired.replicas)
        if replicas == self._written:
            return
        staging = self._path.with_suffix(".new")
        try:
            with staging.open("w") as file:
                file.write(json_format.MessageToJson(desired, preserving_proto_field_name=True))
                file.flush()
                os.fsync(file.fileno())
            staging.replace(self._path)
        except OSError as error:
            log.warning("desired_state_not_saved", path=str(self._path), error=str(error))
        else:
            self._written = replicas
