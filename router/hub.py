"""Connects the router core with the gateway and replica connections.

Events of the connections are passed to the core, and the core's actions to the connections. There
is at most one tick per iteration of the event loop. All functions are synchronous and run on the
event loop, except `send_last`, `flush` and `wait_idle`. The connections own the tasks.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import structlog

from router import wire as convert
from router.closing import Accounts, Closings
from router.core.explain.explain import explain
from router.core.router import RouterCore
from router.core.types.actions import Actions, EjectionNotice, Transfer
from router.core.types.canary import CanaryAnswer
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Dispatch
from router.core.types.service import ServiceReport
from router.core.types.work import WorkReport
from router.counting import TokenCounts
from router.metrics import RouterMetrics
from router.outgoing import GatewayLink, HostOutbox
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

log = structlog.get_logger(__name__)

_TURNED_AWAY_MAX = 1_000_000  # most refused requests that one entry of a message may report
COUNTED_S = 10.0  # seconds between two reports of token counts
_HAND_ON_S = 0.02  # seconds between two batches of closings to gateways
_LOGGED = 4  # most replicas in the log of a decision
# Seconds after a tick during which frames wait, so that one tick serves them all. The frames
# contain only tokens, which would wait for the next message to their gateway anyway. A tick costs
# 30 microseconds.
PASS_S = 0.001
_QUEUE_S = 0.5  # seconds after which a queue beside ready replicas is reported
_MEASURE_S = 0.25  # seconds between two updates of the metrics, besides every scrape


class Hub:
    """The router core with all its connections.

    Attributes:
        work_waits: Set when work waits in a cell for which a replica can be woken or booted.
        is_ending: Whether the gateways' streams end because this router is shutting down.
    """

    def __init__(self, core: RouterCore, metrics: RouterMetrics, router_id: str = "") -> None:
        self.core = core
        self.metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, GatewayLink] = {}
        self._outboxes: dict[str, HostOutbox] = {}
        self._keys = 0
        self._epoch = time.time_ns() // 1000  # greater after each restart, and unique among routers
        self._counts = TokenCounts(router_id, self._epoch)
        self._closings = Closings(router_id, self._counts)
        self._counted_at = float("-inf")  # the first report is due at once
        self._handed_on_at = float("-inf")
        self._start_transfer: Callable[[Transfer], None] | None = None
        self._accuse: Callable[[EjectionNotice], None] = lambda _: None
        self._tick_handle: asyncio.Handle | None = None
        self._ticked_at = float("-inf")
        self._armed_at = 0.0
        self._is_tick_soon = False
        self._measured_at = 0.0
        self._frames = 0
        self._idle = asyncio.Event()
        self._next_sign = asyncio.Event()
        self._wakeable: frozenset[str] = frozenset()
        self._queue_look: asyncio.TimerHandle | None = None
        self.work_waits = asyncio.Event()
        self.is_ending = False

    def next_epoch(self) -> int:
        """Return an epoch that is greater than every earlier epoch of this router."""
        self._epoch = max(self._epoch + 1, time.time_ns() // 1000)
        return self._epoch

    # --- gateways ---------------------------------------------------------------------------

    def connect(
        self, gateway_id: str, *, takes_closings: bool = False, counts_prompts: bool = False
    ) -> GatewayLink:
        """Register a gateway connection, and return its link."""
        self._keys += 1
        accounts = Accounts(self._counts, counts_prompts=counts_prompts)
        link = GatewayLink(self._keys, gateway_id, accounts, takes_closings=takes_closings)
        self._links[link.key] = link
        self.core.on_gateway(link.key, self._loop.time())
        self._tick_soon()
        return link

    def disconnect(self, link: GatewayLink) -> None:
        """End a gateway connection by cancelling its requests and closing its open accounts."""
        del self._links[link.key]
        if not self.is_ending:  # when this router stops, the gateway lives and reports its requests
            self._closings.cut(link.accounts, self.core.gateways[link.key], self._loop.time())
        self.core.on_gateway_gone(link.key)
        self._tick_soon()

    def request(self, link: GatewayLink, message: wire.ConnectRequest) -> None:
        """Apply the submits, refusals and cancels of a gateway's message.

        Raises:
            ValueError: The message violates the protocol, so that the caller must end the
                connection.
        """
        now = self._loop.time()
        for submit in message.submits:
            self.core.submit(link.key, convert.request(submit), now)
            if submit.cell_id in self._wakeable:
                self._note_work(submit.cell_id)
        if message.submits:
            if not link.accounts.submitted(message.submits):
                self._counts.mix(time.time_ns() // 1_000_000)
            if not link.takes_closings:  # older gateways do not report this in Hello
                link.takes_closings = any(submit.closing for submit in message.submits)
        for turned in message.turned_away:
            requests = min(turned.requests, _TURNED_AWAY_MAX)
            self.core.turned_away(turned.cell_id, turned.priority, requests, now)
        link.accounts.cancelled(message)
        for handle in message.cancels:
            self.core.cancel(link.key, handle)
        self._tick_soon()

    def explain(self, message: wire.ExplainRequest) -> wire.Explanation:
        """Return the explanation of a live or hypothetical request.

        Raises:
            ValueError: The message names no request, or the hypothetical request is invalid.
        """
        now = self._loop.time()
        match message.WhichOneof("what"):
            case "request_id":
                return explain(self.core, message.request_id, now)
            case "submit":
                return explain(self.core, convert.request(message.submit), now)
            case _:
                raise ValueError("name a request_id, or give a submit")

    # --- other cells of a pool --------------------------------------------------------------

    def service_report(
        self, cell_id: str, router_id: str, accounts_max: int
    ) -> ServiceReport | None:
        """Return a cell's next report of its tenants' tokens, or None for an unknown cell."""
        cell = self.core.cells.get(cell_id)
        now = self._loop.time()
        return None if cell is None else cell.service_report(router_id, accounts_max, now)

    def service_now(self, cell_id: str, router_id: str, accounts_max: int) -> ServiceReport | None:
        """Return a report of a cell for a new reader, or None for an unknown cell."""
        cell = self.core.cells.get(cell_id)
        return None if cell is None else cell.service_now(router_id, accounts_max)

    def service_elsewhere(self, cells: Iterable[str], report: ServiceReport) -> None:
        """Apply another cell's report to this router's cells of the same pool.

        `cells` are the ids of this router's cells in the pool.
        """
        for cell_id in cells:
            if cell_id != report.cell_id:
                self.core.on_service_elsewhere(cell_id, report, self._loop.time())

    # --- demand -----------------------------------------------------------------------------

    def work_reports(self) -> list[WorkReport]:
        """Return the next demand reports of all owned cells."""
        return [cell.work_report() for cell in self.core.cells.values() if cell.is_owned]

    def note_wakeable(self, cells: Collection[str]) -> None:
        """Set the owned cells that have a sleeping replica, or no replica at all.

        A cell counts, too, if another pool of its models has a sleeping replica.
        """
        self._wakeable = frozenset(cells)
        for cell_id in self._wakeable:
            self._note_work(cell_id)

    def _note_work(self, cell_id: str) -> None:
        """Set `work_waits` if requests wait for a replica that the control plane can wake.

        A queue beside ready replicas counts if it is still there after `_QUEUE_S`.
        """
        cell = self.core.cells.get(cell_id)
        if cell is None or not cell.queue.requests:
            return
        if not cell.fleet.ready():
            self.work_waits.set()
        elif self._queue_look is None:
            self._queue_look = self._loop.call_later(_QUEUE_S, self._look_at_queues)

    def _look_at_queues(self) -> None:
        self._queue_look = None
        cells = [self.core.cells.get(cell_id) for cell_id in self._wakeable]
        if any(cell is not None and cell.queue.requests for cell in cells):
            self.work_waits.set()

    # --- replicas ---------------------------------------------------------------------------

    def plan(
        self, cells: list[str], replicas: list[ReplicaPlan], siblings: Collection[str] = ()
    ) -> None:
        """Apply the control plane's assignment of cells and replicas.

        `siblings` are the cells whose pool has several cells.
        """
        self.core.on_cells(cells, replicas, self.next_epoch())
        self.core.on_siblings(siblings)
        self._tick_soon()

    def attached(self, replica_id: str, outbox: HostOutbox, limits: EngineLimits) -> None:
        """Start to use a replica that was attached."""
        self._outboxes[replica_id] = outbox
        self.core.on_attached(replica_id, outbox.epoch, limits, self._loop.time())
        self._tick_soon()

    def frame(self, replica_id: str, epoch: int, frame: engine.StepFrame) -> bool:
        """Apply a step frame.

        Returns:
            Whether the frame has news. The frames of an idle engine have none.

        Raises:
            ValueError: The frame contradicts itself.
        """
        if any(it.reason == engine.FINISH_REASON_UNKNOWN_SPAN for it in frame.finished):
            self._outboxes[replica_id].lacks_span()
        now = self._loop.time()
        has_news = self.core.on_frame(replica_id, epoch, frame, now)
        self._frames += 1
        if self._is_tick_soon or not (has_news or self.core.has_decisions):
            return has_news
        if now - self._ticked_at >= PASS_S or self.core.has_decisions:
            self._tick_soon()
        else:
            self._arm(self._ticked_at + PASS_S, now)
        return has_news

    def broken(self, replica_id: str, outbox: HostOutbox) -> None:
        """Pause dispatches to a replica whose broken stream is being resumed."""
        self.core.on_broken(replica_id, outbox.epoch)
        self._tick_soon()

    def resumed(
        self,
        replica_id: str,
        outbox: HostOutbox,
        epoch: int,
        resumed: Sequence[engine.Resumed],
    ) -> None:
        """Continue with a replica that still runs this router's sequences.

        Raises:
            ValueError: The replica's list of sequences contradicts its earlier reports.
        """
        now = self._loop.time()
        self.core.on_resumed(replica_id, outbox.epoch, epoch, resumed, now)
        outbox.resume(epoch)
        self.metrics.streams_resumed.inc()
        self._tick_soon()

    def probed(self, replica_id: str, answer: CanaryAnswer) -> None:
        """Record a replica's answer to a canary inference."""
        self.core.on_probe(replica_id, answer, self._loop.time())
        self._tick_soon()

    def probe_failed(self, replica_id: str) -> None:
        """Record that a replica did not answer a canary inference."""
        self.core.on_probe_failed(replica_id, self._loop.time())
        self._tick_soon()

    def note_host_adapters(self, replica_id: str, digests: Iterable[str]) -> None:
        """Record the adapters that a replica has in host memory."""
        book = self.core.replicas.get(replica_id)
        if book is not None and book.limits is not None:
            self.core.cells[book.cell_id].fleet.residency.reported(replica_id, digests)

    def adapter_loads(self, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return the adapters that each replica should load, out of those in `known` by cell."""
        return self.core.adapter_loads(known)

    def transfer_by(self, start: Callable[[Transfer], None]) -> None:
        """Set the function that starts KV transfers. Without it the blocks are recomputed."""
        self._start_transfer = start

    def accuse_by(self, accuse: Callable[[EjectionNotice], None]) -> None:
        """Set the function that reports replicas ejected for wrong answers."""
        self._accuse = accuse

    def transferred(self, sequence: int, blocks: int) -> None:
        """Record the end of a KV transfer, in which `blocks` blocks arrived."""
        self.core.on_transferred(sequence, blocks, self._loop.time())
        self._tick_soon()

    def _transfer(self, transfer: Transfer) -> None:
        if self._start_transfer is None:
            self.transferred(transfer.dispatch.sequence, 0)
        else:
            self._start_transfer(transfer)

    def lost(self, replica_id: str, outbox: HostOutbox) -> None:
        """Stop using a replica whose attachment was lost."""
        if self._outboxes.get(replica_id) is outbox:
            del self._outboxes[replica_id]
        self.core.on_replica_lost(replica_id, outbox.epoch, self._loop.time())
        self._tick_soon()

    # --- ticks ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run the core's tick, and pass its actions to the connections."""
        self._is_tick_soon = False
        self._ticked_at = now = self._loop.time()
        actions = self.core.tick(now)
        self._hand_out(actions, now)
        for accusation in actions.accusations:
            self._accuse(accusation)
        if actions.is_sign_of_life:
            self._next_sign.set()
            self._next_sign = asyncio.Event()
        if now - self._measured_at >= _MEASURE_S:
            self.measure()
        if not self.core.live_requests:
            self._idle.set()
        self._arm(max(min(self.core.next_tick_at(now), self._hand_on_at), now + 0.001), now)

    def _arm(self, due: float, now: float) -> None:
        """Schedule a tick at the time `due`, unless an earlier tick is already scheduled."""
        if not now < self._armed_at <= due:
            if self._tick_handle is not None:
                self._tick_handle.cancel()
            self._armed_at = due
            self._tick_handle = self._loop.call_at(due, self.tick)

    def _hand_out(self, actions: Actions, now: float) -> None:
        for replica_id, dispatches in actions.dispatches.items():
            self._outboxes[replica_id].dispatch(dispatches)
            if self.core.config.decision_sample:
                _log_decisions(dispatches)
        for replica_id, sequences in actions.cancels.items():
            self._outboxes[replica_id].cancel(sequences)
        for replica_id in actions.probes:
            self._outboxes[replica_id].probe_wanted.set()
        for transfer in actions.transfers:
            self._transfer(transfer)
        for key, batch in actions.batches:
            link = self._links[key]
            link.put(batch, now)
            if batch.placed or batch.outcomes:
                link.accounts.note_outcomes(batch, now)
        if now - self._counted_at >= COUNTED_S and not self._closings.is_reporting and self._takers:
            self._counted_at = now
            self._closings.report(self._counts.reports(time.time_ns() // 1_000_000))
        if self._closings.has_work and now - self._handed_on_at >= _HAND_ON_S:
            self._closings.settle(self.core.has_ended, now)
            self._hand_on(now)

    @property
    def _takers(self) -> list[GatewayLink]:
        links = self._links.values()
        return [link for link in links if link.takes_closings and not link.cut.is_set()]

    @property
    def _hand_on_at(self) -> float:
        """Time of the next work on closings, or infinity if none is due."""
        closings = self._closings
        if closings.is_closing or (closings.is_ready and self._takers):
            return self._handed_on_at + _HAND_ON_S
        return float("inf")

    def _hand_on(self, now: float) -> None:
        """Pass closings of lost gateways to a connected gateway, or wait until one connects."""
        self._handed_on_at = now
        link = next((link for link in self._links.values() if link.has_room), None)
        if link is not None and (closings := self._closings.take()):
            link.carry(closings, now)
            self.metrics.closings.inc(len(closings))

    async def send_last(self, timeout_s: float) -> None:
        """Close the open accounts and report all token counts, as the router's last messages.

        Closings that no gateway has accepted after `timeout_s` are dropped.
        """
        closings = self._closings
        deadline = self._loop.time() + timeout_s
        while closings.is_closing:
            closings.settle(lambda _: True, self._loop.time())
            await asyncio.sleep(0)
        self._counted_at = float("inf")
        closings.report(self._counts.reports(time.time_ns() // 1_000_000, is_last=True))
        self._hand_on(self._loop.time())
        while closings.has_work and self._takers and self._loop.time() < deadline:
            await asyncio.sleep(0.005)
            closings.settle(lambda _: True, self._loop.time())
            self._hand_on(self._loop.time())
        if dropped := closings.drop():
            log.warning("closings_dropped", closings=dropped)

    def measure(self) -> None:
        """Add the core's totals since the last call to the metrics."""
        self._measured_at = self._loop.time()
        self.metrics.take(self.core.take_stats())
        self.metrics.frames.inc(self._frames)
        self.metrics.closings_dropped.inc(self._closings.take_dropped())
        self._frames = 0

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self.measure()
        return self.metrics.exposition(self.core)

    def _tick_soon(self) -> None:
        """Schedule a tick after the events that are ready now, so that they share a batch."""
        if not self._is_tick_soon:
            self._is_tick_soon = True
            self._loop.call_soon(self._tick_now)

    def _tick_now(self) -> None:
        if self._is_tick_soon:
            self.tick()

    def close(self) -> None:
        """Cancel the scheduled tick."""
        for handle in (self._tick_handle, self._queue_look):
            if handle is not None:
                handle.cancel()

    async def next_sign_of_life(self) -> None:
        """Wait for the next message that all gateways get, even without news."""
        await self._next_sign.wait()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all messages to gateways are written, at most `timeout_s`."""
        deadline = self._loop.time() + timeout_s
        while not all(link.is_flushed for link in self._links.values()):
            if self._loop.time() >= deadline:
                log.warning("gateways_not_flushed")
                return
            await asyncio.sleep(0.01)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every accepted request has ended, or return False after `timeout_s`."""
        self._idle.clear()
        self.tick()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self.core.live_requests


def _log_decisions(dispatches: list[Dispatch]) -> None:
    """Log the explained placements, with the replicas of the least cost."""
    for dispatch in dispatches:
        decision = dispatch.decision
        if decision is not None:
            log.info(
                "placement_decided",
                request_id=decision.request_id,
                cell_id=decision.cell_id,
                replica_id=decision.chosen,
                waited_ms=round(1000 * (dispatch.dispatched_at - dispatch.request.arrived_at)),
                predicted_ttft_ms=decision.predicted_ttft_ms,
                reason=decision.reason,
                candidates=[
                    {
                        "replica_id": candidate.replica_id,
                        "excluded_by": candidate.excluded_by,
                        "cost_us": candidate.cost_us,
                        "cached_tokens": candidate.cached_tokens,
                    }
                    for candidate in decision.candidates[:_LOGGED]
                ],
            )
