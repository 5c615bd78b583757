"""Migrations only add: processes of the last release go on with the schema of this one.

While a release is rolled out, old and new control planes run side by side on one database, and a
roll-back of the release finds the new schema. So nothing that old code reads may go or change, and
nothing that it writes may be refused.
"""

from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.migrate import scripts

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

# Commit and schema of the release before this one; to be moved on when this one is out.
_, LAST_RELEASE = (scripts().parent / "last_release").read_text().split()
_BASE = "ab" * 32
# What the last release writes, in its own words: no columns that came later.
_OLD_WRITES = (
    "INSERT INTO tiers (id, priority, rpm) VALUES ('{n}', 1, 60)",
    "INSERT INTO tenants (id, name, tier_id, cache_salt, weight) VALUES ('{n}', '', '{n}', '', 1)",
    "INSERT INTO api_keys (id, tenant_id, secret_sha256) VALUES ('{n}', '{n}', '{n}')",
    "INSERT INTO bases (digest, name, context_tokens_max) VALUES ('{n}', 'b', 9)",
    "INSERT INTO pools (id, base_digest, engine, replicas_wanted, engine_options)"
    " VALUES ('{n}', '{n}', 'sim', 1, '{{}}')",
    "INSERT INTO models (id, base_digest, created_at_unix_s, pool_id) VALUES ('{n}', '{n}', 1, '{n}')",
    "INSERT INTO nodes (id, cpu_count, memory_bytes) VALUES ('{n}', 2, 8)",
    "INSERT INTO routers (id, address) VALUES ('{n}', '127.0.0.1:1')",
    "INSERT INTO cells (id, pool_id) VALUES ('{n}', '{n}')",
    "INSERT INTO replicas (id, pool_id, cell_id, node_id, state) VALUES ('{n}', '{n}', '{n}', '{n}', 1)",
    "UPDATE replicas SET state = 2, grpc_address = '127.0.0.1:2' WHERE id = '{n}'",
    "UPDATE nodes SET seen_at = now() WHERE id = '{n}'",
    "UPDATE models SET release = 'v2' WHERE id = '{n}'",
    "DELETE FROM api_keys WHERE id = '{n}'",
)

Columns = dict[str, tuple[str, bool]]


def _schema(connection: Connection) -> dict[str, Columns]:
    """Return type and nullability of every column, by table."""
    found = inspect(connection)
    return {
        table: {c["name"]: (str(c["type"]), c["nullable"]) for c in found.get_columns(table)}
        for table in found.get_table_names()
        if table != "alembic_version"
    }


def _rules(connection: Connection) -> dict[str, set[str]]:
    """Return what rows of a table must fulfil, by table: checks, references, uniqueness."""
    found = inspect(connection)
    rules: dict[str, set[str]] = {}
    for table in found.get_table_names():
        rules[table] = {
            *(f"check {check['sqltext']}" for check in found.get_check_constraints(table)),
            *(f"unique {key['column_names']}" for key in found.get_unique_constraints(table)),
            *(
                f"{key['constrained_columns']} in {key['referred_table']}"
                for key in found.get_foreign_keys(table)
            ),
        }
    return rules


def _needed(connection: Connection, table: str) -> set[str]:
    """Return the columns of a table that every insert must name."""
    return {
        column["name"]
        for column in inspect(connection).get_columns(table)
        if not column["nullable"] and column["default"] is None and not column.get("identity")
    }


def _upgrade(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(scripts()))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


async def test_the_last_release_goes_on_with_the_new_schema(postgres_server) -> None:
    await postgres_server.execute("CREATE DATABASE last_release")
    engine = create_async_engine(postgres_server.url("last_release"))

    async def run(work: Any, *arguments: Any) -> Any:
        async with engine.begin() as connection:
            return await connection.run_sync(work, *arguments)

    async def write(name: str) -> None:
        async with engine.begin() as connection:
            for statement in _OLD_WRITES:
                await connection.execute(text(statement.format(n=name)))

    try:
        await run(_upgrade, LAST_RELEASE)
        old, old_rules = await run(_schema), await run(_rules)
        old_needed = {table: await run(_needed, table) for table in old}
        await write("before")
        await run(_upgrade, "head")
        new, new_rules = await run(_schema), await run(_rules)
        for table, columns in old.items():
            kept = {name: new.get(table, {}).get(name) for name in columns}
            assert kept == columns, f"{table}: old code reads these columns"
            assert await run(_needed, table) == old_needed[table], f"{table}: old code inserts"
            ours = [
                rule for rule in new_rules[table] - old_rules[table] if _is_about(rule, columns)
            ]
            assert ours == [], f"{table}: rows of old code may not fulfil this"
        await write("after")
        async with engine.begin() as connection:
            rows = await connection.execute(text("SELECT id FROM replicas ORDER BY id"))
            assert list(rows.scalars()) == ["after", "before"]
    finally:
        await engine.dispose()


async def test_a_migration_that_takes_something_away_is_found(postgres_server) -> None:
    """The test above can fail: what it looks for is seen."""
    await postgres_server.execute("CREATE DATABASE taken_away")
    engine = create_async_engine(postgres_server.url("taken_away"))
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade, LAST_RELEASE)
        async with engine.begin() as connection:
            before = await connection.run_sync(_schema)
            for change in (
                "ALTER TABLE tiers ALTER COLUMN rpm TYPE bigint",
                "ALTER TABLE nodes ADD COLUMN zone text NOT NULL",
                "ALTER TABLE routers ADD CHECK (address <> '')",
            ):
                await connection.execute(text(change))
            after, rules = await connection.run_sync(_schema), await connection.run_sync(_rules)
            assert after["tiers"]["rpm"] != before["tiers"]["rpm"]
            assert "zone" in await connection.run_sync(_needed, "nodes")
            assert any(_is_about(rule, before["routers"]) for rule in rules["routers"])
        with pytest.raises(IntegrityError):
            async with engine.begin() as connection:
                await connection.execute(text("INSERT INTO nodes (id) VALUES ('n')"))
    finally:
        await engine.dispose()


def _is_about(rule: str, columns: Columns) -> bool:
    """Return whether a rule names an old column and none that is new: those have defaults."""
    words = {word.strip("[]'(),\"") for word in rule.split()}
    return bool(words & columns.keys())
