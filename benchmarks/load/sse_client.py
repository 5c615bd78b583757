"""A closed-loop client of streamed chat completions over raw sockets, which measures its answers.

One operation is one streamed completion, from the request's last byte to the stream's end. TTFT is
the time to the first event with content. Connections are reused. CPU times are those of processes
that the caller names, from /proc. On a noisy machine CPU time is repeatable, while wall time is
not. Not measured: DNS, TLS, connection set-up.
"""

import asyncio
import json
import socket
import struct
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import psutil

_STAMPS = 35  # SO_TIMESTAMPNS: each read returns the kernel's arrival time


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """A load of `streams` concurrent connections that together send `requests` requests.

    Attributes:
        ramp_s: Seconds over which connections begin evenly. Connections that begin at once also end
            at once, and then the figures are those of a burst of requests.
        is_stamped: Whether arrival times are the kernel's. The client's own times are later,
            because it shares the cores and reads one connection after the other.
    """

    host: str
    port: int
    key: str
    streams: int
    requests: int
    model: str = "sluice-tiny"
    prompt: str = "Tell me a story about a river and a gate."
    max_tokens: int = 100
    limit_s: float = 120.0
    ramp_s: float = 0.0
    is_stamped: bool = False

    def request(self) -> bytes:
        """Return the bytes of the HTTP request, which is the same for every operation."""
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": self.prompt}],
                "max_tokens": self.max_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True)
class StreamTally:
    """Counts of the answers, and their times in seconds.

    Attributes:
        arrivals_s: Arrival times of each answer's tokens, by the monotonic clock.
    """

    started: int = 0
    finished: int = 0
    errors: int = 0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list[float])
    gaps_s: list[float] = field(default_factory=list[float])
    arrivals_s: list["array[float]"] = field(default_factory=list["array[float]"])
    problems: list[str] = field(default_factory=list[str])


class _Stream(asyncio.Protocol):
    """A connection that sends one request after another."""

    def __init__(self, load: StreamLoad, tally: StreamTally, done: asyncio.Event) -> None:
        self._load, self._tally, self._done = load, tally, done
        self._request = load.request()
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def _next(self) -> None:
        tally = self._tally
        if tally.started >= self._load.requests:
            self._transport.close()
            return
        tally.started += 1
        self._status, self._tokens, self._tail = 0, 0, b""
        self._arrivals = array("d")
        tally.arrivals_s.append(self._arrivals)
        self._last_at = time.monotonic()
        self._transport.write(self._request)
        self._is_waiting = True

    def data_received(self, data: bytes) -> None:
        self.take(data, time.monotonic())

    def take(self, data: bytes, now: float) -> None:
        """Count the received tokens, and note their time on the monotonic clock."""
        if not self._status:
            self._status = int(data[9:12])
        tokens = data.count(b'"content":') - data.count(b'"content":""')
        if tokens > 0:
            times = self._tally.gaps_s if self._tokens else self._tally.ttft_s
            times.append(now - self._last_at)
            self._last_at = now
            self._tokens += tokens
            self._arrivals.extend([now] * tokens)
        self._tail = (self._tail + data)[-400:]
        if self._tail.endswith(b"0\r\n\r\n") or self._status != 200:
            self._end()

    def _end(self) -> None:
        tally = self._tally
        self._is_waiting = False
        tally.finished += 1
        tally.tokens += self._tokens
        if self._status != 200 or b"[DONE]" not in self._tail:
            tally.errors += 1
            tally.problems.append(self._tail.decode(errors="replace"))
        if tally.finished >= self._load.requests:
            self._done.set()
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_waiting:
            self._tally.problems.append(f"connection lost in mid-answer: {exc!r}")


class _StampedTransport(asyncio.Transport):
    """Reads a connection with `recvmsg`, which returns the kernel's arrival times."""

    def __init__(self, load: StreamLoad, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._ahead_s = min(time.time() - time.monotonic() for _ in range(20))
        self._socket = socket.create_connection((load.host, load.port))
        self._socket.setsockopt(socket.SOL_SOCKET, _STAMPS, 1)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)
        stream.connection_made(self)

    def _read(self) -> None:
        data, stamps, _, _ = self._socket.recvmsg(1 << 16, 64)
        if not data:
            self.close()
            self._stream.connection_lost(None)
            return
        seconds, nanoseconds = struct.unpack("qq", stamps[0][2])
        self._stream.take(data, seconds + nanoseconds * 1e-9 - self._ahead_s)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._socket.sendall(data)  # a small request always fits

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()


def percentile_ms(values: list[float], share: float) -> float | None:
    """Return a percentile in ms, or None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)


def cpu_seconds(pids: dict[str, list[int]]) -> dict[str, float]:
    """Return user + system seconds of each group of processes, descendants included."""
    used: dict[str, float] = {}
    for name, roots in pids.items():
        total = 0.0
        for root in roots:
            process = psutil.Process(root)
            for one in (process, *process.children(recursive=True)):
                times = one.cpu_times()
                total += times.user + times.system
        used[name] = total
    return used


async def run_load(load: StreamLoad, pids: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """Run the load, and return its figures with the CPU time of the processes in `pids`."""
    return (await tallied_load(load, pids))[0]


async def tallied_load(
    load: StreamLoad, pids: dict[str, list[int]] | None = None
) -> tuple[dict[str, Any], StreamTally]:
    """Run the load and return the figures, and the tally of all answers."""
    tally, done, loop = StreamTally(), asyncio.Event(), asyncio.get_running_loop()
    groups = pids or {}
    cpu_before, started_at = cpu_seconds(groups), time.perf_counter()
    try:
        async with asyncio.timeout(load.limit_s):
            for index in range(load.streams):
                if load.is_stamped:
                    _StampedTransport(load, _Stream(load, tally, done))
                else:
                    await loop.create_connection(
                        lambda: _Stream(load, tally, done), load.host, load.port
                    )
                if load.ramp_s:
                    await asyncio.sleep(load.ramp_s / load.streams)
                elif index % 50 == 49:
                    await asyncio.sleep(0.01)
            await done.wait()
    except TimeoutError:
        tally.problems.append(f"only {tally.finished} of {load.requests} within {load.limit_s} s")
    wall_s = time.perf_counter() - started_at
    cpu_after = cpu_seconds(groups)
    cpu = {name: cpu_after[name] - cpu_before[name] for name in groups}
    return _figures(load, tally, wall_s, cpu), tally


def _figures(
    load: StreamLoad, tally: StreamTally, wall_s: float, cpu: dict[str, float]
) -> dict[str, Any]:
    return {
        "streams": load.streams,
        "requests": tally.finished,
        "errors": tally.errors,
        "problems": tally.problems[:3],
        "tokens": tally.tokens,
        "wall_s": round(wall_s, 2),
        "tokens_per_s": round(tally.tokens / wall_s),
        "ttft_ms": {f"p{int(q * 100)}": percentile_ms(tally.ttft_s, q) for q in (0.5, 0.9, 0.99)},
        "gap_ms": {f"p{int(q * 100)}": percentile_ms(tally.gaps_s, q) for q in (0.5, 0.99)},
        "cpu_s": {name: round(value, 2) for name, value in cpu.items()},
        "cpu_us_per_token": {
            name: round(value / max(1, tally.tokens) * 1e6, 2) for name, value in cpu.items()
        },
    }
