"""Connects to ClickHouse, migrates its tables, inserts rows, and runs queries."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import clickhouse_connect
import structlog
from clickhouse_connect.driver import options
from clickhouse_connect.driver.asyncclient import AsyncClient
from clickhouse_connect.driver.exceptions import ClickHouseError, DatabaseError
from clickhouse_connect.driver.summary import QuerySummary

from telemetry import attempts, auto_rows, migrations, retention, shards, text_rows, tool_rows
from telemetry.rows import (
    CLOSING_COLUMNS,
    COLUMNS,
    COUNT_COLUMNS,
    POISON_COLUMNS,
    RowBatch,
    closing_columns,
    count_columns,
    event_columns,
    poison_columns,
)
from telemetry.settings import StoreSettings

log = structlog.get_logger(__name__)

# Errors that the driver raises if ClickHouse cannot be reached or fails.
STORE_ERRORS: tuple[type[Exception], ...] = (
    ClickHouseError,
    aiohttp.ClientError,
    OSError,
    TimeoutError,
)
_SCHEMA_MISSING = (60, 81)  # UNKNOWN_TABLE, UNKNOWN_DATABASE
_CONNECT_S = 5.0
_STATEMENT_S = 30.0
_WRITE_S = 60.0
# When a gateway sends its spool after an outage, one batch may have events of many months.
_INSERT_SETTINGS = {"max_partitions_per_insert_block": 0}


class Store:
    """The connection to one ClickHouse server. The first use opens it, and a loss reopens it.

    Args:
        settings: Settings of the store.
        has_retention: Whether to apply retention settings to the tables. Only processes that have
            the operator's settings may do so.

    Attributes:
        settings: Settings of the store.
    """

    def __init__(self, settings: StoreSettings, *, has_retention: bool = True) -> None:
        self.settings = settings
        self._has_retention = has_retention
        self._client: AsyncClient | None = None
        self._preparing = asyncio.Lock()

    async def prepare(self) -> AsyncClient:
        """Return the client. The first call connects and migrates the tables.

        Raises:
            STORE_ERRORS: ClickHouse cannot be reached. The caller may try again later.
            MigrationError: The schema cannot be migrated.
        """
        async with self._preparing:
            if self._client is None:
                client = await self._connect()
                try:
                    await self._migrate(client)
                except BaseException:
                    await client.close()
                    raise
                self._client = client
            return self._client

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def insert(self, batch: RowBatch) -> None:
        """Write a batch. On return, the server has acknowledged all of its rows.

        Raises:
            STORE_ERRORS: Any part of the rows may have been written. To insert the batch again is
                harmless.
        """
        client = await self.prepare()
        # A thread builds the columns, because 20,000 events take 0.1 s, which would block the
        # event loop.
        tables = await asyncio.to_thread(_tables, batch)
        try:
            async with asyncio.timeout(_STATEMENT_S):
                for table, columns, data in tables:
                    await self._insert(client, table, columns, data)
        except DatabaseError as error:
            # An empty server has replaced the old one, so the next call must migrate again.
            if error.code in _SCHEMA_MISSING:
                await self.close()
            raise

    async def query(self, sql: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run a query and return its rows as dictionaries.

        Raises:
            STORE_ERRORS: ClickHouse cannot be reached, is too slow, or refuses the query.
        """
        client = await self.prepare()
        async with asyncio.timeout(_STATEMENT_S):
            result = await client.query(sql, parameters=dict(parameters))
        return [dict(zip(result.column_names, row, strict=True)) for row in result.result_rows]

    async def write(self, sql: str, parameters: Mapping[str, Any]) -> int:
        """Run an INSERT ... SELECT, and return the number of written rows that the server reports.

        Raises:
            STORE_ERRORS: ClickHouse cannot be reached, is too slow, or refuses the statement. Any
                part of the rows may have been written.
        """
        client = await self.prepare()
        async with asyncio.timeout(_WRITE_S):
            summary = await client.command(sql, parameters=dict(parameters))
        written = summary.written_rows if isinstance(summary, QuerySummary) else 0
        return max(0, written)

    async def delete(self, table: str, condition: str) -> None:
        """Start to delete rows on all shards and replicas. The servers delete in the background.

        Raises:
            STORE_ERRORS: ClickHouse cannot be reached, is too slow, or refuses the statement.
        """
        client = await self.prepare()
        sql = (
            f"ALTER TABLE {self.local_database}.{table} {{{{on_cluster}}}} DELETE WHERE {condition}"
        )
        async with asyncio.timeout(_STATEMENT_S):
            await client.command(migrations.fill(sql, self._variables()))

    async def end_failing_deletes(self, table: str) -> None:
        """Cancel, on all shards, background deletions that fail repeatedly.

        Raises:
            STORE_ERRORS: ClickHouse cannot be reached, is too slow, or refuses the statement.
        """
        client = await self.prepare()
        sql = (
            "KILL MUTATION {{on_cluster}} "
            f"WHERE database = '{self.local_database}' AND table = '{table}' AND NOT is_done"
            " AND latest_fail_reason != '' AND command LIKE '%DELETE WHERE%'"
        )
        async with asyncio.timeout(_STATEMENT_S):
            await client.command(migrations.fill(sql, self._variables()))

    async def raw(self, sql: str, parameters: Mapping[str, Any], file_format: str) -> bytes:
        """Run a query and return its rows as a file in a format of ClickHouse.

        Raises:
            STORE_ERRORS: ClickHouse cannot be reached, is too slow, or refuses the query.
        """
        client = await self.prepare()
        async with asyncio.timeout(_STATEMENT_S):
            return await client.raw_query(sql, parameters=dict(parameters), fmt=file_format)

    async def _insert(
        self,
        client: AsyncClient,
        table: str,
        columns: Mapping[str, str],
        data: Sequence[Sequence[Any]],
    ) -> None:
        await client.insert(
            table,
            data,
            column_names=list(columns),
            column_type_names=list(columns.values()),
            column_oriented=True,
            settings=_INSERT_SETTINGS,
        )

    async def _connect(self) -> AsyncClient:
        # Rows are inserted as lists, which need neither pandas nor numpy. Without this loop, the
        # driver's first insert would import both, which costs 100 MB and over a second of CPU time.
        for name in ("np", "pd", "pd_time_test"):
            setattr(options, name, None)
        url = urlsplit(self.settings.clickhouse_url)
        async with asyncio.timeout(_CONNECT_S):
            client = await clickhouse_connect.get_async_client(
                host=url.hostname,
                port=url.port or (8443 if url.scheme == "https" else 8123),
                secure=url.scheme == "https",
                username=self.settings.clickhouse_user or None,
                password=self.settings.clickhouse_password.get_secret_value(),
                connect_timeout=_CONNECT_S,
                # The longest of all timeouts. Each statement has a shorter one.
                send_receive_timeout=_WRITE_S,
                settings=shards.session(
                    is_sharded=self.settings.clickhouse_is_sharded,
                    is_replicated=bool(self.settings.clickhouse_engine_prefix),
                ),
            )
        try:
            for database in self._databases:
                async with asyncio.timeout(_CONNECT_S):
                    await client.command(
                        f"CREATE DATABASE IF NOT EXISTS {database} "
                        + self._variables()["on_cluster"]
                    )
        except BaseException:
            await client.close()
            raise
        return client

    async def _migrate(self, client: AsyncClient) -> None:
        """Migrate the tables, and then select the database that queries use."""
        client.database = self._databases[0]
        folder = migrations.migrations_folder()
        database, variables = _Migrating(client), self._variables()
        await migrations.apply(database, migrations.load(folder), variables)
        if self.settings.clickhouse_is_sharded:
            cluster, name = self.settings.clickhouse_cluster, self.settings.clickhouse_database
            await self._change(database, await shards.needed(database, cluster, name))
        if self._has_retention:
            # The check for missing rollups must read the tables over all shards. A check of one
            # shard could miss events of another, which would be deleted without being summed.
            todo = await retention.needed(database, self.settings, self.local_database)
            await self._change(database, todo)
        client.database = self._databases[-1]

    async def _change(self, database: "_Migrating", statements: Sequence[str]) -> None:
        for statement in statements:
            await database.command(migrations.fill(statement, self._variables()))
            log.info("table_changed", statement=statement)

    @property
    def local_database(self) -> str:
        """The database with the tables of this server only."""
        return self._databases[0]

    @property
    def _databases(self) -> list[str]:
        """The databases for migrations and for queries. They differ only on a sharded cluster."""
        name = self.settings.clickhouse_database
        return (
            [shards.local_database(name), name] if self.settings.clickhouse_is_sharded else [name]
        )

    def _variables(self) -> dict[str, str]:
        cluster = self.settings.clickhouse_cluster
        return {
            "on_cluster": f"ON CLUSTER '{cluster}'" if cluster else "",
            "engine_prefix": self.settings.clickhouse_engine_prefix,
        }


def _tables(batch: RowBatch) -> list[tuple[str, Mapping[str, str], Sequence[Sequence[Any]]]]:
    """Return for each table to insert into: name, column -> type, and one list per column."""
    found: list[tuple[str, Mapping[str, str], Sequence[Sequence[Any]]]] = [
        ("requests", COLUMNS, event_columns(batch.events)),
        ("attempts", attempts.COLUMNS, attempts.columns(batch.events)),
        ("closings", CLOSING_COLUMNS, closing_columns(batch.closings)),
        ("token_counts", COUNT_COLUMNS, count_columns(batch.counts)),
        ("auto_choices", auto_rows.CHOICE_COLUMNS, auto_rows.choice_columns(batch.events)),
        ("feedback", auto_rows.FEEDBACK_COLUMNS, auto_rows.feedback_columns(batch.judgements)),
        ("tool_calls", tool_rows.COLUMNS, tool_rows.columns(batch.tool_calls)),
        ("texts", text_rows.COLUMNS, text_rows.columns(batch.texts)),
        ("poison", POISON_COLUMNS, poison_columns(batch.poisons)),
    ]
    return [(table, columns, data) for table, columns, data in found if data and data[0]]


class _Migrating:
    """A client with the interface of `telemetry.migrations.TraceDatabase`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def command(self, sql: str) -> object:
        """Run a statement that returns no rows."""
        async with asyncio.timeout(_STATEMENT_S):
            return await self._client.command(sql)

    async def rows(self, sql: str) -> Sequence[Sequence[object]]:
        """Return the rows of a query."""
        async with asyncio.timeout(_STATEMENT_S):
            return (await self._client.query(sql)).result_rows
