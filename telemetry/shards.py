"""Creates the tables of a cluster with several shards.

Each shard has its tables in a separate database. Queries use `Distributed` tables, which cover all
shards. All rows of a tenant are on one shard. Rows that replace one another are also on one shard.
So a shard can evaluate `FINAL` and `IN (SELECT ...)` without rows of other shards.
"""

from collections.abc import Iterable, Mapping, Sequence

from telemetry.migrations import TraceDatabase

# IN over distributed tables reads only rows of the same shard. An insert returns when all shards
# have stored their rows.
SESSION: Mapping[str, str | int] = {
    "distributed_product_mode": "local",
    "distributed_foreground_insert": 1,
}
# Rollups rely on reads that include all rows acknowledged two minutes before.
REPLICATED: Mapping[str, str | int] = {
    "insert_quorum": "auto",
    "insert_quorum_parallel": 0,
    "select_sequential_consistency": 1,
}
_REPLICAS_OF_SHARDS: Mapping[str, str | int] = {
    "max_replica_delay_for_distributed_queries": 30,
    "fallback_to_stale_replicas_for_distributed_queries": 0,
}
_TABLES = """
SELECT name, sorting_key FROM system.tables
WHERE database = '{database}' AND engine LIKE '%MergeTree' AND name != 'schema_migrations'
ORDER BY name
"""
_COLUMNS = """
SELECT database, table, name, type FROM system.columns
WHERE database IN ('{local}', '{database}') ORDER BY database, table, position
"""


def session(*, is_sharded: bool, is_replicated: bool) -> dict[str, str | int]:
    """Return the settings of each statement on such a cluster, or none for a single server."""
    found = dict(SESSION) if is_sharded else {}
    if is_replicated:
        found |= REPLICATED
        found |= _REPLICAS_OF_SHARDS if is_sharded else {}
    return found


def local_database(database: str) -> str:
    """Return the name of the database that has a shard's own tables."""
    return f"{database}_shard"


def sharding_key(sorting_key: str) -> str:
    """Return a table's sharding key. Rows with equal sorting keys replace one another."""
    columns = [column.strip() for column in sorting_key.split(",")]
    return f"cityHash64({'tenant_id' if 'tenant_id' in columns else ', '.join(columns)})"


def statement(cluster: str, database: str, table: str, sorting_key: str) -> str:
    """Return the statement that creates or recreates a distributed table."""
    local = local_database(database)
    return (
        f"CREATE OR REPLACE TABLE {database}.{table} ON CLUSTER '{cluster}' AS {local}.{table} "
        f"ENGINE = Distributed('{cluster}', '{local}', '{table}', {sharding_key(sorting_key)})"
    )


async def needed(database: TraceDatabase, cluster: str, name: str) -> list[str]:
    """Return the statements for distributed tables that are missing or lack columns."""
    local = local_database(name)
    columns = await database.rows(_COLUMNS.format(local=local, database=name))
    tables = await database.rows(_TABLES.format(database=local))
    return [
        statement(cluster, name, str(table), str(key))
        for table, key in tables
        if _of(columns, local, table) != _of(columns, name, table)
    ]


def _of(
    columns: Iterable[Sequence[object]], database: str, table: object
) -> list[Sequence[object]]:
    return [tuple(rest) for where, which, *rest in columns if (where, which) == (database, table)]
