"""Reads the last error from Triton's log."""

import os
from contextlib import suppress
from pathlib import Path


def last_error(log_file: Path | None) -> str:
    """Return the reason of Triton's end, for example a failed load, or empty if it is unknown.

    The last lines of the log are a table of settings and a stack trace, so they are skipped.
    """
    if log_file is None:
        return ""
    with suppress(OSError):
        with log_file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 32_768))
            lines = file.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith("error: "):
                return line.rpartition("state: ")[2].removeprefix("error: ").strip()
    return ""
