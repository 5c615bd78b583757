"""Builds the console from its files, sessions, data and live feed."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from control_plane.access.openid import read_openid
from control_plane.console.batch_routes import ConsoleBatches
from control_plane.console.data_routes import ConsoleData
from control_plane.console.files import ConsoleFiles, folder
from control_plane.console.live import LiveFeed
from control_plane.console.openid_provider import open_provider
from control_plane.console.openid_routes import OpenIdRoutes
from control_plane.console.playground import open_playground
from control_plane.console.session_routes import SessionRoutes
from control_plane.database import Database
from control_plane.http.access import Identities
from control_plane.http.routes import AdminRoute
from control_plane.settings import Settings
from control_plane.telemetry_reader import open_reader


class Console:
    """The console with all its routes below /console."""

    def __init__(self, routes: list[AdminRoute], live: LiveFeed) -> None:
        self._routes = routes
        self._live = live

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        return self._routes

    async def run(self) -> None:
        """Run the feed of live pages until cancelled."""
        await self._live.run()

    def end_with(self, application: web.Application) -> None:
        """End the feed's streams when the application shuts down."""
        application.on_shutdown.append(self._live.close)


@asynccontextmanager
async def open_console(database: Database, settings: Settings) -> AsyncGenerator[Console]:
    """Open the console. The telemetry service need not run yet."""
    identities = Identities(database, settings.admin_key_sha256)
    url, key = settings.telemetry_url, settings.telemetry_key.get_secret_value()
    try:
        openid = read_openid(settings.openid)
    except ValueError as error:
        raise OSError(f"CONTROL_PLANE__OPENID: {error}") from None
    async with (
        open_reader(url, key) as telemetry,
        open_playground(settings.gateway_url) as playground,
        open_provider(openid) as provider,
    ):
        sessions = SessionRoutes(
            database, identities, settings.console_session_s, has_provider=openid is not None
        )
        live = LiveFeed(database, identities)
        routes = [
            *ConsoleFiles(folder()).routes(),
            *sessions.routes(),
            *OpenIdRoutes(sessions, openid, provider).routes(),
            *ConsoleData(database, telemetry).routes(),
            *ConsoleBatches(database).routes(),
            *playground.routes(),
            *live.routes(),
        ]
        yield Console(routes, live)
