"""Real servers for the integration tests, started by the launchers of the local stack."""

import asyncio
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import asyncpg
import httpx
import pytest
import pytest_asyncio

from cli.stack import postgres
from cli.stack.broker import broker_spec
from cli.stack.tracestore import tracestore_spec
from control_plane.migrate import migrate
from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from tests.integration.admin_description import HOOKS
from tests.integration.artifact_site import Site, artifact_site

_DATABASES = count(1)


@dataclass(frozen=True)
class PostgresServer:
    """A running PostgreSQL; `template` is a migrated database to clone."""

    home: Path
    port: int
    spec: ProcessSpec
    template: str

    def url(self, database: str) -> str:
        return postgres.database_url(self.home, self.port, database)

    async def execute(self, statement: str, database: str = "postgres") -> None:
        connection = await asyncpg.connect(
            user="postgres",
            database=database,
            host=str(postgres.locate(self.home).sockets),
            port=self.port,
            timeout=60,
        )
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def postgres_server() -> AsyncIterator[PostgresServer]:
    """One server per worker, data in a folder that its user can enter, gone with the last test here."""
    home = Path(tempfile.mkdtemp(prefix="sluice-test-", dir="/tmp"))
    home.chmod(0o711)
    try:
        await postgres.prepare_postgres(home, fsync=False)
        spec = postgres.postgres_spec(home, 5432, log_file=home / "postgres.log", fsync=False)
        child = await ChildProcess.start(spec)
        try:
            await child.wait_ready(60)
            await migrate(postgres.database_url(home, 5432))
            yield PostgresServer(home, 5432, spec, postgres.DATABASE)
        finally:
            await child.stop()
    finally:
        shutil.rmtree(home)


@pytest_asyncio.fixture
async def database_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """A migrated database of the test's own."""
    name = f"test_{next(_DATABASES)}"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    yield postgres_server.url(name)
    await postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


class RestartableServer:
    """A server of the local stack that a test may kill and start again at the same address."""

    def __init__(self, spec: ProcessSpec, port: int) -> None:
        self.spec = spec
        self.port = port
        self.child: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        assert self.child is None
        self.child = await ChildProcess.start(self.spec)
        await self.child.wait_ready(60)

    async def kill(self) -> None:
        """SIGKILL it, as a crash would."""
        assert self.child is not None
        os.kill(self.child.pid, signal.SIGKILL)
        await self.stop()

    async def stop(self) -> int | None:
        """Ask it to end and return the exit status; None when it does not run."""
        child, self.child = self.child, None
        if child is None:
            return None
        await child.stop()
        return await child.wait()


def child_environment(**settings: str) -> dict[str, str]:
    """What a child of a test inherits: how to find Python, and that it belongs to us."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | shared_secret.environment() | settings


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RestartableServer]:
    """An empty broker of the test's own."""
    port = free_port()
    server = RestartableServer(
        broker_spec(port, tmp_path / "broker.log", child_environment()), port
    )
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def tracestore(tmp_path: Path) -> AsyncIterator[RestartableServer]:
    """An empty trace store of the test's own."""
    port = free_port()
    spec = tracestore_spec(
        port, tmp_path / "traces", tmp_path / "tracestore.log", child_environment()
    )
    server = RestartableServer(spec, port)
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_tracestore(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[RestartableServer]:
    """One trace store per worker, with small bounds; tests must not kill it."""
    home = tmp_path_factory.mktemp("tracestore")
    port = free_port()
    spec = tracestore_spec(port, home / "traces", home / "log", child_environment(), body_max_mib=8)
    server = RestartableServer(spec, port)
    await server.start()
    yield server
    await server.stop()


ADMIN_KEY = "sk-sluice-admin-for-tests"


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane, and an admin's client for it."""

    child: ChildProcess
    spec: ProcessSpec
    admin: httpx.AsyncClient
    grpc_address: str

    async def put(self, path: str, **body: object) -> dict[str, object]:
        answer = await self.admin.put(f"/v1/{path}", json=body)
        assert answer.status_code in {200, 201}, answer.text
        return answer.json()

    async def is_ready(self) -> bool:
        try:
            return (await self.admin.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False


@asynccontextmanager
async def running_control_plane(
    database_url: str, directory: Path, **environment: str
) -> AsyncIterator[ControlPlane]:
    grpc_port, http_port = free_port(), free_port()
    spec = ProcessSpec(
        name=f"control-plane-{http_port}",
        command=[sys.executable, "-m", "control_plane"],
        env={
            "PATH": "/usr/bin:/bin",
            **shared_secret.environment(),
            "CONTROL_PLANE__DATABASE_URL": database_url,
            "CONTROL_PLANE__GRPC_ADDRESS": f"127.0.0.1:{grpc_port}",
            "CONTROL_PLANE__HTTP_ADDRESS": f"127.0.0.1:{http_port}",
            "CONTROL_PLANE__ADMIN_KEY_SHA256": hashlib.sha256(ADMIN_KEY.encode()).hexdigest(),
            **environment,
        },
        log_file=directory / f"control-plane-{http_port}.log",
        ready=partial(port_answers, "127.0.0.1", http_port),
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(60)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{http_port}",
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            timeout=60,
            event_hooks=HOOKS,
        ) as admin:
            control_plane = ControlPlane(child, spec, admin, f"127.0.0.1:{grpc_port}")
            await eventually(control_plane.is_ready, "the control plane is ready")
            yield control_plane
    finally:
        await child.stop()


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 60.0
) -> None:
    """Wait until a condition holds; the time limit only bounds a failing test.

    One that asks a server is looked at ever less often, down to ten times a second: some wait for
    many seconds, and the answers would take half of a core.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        holds = condition()
        if not isinstance(holds, bool):
            holds = await holds
            pause_s = min(1.2 * pause_s, 0.1)
        if holds:
            return
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(pause_s)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture(scope="session")
def start_control_plane() -> Callable[..., AbstractAsyncContextManager[ControlPlane]]:
    """For tests that need several, or stop one."""
    return running_control_plane


@pytest_asyncio.fixture
async def control_plane(database_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    """A control plane on a database of its own."""
    async with running_control_plane(database_url, tmp_path) as found:
        yield found


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_control_plane(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ControlPlane]:
    """One control plane for tests that only touch objects of their own; they share its loop."""
    await postgres_server.execute(f"CREATE DATABASE shared TEMPLATE {postgres_server.template}")
    url = postgres_server.url("shared")
    async with running_control_plane(url, tmp_path_factory.mktemp("shared")) as found:
        yield found


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def package_site(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    await postgres_server.execute(f"CREATE DATABASE site TEMPLATE {postgres_server.template}")
    home = tmp_path_factory.mktemp("site")
    roots = {"CONTROL_PLANE__ARTIFACT_IMPORT_ROOTS": str(home)}
    async with artifact_site(
        running_control_plane, postgres_server.url("site"), home, **roots
    ) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def site(package_site: Site) -> Site:
    """A control plane with a store, and nothing in either: one process for all tests of a worker.

    It may import from `site.home`. Tests must not kill it.
    """
    await package_site.empty()
    return package_site
