"""Triggers of the database record each change that readers of the state have to hear of."""

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.watch.rows import KINDS
from tests.integration.conftest import PostgresServer

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

_TRIGGERS = "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal"


async def test_a_change_of_any_column_that_readers_get_is_recorded(
    postgres_server: PostgresServer,
) -> None:
    await postgres_server.execute(f"CREATE DATABASE triggers TEMPLATE {postgres_server.template}")
    engine = create_async_engine(postgres_server.url("triggers"))
    try:
        async with engine.connect() as connection:
            found = {
                str(name): str(said) for name, said in await connection.execute(text(_TRIGGERS))
            }
    finally:
        await engine.dispose()
    for kind in KINDS.values():
        compared = found[f"{kind.table.name}_changed_by_update"]
        if "old.* IS DISTINCT FROM new.*" not in compared:
            missing = {it.name for it in kind.columns if f"old.{it.name}" not in compared}
            assert missing <= {kind.key.name}, f"{kind.name}: no reader hears of a change of these"
