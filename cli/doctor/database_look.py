"""Reads schema, rights and locks from PostgreSQL, without writing."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from cli.doctor.installation import DatabaseFacts

_TIMEOUT_S = 5
_RIGHTS = """
SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p')
  AND NOT has_table_privilege(c.oid, 'SELECT, INSERT, UPDATE, DELETE')
ORDER BY relname
"""
# Sessions that other sessions wait for, with the age of their open transactions.
_HOLDERS = """
SELECT DISTINCT s.pid, coalesce(nullif(s.application_name, ''), 'a session') AS name, s.state,
       extract(epoch FROM now() - coalesce(s.xact_start, s.backend_start))::float8 AS age_s
FROM pg_stat_activity w, unnest(pg_blocking_pids(w.pid)) AS blocker
JOIN pg_stat_activity s ON s.pid = blocker
WHERE cardinality(pg_blocking_pids(w.pid)) > 0
UNION
SELECT s.pid, coalesce(nullif(s.application_name, ''), 'a session'), s.state,
       extract(epoch FROM now() - s.state_change)::float8
FROM pg_stat_activity s
WHERE s.datname = current_database() AND s.state LIKE 'idle in transaction%'
"""


async def look_at_database(url: str) -> DatabaseFacts:
    """Return the facts, with `problem` set if PostgreSQL does not answer in time."""
    plain = "postgresql://" + url.partition("://")[2]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            connection: Any = await asyncpg.connect(plain, timeout=_TIMEOUT_S)
            try:
                return await _read_facts(connection)
            finally:
                await connection.close(timeout=1.0)
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError) as error:
        return DatabaseFacts(problem=str(error).split("\n")[0][:160] or type(error).__name__)


async def _read_facts(connection: Any) -> DatabaseFacts:
    began_s = time.time()
    told_s = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    ahead_s = told_s - (began_s + time.time()) / 2
    has_schema = await connection.fetchval("SELECT to_regclass('public.alembic_version')")
    revision = has_schema and await connection.fetchval("SELECT version_num FROM alembic_version")
    rights = await connection.fetch(_RIGHTS)
    holders = await connection.fetch(_HOLDERS)
    known = revisions()
    return DatabaseFacts(
        revision=revision or "",
        newest=known[-1],
        is_older=revision in known[:-1],
        missing_rights=[row["relname"] for row in rights],
        holders=[
            (f"{row['name']} (pid {row['pid']}, {row['state']})", row["age_s"] or 0.0)
            for row in holders
        ],
        clock_ahead_s=ahead_s,
    )


def revisions() -> Sequence[str]:
    """Return the revisions of this program's schema, the newest last."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    from control_plane.migrate import scripts

    config = Config()
    config.set_main_option("script_location", str(scripts()))
    found = ScriptDirectory.from_config(config).walk_revisions()
    return [script.revision for script in found][::-1]
