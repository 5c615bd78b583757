"""Output of the command line, as tables for people and as JSON for programs."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

# Import of rich costs 50 ms, and health imports psutil, which only the local stack needs.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cli.stack.health import HealthRow

_PLAIN_WIDTH = 240  # width for pipes and files, for which rich would assume 80 and fold lines
_FOLDED_WIDTH = 12  # least width of a text column
_GAP = 3  # columns between two table columns
_IDS = ("id", "name", "tenant", "model", "key", "pool", "cell", "replica", "node")


def console(*, stderr: bool = False) -> "Console":
    """Return a console as wide as the terminal or COLUMNS, or very wide without either."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    is_sized = file.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=file, width=None if is_sized else _PLAIN_WIDTH, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> "Table":
    """Return a table without frames, in which the columns of `right` are right-aligned.

    Text is folded if the table is too wide, but columns of ids are never folded.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    numbers, cells = right.split(), list(rows)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        widest = max((len(row[number]) for row in cells), default=0)
        least = widest if _is_id(column) else min(widest, _FOLDED_WIDTH)
        made.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            min_width=max(len(column), least),
        )
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))
    return made


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """Print a table, wider than the console if its ids do not fit otherwise."""
    from rich.console import Console

    made, out = table(columns, rows, right=right), console()
    least = sum((column.min_width or 0) + _GAP for column in made.columns)
    console_of = Console(file=out.file, width=max(out.width, least), highlight=False)
    console_of.print(made)


def _is_id(column: str) -> bool:
    return column in _IDS or column.endswith(("_id", "digest"))


def show_json(value: Any) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def show_objects(
    objects: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool
) -> None:
    """Print objects of an API as a table of some fields, or as JSON with all fields."""
    if as_json:
        show_json(list(objects))
        return
    rows = [[_cell(item.get(column)) for column in columns] for item in objects]
    show_table(columns, rows)


def show_fields(item: Mapping[str, Any]) -> None:
    """Print one object with a field per line."""
    show_table(("field", "value"), [(name, _cell(item[name])) for name in item])


def _cell(value: object) -> str:
    if isinstance(value, dict):
        value = [f"{name}={one}" for name, one in cast("dict[str, object]", value).items()]
    if isinstance(value, list):
        value = ", ".join(str(one) for one in cast("list[object]", value))
    if value is None or value == "":
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def size_text(size_bytes: int | None) -> str:
    """Return a size for people in decimal units, or `-` if the size is unknown."""
    if size_bytes is None:
        return "-"
    size, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def status_json(rows: "Sequence[HealthRow]", phase: str, engine: str) -> dict[str, Any]:
    """Return the output of `sluice status --json`."""
    return {
        "phase": phase,
        "engine": engine,
        "is_healthy": all(row.is_healthy for row in rows),
        "memory_mib": round(sum(row.memory_mib for row in rows), 1),
        "processes": [
            asdict(row)
            | {
                "memory_mib": round(row.memory_mib, 1),
                "uptime_s": round(row.uptime_s, 1),
                "is_healthy": row.is_healthy,
            }
            for row in rows
        ],
    }


def status_table(rows: "Sequence[HealthRow]") -> "Table":
    """Return the table of processes with their health."""
    columns = ("name", "pid", "port", "memory", "health", "restarts", "uptime")
    cells = [
        (
            row.name,
            str(row.pid or "-"),
            str(row.port or "-"),
            f"{row.memory_mib:.0f} MiB",
            row.health,
            str(row.restarts),
            duration(row.uptime_s),
        )
        for row in rows
    ]
    total = f"{sum(row.memory_mib for row in rows):.0f} MiB"
    cells.append(("total", "", "", total, "", "", ""))
    return table(columns, cells, right="pid port memory restarts uptime")


def started_table(rows: "Sequence[HealthRow]") -> "Table":
    """Return the table of processes right after the start."""
    cells = [
        (row.name, str(row.pid), str(row.port or "-"), f"{row.memory_mib:.0f} MiB") for row in rows
    ]
    cells.append(("total", "", "", f"{sum(row.memory_mib for row in rows):.0f} MiB"))
    return table(("name", "pid", "port", "memory"), cells, right="pid port memory")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"


def curl_line(base_url: str, key: str, model: str) -> str:
    """Return a shell command line that streams an answer."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Hello! What are you?"}],
            "stream": True,
            "max_tokens": 100,
        }
    )
    return (
        f"curl -N {base_url}/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
