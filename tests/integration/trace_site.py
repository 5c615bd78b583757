"""An empty database in a running trace store, for tests that ask it directly."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from telemetry.settings import StoreSettings
from telemetry.store import Store


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
