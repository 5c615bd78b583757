"""A replica of an embedding pool with a script, over the real wire: faults happen on cue."""

import asyncio
import json
import math
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from sluice.embeddings import SECOND_BEGINS
from sluice.profiles import EMBED
from sluice.triton import Servicer, add_servicer, messages
from sluice.wire.control.v1 import control_pb2 as control


class ScriptedEmbedder(Servicer):
    """Answers each text with `vector_of` its token ids, or with `scores_of` them.

    Attributes:
        dimensions: Of the vectors.
        texts: The token ids of every text that came.
        second_begins: Where the second text of each begins; 0: a single text.
        cancelled: How many calls ended before their answer.
        answers: Cleared while it is frozen.
        failure: gRPC status and text with which calls end; None: they are answered.
        delay_s: Of each answer.
    """

    def __init__(self, *, dimensions: int = 8, gives_scores: bool = False) -> None:
        """Prepare; `serve_embedder` starts it."""
        self.dimensions = dimensions
        self._answer = scores_of if gives_scores else vector_of
        self.texts: list[tuple[int, ...]] = []
        self.second_begins: list[int] = []
        self.cancelled = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.delay_s = 0.0

    async def ModelInfer(  # noqa: N802 - the protocol's name
        self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> Any:
        """Answer one text."""
        tokens = tuple(array("i", request.raw_input_contents[0]))
        self.texts.append(tokens)
        self.second_begins.append(request.parameters[SECOND_BEGINS].int64_param)
        try:
            await self.answers.wait()
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            await context.abort(*self.failure)
        vector = self._answer(tokens, self.dimensions)
        answer = messages.ModelInferResponse(model_name=request.model_name)
        answer.outputs.add(name="embedding", datatype="FP32", shape=[1, self.dimensions])
        answer.raw_output_contents.append(vector.tobytes())
        return answer


def vector_of(tokens: Sequence[int], dimensions: int) -> "array[float]":
    """Return a vector of length 1 that other texts do not have."""
    raw = scores_of(tokens, dimensions)
    length = math.hypot(*raw)
    return array("f", [value / length for value in raw])


def scores_of(tokens: Sequence[int], labels: int) -> "array[float]":
    """Return scores that other texts do not have."""
    seed = sum((place + 1) * token for place, token in enumerate(tokens))
    return array("f", [math.sin((seed + 1) * (place + 1)) for place in range(labels)])


def ready_replica(replica_id: str, pool_id: str, address: str) -> control.Replica:
    """Return what the control plane says of a replica that serves at `address`."""
    return control.Replica(
        id=replica_id,
        pool_id=pool_id,
        grpc_address=address,
        triton_model=EMBED.triton_model,
        state=control.REPLICA_STATE_READY,
        profile=EMBED.name,
    )


@asynccontextmanager
async def serve_embedder(
    embedder: ScriptedEmbedder, address: str = "127.0.0.1:0"
) -> AsyncGenerator[str]:
    """Serve on a port of loopback; yield its address."""
    server = grpc.aio.server()
    add_servicer(embedder, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def write_embedding_base(
    directory: Path, *, dimensions: int, labels: Sequence[str] = ()
) -> Tokenizer:
    """Write what a gateway reads of a base: a WordPiece tokenizer of single characters, and sizes.

    The file asks for cutting and padding, as those of real bases do; the returned one does not.
    """
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    characters = [chr(code) for code in range(33, 127)]
    words = (*special, *characters, *(f"##{character}" for character in characters))
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {"hidden_size": dimensions, "vocab_size": len(words)}
    if labels:  # of a base that classifies
        config["architectures"] = ["BertForSequenceClassification"]
        config["id2label"] = {str(at): label for at, label in enumerate(labels)}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
