"""Background responses, which run as streams whose events every client of the tenant may follow.

The client's request is answered at once with the queued response. The events are written to Valkey,
where all gateways can read them. The response itself is stored like any other response, also after
a failure or a cancellation.
"""

import asyncio
import math
import time
from collections import Counter
from contextlib import suppress

import orjson
import structlog

from gateway.directory import Principal
from gateway.limits.valkey_commands import ValkeyDownError
from gateway.responses.events import EVENT_NUMBER, ResponseEvents, cut_at, written_event
from gateway.responses.keeping import Detached, Keeping
from gateway.responses.retold import retold_until
from gateway.responses.store import ResponseStore, cannot_store
from gateway.responses.task import ResponseTask
from gateway.server.identity import CallerIdentity
from gateway.server.in_process import BodySink, in_process_request
from gateway.tools.answering import Answering
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.lifecycle import run_every
from sluice.wire.state.v1 import state_pb2 as wire

log = structlog.get_logger(__name__)

BACKGROUND_MAX = 512  # responses under way in one worker
_BEAT_S, _BATCH_S = 1.0, 0.05
_SILENT_MS = 15_000  # milliseconds of silence after which a gateway counts as dead
_SWEEP_S, _SWEEP_STEP_S, _TAKEN_MAX = 5.0, 10.0, 32
_STOP_S = 3.0
DETACHED_MAX = 8  # responses of one tenant that go on without their clients, in one worker
_GATEWAY_ENDED = "The gateway that made this response has ended; ask for it again."
_NOT_STORED = (
    "The response could not be stored: it is too large, or its conversation is full or deleted."
)


class BackgroundKeeping(Keeping):
    """The storage of a background response, which is stored after success and failure alike.

    Attributes:
        events: Writer of the events, or None until the response has begun.
        failed: Failed response as JSON, empty unless it failed.
    """

    __slots__ = ("_task", "events", "failed")

    keeps_failures = True

    @classmethod
    def taking_over(cls, keeping: Keeping, events: ResponseEvents) -> "BackgroundKeeping":
        """Return the storage of a response that goes on in the background."""
        made = cls.__new__(cls)
        made._store, made._publish, made._turn = keeping.handed_over()  # noqa: SLF001 - its own
        made._is_marked = made.is_kept = False  # noqa: SLF001 - its own
        made.detach, made.events, made.failed = None, events, b""
        return made

    def begin_queued(self, queued: bytes) -> wire.StoredResponse:
        """Return the stored form of the response, with its queued JSON as content."""
        self.events: ResponseEvents | None = None
        self.failed = b""
        self._turn.response = queued
        return self._turn

    def copy_of_turn(self, under_way: bytes) -> wire.StoredResponse:
        """Return a copy of the stored form, with the JSON of a response under way as content."""
        turn = wire.StoredResponse()
        turn.CopyFrom(self._turn)
        turn.response = under_way
        return turn

    @property
    def response_id(self) -> str:
        """Id of the response."""
        return self._turn.id

    @property
    def place(self) -> tuple[str, str]:
        """Ids of the tenant and of the response."""
        return self._turn.tenant_id, self._turn.id

    def begin(self, events: ResponseEvents) -> None:
        """Set the writer of the events. The next heartbeat writes the new state to Valkey."""
        self.events = events

    def note_failure(self, response: bytes) -> None:
        """Accept the JSON of a failed response, which is stored when the response ends."""
        self.failed = response

    async def keep(self, response: bytes, deltas: bytes = b"") -> bool:
        """Add the turn to its conversation, and store the complete response."""
        self._turn.deltas = deltas
        if self._publish is not None:
            self._turn.response = response
            if not await self._publish(self._turn):
                return False
        return await self.keep_cut(response)

    async def keep_cut(self, response: bytes) -> bool:
        """Store the response, complete or not, and return whether it was stored."""
        self._turn.response = response
        self.is_kept = await self._store.keep(self._turn, is_promised=True)
        return self.is_kept


class _Job:
    """A response that is under way. Its `events` are not yet in Valkey."""

    __slots__ = ("_is_begun", "events", "has_events", "is_done", "keeping", "news", "queued")

    def __init__(
        self, keeping: BackgroundKeeping, queued: bytes, *, is_begun: bool = False
    ) -> None:
        self.keeping, self.queued = keeping, queued
        self.events = bytearray()
        self.news = asyncio.Event()
        self._is_begun = self.has_events = is_begun
        self.is_done = False

    def take(self, body: bytes) -> None:
        """Add complete events."""
        self.has_events = True
        self.events += body
        self.news.set()

    def end(self) -> None:
        """Record that no further events follow."""
        self.is_done = True
        self.news.set()

    def begun(self) -> bytes:
        """Return the response as JSON if it has begun since the last call."""
        events = self.keeping.events
        if self._is_begun or events is None:
            return b""
        self._is_begun = True
        return events.under_way()


class BackgroundResponses:
    """The background responses of one worker, which run as tasks owned by `run`."""

    def __init__(self, answering: Answering, store: ResponseStore, *, grace_s: float) -> None:
        """All arguments are parts of the same worker.

        Args:
            answering: Computes the responses.
            store: Stores the responses.
            grace_s: Seconds for which a detached response goes on unless a request reads it.
        """
        self._answering, self._store, self._grace_s = answering, store, grace_s
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._detached: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Number of responses under way."""
        return len(self._running)

    async def run(self) -> None:
        """Accept responses, and end the responses of dead gateways as failed, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await run_every(
                    _SWEEP_S,
                    self.sweep,
                    name="background_responses",
                    expected=(ValkeyDownError, RejectedError),
                    step_timeout_s=_SWEEP_STEP_S,
                )
            finally:
                self._tasks = None

    async def stop(self) -> None:
        """Accept no more responses, and wait up to `_STOP_S` seconds for the running ones."""
        self._tasks = None
        if self._running:
            _, late = await asyncio.wait(list(self._running.values()), timeout=_STOP_S)
            for task in late:
                task.cancel()

    async def begin(
        self,
        identity: CallerIdentity,
        principal: Principal,
        task: ResponseTask,
        queued: bytes,
    ) -> None:
        """Start a response whose task has a `BackgroundKeeping`.

        Raises RejectedError if too many responses are under way, the worker is stopping, or Valkey
        cannot be reached.
        """
        keeping = task.keeping
        assert isinstance(keeping, BackgroundKeeping), "it is kept, whatever comes of it"
        tasks = self._tasks
        if tasks is None:
            text = "The server is stopping; try again, and another one answers."
            raise RejectedError(ErrorCode.DRAINING, text, retry_after_s=1.0)
        if len(self._running) >= BACKGROUND_MAX:
            text = "Too many responses run in the background; try again shortly."
            raise RejectedError(ErrorCode.OVERLOADED, text, retry_after_s=2.0)
        try:
            await self._store.background.begin(keeping.begin_queued(queued))
        except ValkeyDownError:
            raise cannot_store() from None
        job = _Job(keeping, queued)
        work = tasks.create_task(self._answer(job, identity, principal, task))
        running = tasks.create_task(self._run(job, work))
        self._running[keeping.response_id] = running
        running.add_done_callback(lambda _: self._running.pop(keeping.response_id, None))

    def detach(self, keeping: Keeping, events: ResponseEvents) -> Detached | None:
        """Let the current task continue a stored response whose client has disconnected.

        Returns:
            None if the response must end now, because the worker is stopping, Valkey cannot be
            reached, or too many responses run in the background.
        """
        tasks, tenant_id, work = self._tasks, keeping.tenant_id, asyncio.current_task()
        is_full = len(self._running) >= BACKGROUND_MAX
        if tasks is None or work is None or not self._grace_s or not self._store.is_hot or is_full:
            return None
        if not events.deltas or self._detached[tenant_id] >= DETACHED_MAX:
            return None
        kept, so_far = BackgroundKeeping.taking_over(keeping, events), events.so_far()
        job = _Job(kept, events.under_way(), is_begun=True)
        turn = kept.copy_of_turn(job.queued)
        work.add_done_callback(lambda _: job.end())
        running = tasks.create_task(self._run_detached(job, turn, so_far, work))
        self._running[kept.response_id] = running
        self._detached[tenant_id] += 1

        def forget(_: object) -> None:
            self._running.pop(kept.response_id, None)
            self._detached -= Counter([tenant_id])

        running.add_done_callback(forget)
        return Detached(kept, BodySink(job.take, is_behind_head=True))

    async def _run_detached(
        self,
        job: _Job,
        turn: wire.StoredResponse,
        so_far: tuple[bytes, bytes, int],
        work: "asyncio.Task[object]",
    ) -> None:
        """Write all events of a detached response to Valkey, while a request reads them."""
        sent = await asyncio.to_thread(retold_until, *so_far)
        job.events[:0] = sent
        is_over = True
        with suppress(ValkeyDownError, RejectedError):
            await self._store.background.begin(turn)
            is_over = await self._follow(job, self._grace_s)
        if is_over:
            work.cancel()
        await asyncio.wait([work])
        await self._end(job, None, is_cancelled=is_over)

    async def _answer(
        self, job: _Job, identity: CallerIdentity, principal: Principal, task: ResponseTask
    ) -> PlatformError | None:
        """Run the task to its end, and return its error if it was refused before any event."""
        sink = BodySink(job.take)
        request = in_process_request(task.endpoint, b"", sink, identity)
        answering = self._answering.answer(request, principal, task)
        del task  # frees the body while its answer streams
        try:
            await answering
        except PlatformError as error:
            return error
        except Exception:  # the outermost edge, where one failed response must not stop the worker
            log.exception("background_response_failed", request_id=identity.request_id)
            return PlatformError(ErrorCode.INTERNAL, "The server had an error; try again.")
        finally:
            job.end()
        return None

    async def _run(self, job: _Job, work: "asyncio.Task[PlatformError | None]") -> None:
        is_cancelled = await self._follow(job)
        if is_cancelled:
            work.cancel()
        await asyncio.wait([work])
        error = None if work.cancelled() else work.result()
        await self._end(job, error, is_cancelled=is_cancelled and work.cancelled())

    async def _follow(self, job: _Job, grace_s: float = math.inf) -> bool:
        """Copy events to Valkey until the end, and return whether the response is to end early.

        It is to end if it was cancelled, or if no request has read it for `grace_s` seconds.
        """
        log_, place, read_at_s = self._store.background, job.keeping.place, time.monotonic()
        while not job.is_done:
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await job.news.wait()
            job.news.clear()
            if not job.is_done:
                await asyncio.sleep(_BATCH_S)
            if job.is_done:
                return False
            events = bytes(job.events)
            with suppress(ValkeyDownError, RejectedError):  # the next beat tries again
                if under_way := job.begun():
                    await log_.progress(*place, under_way)
                beat = await log_.beat(*place, events)
                del job.events[: len(events)]
                if beat.is_cancelled:
                    return True
                if beat.is_read:
                    read_at_s = time.monotonic()
            if time.monotonic() - read_at_s > grace_s:
                return True
        return False

    async def _end(self, job: _Job, error: PlatformError | None, *, is_cancelled: bool) -> None:
        keeping, events = job.keeping, job.keeping.events
        if is_cancelled and not keeping.is_kept:
            response = _as(job.queued, "cancelled") if events is None else events.cancelled()
            await keeping.keep_cut(response)
            job.events += _cut(job, "cancelled", response)
        elif error is not None:
            told = {"code": str(error.code), "message": error.message}
            response = _as(job.queued, "failed", told)
            await keeping.keep_cut(response)
            job.events += _cut(job, "failed", response)
        elif not keeping.is_kept:
            not_stored = {"code": "server_error", "message": _NOT_STORED}
            await keeping.keep_cut(keeping.failed or _as(job.queued, "failed", not_stored))
        with suppress(
            ValkeyDownError, RejectedError
        ):  # another gateway then claims the response, although it is stored
            await self._store.background.end(*keeping.place, bytes(job.events))

    async def sweep(self) -> None:
        """End the responses of dead gateways as failed, each with a final event."""
        if not self._store.is_hot:
            return
        for _ in range(_TAKEN_MAX):
            found = await self._store.background.take_over(_SILENT_MS)
            if found is None:
                return
            response_id, turn, blocks = found
            if response_id in self._running:  # this worker itself was paused for too long
                continue
            events = b"" if turn is None else await self._fail(turn, blocks)
            tenant_id = "" if turn is None else turn.tenant_id
            await self._store.background.end(tenant_id, response_id, events)

    async def _fail(self, turn: wire.StoredResponse, blocks: int) -> bytes:
        """Store a dead gateway's response as failed, and return the events that report this."""
        gone = {"code": str(ErrorCode.UNAVAILABLE), "message": _GATEWAY_ENDED}
        turn.response = _as(turn.response, "failed", gone)
        if not await self._store.keep_if_missing(turn):
            return b""
        read = self._store.background.events
        last = await read(turn.tenant_id, turn.id, max(0, blocks - 1))
        return cut_at(_number_behind(b"".join(last)), "failed", turn.response)


def _as(response: bytes, status: str, error: dict[str, str] | None = None) -> bytes:
    """Return the JSON of a response that ended without output, in this status."""
    document: dict[str, object] = orjson.loads(response)
    return orjson.dumps(document | {"status": status, "error": error, "output": []})


def _cut(job: _Job, status: str, response: bytes) -> bytes:
    """Return the final events of a response that ends before its output is complete."""
    events = job.keeping.events
    if events is not None and job.has_events:
        return events.cut(status, response)
    created = written_event("response.created", 0, b'"response":' + job.queued)
    return created + cut_at(1, status, response)


def _number_behind(block: bytes) -> int:
    """Return the number of the event that follows a block of events."""
    return max(map(int, EVENT_NUMBER.findall(block)), default=-1) + 1
