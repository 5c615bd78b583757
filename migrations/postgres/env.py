"""Run migrations on the connection that control_plane.migrate hands over, or on one of our own."""

import asyncio
import os

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from control_plane.schema import metadata


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
    with context.begin_transaction():
        context.run_migrations()


async def _connect_and_migrate() -> None:
    engine = create_async_engine(os.environ["CONTROL_PLANE__DATABASE_URL"], poolclass=NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(_migrate)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is None:
    asyncio.run(_connect_and_migrate())
else:
    _migrate(given)
