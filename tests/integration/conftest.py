"""Real servers for the integration tests, started by the launchers of the local stack."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from cli.stack import postgres
from control_plane.migrate import migrate
from sluice.process import ChildProcess, ProcessSpec

_DATABASES = count(1)


@dataclass(frozen=True)
class PostgresServer:
    """A running PostgreSQL; `template` is a migrated database to clone."""

    home: Path
    port: int
    spec: ProcessSpec
    template: str

    def url(self, database: str) -> str:
        return postgres.database_url(self.home, self.port, database)

    async def execute(self, statement: str, database: str = "postgres") -> None:
        connection = await asyncpg.connect(
            user="postgres",
            database=database,
            host=str(postgres.locate(self.home).sockets),
            port=self.port,
            timeout=5,
        )
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres_server() -> AsyncIterator[PostgresServer]:
    """One server per run, data in a folder that its user can enter, gone with the run."""
    home = Path(tempfile.mkdtemp(prefix="sluice-test-", dir="/tmp"))
    home.chmod(0o711)
    try:
        await postgres.prepare_postgres(home, fsync=False)
        spec = postgres.postgres_spec(home, 5432, log_file=home / "postgres.log", fsync=False)
        child = await ChildProcess.start(spec)
        try:
            await child.wait_ready(30)
            await migrate(postgres.database_url(home, 5432))
            yield PostgresServer(home, 5432, spec, postgres.DATABASE)
        finally:
            await child.stop()
    finally:
        shutil.rmtree(home)


@pytest_asyncio.fixture
async def database_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """A migrated database of the test's own."""
    name = f"test_{next(_DATABASES)}"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    yield postgres_server.url(name)
    await postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")
