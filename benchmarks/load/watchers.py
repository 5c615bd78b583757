"""Many watchers in several processes, which only record when messages arrive.

Each process is started with ADDRESS COUNT KNOWN_VERSION IS_READING. It opens COUNT streams, each
over its own connection, and prints a line when all are open. Then it reads one version of the state
per line from stdin. For each version it prints the times when its streams received the version, in
seconds of the machine's monotonic clock.
"""

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio

from sluice.channels import channel_to
from sluice.identity import CertificateRole
from sluice.wire.control.v1 import control_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_PROCESSES = 2
_OPEN_S = 120.0
_ARRIVE_S = 300.0
_LINE_BYTES_MAX = 16 * 1024 * 1024
_METHOD = "/sluice.wire.control.v1.ControlService/Watch"
_OPTIONS = (
    ("grpc.max_receive_message_length", 512 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Watchers:
    """All processes with watchers, for a benchmark."""

    def __init__(self, address: str, processes: list[asyncio.subprocess.Process]) -> None:
        self._address = address
        self._processes = processes

    @classmethod
    @asynccontextmanager
    async def running(
        cls, address: str, count: int, known_version: int, *, is_reading: bool = True
    ) -> "AsyncGenerator[Watchers]":
        """Open `count` streams. With `is_reading` false, the streams read no message."""
        processes: list[asyncio.subprocess.Process] = []
        try:
            for share in range(_PROCESSES):
                mine = str(count // _PROCESSES + (share < count % _PROCESSES))
                arguments = [address, mine, str(known_version), str(int(is_reading))]
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-c", f"from {__name__} import main; main()", *arguments),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        limit=_LINE_BYTES_MAX,
                    )
                )
            watchers = cls(address, processes)
            async with asyncio.timeout(_OPEN_S):
                await watchers._answers()
            yield watchers
        finally:
            for process in processes:
                process.kill()
                await process.wait()

    async def arrivals(self, version: int) -> list[float]:
        """Wait until all streams have received a version, and return the time of each stream."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{version}\n".encode())
        async with asyncio.timeout(_ARRIVE_S):
            return [at_s for answer in await self._answers() for at_s in answer]

    async def comes_back(self, known_version: int) -> list[str]:
        """Reconnect a watcher that has version `known`. Returns the kinds of its first messages."""
        found: list[str] = []
        async with channel_to(
            self._address, CertificateRole.CONTROL_PLANE, options=_OPTIONS
        ) as channel:
            call = _call(channel, known_version - 3)
            while True:
                response = wire.WatchResponse.FromString(await call.read())
                kind = "snapshot" if response.is_snapshot else "delta"
                found.append("heartbeat" if response.is_heartbeat else kind)
                if response.version >= known_version:
                    call.cancel()
                    return found

    async def _answers(self) -> list[Any]:
        lines: list[bytes] = []
        for process in self._processes:
            assert process.stdout is not None
            lines.append(await process.stdout.readline())
        return [json.loads(line) for line in lines]


class _SeenVersions:
    """Records when the streams of this process received versions."""

    def __init__(self, count: int) -> None:
        self._missing: dict[int, int] = {}
        self._count = count
        self.versions = [0] * count
        self.arrivals: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        self.heard = asyncio.Event()

    def note(self, number: int, version: int) -> None:
        """Record that stream `number` received a version."""
        self.versions[number] = version
        self.arrivals[number].append((version, time.monotonic()))
        self.heard.set()

    async def when(self, version: int) -> list[float]:
        """Return the time when each stream received this version or a newer one."""
        while min(self.versions) < version:
            self.heard.clear()
            await self.heard.wait()
        found = [next(at_s for had, at_s in noted if had >= version) for noted in self.arrivals]
        for noted in self.arrivals:
            noted.clear()
        return found


def _call(channel: grpc.aio.Channel, known_version: int) -> Any:
    request = wire.WatchRequest(
        role=wire.ROLE_OPERATOR, known_version=known_version, takes_parts=True
    )
    serialize = wire.WatchRequest.SerializeToString
    return channel.unary_stream(_METHOD, serialize, None)(request)


async def _watch(call: Any, number: int, noted: _SeenVersions) -> None:
    while True:
        payload = await call.read()
        if not isinstance(payload, bytes):
            raise ConnectionError("the control plane ended a stream")
        response = wire.WatchResponse.FromString(payload)
        if not response.is_heartbeat:
            noted.note(number, response.version)


async def _main(address: str, count: int, known_version: int, is_reading: bool) -> None:
    noted = _SeenVersions(count)
    channels = [
        channel_to(address, CertificateRole.CONTROL_PLANE, options=_OPTIONS) for _ in range(count)
    ]
    calls = [_call(channel, known_version) for channel in channels]
    for call in calls:
        await call.wait_for_connection()
    async with asyncio.TaskGroup() as tasks:
        if is_reading:
            for number, call in enumerate(calls):
                tasks.create_task(_watch(call, number, noted))
        print(count, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await noted.when(int(line))), flush=True)


def main() -> None:
    """Run one of the watching processes."""
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"))
