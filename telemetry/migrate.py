"""`python -m telemetry.migrate`: migrates ClickHouse's schema and exits.

The service itself also migrates the schema when it first connects to ClickHouse. This command is
for deployments with a separate migration step. Only the service applies retention settings. A
migration step may lack the operator's settings, and the default settings would delete rows.
"""

import asyncio
import sys

from sluice.logs import configure_logs
from telemetry.migrations import MigrationError
from telemetry.settings import MigrateSettings
from telemetry.store import STORE_ERRORS, Store


async def _migrate(settings: MigrateSettings) -> None:
    store = Store(settings, has_retention=False)
    try:
        await store.prepare()
    finally:
        await store.close()


def main() -> None:
    """Apply missing migrations. A failure prints one line of text and exits with status 1."""
    settings = MigrateSettings.from_environment()
    configure_logs("telemetry-migrate")
    try:
        asyncio.run(_migrate(settings))
    except (*STORE_ERRORS, MigrationError) as error:
        sys.exit(f"{settings.clickhouse_url} was not migrated: {error}")


if __name__ == "__main__":
    main()
