"""Structured logs: one JSON object per line on stderr, events in past tense."""

import io
import json
import logging
import os
import stat
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


class _JsonFormatter(logging.Formatter):
    """Lines of libraries, in the same form: what clients sent may stand in their messages."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
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
    """Drops what cannot be written: the disk is full, or who reads the log has gone or stopped.

    A log is no reason to fail a request, or the process with all its streams, or to hold them up.
    """

    def __init__(self, descriptor: int) -> None:
        """Write there; a pipe or a socket that is full is not waited for."""
        self._descriptor = descriptor
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            os.set_blocking(descriptor, False)

    def write(self, text: str, /) -> int:
        """Write whole lines, if that can be."""
        with suppress(OSError):
            os.write(self._descriptor, text.encode(errors="backslashreplace"))
        return len(text)


def configure_logs(service: str, *, level: str = "INFO") -> None:
    """Configure structlog and the standard library's logging; call once, in `__main__`."""
    file = cast("TextIO", _Unfailing(sys.stderr.fileno()))
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
