"""POST /v1/responses."""

from functools import partial

from aiohttp import web

from gateway.bodies.parsing import parse
from gateway.bodies.responses import ResponseRequest
from gateway.directory import Directory
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.responses.task import response_task
from gateway.server.identity import identity_of
from gateway.server.middleware import authenticate
from sluice.scopes import Scope


class Responses:
    """The Responses API of one worker."""

    def __init__(self, *, directory: Directory, completer: Completer) -> None:
        """Compose.

        Args:
            directory: Knows who calls.
            completer: Answers.
        """
        self._directory = directory
        self._completer = completer

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.CHAT)
        wanted = await read_parsed(request, partial(parse, ResponseRequest))
        task = response_task(wanted, f"resp_{identity_of(request).uid}")
        return await self._completer.answer(request, principal, task)
