"""Peers for tests of the gateway, over the real wire: a control feed, and a router with a script.

The router answers what a test tells it to, so that faults which a real one shows once a year
(a lost replica at token 7, a rejection, a broken stream) happen on cue. Tests of the whole run with
the real router and engine.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from sluice import channels
from sluice.manifests import manifest_of_directory
from sluice.token_ids import unpacked_ids
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.control.v1 import control_pb2_grpc
from sluice.wire.distribution.v1 import distribution_pb2 as distribution
from sluice.wire.distribution.v1 import distribution_pb2_grpc
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1 import router_pb2_grpc
from sluice.wire.state.v1.state_pb2_grpc import (
    BatchServiceServicer,
    RecordServiceServicer,
    StateServiceServicer,
    add_BatchServiceServicer_to_server,
    add_RecordServiceServicer_to_server,
    add_StateServiceServicer_to_server,
)

if TYPE_CHECKING:
    from pathlib import Path

_HEARTBEAT_S = 0.25


class NeverLags:
    """The lag of an event loop that always keeps up."""

    is_lagging = False


@dataclass
class Plan:
    """How one submission is answered.

    Attributes:
        steps: Token ids by engine step; an empty list is a step without news.
        outcome: The end, sent with the last step; None: never.
        cached_tokens: Reported with the placement.
    """

    steps: Sequence[Sequence[int]]
    outcome: wire.Outcome | None = field(
        default_factory=lambda: wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH)
    )
    cached_tokens: int = 0


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """A RouterService: every `step_s`, one message with the next step of all requests.

    Attributes:
        plan: Called once per submission.
        submits: Everything that was submitted.
        cancelled: Request ids whose cancel came.
        is_frozen: Says nothing, not even that it lives.
        turned_away: Requests that gateways refused by its gates.
        cells: What it tells of the cells that it owns; told when a gateway connects.
    """

    def __init__(
        self,
        plan: Callable[[wire.Submit], Plan],
        *,
        step_s: float = 0.002,
        cells: Sequence[str] = ("cell",),
        router_id: str = "scripted",
    ) -> None:
        """Prepare; `serve` starts it."""
        self.plan = plan
        self.router_id = router_id
        self.cells = [wire.CellState(cell_id=cell_id, replicas_ready=1) for cell_id in cells]
        self.step_s = step_s
        self.submits: list[wire.Submit] = []
        self.cancelled: list[str] = []
        self.turned_away = 0
        self.is_frozen = False
        self._break = asyncio.Event()

    def break_streams(self) -> None:
        """End all connections as a router that dies does."""
        self._break.set()
        self._break = asyncio.Event()

    async def Connect(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: "grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse]",
    ) -> AsyncIterator[wire.ConnectResponse]:
        """Serve one gateway worker."""
        broken = self._break
        session = _Session(self)
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(session.read(request_iterator))
            welcome = wire.Welcome(router_id=self.router_id, epoch=1, reads_prompt_ids=True)
            yield wire.ConnectResponse(welcome=welcome, cells=self.cells)
            alive_at = 0.0
            while not broken.is_set():
                await asyncio.sleep(self.step_s)
                now = asyncio.get_running_loop().time()
                if self.is_frozen:
                    continue
                if (message := session.step()) is not None:
                    yield message
                elif now - alive_at >= _HEARTBEAT_S:
                    alive_at = now
                    yield wire.ConnectResponse(cells=self.cells)
            reader.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")


class _Session:
    """The requests of one connection."""

    def __init__(self, router: ScriptedRouter) -> None:
        self._router = router
        self._live: dict[int, tuple[wire.Submit, Plan, int]] = {}
        self._placed: list[wire.Placed] = []

    async def read(self, requests: AsyncIterator[wire.ConnectRequest]) -> None:
        async for request in requests:
            self._router.turned_away += sum(it.requests for it in request.turned_away)
            for submit in request.submits:
                # tests look at the ids, in whichever form they came
                submit.prompt.extend(unpacked_ids(submit.prompt_ids))
                submit.ClearField("prompt_ids")
                self._router.submits.append(submit)
                plan = self._router.plan(submit)
                self._live[submit.handle] = (submit, plan, 0)
                self._placed.append(
                    wire.Placed(
                        handle=submit.handle,
                        replica_id="replica-1",
                        queue_us=10,
                        cached_tokens=plan.cached_tokens,
                    )
                )
            for handle in request.cancels:
                if (live := self._live.pop(handle, None)) is not None:
                    self._router.cancelled.append(live[0].request_id)

    def step(self) -> wire.ConnectResponse | None:
        """Return the next step of all requests, or None when there are none."""
        if not self._live:
            return None
        message = wire.ConnectResponse(placed=self._placed)
        self._placed.clear()
        handles, counts, tokens = [], [], []
        for handle, (submit, plan, index) in list(self._live.items()):
            if index < len(plan.steps):
                if step := plan.steps[index]:
                    handles.append(handle)
                    counts.append(len(step))
                    tokens += step
                    add_logprobs(message.logprobs, handle, submit, step)
                self._live[handle] = (submit, plan, index + 1)
            if index + 1 >= len(plan.steps) and plan.outcome is not None:
                outcome = message.outcomes.add()
                outcome.CopyFrom(plan.outcome)
                outcome.handle = handle
                del self._live[handle]
        message.handle.extend(handles)
        message.count.extend(counts)
        message.token.extend(tokens)
        return message


def add_logprobs(
    columns: engine.Logprobs, handle: int, submit: wire.Submit, tokens: Sequence[int]
) -> None:
    """Add an entry for each token, if `submit` asked: -id / 1000; for the next id one less."""
    if submit.sampling.HasField("logprobs"):
        for token in tokens:
            top = [(token + i, -token / 1000 - i) for i in range(submit.sampling.logprobs)]
            columns.sequence.append(handle)
            columns.logprob.append(-token / 1000)
            columns.top_count.append(len(top))
            columns.top_token.extend([it[0] for it in top])
            columns.top_logprob.extend([it[1] for it in top])


class ControlFeed(control_pb2_grpc.ControlServiceServicer):
    """A ControlService with one snapshot, which tests may replace.

    Attributes:
        confirmed: What gateways have confirmed, in order.
        is_deaf: Takes no confirmations.
        refused: How many it did not take.
    """

    def __init__(self, objects: control.Objects) -> None:
        """Prepare; `serve` starts it."""
        self.objects = objects
        self.confirmed: list[control.ConfirmRequest] = []
        self.is_deaf = False
        self.refused = 0
        self._version = 1
        self._changed = asyncio.Event()

    def replace(self, objects: control.Objects) -> None:
        """Send a new snapshot to everybody."""
        self.objects = objects
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """Of the newest snapshot."""
        return self._version

    async def Confirm(  # noqa: N802 - gRPC's name
        self,
        request: control.ConfirmRequest,
        context: "grpc.aio.ServicerContext[control.ConfirmRequest, control.ConfirmResponse]",
    ) -> control.ConfirmResponse:
        """Remember what a gateway says."""
        if self.is_deaf:
            self.refused += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "deaf")
        self.confirmed.append(request)
        return control.ConfirmResponse()

    async def Watch(  # noqa: N802 - gRPC's name
        self,
        request: control.WatchRequest,
        context: "grpc.aio.ServicerContext[control.WatchRequest, control.WatchResponse]",
    ) -> AsyncIterator[control.WatchResponse]:
        """Send the snapshot, and again after each change."""
        sent = 0
        while True:
            changed = self._changed
            if sent != self._version:
                sent = self._version
                yield control.WatchResponse(version=sent, is_snapshot=True, upserts=self.objects)
                yield control.WatchResponse(version=sent, is_heartbeat=True)
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await changed.wait()
            except TimeoutError:
                yield control.WatchResponse(version=sent, is_heartbeat=True)


class BaseFiles(distribution_pb2_grpc.DistributionServiceServicer):
    """What a control plane serves of artifacts to gateways, out of directories by digest.

    Attributes:
        directories: Where each is.
        asked: Names of files that were asked for, in order.
        is_open: While it is not set, everybody waits for files.
        spoiled: How many of the next files come with a byte changed.
    """

    def __init__(self) -> None:
        """Prepare; `serve` starts it."""
        self.directories: dict[str, Path] = {}
        self.asked: list[str] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.spoiled = 0

    async def Manifest(  # noqa: N802 - gRPC's name
        self,
        request: distribution.ManifestRequest,
        context: "grpc.aio.ServicerContext[distribution.ManifestRequest, distribution.ManifestPiece]",
    ) -> AsyncIterator[distribution.ManifestPiece]:
        """Send a manifest."""
        directory = self.directories.get(request.digest)
        if directory is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no artifact {request.digest}")
        yield distribution.ManifestPiece(json=manifest_of_directory(directory).canonical_json())

    async def TextFile(  # noqa: N802 - gRPC's name
        self,
        request: distribution.TextFileRequest,
        context: "grpc.aio.ServicerContext[distribution.TextFileRequest, distribution.TextFilePiece]",
    ) -> AsyncIterator[distribution.TextFilePiece]:
        """Send a file, in two pieces."""
        self.asked.append(request.name)
        await self.is_open.wait()
        content = (self.directories[request.digest] / request.name).read_bytes()
        if self.spoiled:
            self.spoiled -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        yield distribution.TextFilePiece(content=content[:10])
        yield distribution.TextFilePiece(content=content[10:])


@asynccontextmanager
async def serve(
    *servicers: ScriptedRouter
    | ControlFeed
    | BaseFiles
    | StateServiceServicer
    | RecordServiceServicer
    | BatchServiceServicer,
    address: str = "127.0.0.1:0",
) -> AsyncGenerator[str]:
    """Serve on a port of loopback, as platform processes do; yield its address."""
    server = channels.server((("grpc.http2.min_ping_interval_without_data_ms", 5_000),))
    for servicer in servicers:
        if isinstance(servicer, ScriptedRouter):
            router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
        elif isinstance(servicer, BaseFiles):
            distribution_pb2_grpc.add_DistributionServiceServicer_to_server(servicer, server)
        elif isinstance(servicer, StateServiceServicer):
            add_StateServiceServicer_to_server(servicer, server)
        elif isinstance(servicer, BatchServiceServicer):
            add_BatchServiceServicer_to_server(servicer, server)
        elif isinstance(servicer, RecordServiceServicer):
            add_RecordServiceServicer_to_server(servicer, server)
        else:
            control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    port = channels.add_port(server, address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
