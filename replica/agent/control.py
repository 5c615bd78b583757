"""Runs the agent's stream that sends the observed state and receives the desired state.

The engines continue to serve while the control plane is absent, for any length of time. Every
desired state is stored on disk. So an agent that starts without a control plane starts the replicas
of the last desired state.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import structlog
from google.protobuf import json_format

from replica.agent.link import Link
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1 import agent_pb2_grpc

log = structlog.get_logger(__name__)

HEARTBEAT_S = 5.0
# seconds to wait after a change, so that simultaneous changes are sent as one message
_SETTLE_S = 0.02
_BACKOFF_MAX_S = 5.0

_Call = grpc.aio.StreamStreamCall[agent.SyncRequest, agent.SyncResponse]


class ControlLink(Link[agent.SyncRequest, agent.SyncResponse]):
    """Opens the `Sync` stream, and reopens it until cancelled."""

    def __init__(
        self,
        address: str,
        observe: Callable[[], agent.SyncRequest],
        on_desired: Callable[[agent.SyncResponse], None],
    ) -> None:
        """Create a stream that `run` opens.

        Args:
            address: Address of the control plane, host:port.
            observe: Function that returns the whole observed state of the node.
            on_desired: Function that is called with every desired state, even if it is unchanged.
        """
        super().__init__(address, "control_plane", agent.SyncResponse, _BACKOFF_MAX_S)
        self._observe = observe
        self._on_desired = on_desired
        self._changed = asyncio.Event()

    def note_change(self) -> None:
        """Cause a report of the observed state before the next heartbeat."""
        self._changed.set()

    def _open(self, channel: grpc.aio.Channel) -> _Call:
        return agent_pb2_grpc.AgentServiceStub(channel).Sync()  # pyright: ignore[reportReturnType] - sync stub's types

    async def _speak(self, call: _Call) -> None:
        while True:
            self._changed.clear()
            await self._write(call, self._observe())
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_SETTLE_S)

    async def _take(self, received: agent.SyncResponse) -> None:
        self._on_desired(received)


class DesiredFile:
    """The file with the last desired state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: list[agent.DesiredReplica] | None = None

    def load(self) -> agent.SyncResponse | None:
        """Return the last stored state, or None if none can be read."""
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
        """Write the desired state atomically, unless its replicas are unchanged.

        An error of the disk is logged instead of raised, because serving does not need this file.
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
