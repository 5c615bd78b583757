"""GET /openapi.json, the description of the API (OpenAPI 3.1), generated from its classes."""

import asyncio
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from gateway.bodies.anthropic import AnthropicRequest, CountTokensRequest
from gateway.bodies.batches import BatchRequest
from gateway.bodies.chat import ChatRequest
from gateway.bodies.completions import CompletionRequest
from gateway.bodies.conversations import AddedItems, ConversationRequest, MetadataChange
from gateway.bodies.embeddings import EmbeddingRequest
from gateway.bodies.feedback import FeedbackRequest
from gateway.bodies.judging import ClassifyRequest, ModerationRequest, RerankRequest
from gateway.bodies.responses import CompactRequest, InputTokensRequest, ResponseRequest
from gateway.bodies.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.endpoints import answers
from gateway.endpoints.anthropic_answers import (
    AnthropicErrorEnvelope,
    AnthropicMessageObject,
    AnthropicTokenCount,
)
from gateway.endpoints.batch_answers import (
    BatchList,
    BatchObject,
    CompletionList,
    DeletedCompletion,
    DeletedFile,
    FileList,
    FileObject,
)
from gateway.endpoints.response_answers import (
    CompactedConversation,
    ConversationObject,
    DeletedConversation,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseObject,
)
from sluice.errors import POLICIES

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
# Statuses that no client receives, or that only clients of the admin API receive.
_UNTOLD = frozenset({409, 412, 422, 499})
# Statuses that the HTTP layer sends. Their error code is always `invalid_request`.
_HTTP_STATUSES = {
    "408": "The body came too slowly.",
    "415": "The content encoding is not supported; use gzip, deflate or none.",
    "417": "The header `Expect` may only be `100-continue`.",
    "431": "The headers are too large.",
}
_READ = frozenset({400, 401, 403, 404, 405, 429, 500, 503})  # error statuses without a body
_RATE_HEADERS = {
    f"x-ratelimit-{what}-{unit}": {
        "description": f"{what} of {unit} per minute, where there is a limit",
        "schema": {"type": "string"},
    }
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
}
_REQUEST_ID: Json = {
    "x-request-id": {
        "description": "the caller's, if it sent a plain one, else a new one",
        "schema": {"type": "string"},
    }
}
_RETRY_AFTER: Json = {
    "Retry-After": {
        "description": "seconds after which trying again makes sense",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
_MODEL: Json = {
    "x-sluice-model": {
        "description": "the model that answers",
        "schema": {"type": "string"},
    },
    "x-sluice-release": {
        "description": "its release, where a pin or a rollout decided that",
        "schema": {"type": "string"},
    },
}


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An operation with a body and its answers."""

    path: str
    summary: str
    body: type[BaseModel]
    answer: type[BaseModel]
    is_streamed: bool = False
    error: type[BaseModel] = answers.ErrorEnvelope


_POSTS = (
    _Endpoint(
        "/v1/chat/completions",
        "Answer a chat",
        ChatRequest,
        answers.ChatCompletion,
        is_streamed=True,
    ),
    _Endpoint(
        "/v1/completions",
        "Continue a text",
        CompletionRequest,
        answers.TextCompletion,
        is_streamed=True,
    ),
    _Endpoint("/v1/responses", "Answer items", ResponseRequest, ResponseObject, is_streamed=True),
    _Endpoint(
        "/v1/messages",
        "Answer a message of Anthropic's API",
        AnthropicRequest,
        AnthropicMessageObject,
        is_streamed=True,
        error=AnthropicErrorEnvelope,
    ),
    _Endpoint(
        "/v1/messages/count_tokens",
        "Count the input tokens of such a message",
        CountTokensRequest,
        AnthropicTokenCount,
        error=AnthropicErrorEnvelope,
    ),
    _Endpoint("/v1/responses/input_tokens", "Count the input", InputTokensRequest, InputTokens),
    _Endpoint("/v1/responses/compact", "Sum up items", CompactRequest, CompactedConversation),
    _Endpoint("/v1/conversations", "Begin a conversation", ConversationRequest, ConversationObject),
    _Endpoint("/v1/batches", "Begin a batch", BatchRequest, BatchObject),
    _Endpoint("/v1/embeddings", "Embed texts", EmbeddingRequest, answers.EmbeddingList),
    _Endpoint("/v1/moderations", "Moderate texts", ModerationRequest, answers.Moderation),
    _Endpoint("/v1/classify", "Classify texts", ClassifyRequest, answers.Classification),
    _Endpoint("/v1/rerank", "Order documents by a query", RerankRequest, answers.Reranking),
    _Endpoint(
        "/v1/tokenize", "Turn a text or a chat into token ids", TokenizeRequest, answers.Tokens
    ),
    _Endpoint("/v1/feedback", "Judge an answer", FeedbackRequest, answers.TakenFeedback),
    _Endpoint("/v1/detokenize", "Turn token ids into text", DetokenizeRequest, answers.DecodedText),
)


async def describe(_: web.Request) -> web.Response:
    """GET /openapi.json."""
    body = await asyncio.to_thread(_written)  # in a thread, because the first call needs 50 ms
    return web.Response(body=body, content_type="application/json")


@cache
def _written() -> bytes:
    return orjson.dumps(document())


def document() -> Json:
    """Return the OpenAPI document."""
    paths: Json = {post.path: {"post": _post(post)} for post in _POSTS}
    name: Json = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "Name of the model; slashes in it stay as they are.",
        "schema": {"type": "string", "minLength": 1},
    }
    one = _get("Show a model", answers.ModelCard, _READ)
    paths["/v1/models"] = {"get": _get("List the models", answers.ModelList, _READ - {404})}
    paths["/v1/models/{id}"] = {"parameters": [name], "get": one}
    paths["/v1/chat/completions"]["get"] = _get("List those stored", CompletionList, _READ)
    paths |= _kept_completions() | _stored_responses() | _conversations() | _batches()
    paths["/v1/batches"]["get"] = _get("List the batches", BatchList, _READ)
    paths["/healthz"] = {"get": _open(_get("Tell that the process lives", answers.Status))}
    ready = _get("Tell whether requests can be served", answers.Status, frozenset({503}))
    paths["/readyz"] = {"get": _open(ready)}
    paths["/health"] = {"get": _open(ready)}
    paths["/version"] = {"get": _open(_get("Tell the version", answers.Version))}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluice",
            "version": version("sluice"),
            "description": "OpenAI's API, with extensions; docs/parameters.md has all parameters.",
        },
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def _stored_responses() -> Json:
    """Return the operations on stored responses."""
    one: Json = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "Of a response that was stored.",
        "schema": {"type": "string", "minLength": 1},
    }
    statuses = _READ | {409}
    deleted = _get("Delete a response", DeletedResponse, statuses)
    shown = _get("Show a response", ResponseObject, statuses)
    items = _get("List what a turn has brought", InputItemList, statuses)
    cancelled = _get("Cancel a response in the background", ResponseObject, statuses)
    return {
        "/v1/responses/{id}": {"parameters": [one], "get": shown, "delete": deleted},
        "/v1/responses/{id}/cancel": {"parameters": [one], "post": cancelled},
        "/v1/responses/{id}/input_items": {"parameters": [one], "get": items},
    }


def _kept_completions() -> Json:
    """Return the operations on stored chat completions."""
    path: Json = {"name": "id", "in": "path", "required": True, "description": "Of a completion."}
    one = path | {"schema": {"type": "string", "minLength": 1}}
    where = "/v1/chat/completions/{id}"
    change = _Endpoint(where, "Change its metadata", MetadataChange, answers.ChatCompletion)
    return {
        where: {
            "parameters": [one],
            "get": _get("Show a completion", answers.ChatCompletion, _READ),
            "post": _post(change) | {"operationId": "changecompletion"},
            "delete": _get("Delete a completion", DeletedCompletion, _READ),
        },
        f"{where}/messages": {
            "parameters": [one],
            "get": _get("List what it answers", InputItemList, _READ),
        },
    }


def _batches() -> Json:
    """Return the operations on files and batches, except the creation of a batch."""
    one: Json = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "Of a file or a batch.",
        "schema": {"type": "string", "minLength": 1},
    }
    upload = _get("Upload a file", FileObject, _READ | {413})
    form = {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}}
    schema: Json = {"type": "object", "required": ["purpose", "file"], "properties": form}
    upload["requestBody"] = {"content": {"multipart/form-data": {"schema": schema}}}
    cancelled = _get("Cancel a batch", BatchObject, _READ | {409})
    return {
        "/v1/files": {"get": _get("List the files", FileList, _READ), "post": upload},
        "/v1/files/{id}": {
            "parameters": [one],
            "get": _get("Show a file", FileObject, _READ),
            "delete": _get("Delete a file", DeletedFile, _READ),
        },
        "/v1/batches/{id}": {
            "parameters": [one],
            "get": _get("Show a batch", BatchObject, _READ),
        },
        "/v1/batches/{id}/cancel": {"parameters": [one], "post": cancelled},
    }


def _conversations() -> Json:
    """Return the operations on conversations."""
    one, item = (
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": f"Of {what}.",
            "schema": {"type": "string", "minLength": 1},
        }
        for name, what in (("id", "a conversation"), ("item_id", "an item of it"))
    )
    shown = _get("Show a conversation", ConversationObject, _READ)
    items = _get("List items of a conversation", InputItemList, _READ)
    removed = _get("Remove an item", ConversationObject, _READ)
    deleted = _get("Delete a conversation", DeletedConversation, _READ)
    path = "/v1/conversations/{id}"
    return {
        path: {
            "parameters": [one],
            "get": shown,
            "post": _post(_Endpoint(path, "Change it", MetadataChange, ConversationObject)),
            "delete": deleted,
        },
        f"{path}/items": {
            "parameters": [one],
            "get": items,
            "post": _post(_Endpoint(path, "Add items to it", AddedItems, InputItemList)),
        },
        f"{path}/items/{{item_id}}": {"parameters": [one, item], "delete": removed},
    }


class _TitleFilter(GenerateJsonSchema):
    """Omits titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: object) -> bool:
        """Return False, by which pydantic omits the title."""
        del schema
        return False


def _schemas() -> Json:
    bodies: list[type[BaseModel]] = [post.body for post in _POSTS]
    bodies += [AddedItems, MetadataChange]
    shapes: list[type[BaseModel]] = [post.answer for post in _POSTS]
    shapes += [
        answers.ErrorEnvelope,
        AnthropicErrorEnvelope,
        BatchList,
        BatchObject,
        CompletionList,
        DeletedCompletion,
        DeletedConversation,
        DeletedFile,
        DeletedResponse,
        FileList,
        FileObject,
        InputItemList,
        answers.ModelCard,
        answers.ModelList,
        answers.Status,
        answers.Version,
    ]
    _, found = models_json_schema(
        [
            *[(body, "validation") for body in bodies],
            *[(shape, "serialization") for shape in shapes],
        ],
        ref_template=_SCHEMAS + "{model}",
        schema_generator=_TitleFilter,
    )
    return found["$defs"]


def _post(post: _Endpoint) -> Json:
    content: Json = {"application/json": {"schema": _reference(post.answer)}}
    if post.is_streamed:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": 'With "stream": true: events with chunks, ended by `data: [DONE]`,'
                " or by an error envelope instead; those of a response and of a message are named.",
            }
        }
    headers = _REQUEST_ID | _RATE_HEADERS | (_MODEL if "model" in post.answer.model_fields else {})
    return {
        "summary": post.summary,
        "operationId": post.body.__name__.removesuffix("Request").lower(),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _reference(post.body)}},
        },
        "responses": {
            "200": {"description": "the answer", "headers": headers, "content": content},
            **_errors(_statuses(post.path), post.error),
            **{status: _error(text, {}, post.error) for status, text in _HTTP_STATUSES.items()},
        },
    }


def _statuses(path: str) -> frozenset[int]:
    """Return the statuses of an endpoint. A stored response that is in use causes a 409."""
    untold = _UNTOLD - {409} if path.startswith("/v1/responses") else _UNTOLD
    return frozenset(it.status for it in POLICIES.values()) - untold


def _get(summary: str, answer: type[BaseModel], errors: frozenset[int] = frozenset()) -> Json:
    schema = {"application/json": {"schema": _reference(answer)}}
    good: Json = {"description": "the answer", "headers": _REQUEST_ID, "content": schema}
    return {"summary": summary, "responses": {"200": good, **_errors(errors)}}


def _open(operation: Json) -> Json:
    """Return an operation that needs no key."""
    return operation | {"security": []}


def _errors(statuses: frozenset[int], envelope: type[BaseModel] = answers.ErrorEnvelope) -> Json:
    codes: dict[int, list[str]] = {}
    for code, policy in POLICIES.items():
        if policy.status in statuses:
            codes.setdefault(policy.status, []).append(f"`{code}`")
    return {
        str(status): _error(
            ", ".join(codes[status]), _RETRY_AFTER if status in (429, 503) else {}, envelope
        )
        for status in sorted(codes)
    }


def _error(description: str, headers: Json, envelope: type[BaseModel]) -> Json:
    return {
        "description": description,
        "headers": _REQUEST_ID | headers,
        "content": {"application/json": {"schema": _reference(envelope)}},
    }


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": _SCHEMAS + model.__name__}
