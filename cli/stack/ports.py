"""Chooses the internal ports of a stack, which later starts reuse."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from cli.stack.home import write_atomic
from sluice.process import port_is_free

# The range is below the ports of Linux for outgoing connections (32768 and up). So no client
# occupies a port of the stack while a process restarts.
FIRST, LAST = 20000, 31999


def assign(
    names: Iterable[str], known: Mapping[str, int], is_free: Callable[[int], bool], start: int
) -> dict[str, int]:
    """Return a port per name, which is the known port if it is free, or else the next free port.

    Args:
        names: Names of the sockets that need a port, in the order of choice.
        known: Ports of the last run.
        is_free: Function that returns whether no process listens on a port now.
        start: Offset of the first port to try. It differs by stack, so that two rarely collide.

    Raises:
        RuntimeError: No port in the range is free.
    """
    wanted = list(names)
    ports: dict[str, int] = {}
    for name in wanted:
        port = known.get(name, 0)
        if port and port not in ports.values() and is_free(port):
            ports[name] = port
    span = LAST - FIRST + 1
    taken = set(ports.values())
    candidates = (FIRST + (start + offset) % span for offset in range(span))
    free = (port for port in candidates if port not in taken and is_free(port))
    for name in wanted:
        if name not in ports:
            port = next(free, None)
            if port is None:
                raise RuntimeError(f"no free port between {FIRST} and {LAST}")
            ports[name] = port
    return {name: ports[name] for name in wanted}


def load_ports(
    file: Path, names: Iterable[str], start: int, *, public: Collection[int]
) -> dict[str, int]:
    """Return the stack's ports, none of them in `public`, and store them in `file`."""
    known = read_ports(file)

    def is_free(port: int) -> bool:
        return port not in public and port_is_free("127.0.0.1", port)

    ports = assign(names, known, is_free, start)
    if ports != known:
        write_atomic(file, json.dumps(ports, indent=1) + "\n")
    return ports


def read_ports(file: Path) -> dict[str, int]:
    """Return the stored ports, empty if there are none."""
    try:
        return {str(name): int(port) for name, port in json.loads(file.read_text()).items()}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


def listener_of(port: int) -> str:
    """Return `name (pid N)` of the process that listens on a TCP port, empty if unknown."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            if connection.laddr[1] == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""
