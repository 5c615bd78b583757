"""Distribution over gRPC, in which agents report their chunks and receive orders to fetch others.

Each control plane plans for the agents that are connected to it. Nodes that are connected to
different control planes exchange no chunks, but all nodes receive their artifacts.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

import grpc.aio
import structlog
from sqlalchemy.exc import DBAPIError

from control_plane.database import Database, DatabaseDownError
from control_plane.distribution import repository
from control_plane.distribution.coordinator import Coordinator, Turn
from control_plane.distribution.messages import (
    BadReportError,
    Said,
    WantedWriter,
    merge,
    new_orders,
    read_report,
    write_answer,
)
from control_plane.distribution.model import STORE, FetchPlan, NodeReport, PlannerLimits, Priority
from control_plane.distribution.recorder import Recorder
from control_plane.distribution.text_files import ReadChunk, TextFiles
from control_plane.distribution.tickets import SECRET_BYTES, Tickets
from control_plane.distribution.wanted import WantedIndex
from control_plane.distribution.wants import Wants, wants_of
from control_plane.fields import is_digest
from control_plane.metrics import ControlPlaneMetrics
from control_plane.watch.feed import Feed
from control_plane.work_poll import MayHaveWork, unknown
from sluice.errors import ErrorCode, PlatformError
from sluice.lifecycle import run_every
from sluice.manifests import parse_manifest
from sluice.wire.distribution.v1 import distribution_pb2 as wire
from sluice.wire.distribution.v1.distribution_pb2_grpc import DistributionServiceServicer

log = structlog.get_logger(__name__)

# An idle agent reports every 2 s, but an agent on a busy machine may be late.
LIMITS = PlannerLimits(lost_after_s=8.0)
_ROUND_S = 0.1
# seconds between two computations of the wanted artifacts while the state changes continuously
_LOOK_S = 0.25
_AHEAD_S = 5.0  # seconds between two reads of the bases that nodes fetch ahead
_SILENCE_S = 15.0
_WRITE_S = 10.0
# pause in seconds between two lookups of artifacts that the database does not have
_LOOKUP_PAUSE_S = 2.0
_DATABASE_S = 2.0
_SECRET_RETRY_S = 1.0
_PIECE_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[wire.DistributionReport, wire.DistributionAnswer]
ManifestContext = grpc.aio.ServicerContext[wire.ManifestRequest, wire.ManifestPiece]
TextFileContext = grpc.aio.ServicerContext[wire.TextFileRequest, wire.TextFilePiece]

_STATUS = {
    ErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(eq=False)
class _Session:
    """The stream of a connected agent.

    Attributes:
        said: Last report of the agent.
        pending: Report since the last round, or None without a report.
        wants: Artifacts that the node should have because of the state or of requests on the node.
        told: Shared mapping of wants that was last sent on this stream, or None before the first
            answer.
        answer: Next answer to send, with the artifacts wanted at that time. A newer answer replaces
            it.
        is_due: Whether an answer is due although the agent has sent no new report.
    """

    said: Said
    pending: NodeReport | None
    wants: Wants = field(default_factory=Wants)
    told: Mapping[str, Priority] | None = None
    last: FetchPlan = field(default_factory=FetchPlan)
    answer: wire.DistributionAnswer | None = None
    has_answer: asyncio.Event = field(default_factory=asyncio.Event)
    is_due: bool = False

    @property
    def node_id(self) -> str:
        return self.said.report.node_id

    def take(self, said: Said) -> None:
        """Add a report to the input of the next round."""
        self.said = said
        self.pending = said.report if self.pending is None else merge(self.pending, said.report)

    def want(self, shared: Mapping[str, Priority]) -> None:
        """Set the artifacts that the node should have."""
        self.wants = wants_of(shared, self.said.needed, self.said.declined)

    def turn(self) -> Turn:
        """Return the input of the next round."""
        report, self.pending, self.is_due = self.pending, None, False
        if report is None:
            report = replace(self.said.report, held={}, failures=(), is_full=False)
        return Turn(report, self.wants)


class DistributionService(DistributionServiceServicer):
    """Serves the gRPC service `DistributionService`, and runs the planner."""

    def __init__(
        self,
        database: Database,
        feed: Feed,
        metrics: ControlPlaneMetrics,
        limits: PlannerLimits,
        read_chunk: ReadChunk,
        may_scale: MayHaveWork = unknown,
    ) -> None:
        """Create the gRPC service. `run` must be started in a task.

        Args:
            database: Database of artifacts, and of the records of nodes.
            feed: State that determines which artifacts nodes should have.
            metrics: Metrics of the service.
            limits: Limits of the planner.
            read_chunk: Reads a chunk from the store, and verifies it.
            may_scale: Tells whether there may be scaled pools, for which nodes fetch bases ahead.
        """
        self._database = database
        self._text_files = TextFiles(database, read_chunk)
        self._feed = feed
        self._may_scale = may_scale
        self._metrics = metrics
        self._wanted = WantedIndex(feed.state)
        self._writer = WantedWriter()
        self._coordinator = Coordinator(limits)
        self._recorder = Recorder(database)
        self._sessions: dict[str, _Session] = {}
        self._left: set[str] = set()
        self._looked_up: dict[str, float] = {}  # time of the last lookup, by unknown artifact
        self._has_work = asyncio.Event()

    async def Exchange(  # noqa: N802 - gRPC's name
        self,
        request_iterator: object,  # noqa: ARG002 - read through the context, with a deadline
        context: Context,
    ) -> None:
        """Serve one agent until it disconnects."""
        session: _Session | None = None
        refused = ""
        try:
            first = await self._read(context)
            if not isinstance(first, Said):
                refused = first
            else:
                session = _Session(first, first.report)
                self._join(session)
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(self._send(session, context))
                    refused = await self._listen(session, context)
                    writing.cancel()
        except* (TimeoutError, grpc.aio.UsageError):
            log.warning("distribution_cut", node=session.node_id if session else "")
        finally:
            if session is not None:
                self._leave(session)
        if refused:
            log.warning("distribution_report_refused", error=refused)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused)

    async def Manifest(  # noqa: N802 - gRPC's name
        self, request: wire.ManifestRequest, context: ManifestContext
    ) -> None:
        """Send the manifest of an artifact."""
        if not is_digest(request.digest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "digest is no SHA-256 in hex")
        try:
            document = await self._database.run(
                lambda connection: repository.manifest(connection, request.digest)
            )
        except (DatabaseDownError, DBAPIError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the database cannot be reached")
        if document is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no artifact {request.digest}")
        content = await asyncio.to_thread(lambda: parse_manifest(document).canonical_json())
        for begin in range(0, len(content), _PIECE_BYTES):
            async with asyncio.timeout(_WRITE_S):
                await context.write(wire.ManifestPiece(json=content[begin : begin + _PIECE_BYTES]))

    async def TextFile(  # noqa: N802 - gRPC's name
        self, request: wire.TextFileRequest, context: TextFileContext
    ) -> None:
        """Send one of the small text files of a base."""
        try:
            async with aclosing(self._text_files.read(request.digest, request.name)) as pieces:
                async for piece in pieces:
                    async with asyncio.timeout(_WRITE_S):
                        await context.write(wire.TextFilePiece(content=piece))
        except PlatformError as error:
            status = _STATUS.get(error.code, grpc.StatusCode.UNAVAILABLE)
            await context.abort(status, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the gateway does not read")

    async def run(self) -> None:
        """Run rounds of planning until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._recorder.run())
            tasks.create_task(self._follow())
            tasks.create_task(self._look_ahead())
            tickets = await self._open_tickets()
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                begin_s = time.monotonic()
                await self._round(tickets)
                took_s = time.monotonic() - begin_s
                self._metrics.count_round(took_s)
                await asyncio.sleep(max(_ROUND_S, took_s))  # planning uses at most half of the time

    async def _open_tickets(self) -> Tickets:
        """Return the writer of tickets, after PostgreSQL has returned the fleet's secret."""
        proposed = secrets.token_bytes(SECRET_BYTES)
        while True:
            try:
                found = await self._database.run(
                    partial(repository.secret, name="peers", if_none=proposed)
                )
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("secret_not_read", error=str(getattr(error, "reason", error)))
                await asyncio.sleep(_SECRET_RETRY_S)
            else:
                return Tickets(found)

    # --- agents

    async def _listen(self, session: _Session, context: Context) -> str:
        """Process reports until the agent disconnects or another stream replaces this one.

        Returns:
            Error for the agent, or an empty text without an error.
        """
        while self._sessions.get(session.node_id) is session:
            said = await self._read(context)
            if not isinstance(said, Said):
                return said
            if said.report.node_id != session.node_id:
                return "a stream is of one node"
            session.take(said)
            self._take_over(session)
        return ""

    async def _read(self, context: Context) -> Said | str:
        """Return a report, the reason why it is not valid, or an empty text at the stream's end."""
        async with asyncio.timeout(_SILENCE_S):
            message = await context.read()
        if not isinstance(message, wire.DistributionReport):  # pyright: ignore[reportUnnecessaryIsInstance] - it may be EOF
            return ""
        try:
            return read_report(message)
        except BadReportError as error:
            return str(error)

    def _join(self, session: _Session) -> None:
        self._sessions[session.node_id] = session
        self._left.discard(session.node_id)
        self._metrics.set_distribution_nodes(len(self._sessions))
        self._take_over(session)

    def _leave(self, session: _Session) -> None:
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
            self._left.add(session.node_id)
            self._recorder.forget(session.node_id)
            self._metrics.set_distribution_nodes(len(self._sessions))
            self._has_work.set()

    def _take_over(self, session: _Session) -> None:
        said = session.said
        session.want(self._wanted.of(session.node_id))
        is_full = said.report.is_full
        self._recorder.note(session.node_id, said.complete, is_full=is_full)
        for failure in said.report.failures:
            source = STORE if failure.source == STORE else "peer"
            self._metrics.count_chunk_failure(source, failure.trouble)
        self._has_work.set()

    async def _send(self, session: _Session, context: Context) -> None:
        while True:
            await session.has_answer.wait()
            session.has_answer.clear()
            answer, session.answer = session.answer, None
            if answer is not None:
                wants, knows_unchanged = session.wants, session.said.knows_unchanged
                self._writer.add(answer, wants, session.told, knows_unchanged=knows_unchanged)
                session.told = wants.shared
                async with asyncio.timeout(_WRITE_S):
                    await context.write(answer)

    # --- rounds

    async def _follow(self) -> None:
        """Send a new plan to the nodes whose wanted artifacts have changed with the state."""
        looks = 0
        while True:
            changed = self._feed.changed()
            self._wanted.refresh()
            if looks != self._wanted.looks:
                looks = self._wanted.looks
                self._compare()
            await changed.wait()
            await asyncio.sleep(_LOOK_S)

    async def _look_ahead(self) -> None:
        """Read which nodes fetch which bases ahead. An outage leaves the last answer in effect."""

        async def look() -> None:
            found: dict[str, frozenset[str]] = {}
            if self._may_scale():
                found = await self._database.run(repository.ahead, deadline_s=_DATABASE_S)
            self._wanted.prefetch(found)
            self._compare()

        expected = (DatabaseDownError, DBAPIError)
        await run_every(
            _AHEAD_S, look, name="bases-ahead", expected=expected, step_timeout_s=2 * _DATABASE_S
        )

    def _compare(self) -> None:
        for session in self._sessions.values():
            wanted = self._wanted.of(session.node_id)
            if wanted is not session.wants.shared:
                session.is_due = True
                session.want(wanted)
                self._has_work.set()

    async def _round(self, tickets: Tickets) -> None:
        sessions = [s for s in self._sessions.values() if s.pending is not None or s.is_due]
        left, self._left = self._left, set()
        await self._learn(sessions)
        turns = {session.node_id: (session, session.turn()) for session in sessions}
        answers = await asyncio.to_thread(
            self._coordinator.round,
            [turn for _, turn in turns.values()],
            left,
            time.monotonic(),
        )
        addresses = {s.node_id: s.said.peer_address for s in self._sessions.values()}
        for node_id, answer in answers.items():
            session = self._sessions.get(node_id)
            if session is None:
                continue
            self._metrics.count_orders(*new_orders(session.last.orders, answer.orders))
            session.last = answer
            session.answer = write_answer(answer, node_id, addresses, tickets, time.time())
            session.has_answer.set()
            if session.told is not session.wants.shared:
                await asyncio.sleep(0)  # sends a long answer before the next answer is built

    async def _learn(self, sessions: list[_Session]) -> None:
        """Look up the wanted artifacts that are still unknown."""
        unknown = self._coordinator.unknown(session.wants for session in sessions)
        now_s = time.monotonic()
        self._looked_up = {
            d: at for d, at in self._looked_up.items() if now_s - at < _LOOKUP_PAUSE_S
        }
        asked = sorted(unknown - self._looked_up.keys())
        if not asked:
            return
        try:
            found = await self._database.run(
                partial(repository.known, digests=asked), deadline_s=_DATABASE_S
            )
        except (DatabaseDownError, DBAPIError) as error:
            log.warning("artifacts_not_read", error=str(getattr(error, "reason", error)))
            return
        self._looked_up |= dict.fromkeys(asked, now_s)
        self._coordinator.know(found)
