"""Lists the log files of a stack, reads their last lines and follows them."""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from cli.stack.home import Home
from sluice.profiles import EMBED

_POLL_S = 0.2


def log_names(home: Home) -> list[str]:
    """Return the names of the processes that have a log."""
    return sorted(_files(home))


def find_log(home: Home, name: str) -> Path | None:
    """Return a process's log. Of several Triton servers of one kind, the newest log is returned."""
    return _files(home).get(name)


def _files(home: Home) -> dict[str, Path]:
    files = {path.stem: path for path in home.logs.glob("*.log")}
    engines = sorted(
        home.service_state("agent").rglob("*.log"), key=lambda path: path.stat().st_mtime
    )
    return files | {_engine_name(path): path for path in engines}


def _engine_name(log: Path) -> str:
    """Return the name that `sluice status` uses for the Triton server with this log."""
    makes_embeddings = (log.parent / "models" / EMBED.triton_model).is_dir()
    return f"{log.stem}-{EMBED.name}" if makes_embeddings else log.stem


def last_lines(file: Path, count: int) -> list[str]:
    """Return the last lines of a file."""
    with file.open(errors="replace") as text:
        return [line.rstrip("\n") for line in deque(text, maxlen=count)]


def follow_file(file: Path) -> Iterator[str]:
    """Yield the text appended to a file, without end. A replaced file is read from its start."""
    text = file.open(errors="replace")
    try:
        text.seek(0, 2)
        identity = file.stat().st_ino
        while True:
            if chunk := text.read():
                yield chunk
                continue
            time.sleep(_POLL_S)
            try:
                current = file.stat().st_ino
            except FileNotFoundError:
                continue
            if current != identity:
                text.close()
                text, identity = file.open(errors="replace"), current
    finally:
        text.close()
