"""An empty database in a running trace store, for tests that ask it directly."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from telemetry.settings import StoreSettings
from telemetry.store import Store

# By address, databases with all tables and no rows: migrations take a second of a processor.
_EMPTY: dict[str, list[str]] = {}
_TABLES = (
    "SELECT name FROM system.tables WHERE database = currentDatabase()"
    " AND engine LIKE '%MergeTree' AND name != 'schema_migrations'"
)


@asynccontextmanager
async def empty_store(address: str) -> AsyncGenerator[Store]:
    """Yield the service's own client, on a database that nobody else uses."""
    store = Store(
        StoreSettings(
            clickhouse_url=f"http://{address}", clickhouse_database=f"test_{os.urandom(6).hex()}"
        )
    )
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def emptied_store(address: str) -> AsyncGenerator[Store]:
    """Yield such a client on tables that were used before, for tests that leave them as they are."""
    names = _EMPTY.setdefault(address, [])
    name = names.pop() if names else f"test_{os.urandom(6).hex()}"
    store = Store(StoreSettings(clickhouse_url=f"http://{address}", clickhouse_database=name))
    try:
        yield store
        for row in await store.query(_TABLES, {}):
            await store.write(f"TRUNCATE TABLE `{row['name']}`", {})
        names.append(name)
    finally:
        await store.close()
