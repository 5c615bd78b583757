"""Structured logs with one JSON object per line on stderr."""

import io
import json
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TextIO, cast

import structlog


class _JsonFormatter(logging.Formatter):
    """Formats log records of libraries as JSON. Their messages may contain data of clients."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON for a log record."""
        fields = {
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            "event": "library_log",
            "level": record.levelname.lower(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _Unfailing(io.TextIOBase):
    """A stream that drops lines that cannot be written, for example on a full disk.

    Logging must neither fail nor delay a request or the process. The rest of a half-written line is
    written before the next line, which also reports the number of dropped lines.
    """

    def __init__(self, service: str, descriptor: int) -> None:
        """Create a stream to the file descriptor `descriptor`."""
        self._service = service
        self._send = _sender(descriptor)
        self._lock = threading.RLock()  # the garbage collector may log in the middle of a line
        self._rest = b""
        self._dropped = 0

    def write(self, text: str, /) -> int:
        """Write one line, its end included, or drop it."""
        with self._lock:
            self._rest = self._unsent(self._rest)
            line = self._about_dropped() + text.encode(errors="backslashreplace")
            rest = line if self._rest else self._unsent(line)
            if len(rest) == len(line):  # no byte was written
                self._dropped += 1
            else:
                self._rest, self._dropped = rest, 0
        return len(text)

    def _unsent(self, data: bytes) -> bytes:
        with suppress(OSError):
            return data[self._send(data) :] if data else data
        return data

    def _about_dropped(self) -> bytes:
        if not self._dropped:
            return b""
        fields = {
            "service": self._service,
            "pid": os.getpid(),
            "lines": self._dropped,
            "event": "log_lines_dropped",
            "level": "warning",
        }
        return f"{json.dumps(fields)}\n".encode()


def _sender(descriptor: int) -> Callable[[bytes], int]:
    """Return a function that writes without blocking, and returns the number of bytes written.

    Other owners of a pipe or a socket must not notice a change, so the descriptor is not made
    non-blocking. Instead, a pipe is opened once more, for this process alone. Where this is
    impossible, for example without /proc or with a terminal, a reader that stops reading delays
    this process.
    """
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(kind):
        held = socket.socket(fileno=os.dup(descriptor))
        return lambda data: held.send(data, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(kind):
        with suppress(OSError):
            descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    return partial(os.write, descriptor)


def configure_logs(service: str, *, level: str = "INFO") -> None:
    """Configure structlog and the standard library's logging, once in `__main__`."""
    file = cast("TextIO", _Unfailing(service, sys.stderr.fileno()))
    handler = logging.StreamHandler(file)
    handler.setFormatter(_JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
