"""POST /v1/tokenize and /v1/detokenize, which convert text to token ids of a model, and back.

No inference runs, so a request counts against the requests per minute, not against the tokens. A
text may be longer than the model's context, because callers want to measure its length.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import orjson
from aiohttp import web
from tokenizers import Tokenizer

from gateway.bases.assets import AssetCache
from gateway.bases.embedding import EmbeddingBaseCache
from gateway.bodies.messages import Message, Tool
from gateway.bodies.mistakes import bad_value
from gateway.bodies.tokenize import (
    TokenizeRequest,
    parse_detokenize_request,
    parse_tokenize_request,
)
from gateway.directory import Directory, Principal
from gateway.endpoints.reading import read_parsed
from gateway.limits.limiter import Limiter, Reservation
from gateway.resolved import ResolvedModel
from gateway.server.middleware import authenticate
from sluice.errors import BadRequestError, PlatformError
from sluice.scopes import Scope

_JSON = "application/json"
_INLINE_TOKENS_MAX = 4096  # maximum number of ids decoded on the event loop, which needs 1 ms


class Tokenizing:
    """The endpoints `/v1/tokenize` and `/v1/detokenize` of one worker."""

    def __init__(
        self,
        *,
        directory: Directory,
        assets: AssetCache,
        embedding_bases: EmbeddingBaseCache,
        limiter: Limiter,
    ) -> None:
        """`assets` tokenizes for text models, and `embedding_bases` for embedding models."""
        self._directory = directory
        self._assets = assets
        self._embedding_bases = embedding_bases
        self._limiter = limiter

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /v1/tokenize."""
        principal = self._admitted(request)
        wanted = await read_parsed(request, parse_tokenize_request)
        resolved = self._directory.resolve_any(principal, wanted.model)
        async with self._counted(principal, resolved) as reservation:
            ids = await self._ids(wanted, resolved)
            answer: dict[str, object] = {
                "count": len(ids),
                "max_model_len": resolved.context_tokens_max or None,
                "tokens": ids,
            }
            return _answer(answer, reservation)

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /v1/detokenize."""
        principal = self._admitted(request)
        wanted = await read_parsed(request, parse_detokenize_request)
        resolved = self._directory.resolve_any(principal, wanted.model)
        async with self._counted(principal, resolved) as reservation:
            tokenizer, vocabulary = await self._tokenizer(resolved)
            wanted.check_vocabulary(vocabulary)
            return _answer({"prompt": await _decoded(tokenizer, wanted.tokens)}, reservation)

    async def count_chat(
        self,
        principal: Principal,
        model: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        options: Mapping[str, object],
    ) -> tuple[int, Mapping[str, str]]:
        """Return the number of tokens of a chat's prompt, and the rate-limit headers.

        Args:
            principal: The caller, of whose limits one request is used.
            model: Name of the model whose template and tokenizer count.
            messages: The conversation.
            tools: Tools in the prompt.
            options: Options for the template.

        Raises:
            PlatformError: The model is unknown or is an embedding model, or a limit is used up.
        """
        resolved = self._directory.resolve_any(principal, model)
        if not resolved.generates_text:
            raise bad_value("model", "this model makes embeddings; name one that chats")
        async with self._counted(principal, resolved) as reservation:
            assets = await self._assets.get(resolved.model.base_digest)
            chat = await assets.encode_chat(
                messages, tools, resolved.cache_root, owner=resolved.tenant_id, options=options
            )
            return len(chat.ids), reservation.headers

    def _admitted(self, request: web.Request) -> Principal:
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.TOKENIZE)
        return principal

    @asynccontextmanager
    async def _counted(
        self, principal: Principal, resolved: ResolvedModel
    ) -> AsyncGenerator[Reservation]:
        """Count one request, except after a failure of the server.

        A refused request, or a request whose caller has disconnected, is counted too, since it has
        caused work. Raises RejectedError 429 over the limit.
        """
        reservation = await self._limiter.reserve(
            principal, resolved.model.id, prompt_tokens=0, output_tokens_max=0, is_bounded=True
        )
        was_served = True
        try:
            yield reservation
        except PlatformError as error:
            was_served = isinstance(error, BadRequestError)
            raise
        finally:
            self._limiter.settle(
                reservation, prompt_tokens=0, output_tokens=0, was_served=was_served
            )

    async def _ids(self, wanted: TokenizeRequest, resolved: ResolvedModel) -> list[int]:
        digest = resolved.model.base_digest
        has_special_tokens = wanted.add_special_tokens is not False
        if not resolved.generates_text:
            if wanted.prompt is None:
                raise bad_value("messages", "this model makes embeddings; send 'prompt'")
            base = await self._embedding_bases.get(digest)
            (ids,) = await base.encode(
                [wanted.prompt], owner=resolved.tenant_id, add_special_tokens=has_special_tokens
            )
            return ids
        assets = await self._assets.get(digest)
        root, owner = resolved.cache_root, resolved.tenant_id
        if wanted.messages is not None:
            tools = wanted.shown_tools
            messages = wanted.shown_messages
            chat = await assets.encode_chat(messages, tools, root, owner=owner)
            return chat.ids.tolist()
        assert wanted.prompt is not None, "the body has one of the two"
        encoded = await assets.encode_text(
            wanted.prompt, root, owner=owner, add_special_tokens=has_special_tokens
        )
        return encoded.ids.tolist()

    async def _tokenizer(self, resolved: ResolvedModel) -> tuple[Tokenizer, int]:
        """Return a model's tokenizer, and the size of the model's vocabulary."""
        digest = resolved.model.base_digest
        if not resolved.generates_text:
            base = await self._embedding_bases.get(digest)
            return base.tokenizer, base.vocabulary
        assets = await self._assets.get(digest)
        return assets.tokenizer, len(assets.table.fragments)


async def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of token ids, including special tokens. Many ids are decoded in a thread."""
    if len(ids) <= _INLINE_TOKENS_MAX:
        return tokenizer.decode(ids, skip_special_tokens=False)
    # The batch call releases the interpreter lock.
    (text,) = await asyncio.to_thread(tokenizer.decode_batch, [ids], skip_special_tokens=False)
    return text


def _answer(answer: dict[str, object], reservation: Reservation) -> web.Response:
    return web.Response(body=orjson.dumps(answer), content_type=_JSON, headers=reservation.headers)
