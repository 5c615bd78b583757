"""Measures a gateway worker's memory with open streams, a scripted router and real sockets.

The scripted router sends one token for each request and then nothing, so that the streams stay
open. A real engine would need very long steps for ten thousand sequences, and its agent would treat
it as frozen. A real router would also accept only 4,096 waiting requests.
"""

import asyncio
import hashlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.engine_alone import SHIPPED_BASE
from benchmarks.load.sse_client import StreamLoad
from cli.stack.valkey import valkey_spec, valkey_url
from sluice import shared_secret
from sluice.artifacts import import_directory
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from tests.support.scripted_router import Plan, ScriptedRouter, serve

_KEY, _MODEL, _PASSWORD = "sk-parked", "parked", "parked"
_CLOSED_ADDRESS = "127.0.0.1:1"
_STEP_S = 0.1
_PARKED_PLAN, _PROGRAM = Plan([[1000]], None), ("-m", "gateway")
_UNBEGUN_MAX = 500
_BEGIN_S = 120.0
_LEAVE_S = 60.0
_SAMPLE_S = 60.0


@dataclass(frozen=True, slots=True)
class ParkedSite:
    """A gateway process with its servers, and `load`, which describes requests to this gateway."""

    load: StreamLoad
    process: psutil.Process
    router: ScriptedRouter

    @property
    def rss_bytes(self) -> int:
        """The resident memory of the gateway now, in bytes."""
        return self.process.memory_info().rss


@asynccontextmanager
async def running_site(
    step_s: float = _STEP_S,
    plan: Plan = _PARKED_PLAN,
    program: Sequence[str] = _PROGRAM,
    *,
    interpreter: str = sys.executable,
) -> AsyncGenerator[ParkedSite]:
    """Run a gateway with one worker, Valkey and a scripted router in a temporary folder.

    Args:
        step_s: Seconds between two messages of the router.
        plan: Answers to requests.
        program: Program that Python runs as the gateway.
        interpreter: Path of this Python.
    """
    router = ScriptedRouter(lambda _: plan, step_s=step_s)
    with tempfile.TemporaryDirectory(prefix="sluice-parked-") as folder:
        home = Path(folder)
        digest = import_directory(SHIPPED_BASE, home / "artifacts")
        async with serve(router) as address:
            port = free_port()
            valkey = valkey_spec(port, home / "valkey", home / "valkey.log", {}, password=_PASSWORD)
            url = valkey_url(port, _PASSWORD)
            gateway = _gateway(home, _objects(digest, address), url, [interpreter, *program])
            started: list[ChildProcess] = []
            try:
                for spec in (valkey, gateway[0]):
                    started.append(await ChildProcess.start(spec))
                    await started[-1].wait_ready(30)
                load = StreamLoad(
                    "127.0.0.1", gateway[1], _KEY, 0, 0, model=_MODEL, max_tokens=4000
                )
                yield ParkedSite(load, psutil.Process(started[-1].pid), router)
            finally:
                for child in reversed(started):
                    await child.stop()


def _objects(digest: str, router_address: str) -> control.Objects:
    secret = hashlib.sha256(_KEY.encode()).digest()
    return control.Objects(
        tiers=[control.Tier(id="all", priority=1)],
        tenants=[control.Tenant(id="one", tier_id="all", cache_salt=b"1")],
        keys=[control.ApiKey(id="key", tenant_id="one", secret_sha256=secret)],
        bases=[control.Base(digest=digest, context_tokens_max=200_000)],
        models=[control.Model(id=_MODEL, base_digest=digest, pool_id="pool", release="1")],
        pools=[control.Pool(id="pool", base_digest=digest)],
        cells=[
            control.Cell(
                id="cell", pool_id="pool", router_id="scripted", router_address=router_address
            )
        ],
    )


def _gateway(
    home: Path, objects: control.Objects, valkey: str, command: Sequence[str]
) -> tuple[ProcessSpec, int]:
    """Start the gateway from a snapshot, without a control plane. Returns process and port."""
    state, port = home / "state", free_port()
    snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=objects)
    write_snapshot(iter([snapshot.SerializeToString()]), state / "control.snapshot")
    settings = {
        "INSTANCE_ID": "parked",
        "HTTP_ADDRESS": f"127.0.0.1:{port}",
        "CONTROL_ADDRESS": _CLOSED_ADDRESS,
        "STATE_DIR": str(state),
        "ARTIFACTS_DIR": str(home / "artifacts"),
        "VALKEY_URL": valkey,
        "KAFKA_BOOTSTRAP": _CLOSED_ADDRESS,
        "FLUSH_S": "0",
        "DRAIN_S": "0",
    }
    spec = ProcessSpec(
        name="gateway",
        command=command,
        env={"PATH": "/usr/bin:/bin", **shared_secret.environment()}
        | {f"GATEWAY__{key}": it for key, it in settings.items()},
        log_file=home / "gateway.log",
        ready=lambda: port_answers("127.0.0.1", port),
    )
    return spec, port


@dataclass(slots=True)
class _Count:
    begun: int = 0
    refused: int = 0
    cut: int = 0
    why: bytes = b""

    async def begins(self, least: int) -> None:
        """Wait until at least `least` streams have begun.

        Raises:
            RuntimeError: A stream was refused.
        """
        while self.begun < least:  # noqa: ASYNC110 - counted by the protocols
            await asyncio.sleep(0.01)
        if self.refused:
            raise RuntimeError(self.why[-300:].decode(errors="replace"))


class _Stream(asyncio.Protocol):
    """A client's stream that stays open until `leave`."""

    __slots__ = ("_count", "_has_begun", "_has_left", "_request", "_transport")

    def __init__(self, request: bytes, count: _Count) -> None:
        self._request = request
        self._count = count
        self._has_begun = False
        self._has_left = False

    @classmethod
    async def open(cls, site: ParkedSite, request: bytes, count: _Count) -> "_Stream":
        """Return a new stream whose request is sent, but not yet answered."""
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: cls(request, count), site.load.host, site.load.port
        )
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._has_begun:
            return
        if not data.startswith(b"HTTP/1.1 200"):
            self._count.refused += 1
            self._count.why = data
            self.leave()
        self._has_begun = True
        self._count.begun += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._count.cut += not self._has_left

    def leave(self) -> None:
        """Close the connection, as a client that disconnects."""
        self._has_left = True
        self._transport.abort()


async def parked(site: ParkedSite, streams: int) -> int:
    """Open streams, a few at a time, and close them. Returns the memory in bytes with all open.

    Raises:
        RuntimeError: A stream was refused, for the reason in the message.
        TimeoutError: The streams did not begin in time.
    """
    opened: deque[_Stream] = deque()
    try:
        await _fill(site, opened, streams, _Count())
        return site.rss_bytes
    finally:
        await _leave(site, opened)


@dataclass(frozen=True, slots=True)
class Churn:
    """Results of a run in which open streams are regularly replaced by new ones.

    Attributes:
        begun: Number of requests.
        refused: Number of refused requests. A busy machine may cause some, because a router that is
            silent for 0.9 s counts as lost.
        cut: Number of accepted requests that the gateway ended early.
        seconds: Duration in seconds, longer than requested if the machine was too slow.
        rss_bytes: Memory of the gateway after every minute.
    """

    begun: int
    refused: int
    cut: int
    seconds: float
    rss_bytes: list[int]


async def churned(site: ParkedSite, streams: int, per_s: int, minutes: int) -> Churn:
    """Open streams, and replace a number of the oldest streams by new ones each second.

    Raises:
        RuntimeError: One of the first streams was refused, for the reason in the message.
        TimeoutError: Streams did not begin, or the gateway accepts no more connections.
    """
    opened: deque[_Stream] = deque()
    count, request, sizes = _Count(), site.load.request(), list[int]()
    try:
        await _fill(site, opened, streams, count)
        began_at = next_at = time.monotonic()
        for _ in range(minutes):
            for _ in range(int(_SAMPLE_S)):
                async with asyncio.timeout(_BEGIN_S):
                    for _ in range(per_s):
                        opened.popleft().leave()
                        opened.append(await _Stream.open(site, request, count))
                next_at += 1.0
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))
                site.router.submits.clear()
                site.router.cancelled.clear()
            sizes.append(site.rss_bytes)
            print(f"{len(sizes)} min: {sizes[-1] >> 20} MiB, {count.begun} streams", flush=True)
        seconds = time.monotonic() - began_at
        return Churn(count.begun, count.refused, count.cut, seconds, sizes)
    finally:
        await _leave(site, opened)


async def _fill(site: ParkedSite, opened: deque[_Stream], streams: int, count: _Count) -> None:
    request = site.load.request()
    async with asyncio.timeout(_BEGIN_S):
        for index in range(streams):
            opened.append(await _Stream.open(site, request, count))
            await count.begins(index - _UNBEGUN_MAX)
        await count.begins(streams)


async def _leave(site: ParkedSite, opened: deque[_Stream]) -> None:
    for stream in opened:
        stream.leave()
    async with asyncio.timeout(_LEAVE_S):
        while len(site.process.net_connections("tcp")) > 100:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
