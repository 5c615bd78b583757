"""Requests embeddings and scores of token ids from a replica, by Triton's `ModelInfer` call.

All texts of one request would need the same length, because a tensor is rectangular. A replica
batches requests of different lengths. So a client sends one request per text, concurrently.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from sluice.channels import RenewedChannel
from sluice.errors import BadRequestError, ErrorCode, FailedError, PlatformError, RejectedError
from sluice.identity import CertificateRole
from sluice.kserve import CHANNEL_OPTIONS
from sluice.triton import Stub, messages

_RETRY_S = 1.0
SECOND_BEGINS = "second_begins"  # name of a parameter of requests

assert sys.byteorder == "little", "tensors are little-endian, and so must be this machine"


class PairedTokens(list[int]):
    """The token ids, with special tokens, of two texts that a cross-encoder reads as one sequence.

    Attributes:
        second_begins: Index of the second text's first token, or 0 if the base does not distinguish
            the texts.
    """

    __slots__ = ("second_begins",)

    def __init__(self, ids: Iterable[int], second_begins: int) -> None:
        """Create the list from the token ids of both texts."""
        super().__init__(ids)
        self.second_begins = second_begins


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text, and optionally the digest of the base that computed it.

    An embedding has length 1. A classifying base returns an unbounded score per label instead.
    """

    values: "array[float]"  # quoted, because Python 3.11 cannot subscript the type
    base_digest: str = ""


class EmbeddingClient:
    """A connection to one replica of an embedding base.

    Because the replica's queue is unbounded, each client has at most `in_flight_max` calls in
    progress. A call that is cancelled or times out is removed from the queue.
    """

    def __init__(self, address: str, model: str = "embed", *, in_flight_max: int = 256) -> None:
        """Create a client for the Triton at `address` (host:port), without connecting."""
        self._address = address
        self._in_flight, self._in_flight_max = 0, in_flight_max
        self._model = model
        self._link = RenewedChannel(address, CertificateRole.ENGINE, options=CHANNEL_OPTIONS)
        self._channel: grpc.aio.Channel | None = None  # channel of `_stub`
        self._stub: Any = None

    async def __aenter__(self) -> Self:
        """Return the client, which connects at the first call."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection."""
        await self.close()

    async def close(self) -> None:
        """Close the connection, and cancel calls in progress."""
        await self._link.aclose()

    async def embed(
        self,
        tokens: Sequence[int],
        *,
        timeout_s: float,
        with_digest: bool = False,
    ) -> Embedding:
        """Return the embedding of one text.

        Args:
            tokens: Token ids of the text, special tokens included, or `PairedTokens` of a pair of
                texts.
            timeout_s: Longest wait for the answer, connecting included.
            with_digest: Whether to request the digest of the base.

        Raises:
            BadRequestError: The replica refuses the text, for the reason in the code and the
                message.
            RejectedError: QUEUE_FULL, because `in_flight_max` calls are in progress. No request was
                sent.
            FailedError: UNAVAILABLE, REPLICA_LOST (no answer in time) or ENGINE_FAILED.
        """
        request = infer_request(self._model, tokens, with_digest=with_digest)
        if self._in_flight >= self._in_flight_max:
            message = f"{self._in_flight} embeddings are under way at {self._address}"
            raise RejectedError(ErrorCode.QUEUE_FULL, message, retry_after_s=_RETRY_S)
        self._in_flight += 1
        try:
            answer = await self._infer(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error, timeout_s) from error
        finally:
            self._in_flight -= 1
        try:
            return read_response(answer)
        except ValueError as error:
            message = f"{self._address} sent no valid embedding: {error}"
            raise FailedError(ErrorCode.ENGINE_FAILED, message) from error

    async def _infer(self, request: Any, *, timeout: float) -> Any:
        channel = await self._link.current()
        if channel is not self._channel:
            self._channel, self._stub = channel, Stub(channel)
        return await self._stub.ModelInfer(request, timeout=timeout)

    def _translated(self, error: grpc.aio.AioRpcError, timeout_s: float) -> PlatformError:
        status, text = error.code(), error.details() or ""
        where = f"{self._address}: {text}"
        if status is grpc.StatusCode.INVALID_ARGUMENT:
            return BadRequestError(*parse_refusal(text))
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            message = f"{self._address} has not answered within {timeout_s} s"
            return FailedError(ErrorCode.REPLICA_LOST, message)
        # CANCELLED here means that the server cancelled the call, because the server is stopping.
        if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return FailedError(ErrorCode.UNAVAILABLE, where)
        return FailedError(ErrorCode.ENGINE_FAILED, where)


def infer_request(model: str, tokens: Sequence[int], *, with_digest: bool) -> Any:
    """Return the `ModelInferRequest` for one text."""
    message = messages.ModelInferRequest(model_name=model)
    message.inputs.add(name="input_ids", datatype="INT32", shape=[1, len(tokens)])
    message.raw_input_contents.append(array("i", tokens).tobytes())
    if isinstance(tokens, PairedTokens) and tokens.second_begins:
        message.parameters[SECOND_BEGINS].int64_param = tokens.second_begins
    message.outputs.add(name="embedding")
    if with_digest:
        message.outputs.add(name="base_digest")
    return message


def read_response(message: Any) -> Embedding:
    """Return the embedding in a `ModelInferResponse`.

    Args:
        message: The response, or None if the received bytes were no such message.

    Raises:
        ValueError: The message does not contain exactly one embedding of one text.
    """
    if message is None:  # gRPC has logged the reason
        raise ValueError("no message of Triton's")
    found = dict(
        zip(
            (output.name for output in message.outputs),
            zip(message.outputs, message.raw_output_contents, strict=True),
            strict=True,
        )
    )
    if "embedding" not in found:
        raise ValueError(f"outputs {sorted(found)}")
    output, content = found["embedding"]
    if output.datatype != "FP32" or list(output.shape) != [1, len(content) // 4] or not content:
        raise ValueError(f"{output.datatype} of shape {list(output.shape)} in {len(content)} bytes")
    digest = found["base_digest"][1].decode("ascii") if "base_digest" in found else ""
    return Embedding(array("f", content), digest)


def render_refusal(error: PlatformError) -> str:
    """Return a refusal as text, because Triton transports no error codes."""
    return f"{error.code}: {error.message}"


def parse_refusal(text: str) -> tuple[ErrorCode, str]:
    """Return the code and message of a refusal's text, or INVALID_REQUEST for any other text."""
    code, _, message = text.partition(": ")
    try:
        return ErrorCode(code), message
    except ValueError:  # Triton's own text, for example about a wrong data type
        return ErrorCode.INVALID_REQUEST, text
