"""The launcher of PostgreSQL, and the migrations."""

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from cli.stack import postgres
from control_plane.database import Database, DatabaseDownError
from control_plane.migrate import scripts
from control_plane.models.model import release_of_digests
from control_plane.schema import metadata
from sluice import accounts
from sluice.process import ChildProcess

pytestmark = pytest.mark.real


@pytest.fixture
def open_home():
    """A home that the server's user can enter, whoever we are."""
    home = Path(tempfile.mkdtemp(prefix="sluice-test-", dir="/tmp"))
    home.chmod(0o711)
    yield home
    shutil.rmtree(home)


async def _query(home: Path, statement: str) -> object:
    connection = await asyncpg.connect(
        user="postgres", database="sluice", host=str(postgres.locate(home).sockets), port=5432
    )
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def _run(home: Path, *statements: str) -> list[object]:
    await postgres.prepare_postgres(home, fsync=False)
    spec = postgres.postgres_spec(home, 5432, log_file=home / "log", fsync=False)
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(60)
        return [await _query(home, statement) for statement in statements]
    finally:
        await child.stop()
        assert child.status == 0
        assert not list(postgres.locate(home).sockets.glob(".s.*"))


async def test_data_survive_a_restart_and_a_stale_lock(open_home) -> None:
    await _run(open_home, "CREATE TABLE kept (n int)", "INSERT INTO kept VALUES (7)")
    lock = postgres.locate(open_home).data / "postmaster.pid"
    lock.write_text(f"{os.getpid()}\n")  # of a killed server, whose number now is somebody else's
    assert await _run(open_home, "SELECT n FROM kept") == [7]


async def test_other_users_of_the_machine_are_kept_out(open_home) -> None:
    await postgres.prepare_postgres(open_home, fsync=False)
    place = postgres.locate(open_home)
    assert place.sockets.stat().st_mode & 0o007 == 0
    assert (place.data / "pg_hba.conf").read_text() == "local all all peer map=owners\n"
    if os.geteuid() != 0:
        return  # nobody else to try it as
    stranger = pwd.getpwnam("daemon")
    spec = postgres.postgres_spec(open_home, 5432, log_file=open_home / "log", fsync=False)
    child = await ChildProcess.start(spec)
    attempt = [
        str(place.programs / "psql"),
        *("-h", str(place.sockets), "-p", "5432", "-U", "postgres", "-c", "SELECT 1", "sluice"),
    ]
    try:
        await child.wait_ready(60)
        for mode, why in ((0o750, "Permission denied"), (0o755, "Peer authentication failed")):
            place.sockets.parent.chmod(mode)
            place.sockets.chmod(mode)  # each of the two locks alone keeps a stranger out
            run = await asyncio.to_thread(
                subprocess.run,
                attempt,
                user=stranger.pw_uid,
                group=stranger.pw_gid,
                extra_groups=[],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert run.returncode != 0
            assert why in run.stderr
    finally:
        await child.stop()


async def test_a_home_that_the_server_cannot_enter_keeps_a_pointer(
    tmp_path, monkeypatch, open_home
) -> None:
    if os.geteuid() != 0:  # then the server is us, and lives in the home
        assert postgres.locate(tmp_path).data == tmp_path / "data" / "postgres" / "data"
        return
    tmp_path.chmod(0o700)
    monkeypatch.setattr(postgres, "_SYSTEM_ROOT", open_home / "system")
    (open_home / "system").mkdir(mode=0o755)
    await _run(tmp_path, "CREATE TABLE kept (n int)", "INSERT INTO kept VALUES (7)")
    data = postgres.locate(tmp_path).data
    assert data.is_relative_to(open_home / "system")
    assert not (tmp_path / "data" / "postgres").exists()
    assert (tmp_path / "data" / "postgres.path").read_text().strip() == str(data.parent)
    assert await _run(tmp_path, "SELECT n FROM kept") == [7]


async def test_a_wheel_that_the_server_cannot_enter_is_copied_once(monkeypatch, open_home) -> None:
    if os.geteuid() != 0:  # then the server is us, and runs from the wheel
        assert "site-packages" in str(postgres.locate(open_home).programs)
        return
    real = postgres.can_traverse
    monkeypatch.setattr(postgres, "_SYSTEM_ROOT", open_home / "system")
    monkeypatch.setattr(
        postgres,
        "can_traverse",
        lambda path, uid, gid: "site-packages" not in str(path) and real(path, uid, gid),
    )
    assert await _run(open_home, "SELECT 1") == [1]
    programs = postgres.locate(open_home).programs
    assert programs.is_relative_to(open_home / "system")
    stamp = programs.stat().st_ctime_ns
    assert await _run(open_home, "SELECT 1") == [1]
    assert programs.stat().st_ctime_ns == stamp
    assert len(list((open_home / "system").iterdir())) == 1


def test_traverse_rights_follow_owner_group_and_mode(open_home) -> None:
    inner = open_home / "a" / "b"
    inner.mkdir(parents=True)
    status = inner.stat()
    stranger, group = status.st_uid + 1, status.st_gid + 1
    for mode, uid, gid, expected in (
        (0o711, stranger, group, True),
        (0o710, stranger, group, False),
        (0o710, stranger, status.st_gid, True),
        (0o700, stranger, status.st_gid, False),
        (0o700, status.st_uid, group, True),
        (0o077, status.st_uid, status.st_gid, False),
    ):
        (open_home / "a").chmod(mode)
        assert accounts.can_traverse(inner, uid, gid) == expected, oct(mode)
        assert accounts.can_traverse(open_home / "a" / "new" / "x", uid, gid) == expected
    (open_home / "a").chmod(0o755)


async def test_a_long_home_gets_a_short_socket(open_home) -> None:
    home = open_home / ("long" * 30)
    home.mkdir()
    assert await _run(home, "SELECT 1") == [1]
    assert str(postgres.locate(home).sockets).startswith("/tmp/sluice-")
    postgres.locate(home).sockets.rmdir()


async def test_a_missing_program_is_named(open_home, monkeypatch) -> None:
    monkeypatch.setenv("PG_BIN", str(open_home))
    with pytest.raises(RuntimeError, match="PG_BIN"):
        postgres.locate(open_home)


async def test_a_failing_initdb_leaves_nothing_half_made(open_home, monkeypatch) -> None:
    programs = open_home / "bin"
    programs.mkdir()
    for name, script in (
        ("initdb", "#!/bin/sh\necho no space left >&2; exit 3\n"),
        ("postgres", ""),
    ):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PG_BIN", str(programs))
    with pytest.raises(RuntimeError, match="status 3: no space left"):
        await postgres.prepare_postgres(open_home)
    assert [p.name for p in (open_home / "data" / "postgres").iterdir()] == ["sockets"]


async def test_the_migrated_schema_is_the_declared_one(database_url) -> None:
    engine = create_async_engine(database_url)
    async with engine.connect() as connection:
        found = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"compare_server_default": True}), metadata
            )
        )
    await engine.dispose()
    assert found == []


async def test_models_of_the_release_before_names_have_releases(postgres_server) -> None:
    """Revision 0004 finds models without a release's name; who watches must hear of it all."""
    base, adapter = "ab" * 32, "cd" * 32
    await postgres_server.execute("CREATE DATABASE before_names")
    engine = create_async_engine(postgres_server.url("before_names"))

    async def scalars(query: str) -> list[object]:
        async with engine.connect() as connection:
            return list((await connection.execute(text(query))).scalars())

    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade_to, "0003")
            await connection.execute(text(f"INSERT INTO bases VALUES ('{base}', 'b', 9)"))
            await connection.execute(
                text(f"INSERT INTO pools (id, base_digest, engine) VALUES ('p', '{base}', 'sim')")
            )
            await connection.execute(
                text(
                    "INSERT INTO models (id, base_digest, adapter_digest, release,"
                    " created_at_unix_s, pool_id) VALUES "
                    f"('plain', '{base}', '', '', 1, 'p'), ('named', '{base}', '', 'v1', 1, 'p'),"
                    f" ('tuned', '{base}', '{adapter}', '', 1, 'p')"
                )
            )
        (known,) = await scalars("SELECT max(version) FROM changes")
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade_to, "head")
        assert await scalars("SELECT id FROM releases ORDER BY id") == [
            "named@v1",
            f"plain@{release_of_digests(base, '')}",
            f"tuned@{release_of_digests(base, adapter)}",
        ]
        query = "SELECT id FROM releases WHERE id = model_id || '@' || (SELECT release FROM models"
        assert len(await scalars(f"{query} WHERE models.id = model_id) AND pool_id = 'p'")) == 3
        told = await scalars(f"SELECT kind FROM changes WHERE version > {known}")
        assert [kind for kind in told if kind != "schema"] == ["models", "models"]
        async with engine.begin() as connection:  # and back, for a roll-back of the release
            await connection.run_sync(_downgrade_to, "0003")
        assert await scalars("SELECT id FROM models ORDER BY id") == ["named", "plain", "tuned"]
    finally:
        await engine.dispose()


async def test_rows_of_the_release_before_audit_stay(postgres_server) -> None:
    """Revision 0005 only adds; and a roll-back of the release keeps what was there before."""
    base = "ab" * 32
    await postgres_server.execute("CREATE DATABASE before_audit")
    engine = create_async_engine(postgres_server.url("before_audit"))

    async def run(*statements: str) -> list[object]:
        async with engine.begin() as connection:
            for statement in statements:
                done = await connection.execute(text(statement))
            return [tuple(row) for row in done] if done.returns_rows else []

    kept = "SELECT t.id, t.tier_id, k.id, k.rpm, m.id FROM tenants t, api_keys k, models m"
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade_to, "0004")
        await run(
            "INSERT INTO tiers (id) VALUES ('gold')",
            "INSERT INTO tenants (id, tier_id, cache_salt, weight) VALUES ('acme', 'gold', '', 1)",
            "INSERT INTO api_keys (id, tenant_id, secret_sha256, rpm) VALUES ('k', 'acme', 'x', 5)",
            f"INSERT INTO bases VALUES ('{base}', 'b', 9)",
            f"INSERT INTO pools (id, base_digest, engine) VALUES ('p', '{base}', 'sim')",
            "INSERT INTO models (id, base_digest, created_at_unix_s, pool_id)"
            f" VALUES ('m', '{base}', 1, 'p')",
        )
        before = await run(kept)
        (told,) = await run("SELECT max(version) FROM changes")
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade_to, "0005")
        assert await run(kept) == before == [("acme", "gold", "k", 5, "m")]
        assert await run("SELECT max(version) FROM changes") == [told], "readers need not hear"
        await run(
            "INSERT INTO admin_keys (id, role, tenant_id, secret_sha256)"
            " VALUES ('a', 'publisher', 'acme', 'y')"
        )
        with pytest.raises(IntegrityError, match="tenant_of_publisher"):
            await run(
                "INSERT INTO admin_keys (id, role, secret_sha256) VALUES ('b', 'publisher', 'z')"
            )
        async with engine.begin() as connection:
            await connection.run_sync(_downgrade_to, "0004")
        assert await run(kept) == before
    finally:
        await engine.dispose()


def _alembic(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts()))
    config.attributes["connection"] = connection
    return config


def _upgrade_to(connection: Connection, revision: str) -> None:
    command.upgrade(_alembic(connection), revision)


def _downgrade_to(connection: Connection, revision: str) -> None:
    command.downgrade(_alembic(connection), revision)


async def test_migrations_at_once_in_several_processes(postgres_server, tmp_path) -> None:
    await postgres_server.execute("CREATE DATABASE fresh")
    environment = {
        "PATH": "/usr/bin:/bin",
        "CONTROL_PLANE__DATABASE_URL": postgres_server.url("fresh"),
        "CONTROL_PLANE__GRPC_ADDRESS": "127.0.0.1:1",
    }
    command = [sys.executable, "-m", "control_plane.migrate"]
    processes = [await asyncio.create_subprocess_exec(*command, env=environment) for _ in range(3)]
    assert [await asyncio.wait_for(p.wait(), 60) for p in processes] == [0, 0, 0]
    await postgres_server.execute("SELECT 1 FROM replicas, changes", "fresh")


async def test_a_migration_without_a_database_fails_in_one_line(tmp_path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "control_plane.migrate"),
        env={"CONTROL_PLANE__DATABASE_URL": f"postgresql+asyncpg://x@/x?host={tmp_path}"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert errors.decode().startswith("the database could not be migrated: ")
    assert errors.decode().count("\n") == 1
    assert scripts().name == "postgres"


async def test_a_database_that_is_gone_is_an_outage_of_it(postgres_server) -> None:
    await postgres_server.execute("CREATE DATABASE dropped")
    database = Database(postgres_server.url("dropped"))

    async def ask(query: str) -> None:
        await database.run(lambda connection: connection.execute(text(query)), deadline_s=0.3)

    try:
        await ask("SELECT 1")
        with pytest.raises(DatabaseDownError) as unmigrated:
            await ask("SELECT * FROM tiers")
        assert "tiers" in unmigrated.value.reason
        await postgres_server.execute("DROP DATABASE dropped WITH (FORCE)")
        with pytest.raises(DatabaseDownError) as gone:
            await ask("SELECT 1")
        assert gone.value.status == 503
        await postgres_server.execute("CREATE DATABASE dropped")
        await ask("SELECT 1")
    finally:
        await database.close()
        await postgres_server.execute("DROP DATABASE IF EXISTS dropped WITH (FORCE)")
