"""Structured logs: one JSON object per line on stderr, events in past tense."""

import logging
import sys

import structlog


def configure_logs(service: str, *, level: str = "INFO") -> None:
    """Configure structlog and the standard library's logging; call once, in `__main__`."""
    logging.basicConfig(
        stream=sys.stderr, level=level, format='{"event": "library_log", "message": "%(message)s"}'
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
