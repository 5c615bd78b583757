"""Writes responses to PostgreSQL through the control plane, and reads them back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

import grpc.aio
import structlog

from sluice.channels import RenewedChannel
from sluice.identity import CertificateRole
from sluice.lifecycle import backoff_s
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import StateServiceStub

log = structlog.get_logger(__name__)

RECORD_BYTES_MAX = 3 << 20  # below gRPC's limit of 4 MiB for one message
_BATCH, _BATCH_BYTES = 64, 1 << 20
# Seconds in which further responses may join a batch. A call for each response costs the gateway as
# much as a tenth of an answer of 100 tokens.
_GATHER_S = 0.1
_WAITING_MAX, _WAITING_BYTES_MAX = 10_000, 64 << 20
_PROBE_S = 2.0
_DEADLINE_S = 4.0
_READ_S = 4.0
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class DurableDownError(Exception):
    """PostgreSQL cannot be reached, or the control plane that connects to it."""


class Durable:
    """One worker's queue of responses to write to PostgreSQL. Its `run` needs a TaskGroup.

    Attributes:
        is_up: Whether the last attempt to write to PostgreSQL succeeded.
    """

    def __init__(self, address: str, settled: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Responses wait in memory until `run` has written them.

        Args:
            address: `host:port` of the control plane.
            settled: Called with the ids of responses that PostgreSQL has.
        """
        self._link = RenewedChannel(
            address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
        )
        self._settled = settled
        self._waiting: dict[str, tuple[wire.StoredResponse, int]] = {}  # each with its bytes
        self._bytes = 0
        self._kept: dict[str, asyncio.Event] = {}
        self._has_some, self._is_urgent = asyncio.Event(), asyncio.Event()
        self.is_up = False

    @property
    def waiting(self) -> int:
        """Number of responses that are not yet in PostgreSQL."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the queue can accept further responses."""
        return len(self._waiting) < _WAITING_MAX and self._bytes < _WAITING_BYTES_MAX

    def offer(self, stored: wire.StoredResponse) -> None:
        """Queue a response."""
        if stored.id not in self._waiting:
            size = stored.ByteSize()
            self._waiting[stored.id] = stored, size
            self._bytes += size
        self._has_some.set()
        if self._kept or len(self._waiting) >= _BATCH or self._bytes >= _BATCH_BYTES:
            self._is_urgent.set()

    async def offer_and_wait(self, stored: wire.StoredResponse, timeout_s: float) -> bool:
        """Queue a response and wait until PostgreSQL has it.

        Returns:
            Whether PostgreSQL confirmed the response in time. Otherwise the response is dropped.
        """
        event = self._kept[stored.id] = asyncio.Event()
        self.offer(stored)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            self._forget(stored.id)
            return False
        else:
            return True
        finally:
            del self._kept[stored.id]

    def promised(self) -> list[str]:
        """Return the ids of waiting responses, without those that `offer_and_wait` may drop."""
        return [it for it in self._waiting if it not in self._kept]

    def waits(self, response_id: str) -> wire.StoredResponse | None:
        """Return a response that is still in this queue, or None."""
        return self._waiting.get(response_id, (None, 0))[0]

    async def run(self) -> None:
        """Write waiting responses to PostgreSQL, and probe it, until cancelled."""
        attempt = 0
        async with aclosing(self._link):
            while True:
                await self._pause(attempt)
                attempt = 0 if await self._step() else attempt + 1

    async def flush(self, timeout_s: float) -> None:
        """Write waiting responses to PostgreSQL, for at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._waiting and await self._step():
                    pass

    async def read(self, tenant_id: str, ids: Sequence[str]) -> dict[str, wire.StoredResponse]:
        """Return a tenant's stored responses by id.

        Raises DurableDownError if PostgreSQL is down.
        """
        found: dict[str, wire.StoredResponse] = {}
        try:
            stub = StateServiceStub(await self._link.current())
            call = stub.Read(wire.ReadRequest(tenant_id=tenant_id, ids=ids), timeout=_READ_S)
            async for stored in call:
                found[stored.id] = stored
        except grpc.aio.AioRpcError as error:
            raise DurableDownError(error.details() or error.code().name) from None
        return found

    async def delete(self, tenant_id: str, response_id: str) -> bool:
        """Delete a response permanently and return whether it existed.

        Raises DurableDownError if PostgreSQL is down.
        """
        self._forget(response_id)
        try:
            stub = StateServiceStub(await self._link.current())
            request = wire.DeleteRequest(tenant_id=tenant_id, id=response_id)
            answer = await stub.Delete(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise DurableDownError(error.details() or error.code().name) from None
        return answer.existed

    async def _pause(self, attempt: int) -> None:
        """Wait for a response or the next probe, or back off after a failed attempt."""
        if attempt:
            await asyncio.sleep(backoff_s(attempt - 1, first_s=0.1, max_s=2.0))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_S if self.is_up else 0):
                await self._has_some.wait()
        if self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._is_urgent.wait()

    async def _step(self) -> bool:
        """Send a batch of responses, or an empty batch as a probe, and return its success."""
        self._is_urgent.clear()
        batch = self._batch()
        is_full = len(batch) < len(self._waiting)
        try:
            stub = StateServiceStub(await self._link.current())
            await stub.Keep(wire.KeepRequest(responses=batch), timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if self.is_up:
                log.warning("responses_not_kept", reason=error.details() or error.code().name)
            self.is_up = False
            return False
        self.is_up = True
        for stored in batch:
            self._forget(stored.id)
            if (event := self._kept.get(stored.id)) is not None:
                event.set()
        if is_full:
            self._is_urgent.set()
        if batch:
            await self._settled([stored.id for stored in batch])
        return True

    def _batch(self) -> list[wire.StoredResponse]:
        batch, total = list[wire.StoredResponse](), 0
        for stored, size in self._waiting.values():
            total += size
            if batch and (len(batch) >= _BATCH or total > _BATCH_BYTES):
                break
            batch.append(stored)
        return batch

    def _forget(self, response_id: str) -> None:
        self._bytes -= self._waiting.pop(response_id, (None, 0))[1]
        if not self._waiting:
            self._has_some.clear()
