"""Every log line is one JSON object, whatever a library or a client put into it."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging
from sluice.logs import configure_logs
configure_logs("test")
log = logging.getLogger("library")
log.warning('a "quote"\\n{"event": "forged"}')
try:
    raise ValueError("x")
except ValueError:
    log.exception("it %s", "failed")
"""


def test_messages_of_libraries_cannot_forge_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["library_log", "library_log"]
    assert lines[0]["message"] == 'a "quote"\n{"event": "forged"}'
    assert lines[0]["level"] == "warning"
    assert lines[1]["message"] == "it failed"
    assert "ValueError: x" in lines[1]["exception"]


SPEAKER = """
import logging
import structlog
from sluice.logs import configure_logs
configure_logs("test")
for _ in range(3):
    structlog.get_logger().warning("said")
    logging.getLogger("library").warning("said, too")
print("went on")
"""


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    """Its disk is full, or whoever reads it has gone."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", SPEAKER],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.stdout == "went on\n"


TALKER = """
import structlog
from sluice.logs import configure_logs
configure_logs("test")
for number in range(10_000):
    structlog.get_logger().warning("said", number=number)
print("went on")
"""


def test_a_log_that_nobody_reads_any_more_holds_nobody_up() -> None:
    unread, pipe = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TALKER],
            stdout=subprocess.PIPE,
            stderr=pipe,
            text=True,
            check=False,
            timeout=60,
        )
        lines = [json.loads(line) for line in os.read(unread, 1 << 20).splitlines()]
    finally:
        os.close(unread)
        os.close(pipe)
    assert done.stdout == "went on\n"
    assert [line["number"] for line in lines] == list(range(len(lines)))
    assert len(lines) > 100
