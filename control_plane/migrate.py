"""Migrates the database to the newest schema. Run by `python -m control_plane.migrate`.

Several migrations may start at the same time. An advisory lock admits one of them, and the others
then have no work. A migration that cannot acquire its table locks within 4 s fails, so that the
service is not blocked.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from control_plane.settings import MigrateSettings
from sluice.logs import configure_logs

_LOCK = 7310520302
_LOCK_WAIT_S = 60.0
_CONNECT_TIMEOUT_S = 5.0
_LIMITS = {"lock_timeout": "4s", "statement_timeout": "60s", "application_name": "sluice-migrate"}


def scripts() -> Path:
    """Return the directory of the migrations, in the checkout if it exists, else in the wheel."""
    package = Path(__file__).resolve().parent
    for place in (package.parent / "migrations", package / "_data" / "migrations"):
        if (place / "postgres" / "env.py").exists():
            return place / "postgres"
    raise RuntimeError(f"no migrations beside {package}: the installation is incomplete")


async def migrate(database_url: str) -> None:
    """Upgrade to the newest revision.

    Raises:
        OSError, DBAPIError: The database cannot be reached, or refuses the migration.
        TimeoutError: Another migration did not end in time.
    """
    engine = create_async_engine(
        database_url,
        poolclass=NullPool,
        connect_args={"timeout": _CONNECT_TIMEOUT_S, "server_settings": _LIMITS},
    )
    try:
        async with engine.connect() as connection, _only_one(connection):
            await connection.run_sync(_upgrade)
            await connection.commit()
    finally:
        await engine.dispose()


@asynccontextmanager
async def _only_one(connection: AsyncConnection) -> AsyncGenerator[None]:
    async with asyncio.timeout(_LOCK_WAIT_S):
        while not await connection.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK})")):
            await connection.rollback()
            await asyncio.sleep(0.1)
    # the lock belongs to the session, and is released when the session ends
    await connection.commit()
    yield


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(scripts()))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def main() -> None:
    """Migrate the database of the settings.

    If the migration fails, the process exits with status 1 and one line of text.
    """
    configure_logs("migrate", level="WARNING")
    settings = MigrateSettings.from_environment()
    try:
        asyncio.run(migrate(settings.database_url.get_secret_value()))
    except (OSError, DBAPIError, TimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        sys.stderr.write(f"the database could not be migrated: {reason}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
