"""What a replica answers to an embedding request, and what is made of garbage."""

import asyncio
from array import array
from typing import Any

import grpc
import grpc.aio
import pytest

from sluice.embeddings import (
    EmbeddingClient,
    infer_request,
    parse_refusal,
    read_response,
    render_refusal,
)
from sluice.errors import BadRequestError, ErrorCode, FailedError, RejectedError
from sluice.triton import messages


def reply(values: list[float], shape: list[int], datatype: str = "FP32") -> Any:
    message = messages.ModelInferResponse()
    message.outputs.add(name="embedding", datatype=datatype, shape=shape)
    message.raw_output_contents.append(array("f", values).tobytes())
    return message


def test_a_request_carries_its_ids_and_its_wishes() -> None:
    message = infer_request("embed", [101, 7, 102], with_digest=True)
    assert list(message.inputs[0].shape) == [1, 3]
    assert array("i", message.raw_input_contents[0]).tolist() == [101, 7, 102]
    assert [output.name for output in message.outputs] == ["embedding", "base_digest"]
    message = infer_request("embed", [101], with_digest=False)
    assert [output.name for output in message.outputs] == ["embedding"]


def test_an_answer_is_read() -> None:
    assert read_response(reply([0.5, -1.0], [1, 2])).values.tolist() == [0.5, -1.0]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        messages.ModelInferResponse(),
        reply([], [1, 0]),
        reply([1.0], [1, 2]),
        reply([1.0, 2.0], [2, 1]),
        reply([1.0], [1, 1], "INT32"),
        messages.ModelInferResponse(outputs=[{"name": "embedding"}]),
    ],
)
def test_garbage_is_no_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"Triton's|outputs|of shape|zip"):
        read_response(answer)


def test_a_refusal_keeps_its_code() -> None:
    error = BadRequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "300 tokens: too many")
    assert parse_refusal(render_refusal(error)) == (error.code, error.message)
    other = "unexpected datatype TYPE_INT64: expecting TYPE_INT32"
    assert parse_refusal(other) == (ErrorCode.INVALID_REQUEST, other)


@pytest.mark.parametrize(
    ("status", "text", "kind", "code"),
    [
        ("INVALID_ARGUMENT", "invalid_request: no", BadRequestError, "invalid_request"),
        ("DEADLINE_EXCEEDED", "", FailedError, "replica_lost"),
        ("UNAVAILABLE", "failed to connect", FailedError, "unavailable"),
        ("INTERNAL", "engine_failed: out of memory", FailedError, "engine_failed"),
    ],
)
async def test_every_failure_has_a_code(status, text, kind, code) -> None:
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode[status], metadata, metadata, details=text)
    async with EmbeddingClient("127.0.0.1:1") as client:
        translated = client._translated(error, 1.0)
    assert type(translated) is kind
    assert translated.code == code


async def test_a_sender_bounds_its_open_requests() -> None:
    async with (
        EmbeddingClient("127.0.0.1:1", in_flight_max=2) as client,
        asyncio.TaskGroup() as group,
    ):
        answer = asyncio.Event()

        async def infer(request: Any, timeout: float) -> Any:
            await answer.wait()
            return reply([1.0], [1, 1])

        client._infer = infer
        calls = [group.create_task(client.embed([1], timeout_s=1)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RejectedError) as caught:
            await client.embed([1], timeout_s=1)
        assert caught.value.code is ErrorCode.QUEUE_FULL
        assert caught.value.retry_after_s
        calls.pop().cancel()
        await asyncio.sleep(0)
        calls.append(group.create_task(client.embed([1], timeout_s=1)))
        answer.set()
    assert [call.result().values.tolist() for call in calls] == [[1.0], [1.0]]
