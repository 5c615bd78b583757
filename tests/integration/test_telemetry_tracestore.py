"""The trace store: unchanged clickhouse-connect clients, and nothing leaks between requests."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import lz4.frame
import pytest
import pytest_asyncio
from clickhouse_connect.driver.exceptions import DatabaseError

from cli.stack.tracestore import tracestore_spec
from sluice.process import ChildProcess, ProcessFailedError, free_port

pytestmark = pytest.mark.real

_NAMES = count(1)
# More requests than the store has worker threads: each of them is seen.
_EVERY_THREAD = range(12)


class Client:
    """The sync or the async driver behind one face."""

    def __init__(self, driver: Any, *, is_async: bool) -> None:
        self._driver = driver
        self._is_async = is_async

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._driver, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            if self._is_async:
                return await method(*arguments, **options)
            return await asyncio.to_thread(method, *arguments, **options)

        return call


async def connect(kind: str, port: int, **options: Any) -> Client:
    options = {"host": "127.0.0.1", "port": port, **options}
    if kind == "async":
        return Client(await clickhouse_connect.get_async_client(**options), is_async=True)
    # The sync driver makes a session by itself and then refuses to be used by two threads.
    options["autogenerate_session_id"] = False
    driver = await asyncio.to_thread(clickhouse_connect.get_client, **options)
    return Client(driver, is_async=False)


@pytest_asyncio.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, shared_tracestore: Any) -> AsyncIterator[Client]:
    found = await connect(request.param, shared_tracestore.port)
    yield found
    await found.close()


@pytest_asyncio.fixture
async def http(shared_tracestore: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{shared_tracestore.address}", timeout=60
    ) as found:
        yield found


async def new_table(client: Client) -> str:
    name = f"t{next(_NAMES)}"
    await client.command(f"CREATE TABLE {name} (a Int32, s String) ENGINE = MergeTree ORDER BY a")
    return name


@pytest.mark.parametrize("compress", [False, "lz4", "zstd", "gzip"])
async def test_rows_go_in_and_come_out(
    client: Client, shared_tracestore: Any, compress: Any
) -> None:
    table = await new_table(client)
    rows = [[number, f"it's {number}\n\t\\ é"] for number in range(1000)]
    writer = await connect("async", shared_tracestore.port, compress=compress)
    summary = await writer.insert(table, rows, column_names=["a", "s"])
    await writer.close()
    assert summary.written_rows == 1000
    found = await client.query(f"SELECT a, s FROM {table} ORDER BY a")
    assert [list(row) for row in found.result_rows] == rows


async def test_a_database_does_not_leak(client: Client, http: httpx.AsyncClient) -> None:
    name = f"d{next(_NAMES)}"
    await client.command(f"CREATE DATABASE {name}")
    for _ in _EVERY_THREAD:
        inside = await http.post("/", params={"database": name}, content="SELECT currentDatabase()")
        assert inside.text == f"{name}\n"
        await http.post("/", content=f"USE {name}")
        assert (await http.post("/", content="SELECT currentDatabase()")).text == "default\n"


async def test_a_setting_does_not_leak(client: Client, http: httpx.AsyncClient) -> None:
    question = "SELECT getSetting('max_block_size')"
    usual = (await http.post("/", content=question)).text
    for _ in _EVERY_THREAD:
        await client.command("SET max_block_size = 77")
        inside = await client.query(question, settings={"max_block_size": 55})
        assert inside.result_rows == [(55,)]
        assert (await http.post("/", content=question)).text == usual
        failed = await http.post("/", params={"max_block_size": "9"}, content="SELECT nonsense")
        assert failed.status_code == 500
        assert (await http.post("/", content=question)).text == usual


async def test_values_are_literals_never_sql(http: httpx.AsyncClient) -> None:
    evil = "x', max_threads = '1"
    for value in (evil, "it's", "back\\slash", "'; DROP TABLE t; --"):
        answer = await http.post(
            "/", params={"log_comment": value}, content="SELECT getSetting('log_comment')"
        )
        assert answer.status_code == 200
        expected = value.replace("\\", "\\\\").replace("'", "\\'")
        assert answer.text == f"{expected}\n"
    for name in ("no`such", "no'such", "default`; SELECT 1"):
        answer = await http.post("/", params={"database": name}, content="SELECT 1")
        assert answer.headers["X-ClickHouse-Exception-Code"] == "81"
    answer = await http.post("/", params={"max_threads = 1, readonly": "1"}, content="SELECT 1")
    assert answer.headers["X-ClickHouse-Exception-Code"] == "115"


async def test_a_format_inside_a_literal_is_text(client: Client) -> None:
    table = await new_table(client)
    await client.command(f"INSERT INTO {table} VALUES (8,'a FORMAT b\n')")
    found = await client.query(f"SELECT s FROM {table}")
    assert found.result_rows == [("a FORMAT b\n",)]


async def test_summaries_count(client: Client, http: httpx.AsyncClient) -> None:
    table = await new_table(client)
    summary = await client.insert(table, [[1, "x"], [2, "y"]], column_names=["a", "s"])
    assert summary.written_rows == 2
    summary = await client.command(f"INSERT INTO {table} SELECT number, '' FROM numbers(5)")
    assert summary.summary["written_rows"] == "5"
    answer = await http.post("/", content=f"SELECT a FROM {table}")
    assert '"read_rows": "7"' in answer.headers["X-ClickHouse-Summary"]


async def test_an_empty_answer_of_a_query_is_empty_text(client: Client) -> None:
    assert await client.command("SELECT 1 WHERE 0") == ""
    assert await client.command("SELECT 3") == 3


async def test_parameters_are_typed_also_when_they_are_long(client: Client) -> None:
    values = {"n": 3, "s": "it's\na \\ tab\t", "long": "é" * 20_000}
    found = await client.query("SELECT {n:UInt8}, {s:String}, {long:String}", parameters=values)
    assert found.result_rows == [tuple(values.values())]


async def test_errors_carry_the_engine_s_code(client: Client) -> None:
    for sql, code in (("SELEC 1", 62), ("SELECT * FROM nowhere", 60), ("SELECT nothing", 47)):
        with pytest.raises(DatabaseError) as caught:
            await client.query(sql)
        assert caught.value.code == code


async def test_many_at_once(client: Client) -> None:
    found = await asyncio.gather(
        *(client.query(f"SELECT {number}, sum(number) FROM numbers(1000)") for number in range(40))
    )
    assert [one.result_rows for one in found] == [[(number, 499_500)] for number in range(40)]


async def test_other_formats_and_large_blocks(client: Client) -> None:
    arrow = await client.raw_query("SELECT number FROM numbers(10)", fmt="Arrow")
    assert arrow.startswith(b"ARROW1")
    found = await client.query("SELECT number FROM numbers(300000)")
    assert len(found.result_rows) == 300_000


async def test_get_reads_only(http: httpx.AsyncClient) -> None:
    assert (await http.get("/ping")).text == "Ok.\n"
    assert (await http.get("/", params={"query": "SELECT 1"})).text == "1\n"
    refused = await http.get("/", params={"query": "CREATE TABLE g (a Int8) ENGINE = Memory"})
    assert refused.status_code == 403
    assert refused.headers["X-ClickHouse-Exception-Code"] == "164"


async def test_bytes_that_are_no_text_pass(http: httpx.AsyncClient) -> None:
    answer = await http.post("/", content=b"SELECT '\xff\xfe' FORMAT RowBinary")
    assert answer.content == b"\x02\xff\xfe"


async def test_bodies_are_bounded_also_when_they_unpack(
    http: httpx.AsyncClient, client: Client
) -> None:
    table = await new_table(client)
    params = {"query": f"INSERT INTO {table} (s) FORMAT LineAsString"}
    too_much = b"x" * (9 << 20)
    for headers, body in (
        ({}, too_much),
        ({"Content-Encoding": "lz4"}, lz4.frame.compress(too_much)),
    ):
        answer = await http.post("/", params=params, content=body, headers=headers)
        assert answer.status_code == 413
        assert answer.headers["X-ClickHouse-Exception-Code"] == "307"
        assert "send smaller batches" in answer.text
    torn = lz4.frame.compress(b"x" * 1000)[:-8]
    answer = await http.post("/", params=params, content=torn, headers={"Content-Encoding": "lz4"})
    assert answer.status_code == 500
    assert await client.command(f"SELECT count() FROM {table}") == 0


async def test_external_tables_are_refused_clearly(http: httpx.AsyncClient) -> None:
    answer = await http.post("/", params={"query": "SELECT 1"}, files={"t": ("t", b"1")})
    assert answer.headers["X-ClickHouse-Exception-Code"] == "48"


async def test_a_name_that_only_points_here_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/", content="SELECT 1", headers={"Host": "evil.example:8123"})
    assert answer.status_code == 403


async def test_other_addresses_than_loopback_are_refused(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.stack.tracestore", "--port", str(free_port())),
        *("--host", "0.0.0.0", "--directory", str(tmp_path)),
        stderr=asyncio.subprocess.PIPE,
    )
    _, text = await process.communicate()
    assert process.returncode == 1
    assert b"0.0.0.0 is not a loopback address" in text


async def test_one_folder_has_one_owner_and_rows_outlive_a_kill(
    tmp_path: Path, tracestore: Any
) -> None:
    client = await connect("sync", tracestore.port)
    table = await new_table(client)
    for number in range(20):
        await client.insert(table, [[number, "acknowledged"]], column_names=["a", "s"])

    port = free_port()
    spec = tracestore_spec(port, tmp_path / "traces", tmp_path / "2.log", tracestore.spec.env)
    second = type(tracestore)(spec, port)
    try:
        with pytest.raises(ProcessFailedError, match="one trace store per folder"):
            await second.start()
    finally:
        await second.stop()

    await tracestore.kill()
    await tracestore.start()
    assert await client.command(f"SELECT count() FROM {table}") == 20
    assert await tracestore.stop() == 0  # SIGTERM closes the engine
    await tracestore.start()
    assert await client.command(f"SELECT count() FROM {table}") == 20
    await client.close()


async def test_a_password_is_asked_for(tmp_path: Path, shared_tracestore: Any) -> None:
    secret = tmp_path / "password"
    secret.write_text("correct horse\n")
    port = free_port()
    environment = shared_tracestore.spec.env
    spec = tracestore_spec(
        port, tmp_path / "own", tmp_path / "own.log", environment, password_file=secret
    )
    server = await ChildProcess.start(spec)
    try:
        await server.wait_ready(60)
        for kind in ("sync", "async"):
            for options in ({}, {"password": "wrong"}):
                with pytest.raises(DatabaseError) as caught:
                    await connect(kind, port, **options)
                assert caught.value.code == 516
            client = await connect(kind, port, password="correct horse")
            assert await client.command("SELECT 1") == 1
            await client.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.post(
                "/", content="SELECT 1", headers={"X-ClickHouse-Key": "correct horse"}
            )
            assert answer.text == "1\n"
            assert (await http.post("/", content="SELECT 1")).status_code == 403
    finally:
        await server.stop()
