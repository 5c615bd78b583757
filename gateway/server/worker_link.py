"""The messages between a worker process and its parent, as JSON lines over a socket pair.

Twice a second the worker reports that its event loop runs, whether it is ready and whether it is
stopping. The parent requests the worker's metrics, and commands a replaced worker to retire. When
either process ends, the other process reads the end of the stream.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import orjson

HEARTBEAT_S = 0.5
_LINE_BYTES_MAX = 16 << 20  # a page of metrics is sent as one line
_METRICS_TIMEOUT_S = 2.0

_METRICS = b"metrics\n"
_RETIRE = b"retire\n"


class WorkerEnd:
    """The worker's side of the link to its parent.

    Attributes:
        is_retired: Whether the parent has replaced this worker by another worker.
    """

    def __init__(self, sock: socket.socket, stop: asyncio.Event) -> None:
        """`stop` is set when the parent commands a stop or has ended."""
        self._sock = sock
        self._stop = stop
        self._read_metrics: Callable[[], bytes] = bytes
        self._not_ready_because: Callable[[], str] | None = None
        self.is_retired = False

    def serve(
        self, *, read_metrics: Callable[[], bytes], not_ready_because: Callable[[], str]
    ) -> None:
        """Report from now on that connections are accepted."""
        self._read_metrics = read_metrics
        self._not_ready_because = not_ready_because

    async def run(self) -> None:
        """Exchange messages until the parent ends or the task is cancelled."""
        reader, writer = await asyncio.open_connection(sock=self._sock)
        try:
            async with asyncio.TaskGroup() as tasks:
                beats = tasks.create_task(self._beat(writer))
                while line := await reader.readline():
                    if line == _METRICS:
                        page = self._read_metrics().decode()
                        writer.write(orjson.dumps({"metrics": page}) + b"\n")
                    else:
                        self.is_retired = True
                        self._stop.set()
                self._stop.set()
                beats.cancel()
        except* ConnectionError:
            self._stop.set()
        finally:
            writer.close()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            ask = self._not_ready_because
            reason = "it is starting" if ask is None else ask()
            is_stopping = self._stop.is_set()
            state = {
                "is_serving": ask is not None and not is_stopping,
                "is_stopping": is_stopping,
                "not_ready_because": reason,
            }
            writer.write(orjson.dumps(state) + b"\n")
            await writer.drain()
            await asyncio.sleep(HEARTBEAT_S)


class ParentEnd:
    """The parent's side of the link to a worker.

    Attributes:
        is_serving: Whether the worker accepts connections and has no command to stop.
        is_stopping: Whether the worker has a command to stop, even before it has served.
        not_ready_because: Reason why the worker cannot serve, empty if it can.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calls: list[asyncio.Future[bytes]] = []
        self.is_serving = self.is_stopping = False
        self.not_ready_because = "it is starting"

    @classmethod
    async def open(cls, sock: socket.socket) -> "ParentEnd":
        """Return the parent's end of the pair."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_LINE_BYTES_MAX))

    async def next_word(self) -> bool:
        """Read the worker's next line.

        Returns False if the worker has ended or the line is invalid.
        """
        try:
            line = await self._reader.readline()
            if not line:
                return False
            said = cast("dict[str, Any]", orjson.loads(line))
        except (ConnectionError, ValueError):
            return False
        if "metrics" in said:
            if self._calls:
                answer = self._calls.pop(0)
                if not answer.done():
                    answer.set_result(said["metrics"].encode())
        else:
            self.is_serving = said["is_serving"]
            # After an upgrade by SIGHUP, a worker of the older release does not send `is_stopping`.
            self.is_stopping = said.get("is_stopping", False)
            self.not_ready_because = said["not_ready_because"]
        return True

    async def metrics(self) -> bytes:
        """Return the worker's metrics page, or an empty page if none arrives in two seconds."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls.append(answer)
        with suppress(TimeoutError, ConnectionError):
            self._writer.write(_METRICS)
            async with asyncio.timeout(_METRICS_TIMEOUT_S):
                return await answer
        return b""

    def retire(self) -> None:
        """Command the worker to accept no more connections, finish its requests and end."""
        self._writer.write(_RETIRE)

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()
        for answer in self._calls:
            answer.cancel()
