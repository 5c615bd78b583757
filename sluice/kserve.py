"""The engine host's protocol inside Triton's `ModelStreamInfer`, on grpc.aio.

The module is used by the router (attachments) and by the node agent (probes). The message classes
come from tritonclient. Its client is not used, because it cannot request the empty final response,
and loses the request id of errors.

A finished stream must be half-closed and read to its end. Cancelling a stream after a final
response leaks a model reference inside Triton, which then cannot stop normally. Cancelling earlier,
as for a dead or silent host, is safe.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sluice.channels import channel_to
from sluice.errors import ErrorCode, FailedError
from sluice.identity import CertificateRole
from sluice.triton import Stub, messages
from sluice.wire.engine.v1 import engine_pb2 as engine

TENSOR = "frame"
_FINAL = "triton_final_response"
_FINAL_RESPONSE = "triton_enable_empty_final_response"
_ATTACH_ID = "attach"

# Frames arrive at least every 0.25 s, so keepalive pings only detect a dead peer on an idle
# channel. Triton answers more frequent pings with GOAWAY.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each channel has its own connection and flow window
)

_EOF = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
Call = grpc.aio.StreamStreamCall[Any, Any]
_TRANSPORT_ERRORS = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


def infer_request(model: str, request: engine.HostRequest, *, request_id: str) -> Any:
    """Return the `ModelInferRequest` that contains `request`.

    Only an attachment requests the empty final response. For all other requests that message is
    suppressed.
    """
    payload = request.SerializeToString()
    message = messages.ModelInferRequest(model_name=model, id=request_id)
    message.inputs.add(name=TENSOR, datatype="UINT8", shape=[len(payload)])
    message.raw_input_contents.append(payload)
    if request.HasField("attach"):
        message.parameters[_FINAL_RESPONSE].bool_param = True
    return message


def read_response(message: Any) -> tuple[str, engine.HostFrame | None, bool, str]:
    """Return the contents of a `ModelStreamInferResponse`.

    The result is (request id, frame or None, whether the response is final, error text or "").

    Raises:
        DecodeError: The contents are not a valid frame.
    """
    reply = message.infer_response
    final = _FINAL in reply.parameters and reply.parameters[_FINAL].bool_param
    contents = reply.raw_output_contents
    frame = engine.HostFrame.FromString(contents[0]) if contents else None
    return reply.id, frame, final, message.error_message


class HostStream:
    """One `ModelStreamInfer` stream to an engine host.

    One task iterates over the frames, while other tasks may call `send` and `close`. Every failure
    of the host or of the connection raises `FailedError`, after which only `close` may be called.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        silence_s: float | None = None,
        send_timeout_s: float = 2.0,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """Create a stream to the Triton at `address` (host:port), which `open` connects.

        Args:
            address: Triton's gRPC address.
            model: Name of the model that runs the engine host.
            silence_s: Longest wait of the iteration for the next frame, or None to wait forever.
            send_timeout_s: Longest wait until gRPC accepts a message.
            channel: Channel to the address, with `CHANNEL_OPTIONS`, which `close` leaves open. With
                None, the stream opens its own channel.
        """
        self._address = address
        self._model = model
        self._silence_s = silence_s
        self._send_timeout_s = send_timeout_s
        self._lent, self._channel = channel, channel
        self._call: Call | None = None
        self._write_lock = asyncio.Lock()  # gRPC permits one concurrent write and read
        self._read_lock = asyncio.Lock()
        self._attached_epoch: int | None = None
        self._requests = 0

    async def __aenter__(self) -> Self:
        """Return the stream unopened. The caller calls `open`, which needs a timeout."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach and close the stream, or cancel the stream at once after an error."""
        await self.close(timeout_s=2.0 if exc is None else 0.0)

    async def open(self, *, timeout_s: float, is_patient: bool = True) -> None:
        """Connect and start the stream.

        Args:
            timeout_s: Longest wait.
            is_patient: Whether to retry a refused connection until `timeout_s` is over.

        Raises:
            FailedError: With UNAVAILABLE if no process answers at the address within `timeout_s`.
        """
        if self._channel is None:
            role = CertificateRole.ENGINE
            self._channel = channel_to(self._address, role, options=CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(timeout_s):
                await _connect(self._channel, is_patient=is_patient)
        except TimeoutError:
            message = f"no engine host answers at {self._address} within {timeout_s} s"
            raise FailedError(ErrorCode.UNAVAILABLE, message) from None
        self._call = Stub(self._channel).ModelStreamInfer()

    async def send(self, request: engine.HostRequest) -> None:
        """Write one request, and return when gRPC has accepted the message.

        Raises:
            FailedError: With REPLICA_LOST if the stream is broken, or the write times out.
        """
        request_id = _ATTACH_ID if request.HasField("attach") else str(self._requests)
        self._requests += 1
        message = infer_request(self._model, request, request_id=request_id)
        async with self._write_lock:
            await self._guarded(lambda call: call.write(message), self._send_timeout_s)
        if request.HasField("attach"):
            self._attached_epoch = request.attach.epoch

    def __aiter__(self) -> Self:
        """Iterate over the host's frames until the attachment or the stream ends."""
        return self

    async def __anext__(self) -> engine.HostFrame:
        """Return the next frame, or end the iteration when `receive` returns None."""
        frame = await self.receive(self._silence_s)
        if frame is None:
            raise StopAsyncIteration
        return frame

    async def receive(self, timeout_s: float | None) -> engine.HostFrame | None:
        """Return the next frame, or None when the attachment or the stream has ended.

        Raises:
            FailedError: With REPLICA_LOST if the stream broke or was silent for `timeout_s`, with
                ENGINE_FAILED if Triton or the host answered with an error.
        """
        while True:
            async with self._read_lock:
                if self._call is None:
                    return None
                message = await self._guarded(lambda call: call.read(), timeout_s)
            if message is _EOF:
                return None
            try:
                if message is None:  # gRPC has logged the reason
                    raise DecodeError("no message of Triton's")  # noqa: TRY301 - the same end
                request_id, frame, final, error = read_response(message)
            except DecodeError as broken:
                what = f"{self._address} sent an invalid frame: {broken}"
                raise FailedError(ErrorCode.ENGINE_FAILED, what) from None
            if error:
                raise FailedError(ErrorCode.ENGINE_FAILED, f"{self._address}: {error}")
            if final and request_id == _ATTACH_ID:
                self._attached_epoch = None
            if frame is not None:
                return frame
            if final and request_id == _ATTACH_ID:
                return None

    async def close(self, *, timeout_s: float) -> None:
        """Detach, half-close and read to the end, or cancel after `timeout_s`."""
        call, channel = self._call, self._channel
        self._call = self._channel = None
        if call is not None and not call.done():
            try:
                # Without time for a complete detach, the stream is cancelled without a detach. A
                # cancel that meets the final response of a detach can crash Triton (SIGSEGV).
                if timeout_s <= 0:
                    raise TimeoutError  # noqa: TRY301 - the same end as one that takes too long
                async with asyncio.timeout(timeout_s):
                    await self._finish(call)
            except (TimeoutError, *_TRANSPORT_ERRORS):
                call.cancel()
        if channel is not None and channel is not self._lent:
            await channel.close(0)

    async def _finish(self, call: Call) -> None:
        async with self._write_lock:
            if self._attached_epoch is not None:
                detach = engine.HostRequest(detach=engine.Detach(epoch=self._attached_epoch))
                await call.write(infer_request(self._model, detach, request_id="detach"))
            await call.done_writing()
        async with self._read_lock:
            while await call.read() is not _EOF:
                pass

    async def _guarded(
        self, operation: Callable[[Call], Awaitable[object]], timeout_s: float | None
    ) -> object:
        call = self._call
        if call is None:
            raise FailedError(ErrorCode.REPLICA_LOST, f"the stream to {self._address} is closed")
        try:
            if timeout_s is None:
                return await operation(call)
            async with asyncio.timeout(timeout_s):
                return await operation(call)
        except TimeoutError:
            message = f"{self._address} is silent for {timeout_s} s"
            raise FailedError(ErrorCode.REPLICA_LOST, message) from None
        except _TRANSPORT_ERRORS as error:
            detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            message = f"the stream to {self._address} broke: {detail}"
            raise FailedError(ErrorCode.REPLICA_LOST, message) from error


async def _connect(channel: grpc.aio.Channel, *, is_patient: bool) -> None:
    """Wait until a channel is ready.

    Raises:
        TimeoutError: The connection was refused, and `is_patient` is false.
    """
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not is_patient:
            raise TimeoutError
        await channel.wait_for_state_change(state)


async def call_host(
    address: str,
    model: str,
    request: engine.HostRequest,
    *,
    timeout_s: float,
    channel: grpc.aio.Channel | None = None,
) -> engine.HostFrame:
    """Return the host's single answer to a request, for example `adapters` or `probe`.

    The call uses `channel`, or opens its own connection.

    Raises:
        FailedError: With UNAVAILABLE or REPLICA_LOST if there is no answer in time, or with the
            host's own code if the host refused.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with HostStream(address, model, send_timeout_s=timeout_s, channel=channel) as stream:
        await stream.open(timeout_s=timeout_s)
        await stream.send(request)
        rest_s = max(0.0, deadline - asyncio.get_running_loop().time())
        frame = await stream.receive(rest_s)
    if frame is None:
        message = f"{address} ended the stream without an answer"
        raise FailedError(ErrorCode.REPLICA_LOST, message)
    if frame.HasField("refused"):
        try:
            code = ErrorCode(frame.refused.code)
        except ValueError:  # a newer host may send unknown codes
            code = ErrorCode.ENGINE_FAILED
        raise FailedError(code, f"{address} refused: {frame.refused.message}")
    return frame


async def rest(address: str, model: str, timeout_s: float, *, is_asleep: bool) -> bool:
    """Put an engine to sleep, or wake it up, and return whether the engine sleeps now.

    Raises:
        FailedError: With ENGINE_BUSY if the engine has sequences, with UNSUPPORTED_PARAMETER if the
            engine cannot sleep, or with another code if the engine is not healthy.
    """
    request = engine.HostRequest(rest=engine.Rest(is_asleep=is_asleep))
    return (await call_host(address, model, request, timeout_s=timeout_s)).rested.is_asleep


async def probe(
    address: str,
    model: str,
    prompt: Sequence[int],
    tokens: int,
    timeout_s: float,
    *,
    adapter_digest: str = "",
    cache_root: bytes = b"",
    wants_logprobs: bool = False,
    channel: grpc.aio.Channel | None = None,
) -> engine.ProbeReply:
    """Run a real inference of `tokens` greedy tokens on the host and return its answer.

    Args:
        address: host:port of Triton's gRPC.
        model: Model that the host serves.
        prompt: Token ids.
        tokens: Number of tokens to generate.
        timeout_s: Seconds for the whole call, including the load of the adapter. The host drops the
            inference after the same time.
        adapter_digest: Digest of the adapter, or empty for the base alone.
        cache_root: Root of the prefix cache, 16 bytes. A fresh root forces a full computation.
        wants_logprobs: Whether to return log probabilities, if the engine supports them.
        channel: Connection to the address. With None, the call opens its own connection.

    Raises:
        FailedError: The engine is not healthy.
    """
    message = engine.Probe(
        prompt=prompt,
        tokens=tokens,
        adapter_digest=adapter_digest,
        cache_root=cache_root,
        wants_logprobs=wants_logprobs,
        timeout_ms=max(1, round(timeout_s * 1000)),
    )
    request = engine.HostRequest(probe=message)
    return (await call_host(address, model, request, timeout_s=timeout_s, channel=channel)).probe
