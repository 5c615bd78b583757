"""Answers the lines of batches with the worker's own handlers, at the lowest priority.

The control plane leases lines to a gateway for half a minute. The gateway renews the lease while it
works on the line. The lines of a dead gateway are leased to another gateway. A line that is refused
for lack of capacity is returned. Then the worker leases fewer lines, so that batches use only the
spare capacity of pools.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress

import orjson
import structlog
from aiohttp import web

from gateway.batches.client import BatchClient
from gateway.directory import Directory, Principal
from gateway.server.errors import body_of
from gateway.server.identity import CallerIdentity
from gateway.server.in_process import BodySink, in_process_request
from gateway.server.middleware import give_principal
from gateway.server.routes import Routes
from sluice import tracecontext
from sluice.errors import ErrorCode, PlatformError, policy_of
from sluice.lifecycle import backoff_s
from sluice.wire.state.v1 import state_pb2 as wire

log = structlog.get_logger(__name__)

LINES_MAX = 32  # maximum number of lines that one worker answers at the same time
# Seconds between calls while lines are under way, without lines, and after many empty calls.
_BUSY_S, _IDLE_S, _IDLE_MAX_S = 0.25, 2.0, 15.0
_CALL_BYTES_MAX = 2 << 20  # bytes of results per call, below gRPC's 4 MiB per message
_RESULT_BYTES_MAX = 3 << 20
_STOP_S = 5.0
_LINE_S = 3600.0
# HTTP statuses of temporary refusals, when the platform has no capacity or is unavailable.
_PASSING = frozenset({429, 503})

Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Place = tuple[str, int]


class BatchWorker:
    """Answers the lines that one gateway worker leases. `run` must run in a TaskGroup."""

    def __init__(
        self, client: BatchClient, directory: Directory, routes: Routes, gateway_id: str
    ) -> None:
        """Start without lines.

        Args:
            client: Client that leases lines.
            directory: Keys and tenants, to find the caller of each line.
            routes: Routes that answer the lines.
            gateway_id: Id of this worker.
        """
        self._client, self._directory, self._routes = client, directory, routes
        self._gateway_id = gateway_id
        self._running: dict[_Place, asyncio.Task[None]] = {}
        self._results: list[wire.LineResult] = []
        self._returned: list[wire.LineName] = []
        self._room = LINES_MAX // 4
        self._calls_in_vain = 0  # consecutive calls that returned no lines
        self._is_awaited = asyncio.Event()
        self._is_stopping = False
        self._has_ended = asyncio.Event()

    @property
    def open(self) -> int:
        """Number of lines that are being answered."""
        return len(self._running)

    def look_soon(self) -> None:
        """Lease lines soon and at short intervals again, because a new batch was created."""
        self._calls_in_vain = 0
        self._is_awaited.set()

    async def run(self) -> None:
        """Answer lines until cancelled."""
        attempt = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    await self._step(tasks)
                    attempt = 0
                except PlatformError:
                    attempt += 1
                if attempt:
                    await asyncio.sleep(backoff_s(attempt, first_s=0.25, max_s=5.0))
                else:
                    await self._pause()

    async def _pause(self) -> None:
        """Wait until the next call of the control plane is due."""
        if self._running or self._results:
            self._calls_in_vain = 0
            await asyncio.sleep(_BUSY_S)
            return
        pause_s = idle_s(self._calls_in_vain)
        self._calls_in_vain += 1
        self._is_awaited.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._is_awaited.wait()

    async def stop(self) -> None:
        """Lease no more lines, report the finished lines, and return the unfinished lines."""
        self._is_stopping = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_STOP_S)
        with suppress(PlatformError, TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while self._results or self._returned:
                    await self._sync(0)

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        wanted = 0 if self._is_stopping else max(0, self._room - len(self._running))
        response = await self._sync(wanted)
        for name in response.lost:
            if (task := self._running.get((name.batch_id, name.number))) is not None:
                task.cancel()
        for line in response.lines:
            place = (line.name.batch_id, line.name.number)
            task = tasks.create_task(self._answer(line))
            self._running[place] = task
            task.add_done_callback(lambda _, place=place: self._running.pop(place, None))

    async def _sync(self, wanted: int) -> wire.SyncLinesResponse:
        """Report results and lease lines. Results above the size limit wait for the next call."""
        results, size = list[wire.LineResult](), 0
        for result in self._results:
            size += result.ByteSize()
            if results and size > _CALL_BYTES_MAX:
                break
            results.append(result)
        given_back = list(self._returned)
        under_way = [wire.LineName(batch_id=it[0], number=it[1]) for it in self._running]
        response = await self._client.sync(
            wire.SyncLinesRequest(
                gateway_id=self._gateway_id,
                wanted=wanted,
                under_way=under_way,
                given_back=given_back,
                results=results,
            )
        )
        del self._results[: len(results)]
        del self._returned[: len(given_back)]
        return response

    async def _answer(self, line: wire.BatchLine) -> None:
        identity = _identity(line)
        try:
            async with asyncio.timeout(_LINE_S):
                status, body = await self._serve(line, identity)
        except (asyncio.CancelledError, TimeoutError, ConnectionError) as error:
            self._returned.append(line.name)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        if is_passing(status, body):
            self._room = max(1, self._room // 2)
            self._returned.append(line.name)
            return
        self._room = min(LINES_MAX, self._room + 1)
        self._results.append(
            wire.LineResult(
                name=line.name, status=status, request_id=identity.request_id, body=body
            )
        )

    async def _serve(self, line: wire.BatchLine, identity: CallerIdentity) -> tuple[int, bytes]:
        """Return the status and body of the answer to a line."""
        collected = bytearray()
        try:
            principal = self._principal(line)
            request = in_process_request(
                line.endpoint, line.body, BodySink(collected.extend), identity
            )
            give_principal(request, principal)
            response = await self._routes.find(line.endpoint).handler("POST")(request)
        except PlatformError as error:
            return error.status, body_of(error)
        except ConnectionError:
            raise
        except Exception:  # outermost edge: the worker survives a line that fails
            log.exception("batch_line_failed", request_id=identity.request_id)
            error = PlatformError(ErrorCode.INTERNAL, "The server had an error; try again.")
            return error.status, body_of(error)
        body = response.body if isinstance(response, web.Response) else bytes(collected)
        if not isinstance(body, bytes) or len(body) > _RESULT_BYTES_MAX:
            text = "The answer is larger than what a batch can hold; ask for less."
            error = PlatformError(ErrorCode.INVALID_REQUEST, text)
            return error.status, body_of(error)
        return response.status, body

    def _principal(self, line: wire.BatchLine) -> Principal:
        principal = self._directory.batch_principal(line.key_id)
        if principal is None or principal.tenant.id != line.tenant_id:
            text = (
                "The key that created the batch is disabled or has expired; create it again with"
                " another key."
            )
            raise PlatformError(ErrorCode.INVALID_API_KEY, text)
        return principal


def idle_s(calls_in_vain: int) -> float:
    """Return the pause in seconds after a number of consecutive calls without lines."""
    return backoff_s(calls_in_vain, first_s=_IDLE_S, max_s=_IDLE_MAX_S)


def is_passing(status: int, body: bytes) -> bool:
    """Return whether a refusal is temporary, so that the line can be tried again.

    A line whose replica was lost is not tried again, because its prompt might crash more engines.

    Args:
        status: HTTP status of the refusal.
        body: The error in the API's JSON.
    """
    if status not in _PASSING:
        return False
    policy = policy_of(orjson.loads(body)["error"]["code"])
    return policy is None or not policy.is_costly_again


def _identity(line: wire.BatchLine) -> CallerIdentity:
    """Return a line's ids. They are equal at every gateway, so that the line is billed once."""
    name = f"{line.name.batch_id}/{line.name.number}".encode()
    uid = hashlib.blake2b(name, digest_size=16).hexdigest()
    request_id = f"{line.name.batch_id}-{line.name.number}"
    ours = tracecontext.traceparent(uid, uid[16:], sampled=False)
    return CallerIdentity(uid, request_id, uid, ours)
