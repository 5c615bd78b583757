"""A classifier of an operator's Triton, with the input `text` and the output `scores`."""

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from gateway.guard.classifiers.protocol import ClassifierError, checked_scores
from sluice.kserve import CHANNEL_OPTIONS
from sluice.triton import Stub, messages


class TritonClassifier:
    """Sends texts to one model of one Triton server, and connects with the first request."""

    def __init__(self, address: str, model: str, categories: Sequence[str]) -> None:
        """The arguments describe the operator's server and its model.

        Args:
            address: `host:port` of Triton's gRPC.
            model: Name of the model, whose input `text` has shape [n, 1] and whose output `scores`
                has shape [n, categories].
            categories: Names of the columns of `scores`.
        """
        self._model = model
        self._categories = tuple(categories)
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = Stub(self._channel)

    async def scores(
        self, texts: Sequence[str], *, timeout_s: float
    ) -> Sequence[Mapping[str, float]]:
        """Return the scores of all texts, from one request to the model."""
        try:
            answer = await self._stub.ModelInfer(question(self._model, texts), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise ClassifierError(f"it cannot be asked: {error.code().name}") from error
        return read_scores(answer, len(texts), self._categories)

    async def close(self) -> None:
        """Close the gRPC channel."""
        await self._channel.close(None)


def question(model: str, texts: Sequence[str]) -> Any:
    """Return the `ModelInferRequest` that scores these texts."""
    message = messages.ModelInferRequest(model_name=model)
    message.inputs.add(name="text", datatype="BYTES", shape=[len(texts), 1])
    packed = [it.encode() for it in texts]
    message.raw_input_contents.append(b"".join([struct.pack("<I", len(it)) + it for it in packed]))
    message.outputs.add(name="scores")
    return message


def read_scores(message: Any, count: int, categories: Sequence[str]) -> list[dict[str, float]]:
    """Return the scores of a `ModelInferResponse`, or raise ClassifierError for invalid scores."""
    if message is None or len(message.outputs) != len(message.raw_output_contents):
        raise ClassifierError("the answer is no message of Triton's")
    for output, content in zip(message.outputs, message.raw_output_contents, strict=True):
        if output.name != "scores":
            continue
        shape, columns = list(output.shape), len(categories)
        if output.datatype != "FP32" or shape != [count, columns]:
            text = f"'scores' is {output.datatype} of shape {shape}, not FP32 of {[count, columns]}"
            raise ClassifierError(text)
        if len(content) != 4 * count * columns:
            raise ClassifierError(f"'scores' has {len(content)} bytes")
        values = array("f", content)
        rows = [values[at * columns : (at + 1) * columns] for at in range(count)]
        return [checked_scores(zip(categories, row, strict=True)) for row in rows]
    raise ClassifierError("the answer has no output 'scores'")
