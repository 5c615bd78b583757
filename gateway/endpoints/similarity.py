"""POST /v1/rerank and /v1/classify over a model of an embedding pool.

A model that classifies reads query and document together (a cross-encoder), or one text alone. With
an embedding model, both are embedded separately, and compared by the cosine of their vectors (a
bi-encoder).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from operator import mul

from aiohttp import web

from gateway.bases.embedding import EmbeddingBase
from gateway.bases.labels import sigmoid, softmax
from gateway.bodies.judging import ClassifyRequest, RerankRequest, texts_of
from gateway.embedding.embedders import Vector
from gateway.embedding.inputs import pair_ids, token_ids
from gateway.endpoints.embeddings import Embeddings
from gateway.server.identity import identity_of
from sluice.errors import BadRequestError, ErrorCode

RERANK, CLASSIFY = "/v1/rerank", "/v1/classify"
_AT_ONCE = 64  # Comparisons before the event loop may run other tasks.
# Factor of the softmax over labels, which enlarges the small differences between cosines.
_SHARPNESS = 20.0


class Similarity:
    """The endpoints `/v1/rerank` and `/v1/classify` of one worker."""

    def __init__(self, embeddings: Embeddings) -> None:
        """`embeddings` accepts the requests and computes their vectors."""
        self._embeddings = embeddings

    async def rerank(self, request: web.Request, wanted: RerankRequest) -> web.StreamResponse:
        """Answer with the documents, the most relevant first."""
        query, *documents = wanted.texts

        def read(base: EmbeddingBase, owner: str, context: int) -> Awaitable[list[list[int]]]:
            if base.labels is None:
                texts = [query, *documents]
                return token_ids(texts, base, owner=owner, context_tokens_max=context)
            _require_one_score(base, "rerank wants a model with one")
            return pair_ids([query], documents, base, owner=owner, context_tokens_max=context)

        run = await self._embeddings.begun(request, wanted.model, RERANK, read)
        with run:
            vectors = await run.vectors()
            if run.base.labels is None:
                scores = await _cosines(vectors[0], vectors[1:])
            else:
                scores = [sigmoid(score) for (score,) in vectors]
            return run.respond(
                {
                    "id": f"rerank-{identity_of(request).uid}",
                    "object": "list",
                    "results": _ranked(scores, documents, wanted),
                }
            )

    async def classify(
        self, request: web.Request, wanted: ClassifyRequest, labels: Sequence[str] | None
    ) -> web.StreamResponse:
        """Answer with the best label of each text, from `labels` or from the model's own labels."""
        texts = texts_of(wanted.input)

        def read(base: EmbeddingBase, owner: str, context: int) -> Awaitable[list[list[int]]]:
            if labels is None:
                _require_own_labels(base)
                return token_ids(texts, base, owner=owner, context_tokens_max=context)
            if base.labels is None:
                rows = [*labels, *texts]
                return token_ids(rows, base, owner=owner, context_tokens_max=context)
            _require_one_score(base, "leave 'labels' out")
            return pair_ids(texts, labels, base, owner=owner, context_tokens_max=context)

        run = await self._embeddings.begun(request, wanted.model, CLASSIFY, read)
        with run:
            vectors = await run.vectors()
            own = run.base.labels
            if labels is None:
                assert own is not None, "it was required"
                names, rows = own.names, [own.probabilities(it) for it in vectors]
            elif own is None:
                names, rows = labels, await _compared(vectors, len(labels))
            else:
                scores, step = [score for (score,) in vectors], len(labels)
                starts = range(0, len(scores), step)
                names, rows = labels, [softmax(scores[at : at + step]) for at in starts]
            return run.respond(
                {
                    "id": f"classify-{identity_of(request).uid}",
                    "object": "list",
                    "created": run.exchange.received_at_unix_ms // 1000,
                    "data": [label_row(at, names, it) for at, it in enumerate(rows)],
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


def _ranked(
    scores: Sequence[float], documents: Sequence[str], wanted: RerankRequest
) -> list[dict[str, object]]:
    order = sorted(range(len(scores)), key=lambda it: -scores[it])
    results = list[dict[str, object]]()
    for index in order[: wanted.top_n or len(order)]:
        row: dict[str, object] = {"index": index, "relevance_score": scores[index]}
        if wanted.return_documents:
            row["document"] = {"text": documents[index]}
        results.append(row)
    return results


async def _compared(vectors: Sequence[Vector], labels: int) -> list[list[float]]:
    """Return the labels' shares for each text. The first `labels` vectors belong to the labels."""
    of_labels = vectors[:labels]
    found = [await _cosines(it, of_labels) for it in vectors[labels:]]
    return [softmax([_SHARPNESS * it for it in row]) for row in found]


async def _cosines(one: Vector, others: Sequence[Vector]) -> list[float]:
    """Return the cosines of one vector with each other vector. All vectors have length 1."""
    found = list[float]()
    for number, it in enumerate(others, 1):
        found.append(sum(map(mul, one, it)))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


def _require_one_score(base: EmbeddingBase, fix: str) -> None:
    assert base.labels is not None, "the base classifies"
    if (count := len(base.labels.names)) > 1:
        text = f"This model has {count} labels of its own; {fix}."
        raise BadRequestError(ErrorCode.INVALID_REQUEST, text, param="model")


def _require_own_labels(base: EmbeddingBase) -> None:
    if base.labels is None or len(base.labels.names) == 1:
        text = "This model has no labels of its own; send 'labels', or name a classifier."
        raise BadRequestError(ErrorCode.INVALID_REQUEST, text, param="labels")
