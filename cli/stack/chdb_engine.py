"""The ClickHouse engine inside this process (chDB), with an isolated connection per statement.

`USE`, `SET` and temporary tables belong to a connection in chDB, and opening a connection costs 0.1
ms. With a new connection for every statement, nothing can leak from one request to the next.
"""

import fcntl
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.stack.sqltext import InlineInsert, output_format, returns_rows, split_inline_insert

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CODE = re.compile(r"Code: (\d+)")
_UNKNOWN_CODE = 1000


class QueryError(Exception):
    """The engine or the interface refused a statement, with a ClickHouse error code."""

    def __init__(self, message: str, code: int | None = None) -> None:
        found = _CODE.search(message)
        self.code = code or (int(found[1]) if found else _UNKNOWN_CODE)
        super().__init__(message if found else f"Code: {self.code}. {message}")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement for the engine, decoded from a request.

    Attributes:
        sql: Text of the statement, with inline data if there is any.
        database: Database for names without a database.
        settings: Settings that apply to this statement only.
        parameters: Values of placeholders `{name:Type}` in the text.
        default_format: Format of the answer if the text names none.
        is_readonly: Whether writes are refused (GET requests).
    """

    sql: bytes
    database: str = "default"
    settings: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    default_format: str = "TabSeparated"
    is_readonly: bool = False


@dataclass(frozen=True, slots=True)
class StatementResult:
    """The result of a statement. `format` is None for a statement without rows."""

    body: bytes
    format: str | None
    rows_read: int = 0
    rows_written: int = 0


def quoted(text: str) -> str:
    """Return a ClickHouse string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def identifier(text: str) -> str:
    """Return a quoted identifier."""
    return "`" + text.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _lock(directory: Path) -> int:
    """Lock the folder, because the engine may not detect a second process that uses it."""
    fd = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RuntimeError("another process has it open") from None
    return fd


class ChdbEngine:
    """The embedded engine. Its methods block, so call them in worker threads."""

    def __init__(self, directory: Path, *, limits: Mapping[str, str]) -> None:
        """Open the data directory.

        Args:
            directory: Data directory, created if missing. One process may use it at a time.
            limits: Settings that apply to every statement unless a request overrides them.

        Raises:
            RuntimeError: Another process uses the directory, or it is not a data directory.
        """
        import chdb

        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory)
        self._path = str(directory.resolve())
        self._connect: Callable[[str], Any] = chdb.connect
        self._limits = limits
        # The engine ends with its last connection, so this connection stays open.
        self._keeper = self._connect(self._path)
        self._keeper.query("SELECT 1", "TabSeparated")

    def close(self) -> None:
        """Write pending data and release the directory."""
        self._keeper.close()
        os.close(self._lock)

    def execute(self, statement: Statement) -> StatementResult:
        """Run one statement on a connection that no other request uses.

        Raises:
            QueryError: With the engine's message and code.
        """
        connection = self._connect(self._path)
        try:
            for command in self._preparation(statement):
                connection.query(command, "TabSeparated")
            insert = split_inline_insert(statement.sql)
            if insert is not None:
                return self._insert(connection, insert, statement)
            return self._query(connection, statement)
        except RuntimeError as error:  # chdb raises RuntimeError or its subclass ChdbError
            raise QueryError(str(error)) from error
        finally:
            connection.close()

    def _preparation(self, statement: Statement) -> list[str]:
        commands = [f"USE {identifier(statement.database)}"]
        settings = {**self._limits, **statement.settings}
        for name, value in settings.items():
            if _NAME.fullmatch(name) is None:
                raise QueryError(f"{name!r} is no name of a setting", 115)
            commands.append(f"SET {name} = {quoted(value)}")
        if statement.is_readonly:
            commands.append("SET readonly = 2")
        return commands

    @staticmethod
    def _insert(connection: Any, insert: InlineInsert, statement: Statement) -> StatementResult:
        if statement.parameters:
            raise QueryError("parameters cannot be combined with data after FORMAT", 48)
        inserter = connection.send_insert(insert.query.decode(), insert.format)
        try:
            inserter.append(insert.data)
            result = inserter.finish()
        finally:
            inserter.close()
        return StatementResult(b"", None, rows_written=result.rows_written)

    @staticmethod
    def _query(connection: Any, statement: Statement) -> StatementResult:
        result = connection.query(
            statement.sql, statement.default_format, params=dict(statement.parameters)
        )
        shape = None
        if returns_rows(statement.sql):
            shape = output_format(statement.sql) or statement.default_format
        return StatementResult(
            result.bytes() or b"",
            shape,
            rows_read=result.storage_rows_read() if shape else 0,
            rows_written=result.rows_written(),
        )
