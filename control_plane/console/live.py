"""The feed of live pages, which reads the fleet every two seconds for all viewers together.

Each event contains the whole state. So a viewer that was disconnected is up to date after the next
event, and a slow viewer skips states. Without viewers there are no queries.
"""

import asyncio
import json
from contextlib import suppress

from aiohttp import web

from control_plane.access.roles import Action, Actor
from control_plane.console.overview import overview
from control_plane.database import Database, DatabaseDownError
from control_plane.http import describe
from control_plane.http.access import Identities
from control_plane.http.routes import ACTOR, AdminRoute
from sluice.errors import ErrorCode, PlatformError

VIEWERS_MAX = 200
_EVERY_S = 2.0
# seconds without an event after which a comment is sent, because proxies close silent connections
_QUIET_S = 15.0
_WRITE_TIMEOUT_S = 10.0
_RETRY_S = 5.0
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # so that nginx and similar proxies forward each event at once
}


class LiveFeed:
    """Queries the fleet while there are viewers, and sends each change to the viewers."""

    def __init__(
        self, database: Database, identities: Identities, every_s: float = _EVERY_S
    ) -> None:
        self._database = database
        self._identities = identities
        self._every_s = every_s
        self._viewers = 0
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._number = 0
        self._event = b""
        self._is_closed = False

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        told = describe.operation("For the console")
        path = "/console/data/live"
        return [AdminRoute("GET", path, self.stream, Action.READ_PLATFORM, "console", told)]

    async def run(self) -> None:
        """Query the fleet at regular intervals while there are viewers."""
        while True:
            await self._wanted.wait()
            await self._look()
            await asyncio.sleep(self._every_s)

    async def close(self, _: web.Application) -> None:
        """End all streams, so that their viewers reconnect to another control plane."""
        self._is_closed = True
        self._changed.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send the present state, and then each newer state."""
        if self._viewers >= VIEWERS_MAX:
            message = (
                f"{VIEWERS_MAX} pages are connected already: close some, or read /console/data"
            )
            raise PlatformError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_S)
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        self._viewers += 1
        self._wanted.set()
        try:
            # The stream of a viewer that has disconnected or stopped reading ends. The viewer may
            # reconnect.
            with suppress(ConnectionError, TimeoutError):
                await self._serve(request, response)
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._wanted.clear()
        return response

    async def _serve(self, request: web.Request, response: web.StreamResponse) -> None:
        await _write(response, f"retry: {round(self._every_s * 1000)}\n\n".encode())
        sent = 0
        while not self._is_closed:
            changed = self._changed
            if self._number != sent:
                sent = self._number
                await _write(response, self._event)
                continue
            try:
                async with asyncio.timeout(_QUIET_S):
                    await changed.wait()
            except TimeoutError:
                if not await self._is_welcome(request):
                    return
                await _write(response, b": still here\n\n")

    async def _is_welcome(self, request: web.Request) -> bool:
        """Return whether the viewer's key or session is still valid, with an unchanged role."""
        actor: Actor = request[ACTOR]
        try:
            return await self._identities.of(request) == actor
        except DatabaseDownError:
            return True  # the viewer stays connected while the database is down
        except PlatformError:
            return False

    async def _look(self) -> None:
        try:
            state = await self._database.run(overview)
        except DatabaseDownError as error:
            state = {"problem": error.message}
        data = json.dumps(state)
        event = f"event: state\ndata: {data}\n\n".encode()
        if event == self._event:
            return
        self._event = event
        self._number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await response.write(data)
