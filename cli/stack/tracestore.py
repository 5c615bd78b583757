"""The trace store of one machine, the ClickHouse engine (chDB) behind ClickHouse's HTTP interface.

The unchanged clickhouse-connect clients, sync and async, work with it. One process owns the data
directory. Each request has its own connection to the engine (0.1 ms), so nothing leaks between
requests. Unlike ClickHouse's server, it builds whole answers in memory (bounded). It has one
password, and no users, sessions, external tables or replication. Production uses a real server's
URL.

Run: `python -m cli.stack.tracestore --port 8123 --directory .sluice/tracestore`.
"""

import argparse
import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import sys
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop
from aiohttp import BodyPartReader, ClientPayloadError, web

from cli.stack.chdb_engine import ChdbEngine, QueryError, Statement, StatementResult
from cli.stack.lz4_stream import Lz4Stream
from cli.stack.sqltext import split_inline_insert
from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs
from sluice.process import ProcessSpec, port_answers

log = structlog.get_logger(__name__)

_HOST = "127.0.0.1"
# Parameters of the HTTP interface itself, which the engine would refuse as unknown settings.
_TRANSPORT = {
    *("query", "user", "password", "database", "default_format", "query_id", "quota_key", "role"),
    *("session_id", "session_timeout", "session_check", "buffer_size", "wait_end_of_query"),
    *("compress", "decompress", "enable_http_compression", "client_protocol_version"),
    *("send_progress_in_http_headers", "http_headers_progress_interval_ms"),
    "cancel_http_readonly_queries_on_client_close",
}
_STATUS = {60: 404, 62: 400, 81: 404, 164: 403, 202: 503, 241: 503, 307: 413, 516: 403}


@dataclass(frozen=True, slots=True)
class TraceStoreLimits:
    """The limits of the HTTP interface.

    Attributes:
        body_max_bytes: Largest body of one request in bytes, decompressed.
        bodies_max_bytes: Largest size in bytes of the bodies of all requests together.
        waiting_max: Largest number of statements that run or wait.
    """

    body_max_bytes: int = 256 << 20
    bodies_max_bytes: int = 512 << 20
    waiting_max: int = 1024


@dataclass(slots=True)
class _BodyMemory:
    """Number of bytes that one request's body occupies in memory."""

    bytes: int = 0


class TraceStore:
    """The HTTP interface, with `GET /ping` and with statements on `/`."""

    def __init__(
        self,
        engine: ChdbEngine,
        pool: ThreadPoolExecutor,
        limits: TraceStoreLimits,
        password: str | None,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._limits = limits
        self._password = password
        self._held_bytes = 0
        self._waiting = 0

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application()
        app.router.add_get("/ping", self._ping)
        app.router.add_route("*", "/", self._serve)
        return app

    async def _ping(self, _request: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    async def _serve(self, request: web.Request) -> web.Response:
        query_id = request.query.get("query_id") or str(uuid.uuid4())
        headers = {
            "X-ClickHouse-Query-Id": query_id if query_id.isprintable() else "",
            "X-ClickHouse-Server-Display-Name": "tracestore",
            "X-ClickHouse-Timezone": "UTC",
        }
        held = _BodyMemory()
        self._waiting += 1
        try:
            answer = await self._answer(request, held)
        except QueryError as error:
            headers["X-ClickHouse-Exception-Code"] = str(error.code)
            status = _STATUS.get(error.code, 500)
            return web.Response(status=status, text=f"{error}\n", headers=headers)
        finally:
            self._waiting -= 1
            self._held_bytes -= held.bytes
        counts = {
            "read_rows": str(answer.rows_read),
            "written_rows": str(answer.rows_written),
            "result_bytes": str(len(answer.body)),
        }
        headers["X-ClickHouse-Summary"] = json.dumps(counts)
        if answer.format is not None:
            headers["X-ClickHouse-Format"] = answer.format
        return web.Response(
            body=answer.body, headers=headers, content_type="application/octet-stream"
        )

    async def _answer(self, request: web.Request, held: _BodyMemory) -> StatementResult:
        if self._waiting > self._limits.waiting_max:
            raise QueryError("too many statements are waiting; try again later", 202)
        _check_host(request.host)
        self._check_password(request)
        statement = await self._statement(request, held)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._engine.execute, statement)

    def _check_password(self, request: web.Request) -> None:
        if self._password is None:
            return
        given = request.headers.get("X-ClickHouse-Key", "")
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(credentials, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                given = ""
        if not hmac.compare_digest(given.encode(), self._password.encode()):
            raise QueryError("Authentication failed: wrong or missing password", 516)

    async def _statement(self, request: web.Request, held: _BodyMemory) -> Statement:
        fields: dict[str, str] = dict(request.query)
        if request.content_type.startswith("multipart/"):
            fields.update(await self._form(request, held))
            body = b""
        else:
            body = await self._body(request, held)
        text = fields.get("query", "").encode()
        if text and body and split_inline_insert(text) is None:
            text += b"\n"
        settings = {
            name: value
            for name, value in fields.items()
            if name not in _TRANSPORT and not name.startswith("param_")
        }
        database = fields.get("database") or request.headers.get("X-ClickHouse-Database")
        return Statement(
            sql=text + body,
            database=database or "default",
            settings=settings,
            parameters={k[6:]: v for k, v in fields.items() if k.startswith("param_")},
            default_format=fields.get("default_format")
            or request.headers.get("X-ClickHouse-Format")
            or "TabSeparated",
            is_readonly=request.method in ("GET", "HEAD"),
        )

    async def _body(self, request: web.Request, held: _BodyMemory) -> bytes:
        # aiohttp itself decodes gzip, deflate, br and zstd.
        is_lz4 = request.headers.get("Content-Encoding", "").lower() == "lz4"
        frames = Lz4Stream() if is_lz4 else None
        parts: list[bytes] = []
        try:
            async for chunk in request.content.iter_any():
                for part in (chunk,) if frames is None else frames.decode(chunk):
                    self._hold(held, len(part))
                    parts.append(part)
        except (ClientPayloadError, RuntimeError, EOFError) as error:
            raise QueryError(f"the body cannot be decoded: {error}", 432) from error
        if frames is not None and not frames.is_complete:
            raise QueryError("the body ends inside an lz4 frame", 432)
        return b"".join(parts)

    async def _form(self, request: web.Request, held: _BodyMemory) -> dict[str, str]:
        """Read a form with the query and its parameters. Files are refused."""
        fields: dict[str, str] = {}
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or part.name is None or part.filename:
                raise QueryError("external tables are not supported by the trace store", 48)
            value = bytearray()
            while chunk := await part.read_chunk():
                self._hold(held, len(chunk))
                value += chunk
            fields[part.name] = value.decode()
        return fields

    def _hold(self, held: _BodyMemory, count: int) -> None:
        """Account for `count` more bytes of a request's body."""
        held.bytes += count
        self._held_bytes += count
        if held.bytes > self._limits.body_max_bytes:
            limit = self._limits.body_max_bytes
            raise QueryError(f"the body is larger than {limit} bytes; send smaller batches", 307)
        if self._held_bytes > self._limits.bodies_max_bytes:
            raise QueryError("too many large bodies at once; try again later", 241)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_host(host_header: str) -> None:
    """Refuse foreign host names, which a web page may have resolved to this machine."""
    host = host_header.rpartition(":")[0] if ":" in host_header else host_header
    if not _is_loopback(host.strip("[]")):
        raise QueryError(f"host {host_header!r} is not this machine's loopback", 516)


async def _run(arguments: argparse.Namespace) -> None:
    password = arguments.password_file.read_text().strip() if arguments.password_file else None
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(arguments.threads, thread_name_prefix="engine")
    limits = {
        "max_execution_time": "120",
        "max_result_bytes": str(512 << 20),
        "max_threads": str(arguments.threads),
    }
    engine = await loop.run_in_executor(
        pool, lambda: ChdbEngine(arguments.directory, limits=limits)
    )
    body_max_bytes = arguments.body_max_mib << 20
    bounds = TraceStoreLimits(body_max_bytes=body_max_bytes, bodies_max_bytes=2 * body_max_bytes)
    store = TraceStore(engine, pool, bounds, password)
    # A client that disconnects must not stop an insert half way.
    runner = web.AppRunner(store.application(), handler_cancellation=False, access_log=None)
    async with stop_signals() as stop:
        await runner.setup()
        try:
            await web.TCPSite(runner, arguments.host, arguments.port, shutdown_timeout=5.0).start()
            log.info("tracestore_started", port=arguments.port)
            await stop.wait()
        finally:
            await runner.cleanup()
            await loop.run_in_executor(pool, engine.close)
            pool.shutdown()


def main() -> None:
    """Run the trace store until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default=_HOST, help="a loopback address")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=4, help="statements at a time")
    parser.add_argument("--password-file", type=Path)
    parser.add_argument("--body-max-mib", type=int, default=256, help="of one request, unpacked")
    arguments = parser.parse_args()
    if not _is_loopback(arguments.host):
        sys.exit(
            f"{arguments.host} is not a loopback address: the trace store serves one machine "
            "without encryption; for a network run a ClickHouse server"
        )
    configure_logs("tracestore")
    try:
        uvloop.run(_run(arguments))
    except OSError as error:
        sys.exit(f"port {arguments.port} or {arguments.directory} cannot be used: {error}")
    except RuntimeError as error:
        sys.exit(f"{arguments.directory} cannot be opened (one trace store per folder): {error}")


def tracestore_spec(
    port: int,
    directory: Path,
    log_file: Path,
    env: Mapping[str, str],
    *,
    password_file: Path | None = None,
    body_max_mib: int = 256,
) -> ProcessSpec:
    """Return the spec of the trace store, whose engine is open when its port answers."""
    command = [
        *(sys.executable, "-m", "cli.stack.tracestore"),
        *("--port", str(port), "--directory", str(directory)),
        *("--body-max-mib", str(body_max_mib)),
    ]
    if password_file is not None:
        command += ["--password-file", str(password_file)]
    return ProcessSpec(
        name="tracestore",
        command=command,
        env=env,
        log_file=log_file,
        ready=lambda: port_answers(_HOST, port),
        stop_grace_s=15.0,
    )


if __name__ == "__main__":
    main()
