"""A client of the control plane's batch service."""

from collections.abc import Sequence

import grpc.aio

from gateway.records.client import missing
from sluice.channels import RenewedChannel
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.identity import CertificateRole
from sluice.response_ids import is_owned, new_owned_id
from sluice.shared_secret import SharedSecret
from sluice.wire.state.v1 import state_pb2 as wire
from sluice.wire.state.v1.state_pb2_grpc import BatchServiceStub

PREFIX = "batch"
_DEADLINE_S, _LIST_S = 4.0, 30.0
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class BatchClient:
    """The batch client of one worker.

    All methods raise RejectedError UNAVAILABLE if PostgreSQL cannot be reached.
    """

    def __init__(self, control_address: str, secret: SharedSecret) -> None:
        """Connect at the first call. `secret` verifies that a batch's id belongs to a tenant."""
        self._link = RenewedChannel(
            control_address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
        )
        self._secret = secret

    async def close(self) -> None:
        """Close the connection."""
        await self._link.aclose()

    def new_id(self, tenant_id: str) -> str:
        """Return an id for a new batch of a tenant."""
        return new_owned_id(PREFIX, tenant_id, self._secret)

    async def begin(self, batch: wire.Batch) -> wire.Batch:
        """Store a new batch."""
        try:
            return await (await self._stub()).Begin(batch, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, batch.id) from None

    async def show(self, tenant_id: str, batch_id: str) -> wire.Batch:
        """Return a batch, or raise PlatformError NOT_FOUND if the tenant has no such batch."""
        request = self._request(tenant_id, batch_id)
        try:
            return await (await self._stub()).Show(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, batch_id) from None

    async def cancel(self, tenant_id: str, batch_id: str) -> wire.Batch:
        """Start the cancellation of a batch.

        Raises:
            PlatformError: NOT_FOUND if the batch does not exist, CONFLICT if it has ended.
        """
        request = self._request(tenant_id, batch_id)
        try:
            return await (await self._stub()).Cancel(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, batch_id) from None

    async def listed(self, tenant_id: str, limit: int, after: str) -> Sequence[wire.Batch]:
        """Return batches, the newest first, or raise NOT_FOUND if `after` is no id of a batch."""
        if after:
            self._request(tenant_id, after)
        wanted = wire.ListRecordsRequest(tenant_id=tenant_id, limit=limit, after=after)
        try:
            call = (await self._stub()).List(wanted, timeout=_LIST_S)
            return [batch async for batch in call]
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, after) from None

    async def sync(self, request: wire.SyncLinesRequest) -> wire.SyncLinesResponse:
        """Report the results of lines, and lease further lines from the control plane."""
        try:
            return await (await self._stub()).Sync(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, "") from None

    async def _stub(self) -> BatchServiceStub:
        return BatchServiceStub(await self._link.current())

    def _request(self, tenant_id: str, batch_id: str) -> wire.RecordRequest:
        if not is_owned(batch_id, PREFIX, tenant_id, self._secret):
            raise missing(batch_id)
        return wire.RecordRequest(tenant_id=tenant_id, id=batch_id)


def _error_of(error: grpc.aio.AioRpcError, batch_id: str) -> PlatformError:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return missing(batch_id)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        text = f"Batch '{batch_id}' has ended: there is nothing to cancel."
        return PlatformError(ErrorCode.CONFLICT, text)
    text = "Batches cannot be reached now; try again shortly."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0)
