"""A real worker process against clients who mean harm: it answers in one shape, stays small, lives.

No router and no Valkey are there: whatever gets past the server ends with 401, 404 or 503.
"""

import asyncio
import gzip
import hashlib
import json
import random
import re
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from tests.support.http2_peer import SocketPeer

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

KEY = "sk-hostile-key-that-must-not-be-logged"
NOBODY = "127.0.0.1:1"
CONNECTIONS_MAX = 2_000
HEAD_TIMEOUT_S = 8.0  # longer than it takes to open all connections of a test
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
GROWTH_BYTES_MAX = 150 << 20

Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Server:
    child: ChildProcess
    port: int
    log_file: Path

    @property
    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]) * 4096

    async def open(self) -> Raw:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, data: bytes, *, wait_s: float = 60.0) -> bytes:
        """What comes back until the server closes, or says nothing more."""
        reader, writer = await self.open()
        received = bytearray()
        try:
            writer.write(data)
            async with asyncio.timeout(wait_s):
                while part := await reader.read(65536):
                    received += part
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        return bytes(received)

    async def until_alone(self) -> None:
        """Connections of before have ended."""
        async with asyncio.timeout(60):
            while b"gateway_open_connections 1.0" not in await self.send(get("/metrics")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def is_well(self) -> None:
        """Somebody else is answered."""
        answer = await self.send(get("/healthz"))
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert self.child.is_running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    home = tmp_path_factory.mktemp("hostile")
    secret = hashlib.sha256(KEY.encode()).digest()
    objects = control.Objects(
        tenants=[control.Tenant(id="one")],
        keys=[control.ApiKey(id="k", tenant_id="one", secret_sha256=secret)],
    )
    snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=objects)
    write_snapshot(iter([snapshot.SerializeToString()]), home / "control.snapshot")
    port = free_port()
    settings = {
        "INSTANCE_ID": "hostile",
        "HTTP_ADDRESS": f"127.0.0.1:{port}",
        "CONTROL_ADDRESS": NOBODY,
        "STATE_DIR": home,
        "ARTIFACTS_DIR": home,
        "VALKEY_URL": f"redis://{NOBODY}",
        "KAFKA_BOOTSTRAP": NOBODY,
        "CONNECTIONS_MAX": CONNECTIONS_MAX,
        "HEAD_TIMEOUT_S": HEAD_TIMEOUT_S,
        "BODY_BUFFER_BYTES": 8 << 20,
        "IDLE_GRACE_S": 0,
        "FLUSH_S": 0,
    }

    async def ready() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    spec = ProcessSpec(
        name="hostile",
        command=[sys.executable, "-m", "gateway"],
        env={"PATH": "/usr/bin:/bin", **shared_secret.environment()}
        | {f"GATEWAY__{k}": str(v) for k, v in settings.items()},
        log_file=home / "log",
        ready=ready,
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(60)
        yield Server(child, port, spec.log_file)
    finally:
        await child.stop()
    log = spec.log_file.read_text()
    assert KEY not in log
    assert "Traceback" not in log


def get(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n".encode()


def post(body: bytes, *, more: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {size}\r\n{more}\r\n"
    )
    return head.encode() + body


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in STATUS.findall(answer)]


def check_error(answer: bytes) -> None:
    """One answer, in our envelope, with an id, and nothing of our insides."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.search(rb"\r\nx-request-id: \S+", head), answer
    assert b"aiohttp" not in answer.lower()
    assert b"Traceback" not in answer
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


CHUNKED = "Transfer-Encoding: chunked\r\n"
MALFORMED = {
    "no http": (b"hello\r\n\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "http 0.9": (b"GET /\r\n\r\n", 505),
    "http 2": (get("/healthz").replace(b"HTTP/1.1", b"HTTP/2.0"), 505),
    "half of http 2's preface": (b"PRI * HTTP/2.0\r\n\r\nSMALL\r\n", 400),
    "http 7.7": (get("/healthz").replace(b"HTTP/1.1", b"HTTP/7.7"), 505),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    "two hosts": (get("/healthz", "Host: y\r\n"), 400),
    "bad target": (b"GET http://[bad HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "long target": (get("/" + "a" * 9_000), 414),
    "long header": (get("/healthz", f"X: {'a' * 17_000}\r\n"), 431),
    "long name": (get("/healthz", f"{'a' * 17_000}: x\r\n"), 431),
    "many headers": (get("/healthz", "X: a\r\n" * 1_000), 431),
    "space in a name": (get("/healthz", "X : a\r\n"), 400),
    "no colon": (get("/healthz", "nonsense\r\n"), 400),
    "folded": (get("/healthz", "X: a\r\n b\r\n"), 400),
    "nul": (get("/healthz", "X: a\x00b\r\n"), 400),
    "bare cr": (get("/healthz", "X: a\rb\r\n"), 400),
    "length and chunks": (post(b"abc", more=CHUNKED), 400),
    "two lengths": (post(b"abc", more="Content-Length: 4\r\n"), 400),
    "negative length": (post(b"", length=-1), 400),
    "huge length": (post(b"", length=10**30), 400),
    "long length": (
        post(b"{}").replace(b"Content-Length: ", b"Content-Length: " + b"0" * 5_000),
        400,
    ),
    "length no number": (get("/healthz", "Content-Length: 0x3\r\n"), 400),
    "unknown coding": (get("/healthz", "Transfer-Encoding: cow\r\n"), 400),
    "chunked, not last": (get("/healthz", "Transfer-Encoding: chunked, gzip\r\n"), 400),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
    "unknown method": (get("/healthz").replace(b"GET", b"BREW"), 400),
    "wrong method": (get("/healthz").replace(b"GET", b"DELETE"), 405),
    "unknown path": (get("/%ff%00/../..%2f"), 404),
    "no body": (post(b""), 400),
    "bad expectation": (post(b"{}", more="Expect: miracles\r\n"), 417),
    "too large": (post(b"x" * (5 << 20)), 413),
    "gzip that is none": (post(b"{}", more="Content-Encoding: gzip\r\n"), 400),
    "brotli": (post(b"{}", more="Content-Encoding: br\r\n"), 415),
    "zstandard": (post(b"{}", more="Content-Encoding: zstd\r\n"), 415),
    "packed twice": (post(b"{}", more="Content-Encoding: gzip, gzip\r\n"), 415),
    "gzip, cut": (post(gzip.compress(b"{}")[:-4], more="Content-Encoding: gzip\r\n"), 400),
    "gzip, and more": (post(gzip.compress(b"{}") * 2, more="Content-Encoding: gzip\r\n"), 400),
    "bad utf-8": (post(b'{"model":"\xff\xfe"}'), 400),
    "deep": (post(b"[" * 1_000_000), 400),
    "huge number": (post(b'{"model":' + b"9" * 1_000_000 + b"}"), 400),
}


@pytest.mark.parametrize(("data", "status"), MALFORMED.values(), ids=MALFORMED)
async def test_every_hostile_request_is_answered_in_one_shape(server, data, status) -> None:
    answer = await server.send(data)
    assert statuses(answer) == [status], answer[:500]
    check_error(answer)


async def test_broken_chunks_end_the_request_at_once(server) -> None:
    head = post(b"", more=CHUNKED).replace(b"Content-Length: 0\r\n", b"")
    for chunks in (
        b"zz\r\n",
        b"3\r\nabcdef\r\n",
        b"-1\r\n",
        b"f" * 40 + b"\r\n",
        b"3;a=\x00\r\nabc",
    ):
        answer = await server.send(head + b"2\r\n{}\r\n" + chunks)
        assert statuses(answer) == [400], answer
        check_error(answer)


async def test_chunks_are_the_only_transfer_coding(server) -> None:
    head = post(b"", more="Transfer-Encoding: %s\r\n").replace(b"Content-Length: 0\r\n", b"")
    packed = gzip.compress(b"[]")
    for coding, body in ((b"chunked", b"[]"), (b"Chunked ", b"[]"), (b"gzip, chunked", packed)):
        answer = await server.send(head % coding + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert statuses(answer) == [400], answer
        check_error(answer)
        assert (b"Transfer-Encoding" in answer) == (body is packed), answer


async def test_nothing_that_follows_a_broken_request_is_answered(server) -> None:
    smuggled = get("/healthz").replace(b"Connection: close\r\n", b"")
    both = b"Content-Length: 4\r\n" + CHUNKED.encode()
    for broken in (
        b"POST /healthz HTTP/1.1\r\nHost: x\r\n" + both + b"\r\n0\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1\nX: y\r\n\r\na",
    ):
        assert statuses(await server.send(broken + smuggled)) == [400], broken


SEEDS = [
    post(b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'),
    post(gzip.compress(b"{}"), more="Content-Encoding: gzip\r\n"),
    post(b"", more=CHUNKED).replace(b"Content-Length: 0\r\n", b"") + b"2\r\n{}\r\n0\r\n\r\n",
    get("/v1/models/a%2Fb", f"Authorization: Bearer {KEY}\r\nTraceparent: 00-{'a' * 32}-b\r\n"),
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\x00", b"\xff\xfe", b" ", b":", b"%", b"\xf0\x9f\x98\x80", b"\r\n\r\n",
    b"Content-Length: 5\r\n", CHUNKED.encode(), b"Host: y\r\n", b"HTTP/1.1", b"Upgrade: h2c\r\n",
    b"Connection: upgrade\r\n", b"Expect: 100-continue\r\n", "Ключ: значение\r\n".encode(),
]  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        what = rng.random()
        if what < 0.5:
            data[at:at] = rng.choice(PIECES)
        elif what < 0.8:
            del data[at : at + rng.randint(1, 20)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 40))
    return bytes(data)


async def test_mutated_requests_are_answered_or_cut(server) -> None:
    rng = random.Random(20)
    inputs = [mutated(rng) for _ in range(1_000)]
    gate = asyncio.Semaphore(100)

    async def one(data: bytes) -> None:
        async with gate:
            answer = await server.send(data, wait_s=0.5)
        assert not answer or STATUS.match(answer), (data, answer)
        assert 500 not in statuses(answer), (data, answer)
        assert b"Traceback" not in answer, (data, answer)

    async with asyncio.TaskGroup() as tasks:
        for data in inputs:
            tasks.create_task(one(data))
    await server.is_well()


async def test_ten_thousand_pipelined_requests(server) -> None:
    before = server.memory_bytes
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = await server.send(one * 9_999 + get("/healthz"), wait_s=60)
    assert statuses(answer) == [200] * 10_000
    reader, writer = await server.open()  # and one who never reads
    writer.write(one * 10_000)
    await server.is_well()
    assert server.memory_bytes - before < GROWTH_BYTES_MAX
    writer.close()
    del reader


@asynccontextmanager
async def crowd(server: Server, count: int, first: bytes) -> AsyncIterator[list[Raw]]:
    """Connections that say `first` and then no more."""
    found: list[Raw] = []
    try:
        for _ in range(count):
            found.append(await server.open())
            found[-1][1].write(first)
        yield found
    finally:
        for _, writer in found:
            writer.close()


async def test_slow_heads_do_not_keep_others_waiting(server) -> None:
    before = server.memory_bytes
    async with crowd(server, CONNECTIONS_MAX - 10, b"GET /healthz HTTP/1.1\r\nHos") as slow:
        await server.is_well()
        for _, writer in slow:
            writer.write(b"t")  # a byte from time to time
        async with asyncio.timeout(60):
            answers = [await reader.read() for reader, _ in slow]
        assert {tuple(statuses(answer)) for answer in answers} == {(408,)}
        check_error(answers[0])
    assert server.memory_bytes - before < GROWTH_BYTES_MAX
    await server.is_well()


async def test_a_head_of_many_long_fields_is_not_kept(server) -> None:
    before = server.memory_bytes
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 16_000) for number in range(120))
    endless = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + fields
    answers = await asyncio.gather(*(server.send(endless) for _ in range(200)))
    assert server.memory_bytes - before < GROWTH_BYTES_MAX
    for answer in filter(None, answers):  # others were reset while they sent
        assert statuses(answer) == [431]
        check_error(answer)
    assert any(answers)
    await server.is_well()


async def test_a_body_that_is_dropped_is_no_head(server) -> None:
    late = post(b"x" * 200_000, length=5 << 20).replace(b"Connection: close\r\n", b"")
    reader, writer = await server.open()
    writer.write(late)
    await reader.readuntil(b'"request_too_large"}}')
    writer.write(b"x" * 200_000)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_a_full_worker_answers_probes_and_says_so_to_others(server) -> None:
    await server.until_alone()
    kept = get("/healthz").replace(b"Connection: close\r\n", b"")
    async with crowd(server, CONNECTIONS_MAX, kept) as idle:
        for reader, _ in idle:
            await reader.readuntil(b'{"status":"ok"}')
        await server.is_well()
        refused = await server.send(get("/v1/models"))
        assert statuses(refused) == [503]
        assert b"Retry-After: 1" in refused
        check_error(refused)
        async with crowd(server, 64, b""):
            turned_away = await server.send(b"")
            assert statuses(turned_away) == [503]
            check_error(turned_away)
    await server.until_alone()
    await server.is_well()


async def test_bombs_stay_packed(server) -> None:
    before = server.memory_bytes
    zeros = bytes(100 << 20)
    packed = {"gzip": gzip.compress(zeros, 1), "deflate": zlib.compress(zeros, 1)}
    del zeros
    for encoding, bomb in packed.items():
        data = post(bomb, more=f"Content-Encoding: {encoding}\r\n")
        answers = await asyncio.gather(*(server.send(data) for _ in range(8)))
        assert {tuple(statuses(answer)) for answer in answers} == {(413,)}
        check_error(answers[0])
    assert server.memory_bytes - before < GROWTH_BYTES_MAX
    await server.is_well()


async def test_unfinished_bodies_have_a_bound_together(server) -> None:
    size = 4 << 20
    begun = post(b"x" * (size - 1), length=size)
    async with crowd(server, 2, begun):
        async with asyncio.timeout(60):
            while b"gateway_body_buffer_bytes 8.388606e+06" not in (  # noqa: ASYNC110
                await server.send(get("/metrics"))
            ):
                await asyncio.sleep(0.05)
        refused = await server.send(begun)
        assert statuses(refused) == [503]
        check_error(refused)
        assert b'"code":"overloaded"' in refused
    async with asyncio.timeout(60):
        while statuses(await server.send(post(b"x" * 100_000))) != [400]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_floods_over_http_2_end_their_connection_and_no_other(server) -> None:
    await server.until_alone()
    patient = await SocketPeer.connect(server.port)
    patient.ask(1, path="/healthz")
    await patient.until(lambda: patient.has_ended(1))
    memory_bytes = server.memory_bytes
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)
    begun = b"\x00\x00\x00\x01\x00\x00\x00\x00\x01"  # a head that has no end
    more = b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + bytes(16_384)
    for flood in (ping * 200_000, begun + more * 1_000, bytes(1 << 20)):
        client = await SocketPeer.connect(server.port)
        with suppress(ConnectionError):
            client.send(flood)
            await client.until(lambda client=client: client.is_over)
        await client.close()
    assert b"gateway_http2_floods_total 3.0" in await server.send(get("/metrics"))
    assert server.memory_bytes - memory_bytes < GROWTH_BYTES_MAX
    patient.ask(3, path="/healthz")
    await patient.until(lambda: patient.has_ended(3))
    assert patient.status(3) == 200
    await patient.close()
