"""POST /v1/embeddings, which returns one vector for each text or list of token ids.

An embedding model has no fallback model, because another model's vectors are not comparable.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

import orjson
from aiohttp import web

from gateway.bases.embedding import EmbeddingBase, EmbeddingBaseCache
from gateway.bodies.embeddings import EmbeddingRequest, parse_embedding_request
from gateway.bodies.mistakes import bad_value
from gateway.directory import Directory, Principal
from gateway.dispatch.tally import Tally
from gateway.embedding.embedders import Embedders, Vector
from gateway.embedding.inputs import check_lengths, token_ids
from gateway.embedding.vectors import rendered, shortened
from gateway.endpoints.exchange import HttpExchange
from gateway.endpoints.reading import read_parsed, takes_work
from gateway.limits.limiter import Limiter, Reservation
from gateway.metrics import GatewayMetrics
from gateway.resolved import ResolvedModel
from gateway.rollouts.decided import Decided
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate, note_outcome
from sluice.errors import BadRequestError, ErrorCode, RejectedError
from sluice.scopes import Scope

ENDPOINT = "/v1/embeddings"

DEADLINE_S = 300.0
_WRITE_TIMEOUT_S = 30.0  # longest wait for a client to read a slice of the answer, in seconds
_SLICE_VECTORS = 32  # vectors per slice, 0.3 MB of JSON numbers
_JSON = "application/json"

# A function that returns rows of token ids. Its arguments are the base, the owner of the texts, and
# the context in tokens (0 if unknown).
RowReader: TypeAlias = Callable[[EmbeddingBase, str, int], Awaitable[Sequence[Sequence[int]]]]


class Embeddings:
    """The endpoint `/v1/embeddings` of one worker.

    Attributes:
        directory: Names of models, and the rights of callers.
        limiter: Limits of all callers.
        emit: Queues one event per accepted request and never blocks.
        gateway_id: Id of this worker.
    """

    def __init__(
        self,
        *,
        directory: Directory,
        bases: EmbeddingBaseCache,
        embedders: Embedders,
        limiter: Limiter,
        metrics: GatewayMetrics,
        emit: Callable[[bytes], None],
        gateway_id: str,
        decided: Decided,
    ) -> None:
        """`emit` queues one event per accepted request and never blocks."""
        self.directory = directory
        self._bases = bases
        self._embedders = embedders
        self.limiter = limiter
        self._metrics = metrics
        self.emit = emit
        self.gateway_id = gateway_id
        self._decided = decided

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        principal = authenticate(self.directory, request)
        self.directory.require_scope(principal, Scope.EMBEDDINGS)
        wanted = await read_parsed(request, parse_embedding_request)
        received_s = time.monotonic(), time.time_ns() // 1_000_000
        resolved = self._resolved(principal, wanted.model)
        base = await self._bases.get(resolved.model.base_digest)
        _require_embeddings(base, wanted.model)
        dimensions = _dimensions(wanted, base)
        async with self._counted(request, principal, resolved) as counted:
            context = resolved.context_tokens_max
            texts = await token_ids(
                wanted.inputs,
                base,
                owner=principal.tenant.id,
                context_tokens_max=context,
                tokens_kept=wanted.truncation_tokens(context),
            )
            exchange = await self._accepted(
                request, principal, resolved, texts, ENDPOINT, received_s, counted
            )
        with _Run(self, request, exchange, texts, base) as run:
            await run.embed(
                self._embedders, dimensions=dimensions, is_base64=wanted.encoding_format == "base64"
            )
            return await run.answer()

    async def begun(
        self, request: web.Request, name: str, endpoint: str, read: RowReader
    ) -> "_Run":
        """Return an accepted request with the rows that `read` returns, as a context manager."""
        principal = authenticate(self.directory, request)
        received_s = time.monotonic(), time.time_ns() // 1_000_000
        resolved = self._resolved(principal, name)
        base = await self._bases.get(resolved.model.base_digest)
        async with self._counted(request, principal, resolved) as counted:
            texts = await read(base, principal.tenant.id, resolved.context_tokens_max)
            exchange = await self._accepted(
                request, principal, resolved, texts, endpoint, received_s, counted
            )
        return _Run(self, request, exchange, texts, base)

    @asynccontextmanager
    async def _counted(
        self, request: web.Request, principal: Principal, resolved: ResolvedModel
    ) -> AsyncGenerator[Reservation | None]:
        """Count a large request in its limits before tokenization, even if it is refused later.

        A request that has no place in its pool is refused before any work. Yields None for a small
        body, whose request is counted together with its tokens.
        """
        self._require_room(principal, resolved.model.pool_id)
        if not takes_work(request):
            yield None
            return
        counted = await self.limiter.count(principal, resolved.model.id)
        try:
            yield counted
        finally:  # has no effect if the request was accepted and settled
            self.limiter.settle(counted, prompt_tokens=0, output_tokens=0, was_served=True)

    def _require_room(self, principal: Principal, pool_id: str) -> None:
        is_highest = self.directory.is_highest(principal.tier)
        try:
            self._embedders.require_room(pool_id, 1, is_highest=is_highest)
        except RejectedError as refusal:
            if refusal.code is ErrorCode.QUEUE_FULL:
                self._metrics.gate_refusals.inc()
            raise

    async def _accepted(
        self,
        request: web.Request,
        principal: Principal,
        resolved: ResolvedModel,
        texts: Sequence[Sequence[int]],
        endpoint: str,
        received: tuple[float, int],
        counted: Reservation | None,
    ) -> HttpExchange:
        """Return an admitted request, `received` at monotonic seconds and Unix milliseconds."""
        check_lengths(texts, resolved.context_tokens_max)
        identity, limiter = identity_of(request), self.limiter
        take = limiter.reserve if counted is None else partial(limiter.reserve_counted, counted)
        return HttpExchange(
            uid=identity.uid,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            upstream=identity.upstream,
            endpoint=endpoint,
            received_at_s=received[0],
            received_at_unix_ms=received[1],
            principal=principal,
            model=resolved.model,
            requested_model=resolved.name,
            reservation=await take(
                principal,
                resolved.model.id,
                prompt_tokens=sum(map(len, texts)),
                output_tokens_max=0,
                is_bounded=True,
            ),
            is_stream=False,
            decision=resolved.decision,
        )

    def _resolved(self, principal: Principal, name: str) -> ResolvedModel:
        resolved = self.directory.resolve_any(principal, name)
        if resolved.generates_text:
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"The model '{name}' generates text; it makes no embeddings. Choose another model.",
                param="model",
            )
        return resolved

    @property
    def embedders(self) -> Embedders:
        """The replicas that compute vectors."""
        return self._embedders

    def close(self, run: "_Run") -> None:
        """Settle the limits, count the request and emit its event, once for every outcome."""
        now_s, exchange = time.monotonic(), run.exchange
        assert exchange.reservation is not None, "it was accepted"
        has_left = exchange.outcome == ErrorCode.CLIENT_CLOSED
        used_tokens = run.begun_tokens if has_left else run.computed_tokens
        self.limiter.settle(
            exchange.reservation,
            prompt_tokens=used_tokens,
            output_tokens=0,
            was_served=has_left or exchange.status == 200,
        )
        note_outcome(run.request, exchange.outcome)
        self._metrics.total.observe(now_s - exchange.received_at_s)
        self._metrics.prompt_tokens.inc(used_tokens)
        if exchange.decision is not None:
            tenant_id = exchange.principal.tenant.id
            self._decided.note(tenant_id, exchange.model.id, exchange.decision)
        tally = Tally(prompt_tokens=used_tokens, submitted_at_s=run.submitted_at_s)
        self.emit(exchange.event(tally, self.gateway_id, now_s))


class _Run:
    """An accepted request, from its admission to its single event.

    As a context manager it closes the request at the end of the block, with the block's outcome.

    Attributes:
        base: Embedding base that computes the vectors.
        begun_tokens: Tokens of the texts that were sent to replicas.
        computed_tokens: Tokens of the texts whose vectors have arrived.
        submitted_at_s: Monotonic time of the first submission, 0 before.
    """

    def __init__(
        self,
        endpoint: Embeddings,
        request: web.Request,
        exchange: HttpExchange,
        texts: Sequence[Sequence[int]],
        base: EmbeddingBase,
    ) -> None:
        self.base = base
        self._endpoint = endpoint
        self._texts = texts
        self._pieces: list[bytes] = [b""] * len(texts)
        self.request = request
        self.exchange = exchange
        self.begun_tokens = self.computed_tokens = 0
        self.submitted_at_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.exchange.end_by(exc)
        self._endpoint.close(self)

    async def embed(self, embedders: Embedders, *, dimensions: int, is_base64: bool) -> None:
        """Compute all vectors, and encode each at its arrival, which spreads the work over time."""
        pieces = self._pieces

        def take(index: int, vector: Vector) -> None:
            pieces[index] = rendered(index, shortened(vector, dimensions), is_base64=is_base64)

        await self._compute(embedders, take)

    async def vectors(self) -> list[Vector]:
        """Return the vectors of all texts, in their order."""
        found = dict[int, Vector]()
        await self._compute(self._endpoint.embedders, found.__setitem__)
        return [found[it] for it in range(len(found))]

    async def _compute(self, embedders: Embedders, use: Callable[[int, Vector], None]) -> None:
        texts = self._texts

        def begin(index: int) -> None:
            self.begun_tokens += len(texts[index])

        def take(index: int, vector: Vector) -> None:
            self.computed_tokens += len(texts[index])
            use(index, vector)

        self.submitted_at_s = time.monotonic()
        give_up_at_s = asyncio.get_running_loop().time() + DEADLINE_S
        is_highest = self._endpoint.directory.is_highest(self.exchange.principal.tier)
        await embedders.embed(
            self.exchange.model.pool_id,
            texts,
            begin,
            take,
            give_up_at_s=give_up_at_s,
            is_highest=is_highest,
        )

    def respond(self, body: dict[str, object]) -> web.Response:
        """Return the answer of an API that computes other results from the vectors."""
        headers = self._ended()
        content = orjson.dumps(body | self._usage())
        return web.Response(body=content, content_type=_JSON, headers=headers)

    def _usage(self) -> dict[str, object]:
        count = self.computed_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"model": self.exchange.model.id, "usage": usage}

    def _ended(self) -> dict[str, str]:
        """Record the success, and return the answer's headers."""
        exchange = self.exchange
        exchange.outcome, exchange.status = "stop", 200
        exchange.first_sent_at_s = time.monotonic()
        assert exchange.reservation is not None, "it was accepted"
        headers = {"x-sluice-model": exchange.model.id, **exchange.reservation.headers}
        if (decision := exchange.decision) is not None and decision.has_decided:
            headers["x-sluice-release"] = exchange.model.release
        return headers

    async def answer(self) -> web.StreamResponse:
        """Return the answer, which is already written if it is large."""
        headers, end = self._ended(), self._usage()
        head, tail = b'{"object":"list","data":[', b"]," + orjson.dumps(end)[1:]
        if len(self._pieces) <= _SLICE_VECTORS:
            body = head + b",".join(self._pieces) + tail
            return web.Response(body=body, content_type=_JSON, headers=headers)
        commas = len(self._pieces) - 1
        size = len(head) + sum(map(len, self._pieces)) + commas + len(tail)
        slices = _slices(head, self._pieces, tail)
        return await _write_slices(self.request, slices, size, headers)


def _slices(head: bytes, pieces: Sequence[bytes], tail: bytes) -> Iterator[bytes]:
    yield head
    for first in range(0, len(pieces), _SLICE_VECTORS):
        yield (b"," if first else b"") + b",".join(pieces[first : first + _SLICE_VECTORS])
    yield tail


async def _write_slices(
    request: web.Request, slices: Iterator[bytes], size: int, headers: dict[str, str]
) -> web.StreamResponse:
    """Write a large body as the client reads it, and disconnect a client that stops reading."""
    response = web.StreamResponse(headers=headers | identity_of(request).headers)
    response.content_type = _JSON
    response.content_length = size
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.prepare(request)
        for content in slices:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await response.write(content)
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
    return response


def _require_embeddings(base: EmbeddingBase, name: str) -> None:
    if base.labels is not None:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            f"The model '{name}' judges texts; it makes no embeddings. Use /v1/rerank or"
            " /v1/classify, or choose another model.",
            param="model",
        )


def _dimensions(wanted: EmbeddingRequest, base: EmbeddingBase) -> int:
    if wanted.dimensions is None:
        return base.dimensions
    if wanted.dimensions > base.dimensions:
        raise bad_value("dimensions", f"this model's embeddings have {base.dimensions}")
    return wanted.dimensions
