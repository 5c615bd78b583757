"""Every log line is one JSON object, whatever a library or a client put into it."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

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


def test_an_unwritable_log_stops_no_service() -> None:
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
import sys
import structlog
from sluice.logs import configure_logs
configure_logs("test")
for number in range(10_000):
    structlog.get_logger().warning("said", number=number, pad="x" * int(sys.argv[1]))
print("went on", flush=True)
sys.stdin.readline()
structlog.get_logger().warning("said", number=10_000)
"""
LONG = 9_000  # more than a pipe takes as one


def ends(kind: str) -> tuple[int, int]:
    """Return where a log is read, and where it is written."""
    if kind == "pipe":
        return os.pipe()
    one, other = socket.socketpair()
    return one.detach(), other.detach()


def everything_in(unread: int) -> bytes:
    """Return what waits to be read."""
    os.set_blocking(unread, False)
    read = b""
    with suppress(BlockingIOError):
        while piece := os.read(unread, 1 << 20):
            read += piece
    return read


@pytest.mark.parametrize("pad", [0, LONG])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_an_unread_log_delays_no_service(kind: str, pad: int) -> None:
    unread, end = ends(kind)
    with (
        os.fdopen(unread, "rb", buffering=0),
        os.fdopen(end, "wb", buffering=0) as held,
        subprocess.Popen(
            [sys.executable, "-c", TALKER, str(pad)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=held,
            text=True,
        ) as talker,
    ):
        assert talker.stdout is not None
        assert talker.stdout.readline() == "went on\n"
        assert os.get_blocking(end)  # it is not ours alone
        read = everything_in(unread)
        talker.communicate("\n", timeout=60)
        *lines, dropped, last = map(json.loads, (read + everything_in(unread)).splitlines())
    assert [line["number"] for line in lines] == list(range(len(lines)))
    assert len(lines) > 5
    assert (dropped["event"], dropped["service"]) == ("log_lines_dropped", "test")
    assert dropped["lines"] == 10_000 - len(lines)
    assert last["number"] == 10_000
