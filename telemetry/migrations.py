"""Migrates the schema of ClickHouse by numbered SQL files, each applied once and recorded.

ClickHouse has no transactional DDL. So every statement of a file may be repeated without harm, and
a migration is recorded only after its last statement.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

_FILE_NAME = re.compile(r"(\d{4})_(\w+)\.sql", re.ASCII)
_VARIABLE = re.compile(r"\{\{(\w+)\}\}")
_COMMENT = re.compile(r"^\s*--.*$", re.MULTILINE)
_HISTORY = """
CREATE TABLE IF NOT EXISTS schema_migrations {{on_cluster}}
(version UInt32, name String, checksum String, applied_at DateTime64(3, 'UTC') DEFAULT now64(3))
ENGINE = {{engine_prefix}}ReplacingMergeTree(applied_at) ORDER BY version
"""


class MigrationError(RuntimeError):
    """The migration files do not match the database's history."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration file. `checksum` is that of its text before variables are replaced."""

    version: int
    name: str
    statements: tuple[str, ...]
    checksum: str


class TraceDatabase(Protocol):
    """The methods of a ClickHouse client that migrations use."""

    async def command(self, sql: str) -> object:
        """Run a statement that returns no rows."""
        ...

    async def rows(self, sql: str) -> Sequence[Sequence[object]]:
        """Return the rows of a query."""
        ...


def fill(template: str, variables: Mapping[str, str]) -> str:
    """Replace every `{{name}}` by the variable's value. Raises KeyError for an unknown name."""
    return _VARIABLE.sub(lambda found: variables[found[1]], template)


def parse(file_name: str, text: str) -> Migration:
    """Parse a migration file. A semicolon at the end of a line ends a statement.

    Raises:
        MigrationError: The file is not named `NNNN_name.sql`.
    """
    found = _FILE_NAME.fullmatch(file_name)
    if found is None:
        raise MigrationError(f"{file_name}: a migration is named NNNN_what_it_does.sql")
    statements = [part.strip() for part in re.split(r";\s*$", text, flags=re.MULTILINE)]
    kept = tuple(part for part in statements if _COMMENT.sub("", part).strip())
    return Migration(int(found[1]), found[2], kept, hashlib.sha256(text.encode()).hexdigest())


def pending(files: Sequence[Migration], applied: Mapping[int, str]) -> list[Migration]:
    """Return the migrations to apply, in order.

    Args:
        files: All migrations that exist.
        applied: Version -> checksum of each applied migration, from the database.

    Raises:
        MigrationError: A version exists twice, or an applied file was changed afterwards.
    """
    ordered = sorted(files, key=lambda migration: migration.version)
    versions = [migration.version for migration in ordered]
    if len(set(versions)) != len(versions):
        raise MigrationError(f"two migrations have the same number: {versions}")
    for migration in ordered:
        if applied.get(migration.version, migration.checksum) != migration.checksum:
            raise MigrationError(
                f"{migration.version:04}_{migration.name}.sql was changed after it was applied: "
                "restore it and write a new migration"
            )
    return [migration for migration in ordered if migration.version not in applied]


def migrations_folder() -> Path:
    """Return the directory of the SQL files, in the checkout or in the installed wheel."""
    root = Path(__file__).resolve().parents[1]
    candidates = (
        root / "migrations" / "clickhouse",
        root / "telemetry" / "_data" / "migrations",
    )
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise MigrationError(f"no migrations in {candidates[0]}: the installation is incomplete")


def load(folder: Path) -> list[Migration]:
    """Parse all migrations of a folder."""
    return [parse(path.name, path.read_text()) for path in sorted(folder.glob("*.sql"))]


async def apply(
    database: TraceDatabase, migrations: Sequence[Migration], variables: Mapping[str, str]
) -> list[int]:
    """Apply pending migrations, and return the versions applied by this call."""
    await database.command(fill(_HISTORY, variables))
    history = await database.rows("SELECT version, checksum FROM schema_migrations FINAL")
    applied = {int(str(version)): str(checksum) for version, checksum in history}
    todo = pending(migrations, applied)
    for migration in todo:
        for statement in migration.statements:
            await database.command(fill(statement, variables))
        await database.command(
            "INSERT INTO schema_migrations (version, name, checksum) VALUES "  # noqa: S608 - checked
            f"({migration.version}, '{migration.name}', '{migration.checksum}')"
        )
        log.info("migration_applied", version=migration.version, name=migration.name)
    return [migration.version for migration in todo]
