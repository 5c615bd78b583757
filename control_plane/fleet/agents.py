"""Sync over gRPC, in which agents report their replicas and receive the desired replicas.

The desired replicas are read from the copy of the state in memory, so that agents receive answers
while PostgreSQL is down. Reports are then lost, but the next heartbeat repeats them completely.
"""

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import grpc.aio
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.database import Database, DatabaseDownError
from control_plane.fields import is_id
from control_plane.fleet import model, repository
from control_plane.fleet.desired import DesiredIndex
from control_plane.fleet.service import FleetLoop
from control_plane.models.model import release_id
from control_plane.watch.feed import Feed
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as wire
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceServicer
from sluice.wire.control.v1 import control_pb2 as control

log = structlog.get_logger(__name__)

_WRITE_TIMEOUT_S = 10.0
_REFRESH_S = 5.0  # seconds after which the desired state is sent again, even if it has not changed
# seconds for which changes are collected, so that simultaneous changes are sent as one message
_SETTLE_S = 0.05

Context = grpc.aio.ServicerContext[wire.SyncRequest, wire.SyncResponse]


class Golden(Protocol):
    """The source of golden prompts for replicas, and the receiver of the answers to them."""

    def prompts_for(self, bases: Iterable[str]) -> Sequence[wire.GoldenPrompt]:
        """Return the prompts for replicas of the given bases.

        Callers must not change the result.
        """
        ...

    def accused_at_unix_ms(self, replica_id: str) -> int:
        """Return the Unix time (ms) of a replica's ejection for wrong answers, or 0."""
        ...

    def suspected_at_unix_ms(self, replica_id: str) -> int:
        """Return the Unix time (ms) of a recent wrong answer that caused no drain, or 0."""
        ...

    def take(self, message: wire.SyncRequest) -> None:
        """Queue the answers that an agent reports, without blocking."""
        ...


class Trials(Protocol):
    """Trial loads of the canary's adapter on nodes, before the canary receives requests."""

    def trials_of(self, state: ControlState, pool_ids: Collection[str]) -> list[wire.Trial]:
        """Return the trial loads for a node that has replicas of the given pools."""
        ...

    def write_trials(
        self, connection: AsyncConnection, message: wire.SyncRequest
    ) -> Awaitable[None]:
        """Store the trial results that an agent reports."""
        ...


@dataclass(eq=False)
class _Stream:
    """The stream of a connected agent.

    Attributes:
        lifted: Ids of cordons that operators have lifted, but that the agent still reports.
        changed: Set when the agent's desired state may have changed.
        keeps_golden: Whether the agent accepts messages that only mark its golden prompts as
            unchanged.
        golden: Golden prompts of the last message to the agent, or None before the first message.
    """

    node_id: str
    keeps_golden: bool = False
    golden: Sequence[wire.GoldenPrompt] | None = None
    lifted: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AgentService(AgentServiceServicer):
    """Serves the gRPC service `AgentService`, with one stream per node."""

    def __init__(
        self, database: Database, feed: Feed, fleet: FleetLoop, golden: Golden, trials: Trials
    ) -> None:
        self._database = database
        self._trials = trials
        self._feed = feed
        self._fleet = fleet
        self._golden = golden
        self._streams: dict[str, _Stream] = {}
        self._index = DesiredIndex(feed.state)
        feed.on_change(self._take_change)

    async def Sync(  # noqa: N802 - gRPC's name
        self,
        request_iterator: object,  # noqa: ARG002 - read through the context, with a deadline
        context: Context,
    ) -> None:
        """Serve one agent until it disconnects."""
        first = await self._read(context)
        if first is None or not is_id(first.node_id):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message names no node")
            return
        if not self._feed.is_loaded:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "no state yet: the database has not been read"
            )
        stream = _Stream(first.node_id, first.keeps_golden_prompts)
        self._streams[first.node_id] = stream
        is_one_node = True
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._send_desired(stream, context))
                message: wire.SyncRequest | None = first
                while message is not None and self._streams.get(first.node_id) is stream:
                    if not (is_one_node := message.node_id == first.node_id):
                        break
                    await self._record(stream, message)
                    message = await self._read(context)
                writing.cancel()
        except* (TimeoutError, grpc.aio.UsageError):
            log.warning("agent_cut", node=first.node_id)
        finally:
            if self._streams.get(first.node_id) is stream:
                del self._streams[first.node_id]
        if not is_one_node:
            log.warning("agent_report_refused", node=first.node_id)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream is of one node")

    async def _read(self, context: Context) -> wire.SyncRequest | None:
        async with asyncio.timeout(model.NODE_LOST_AFTER_S):
            message = await context.read()
        # grpc.aio.EOF is not a message, although the type stubs do not mention it.
        return message if isinstance(message, wire.SyncRequest) else None  # pyright: ignore[reportUnnecessaryIsInstance]

    def _take_change(self, change: control.WatchResponse) -> None:
        if change.is_snapshot:
            self._index.restart(self._feed.state)
            self._wake(list(self._streams))
        else:
            self._wake(self._index.apply(change))
            if change.upserts.splits:
                releases = self._feed.state.releases
                names = (release_id(it.id, it.canary) for it in change.upserts.splits)
                pools = {releases[name].pool_id for name in names if name in releases}
                self._wake(self._index.nodes_of(pools))

    def _wake(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            if (stream := self._streams.get(node_id)) is not None:
                stream.changed.set()

    async def _send_desired(self, stream: _Stream, context: Context) -> None:
        """Send the desired state to an agent after each change, and at least every few seconds.

        A change of the golden prompts waits for the next message, because it concerns all nodes at
        the same time and may be large.
        """
        clock = asyncio.get_running_loop().time
        last, repeat_at = wire.SyncResponse(), clock()
        while True:
            stream.changed.clear()
            response, golden = self._desired(stream)
            is_same = golden == stream.golden  # fast if both are the same list object
            if (
                clock() >= repeat_at
                or not is_same
                or _urgent_fields(response) != _urgent_fields(last)
            ):
                if is_same and stream.keeps_golden:
                    response.golden_unchanged = True
                else:
                    response.golden_prompts.extend(golden)
                await self._write(context, response)
                stream.golden = golden
                last, repeat_at = response, repeat_at_s(stream.node_id, clock())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(repeat_at):
                    await stream.changed.wait()
                    await asyncio.sleep(_SETTLE_S)

    def _desired(self, stream: _Stream) -> tuple[wire.SyncResponse, Sequence[wire.GoldenPrompt]]:
        """Return the message for an agent, and the golden prompts that the message still lacks."""
        response = self._index.of(stream.node_id, self._feed.state.version)
        response.lifted_cordons.extend(stream.lifted)
        bases = {replica.base_digest for replica in response.replicas}
        pools = {replica.pool_id for replica in response.replicas}
        for replica in response.replicas:
            replica.accused_at_unix_ms = self._golden.accused_at_unix_ms(replica.replica_id)
            replica.suspected_at_unix_ms = self._golden.suspected_at_unix_ms(replica.replica_id)
        response.trials.extend(self._trials.trials_of(self._feed.state, pools))
        return response, self._golden.prompts_for(bases)

    @staticmethod
    async def _write(context: Context, response: wire.SyncResponse) -> None:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await context.write(response)

    async def _record(self, stream: _Stream, message: wire.SyncRequest) -> None:
        self._golden.take(message)
        report = {seen.replica_id: seen for seen in message.replicas}

        async def work(connection: AsyncConnection) -> tuple[list[str], list[model.Replica]]:
            lifted = await repository.write_node(connection, message)
            await self._trials.write_trials(connection, message)
            known = await repository.replicas(connection, message.node_id)
            changed = model.observe(known, _observed(report))
            await repository.write_observed(
                connection, changed, {r.id: report[r.id] for r in known if r.id in report}
            )
            return lifted, changed

        try:
            lifted, changed = await self._database.run(work)
        except (DatabaseDownError, DBAPIError) as error:
            reason = str(getattr(error, "reason", error))
            log.warning("agent_report_not_recorded", node=message.node_id, error=reason)
            return
        if lifted != stream.lifted:
            stream.lifted = lifted
            stream.changed.set()
        for replica in changed:
            log.info("replica_state_changed", replica=replica.id, state=replica.state.name.lower())
        if changed:
            self._fleet.wake()


def repeat_at_s(node_id: str, now_s: float) -> float:
    """Return the time at which the message to a node's agent is repeated, on the clock of `now_s`.

    The nodes are spread over the interval, so that their messages are not sent at the same time.
    """
    phase_s = crc32(node_id.encode()) / 2**32 * _REFRESH_S
    return now_s + _REFRESH_S - (now_s - phase_s) % _REFRESH_S


def _urgent_fields(response: wire.SyncResponse) -> tuple[object, ...]:
    """Return the fields whose changes are sent at once. Golden prompts are not among the fields."""
    parts = response.replicas, response.lifted_cordons, response.trials
    return tuple(list(part) for part in parts)


def _observed(report: Mapping[str, wire.ObservedReplica]) -> dict[str, model.Observed]:
    return {
        replica_id: model.Observed(_state(seen.state), seen.grpc_address)
        for replica_id, seen in report.items()
    }


def _state(number: int) -> model.ReplicaState:
    """Return the replica state that has this number in control.proto.

    A state that only a newer agent defines counts as starting.
    """
    try:
        return model.ReplicaState(number)
    except ValueError:
        return model.ReplicaState.STARTING
