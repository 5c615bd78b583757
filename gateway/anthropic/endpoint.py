"""The endpoints POST /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

from functools import partial

import orjson
from aiohttp import web

from gateway.anthropic.errors import anthropic_body
from gateway.anthropic.task import message_task
from gateway.bodies.anthropic import AnthropicRequest, CountTokensRequest
from gateway.bodies.parsing import parse
from gateway.directory import Directory
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.endpoints.tokenize import Tokenizing
from gateway.server.identity import set_request_id_header
from gateway.server.middleware import authenticate
from gateway.server.routes import Routes
from sluice.scopes import Scope

_REQUEST_ID = "request-id"  # the response header that Anthropic's SDKs read


class AnthropicMessages:
    """The endpoints of Anthropic's Messages API, for one worker."""

    def __init__(self, directory: Directory, completer: Completer, tokenizing: Tokenizing) -> None:
        """Store the parts that serve the requests.

        Args:
            directory: Keys, tenants and models.
            completer: Runs the requests.
            tokenizing: Counts tokens.
        """
        self._directory = directory
        self._completer = completer
        self._tokenizing = tokenizing

    def add_to(self, routes: Routes) -> None:
        """Add the paths of the API to a router."""
        for path, handler in (
            ("/v1/messages", self.create),
            ("/v1/messages/count_tokens", self.count_tokens),
        ):
            routes.add("POST", path, handler, error_form=anthropic_body)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        set_request_id_header(request, _REQUEST_ID)
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        # The parsed body has no variable, so that its memory is freed while the answer streams.
        return await self._completer.answer(
            request,
            principal,
            message_task(await read_parsed(request, partial(parse, AnthropicRequest))),
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens. Returns the number of a message's prompt tokens."""
        set_request_id_header(request, _REQUEST_ID)
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        wanted = await read_parsed(request, partial(parse, CountTokensRequest))
        count, headers = await self._tokenizing.count_chat(
            principal,
            wanted.model,
            wanted.turns,
            wanted.shown_tools,
            options=wanted.counted_options,
        )
        body = orjson.dumps({"input_tokens": count})
        return web.Response(body=body, content_type="application/json", headers=headers)
