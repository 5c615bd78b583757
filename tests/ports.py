"""TCP ports for the servers of tests: nobody else gets one before its server listens, or after.

The kernel hands out what it has, also to clients and to other test processes: between the choice
of a port and the start of its server, and while a test has a server down, somebody may take it.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Below what stacks choose from (cli.stack.ports), and below what Linux gives to clients.
_FIRST, _BLOCKS, _BLOCK = 10_000, 100, 100
_OWN_BLOCKS = 5  # then again from the first: what used it is long gone


def _claimed(folder: Path) -> Iterator[range]:
    """Yield blocks that no other process holds; they are held until this process ends."""
    folder.mkdir(exist_ok=True)
    for block in random.sample(range(_BLOCKS), _BLOCKS):
        lock = os.open(folder / str(block), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            yield range(_FIRST + block * _BLOCK, _FIRST + (block + 1) * _BLOCK)


def _ports() -> Iterator[int]:
    claimed = _claimed(Path(tempfile.gettempdir()) / f"sluice-test-ports-{os.getuid()}")
    own: list[range] = []
    while len(own) < _OWN_BLOCKS and (block := next(claimed, None)) is not None:
        own.append(block)
        yield from block
    while True:
        assert own, "other test processes hold all ports"
        for block in own:
            yield from block


_next = _ports()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on, and that no other test process is given."""
    for port in _next:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the ports come round")
