"""POST /v1/rerank and /v1/classify over an embedding model.

Query and documents, or texts and labels, are embedded separately, and compared by the cosine of
their vectors (a bi-encoder). No model reads both together.
"""

import asyncio
import math
from collections.abc import Sequence
from operator import mul

from aiohttp import web

from gateway.bodies.judging import ClassifyRequest, RerankRequest, texts_of
from gateway.embedding.embedders import Vector
from gateway.endpoints.embeddings import Embeddings
from gateway.server.identity import identity_of

RERANK, CLASSIFY = "/v1/rerank", "/v1/classify"
_AT_ONCE = 64  # comparisons before others have their turn
# Cosines of texts lie close together: this makes shares of labels out of them.
_SHARPNESS = 20.0


class Similarity:
    """Both endpoints of one worker."""

    def __init__(self, embeddings: Embeddings) -> None:
        """Compose."""
        self._embeddings = embeddings

    async def rerank(self, request: web.Request, wanted: RerankRequest) -> web.StreamResponse:
        """Answer with the documents, the nearest first."""
        texts = wanted.texts
        run = await self._embeddings.begun(request, wanted.model, texts, RERANK)
        with run:
            query, *documents = await run.vectors()
            scores = await _cosines(query, documents)
            order = sorted(range(len(scores)), key=lambda it: -scores[it])
            results = list[dict[str, object]]()
            for index in order[: wanted.top_n or len(order)]:
                row: dict[str, object] = {"index": index, "relevance_score": scores[index]}
                if wanted.return_documents:
                    row["document"] = {"text": texts[index + 1]}
                results.append(row)
            return run.respond(
                {
                    "id": f"rerank-{identity_of(request).uid}",
                    "object": "list",
                    "results": results,
                }
            )

    async def classify(
        self, request: web.Request, wanted: ClassifyRequest, labels: Sequence[str]
    ) -> web.StreamResponse:
        """Answer with the nearest label of each text."""
        texts = texts_of(wanted.input)
        run = await self._embeddings.begun(request, wanted.model, [*labels, *texts], CLASSIFY)
        with run:
            vectors = await run.vectors()
            of_labels, of_texts = vectors[: len(labels)], vectors[len(labels) :]
            rows = [_shares(await _cosines(it, of_labels)) for it in of_texts]
            return run.respond(
                {
                    "id": f"classify-{identity_of(request).uid}",
                    "object": "list",
                    "created": run.exchange.received_at_unix_ms // 1000,
                    "data": [label_row(at, labels, it) for at, it in enumerate(rows)],
                }
            )


def label_row(index: int, labels: Sequence[str], shares: Sequence[float]) -> dict[str, object]:
    """Return the answer for one text, with the fields of vLLM and of Jina."""
    best = max(range(len(labels)), key=shares.__getitem__)
    pairs = zip(labels, shares, strict=True)
    return {
        "object": "classification",
        "index": index,
        "label": labels[best],
        "probs": list(shares),
        "num_classes": len(labels),
        "prediction": labels[best],
        "score": shares[best],
        "predictions": [{"label": label, "score": share} for label, share in pairs],
    }


async def _cosines(one: Vector, others: Sequence[Vector]) -> list[float]:
    """Return the cosine of each pair; vectors have length 1."""
    found = list[float]()
    for number, it in enumerate(others, 1):
        found.append(sum(map(mul, one, it)))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


def _shares(cosines: Sequence[float]) -> list[float]:
    most = max(cosines)
    powers = [math.exp(_SHARPNESS * (it - most)) for it in cosines]
    return [it / sum(powers) for it in powers]
