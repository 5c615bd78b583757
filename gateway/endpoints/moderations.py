"""POST /v1/moderations, /v1/classify and /v1/rerank, which judge, label and order texts."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import orjson
from aiohttp import web

from gateway.bodies.judging import (
    ClassifyRequest,
    ModerationRequest,
    RerankRequest,
    texts_of,
)
from gateway.bodies.parsing import parse
from gateway.directory import Principal
from gateway.dispatch.tally import Tally
from gateway.endpoints.embeddings import Embeddings
from gateway.endpoints.exchange import HttpExchange
from gateway.endpoints.reading import read_parsed
from gateway.endpoints.similarity import CLASSIFY, RERANK, Similarity, label_row
from gateway.guard.judges import Judges
from gateway.guard.verdicts import Scores
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate, note_outcome
from gateway.server.routes import Routes
from sluice.errors import BadRequestError, ErrorCode
from sluice.scopes import Scope
from sluice.wire.control.v1 import control_pb2 as control

ENDPOINT = "/v1/moderations"
FLAGGED = 0.5  # Minimum score of a flagged category.
# OpenAI's categories. A client may expect each category, even if the classifier lacks it.
OPENAI_CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit"),
    *("illicit/violent", "self-harm", "self-harm/intent", "self-harm/instructions", "sexual"),
    *("sexual/minors", "violence", "violence/graphic"),
)
# Default model names of OpenAI's clients, for which this server's first classifier answers.
_ANY = frozenset({"omni-moderation-latest", "text-moderation-latest", "text-moderation-stable"})


class Judging:
    """The endpoints that judge texts."""

    def __init__(self, embeddings: Embeddings, judges: Judges) -> None:
        """`judges` are the classifiers. `embeddings` labels and ranks by an embedding pool."""
        self._directory = embeddings.directory
        self._judges = judges
        self._limiter = embeddings.limiter
        self._similarity = Similarity(embeddings)
        self._emit = embeddings.emit
        self._gateway_id = embeddings.gateway_id
        self._models = {name: control.Model(id=name) for name in judges.names}

    def add_to(self, routes: Routes) -> None:
        """Add the paths."""
        routes.add("POST", ENDPOINT, self.moderate)
        routes.add("POST", CLASSIFY, self.classify)
        # paths of Jina and vLLM, of Cohere, and of TEI
        for path in (RERANK, "/v2/rerank", "/rerank"):
            routes.add("POST", path, self.rerank)

    async def moderate(self, request: web.Request) -> web.StreamResponse:
        """Answer in the form of OpenAI's moderation."""
        principal = self._admitted(request)
        wanted = await read_parsed(request, lambda body: parse(ModerationRequest, body))
        name, texts = self._classifier(wanted.model), texts_of(wanted.input)
        scores, headers = await self._scores(request, principal, name, texts, ENDPOINT)
        uid = identity_of(request).uid
        body = {"id": f"modr-{uid}", "model": name, "results": [_result(it) for it in scores]}
        return _json(body, headers)

    async def classify(self, request: web.Request) -> web.StreamResponse:
        """Answer with a label for each text."""
        principal = self._admitted(request)
        wanted = await read_parsed(request, lambda body: parse(ClassifyRequest, body))
        is_classifier = wanted.model in _ANY or wanted.model in self._judges.names
        if wanted.labels is not None or not is_classifier:
            return await self._similarity.classify(request, wanted, wanted.labels)
        name, texts = self._classifier(wanted.model), texts_of(wanted.input)
        scores, headers = await self._scores(request, principal, name, texts, CLASSIFY)
        labels = sorted({label for one in scores for label in one})
        rows = [[one.get(label, 0.0) for label in labels] for one in scores]
        body = {
            "id": f"classify-{identity_of(request).uid}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [label_row(at, labels, row) for at, row in enumerate(rows)],
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
        }
        return _json(body, headers)

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        """Answer with the documents, most relevant first."""
        self._admitted(request)
        wanted = await read_parsed(request, lambda body: parse(RerankRequest, body))
        return await self._similarity.rerank(request, wanted)

    def _admitted(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.EMBEDDINGS)
        return principal

    def _classifier(self, name: str | None) -> str:
        """Return the requested classifier. The default is the first one of the operator's file."""
        if name is None or name in _ANY:
            return self._judges.names[0]
        if name not in self._judges.names:
            text = f"There is no classifier '{name}'. Leave 'model' out, or choose one of "
            text += ", ".join(self._judges.names) + "."
            raise BadRequestError(ErrorCode.MODEL_NOT_FOUND, text, param="model")
        return name

    async def _scores(
        self,
        request: web.Request,
        principal: Principal,
        name: str,
        texts: Sequence[str],
        endpoint: str,
    ) -> tuple[list[Scores], dict[str, str]]:
        """Return the scores of texts, counted as one request, and the answer's headers."""
        identity = identity_of(request)
        reservation = await self._limiter.reserve(
            principal, name, prompt_tokens=0, output_tokens_max=0, is_bounded=True
        )
        exchange = HttpExchange(
            uid=identity.uid,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            upstream=identity.upstream,
            endpoint=endpoint,
            received_at_s=time.monotonic(),
            received_at_unix_ms=time.time_ns() // 1_000_000,
            principal=principal,
            model=self._models[name],
            requested_model=name,
            reservation=reservation,
            is_stream=False,
        )
        was_served = True
        try:
            scores = await self._judges.scores(name, texts)
            exchange.outcome, exchange.status = "stop", 200
        except BaseException as error:
            exchange.end_by(error)
            # The server is not at fault, because the request was invalid or its client has
            # disconnected.
            was_served = isinstance(error, BadRequestError | asyncio.CancelledError)
            raise
        finally:
            self._limiter.settle(
                reservation, prompt_tokens=0, output_tokens=0, was_served=was_served
            )
            note_outcome(request, exchange.outcome)
            self._emit(exchange.event(Tally(), self._gateway_id, time.monotonic()))
        return scores, {"x-sluice-model": name, **reservation.headers}


def _result(scores: Scores) -> dict[str, object]:
    names = (*OPENAI_CATEGORIES, *sorted(scores.keys() - set(OPENAI_CATEGORIES)))
    found = {name: scores.get(name, 0.0) for name in names}
    kinds = {name: ["text"] if name in scores else [] for name in names}
    return {
        "flagged": any(it >= FLAGGED for it in found.values()),
        "categories": {name: it >= FLAGGED for name, it in found.items()},
        "category_scores": found,
        "category_applied_input_types": kinds,
    }


def _json(body: Mapping[str, object], headers: dict[str, str]) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json", headers=headers)
