"""The core of the router decides which requests are admitted, queued, placed and ended, and when.

This module does no I/O and reads no clock. The shell calls one method per event and then `tick`,
which dispatches waiting requests to replicas and returns all messages to send.

The invariants are asserted here or in `router.core.invariants`.

- Every accepted request ends exactly once.
- No replica is sent more sequences or KV blocks than it has room for.
- Queues stay within their bounds.
- A replica's record (`ReplicaBook`) lists exactly its dispatches that the engine has not reported
  as ended.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from router.core import cell_admission, frames
from router.core.cell import CellBook
from router.core.cell_news import CellNews
from router.core.decide import admission
from router.core.dispatch import QueueDispatcher
from router.core.engine_news import EngineNews
from router.core.explain.decision_log import DecisionLog
from router.core.fleet.health import LYING, HealthState
from router.core.fleet.replica import ReplicaBook
from router.core.handovers import Handovers
from router.core.lifecycle import RequestLifecycle
from router.core.ownership import Ownership
from router.core.types.actions import Actions, EjectionNotice, Stats
from router.core.types.batch import GatewayBatch
from router.core.types.canary import CanaryAnswer
from router.core.types.config import CoreConfig
from router.core.types.ending import Ending, count
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import ConnectedGateway, Dispatch, Request
from router.core.types.service import ServiceReport
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

SIGN_OF_LIFE_S = 0.25  # longest silence to a gateway, which treats 0.9 s of silence as a freeze


class RouterCore:
    """The cells, replicas, gateways and requests of one router process."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.cells: dict[str, CellBook] = {}
        self.replicas: dict[str, ReplicaBook] = {}
        self.gateways: dict[int, ConnectedGateway] = {}
        decisions = DecisionLog(config)
        self.lifecycle = RequestLifecycle(config, self.cells, decisions)
        self.handovers = Handovers()
        self._ownership = Ownership(config, self.cells, self.replicas, self.lifecycle)
        self.dispatcher = QueueDispatcher(self.lifecycle, self.handovers, decisions)
        self.engine_news = EngineNews(config, self.lifecycle, self.dispatcher)
        self.is_draining = False
        self._cell_news = CellNews(config.cell_state_interval_s)
        self._alive_at = float("-inf")

    # --- gateways ---------------------------------------------------------------------------

    def on_gateway(self, key: int, now: float) -> None:
        """Register a gateway connection under `key`, which no later connection reuses."""
        gateway = self.gateways[key] = ConnectedGateway(key)
        for cell in self.cells.values():
            if cell.is_owned:
                gateway.batch.cells.append(cell.state(now, is_draining=self.is_draining))
                gateway.batch.sketches.extend(cell.fleet.sketch.whole(cell.cell_id, cell.epoch))

    def on_gateway_gone(self, key: int) -> None:
        """End a gateway connection, and cancel all requests of that gateway."""
        gateway = self.gateways.pop(key)
        for request in list(gateway.requests.values()):
            self.lifecycle.withdraw(request, Ending(wire.OUTCOME_KIND_CANCELLED))

    def submit(self, key: int, request: Request, now: float) -> None:
        """Queue a request, or reject the request at once.

        Raises:
            ValueError: The gateway already uses the handle for a live request.
        """
        gateway = self.gateways[key]
        if request.handle in gateway.requests:
            raise ValueError(f"handle {request.handle} is in use")
        self.lifecycle.stamp(gateway, request, now)
        cell = self.cells.get(request.cell_id)
        figures = None if cell is None else cell.price(request)
        rejection = cell_admission.rejection(
            request,
            cell,
            self.config,
            now,
            figures=figures,
            router_is_draining=self.is_draining,
        )
        if rejection is not None:
            code = rejection.code
            if cell is not None and code is not None and code.policy.is_demand:
                cell.work.came(request, is_refused=True)
                if figures is not None and not figures.adapter_s:  # others may still have room
                    self._cell_news.refused(cell, request, rejection.retry_after_s, now)
            gateway.batch.outcomes.append(rejection.outcome(request.handle))
            count(rejection, self.lifecycle.stats)
            return
        assert cell is not None, "without a cell it was rejected"
        queue = cell.queue
        while admission.is_full(request, queue.requests, queue.tokens, self.config):
            self.lifecycle.withdraw(*cell_admission.shed_for(request, cell, now))
        self.lifecycle.accept(request, cell, now)
        self._cell_news.fitted(request)

    def turned_away(self, cell_id: str, priority: int, requests: int, now: float) -> None:
        """Add requests that a gateway refused because of a closed gate to the cell's demand."""
        cell = self.cells.get(cell_id)
        if cell is None:
            return
        cell.work.turned_away(priority, requests, cell.uncached_mean, cell.answers.mean)
        self._cell_news.turned_away(cell, priority, requests, now)

    def cancel(self, key: int, handle: int) -> None:
        """Cancel a request for its gateway. An unknown handle belongs to an ended request."""
        request = self.gateways[key].requests.get(handle)
        if request is not None:
            self.lifecycle.withdraw(request, Ending(wire.OUTCOME_KIND_CANCELLED))

    # --- cells and replicas -----------------------------------------------------------------

    def on_cells(self, owned: Iterable[str], plans: Iterable[ReplicaPlan], epoch: int = 1) -> None:
        """Adopt the complete list of cells that this router owns, and of their replicas.

        If a cell has moved to another router, its waiting requests are evicted. This router
        finishes the cell's running requests.

        Args:
            owned: Ids of all owned cells.
            plans: All replicas of the owned cells.
            epoch: Epoch of the new cells, greater than every earlier epoch.
        """
        self._ownership.adopt(owned, plans, epoch)

    def on_siblings(self, cells: Collection[str]) -> None:
        """Set the cells that share their pool with other cells.

        Gateways receive the prefix sketches of these cells only, because other pools offer no
        choice between cells.
        """
        for cell in self.cells.values():
            cell.fleet.sketch.is_wanted = cell.cell_id in cells

    def has_ended(self, dispatch: Dispatch) -> bool:
        """Return whether the engine has reported the end of a sequence, or is detached."""
        book = self.replicas.get(dispatch.replica_id)
        return book is None or book.dispatches.get(dispatch.sequence) is not dispatch

    def is_surplus(self, replica_id: str) -> bool:
        """Return whether the shell should detach from a replica.

        The result is true if the replica has left its cell and runs no sequence of this router.
        """
        book = self.replicas.get(replica_id)
        return book is None or (book.is_leaving and not book.dispatches)

    def on_attached(self, replica_id: str, epoch: int, limits: EngineLimits, now: float) -> None:
        """Begin to use a replica whose engine runs no sequence of this router."""
        book = self.replicas.get(replica_id)
        if book is None:
            return
        assert book.limits is None, "a replica has one attachment"
        book.attach(epoch, limits, now)
        self.cells[book.cell_id].fleet.attached(book, now)

    def on_broken(self, replica_id: str, epoch: int) -> None:
        """Pause dispatches to a replica whose stream broke, until it is resumed or lost."""
        book = self.replicas.get(replica_id)
        if book is not None and book.epoch == epoch and book.limits is not None:
            book.is_broken = True
            self.cells[book.cell_id].update(book)

    def on_resumed(
        self,
        replica_id: str,
        epoch: int,
        new_epoch: int,
        resumed: Sequence[engine.Resumed],
        now: float,
    ) -> None:
        """Continue with an engine that still runs this router's sequences after a broken stream.

        A sequence that the engine does not list has ended, as the engine's first frame reports, or
        never reached the engine.

        Raises:
            ValueError: The list contradicts the engine's own reports, so that the caller must end
                the attachment.
        """
        book = self.replicas.get(replica_id)
        if book is None or book.epoch != epoch or book.limits is None:
            return
        for entry in resumed:
            dispatch = book.dispatches.get(entry.sequence)
            if dispatch is None or not dispatch.is_open:  # the cancel may be lost
                self.lifecycle.cancels.setdefault(replica_id, []).append(entry.sequence)
            if dispatch is not None:
                frames.file_missed(book, dispatch, entry, self.lifecycle.stats, now)
        book.resume(new_epoch, {entry.sequence for entry in resumed}, now)
        self.cells[book.cell_id].update(book)

    def on_replica_lost(self, replica_id: str, epoch: int, now: float) -> None:
        """End an attachment. Requests without output are retried, and others end as LOST."""
        book = self.replicas.get(replica_id)
        if book is None or book.epoch != epoch or book.limits is None:
            return
        self.lifecycle.cancels.pop(replica_id, None)
        self._give_up(book, " was lost", now)

    def _give_up(self, book: ReplicaBook, what: str, now: float) -> None:
        cell = self.cells[book.cell_id]
        dispatches = book.detach()
        cell.fleet.detached(book, dispatches, now)
        for dispatch in dispatches:
            if dispatch.is_open:
                self.lifecycle.retry(dispatch, ErrorCode.REPLICA_LOST, what, now)

    # --- other cells of a pool --------------------------------------------------------------

    def on_service_elsewhere(self, cell_id: str, report: ServiceReport, now: float) -> None:
        """Apply another cell's report of tenants' tokens to an owned cell of the same pool."""
        cell = self.cells.get(cell_id)
        if cell is not None:
            cell.queue.hear(report, now)

    # --- adapters ---------------------------------------------------------------------------

    def adapter_loads(self, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return the adapters that each replica should load ahead of requests.

        Args:
            known: Adapters that requests may name, by cell.
        """
        loads: dict[str, list[str]] = {}
        for cell in self.cells.values():
            if cell.is_owned:
                loads |= cell.fleet.adapter_loads(known.get(cell.cell_id, ()))
        return loads

    # --- canary probes ----------------------------------------------------------------------

    def on_probe(self, replica_id: str, answer: CanaryAnswer, now: float) -> None:
        """Record the answer of a replica to a canary inference."""
        book = self.replicas.get(replica_id)
        if book is not None:
            self.cells[book.cell_id].fleet.health.answered(replica_id, answer, now)

    def on_probe_failed(self, replica_id: str, now: float) -> None:
        """Record that a replica did not answer a canary inference in time."""
        book = self.replicas.get(replica_id)
        if book is not None:
            self.cells[book.cell_id].fleet.health.probe_failed(replica_id, now)

    def on_transferred(self, sequence: int, blocks: int, now: float) -> None:
        """Record the end of a KV transfer, successful or not, and dispatch its request.

        Args:
            sequence: Sequence on the target replica.
            blocks: Number of leading blocks that arrived, or 0 if the transfer failed.
            now: Time, in seconds.
        """
        result = self.handovers.end(self.cells, sequence, blocks, now)
        if result:
            transfers = self.lifecycle.stats.transfers
            transfers[result] = transfers.get(result, 0) + 1

    # --- frames -----------------------------------------------------------------------------

    def on_frame(self, replica_id: str, epoch: int, frame: engine.StepFrame, now: float) -> bool:
        """Record one step frame, and append its tokens to the gateways' batches.

        The call is on the hot path, because it does work for each token.

        Returns:
            Whether the frame has news, so that a tick is due.

        Raises:
            ValueError: The frame contradicts itself, so that the caller must end the attachment.
        """
        book = self.replicas.get(replica_id)
        if book is None or book.epoch != epoch or book.limits is None:
            return False
        return self.engine_news.take(book, self.cells[book.cell_id], frame, now)

    # --- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Expire late requests, bind requests that can start soon, and return all actions.

        The actions include the results of all events since the last tick.
        """
        actions = Actions()
        self.lifecycle.expire(now)
        for book in self.engine_news.rested(now):
            if book.replica_id in self.replicas:
                self.cells[book.cell_id].update(book)
        for cell in self.cells.values():
            actions.probes += cell.fleet.health.tick(now)
            self._judge(cell, actions, now)
            if cell.queue.requests:
                self.dispatcher.bind(cell, actions, now)
        if not self.handovers.is_idle:
            self._hand_over(actions, now)
        is_sign_of_life = now - self._alive_at >= SIGN_OF_LIFE_S
        if is_sign_of_life:
            self._alive_at = now
            actions.is_sign_of_life = True
        self._cell_news.tell(
            self.cells,
            self.gateways.values(),
            now,
            may_recite=is_sign_of_life,
            is_draining=self.is_draining,
        )
        if self.lifecycle.cancels:
            actions.cancels, self.lifecycle.cancels = self.lifecycle.cancels, {}
        for gateway in self.gateways.values():
            if gateway.batch or is_sign_of_life:
                actions.batches.append((gateway.key, gateway.batch))
                gateway.batch = GatewayBatch()
        return actions

    @property
    def has_decisions(self) -> bool:
        """Whether a tick may make decisions, beyond sending the tokens of received frames."""
        if not self.handovers.is_idle:
            return True
        return any(cell.queue.requests for cell in self.cells.values())

    def next_tick_at(self, now: float) -> float:
        """Return the time at which `tick` is due even if no event occurs."""
        due = [self._alive_at + SIGN_OF_LIFE_S, self.lifecycle.next_deadline()]
        for cell in self.cells.values():
            if cell.is_dirty:
                due.append(self._cell_news.due_at())
            if cell.queue.requests:
                due.append(cell.fleet.retry_at(now))
            due.append(cell.fleet.health.next_at(now))
        due += [self.engine_news.next_at(), self.handovers.next_at()]
        return max(min(due), now)

    def _hand_over(self, actions: Actions, now: float) -> None:
        """Start transfers, and send the dispatches whose transfer has ended."""
        handovers = self.handovers
        for sequence in handovers.overdue(now):
            self.on_transferred(sequence, 0, now)
        for dispatch in handovers.ready:
            book = self.replicas.get(dispatch.replica_id)
            if book is None or book.dispatches.get(dispatch.sequence) is not dispatch:
                continue
            if dispatch.is_open:
                dispatch.dispatched_at = now
                actions.dispatches.setdefault(dispatch.replica_id, []).append(dispatch)
            else:  # cancelled before the dispatch was sent to its engine
                cell = self.cells[book.cell_id]
                book.finish(dispatch)
                cell.fleet.released(dispatch)
                cell.update(book)
        handovers.ready = []
        actions.transfers, handovers.transfers = handovers.transfers, []

    def _judge(self, cell: CellBook, actions: Actions, now: float) -> None:
        """Apply health changes of the cell's replicas, such as ejections and readmissions."""
        for verdict in cell.fleet.health.verdicts():
            book = cell.fleet.replicas.get(verdict.replica_id)
            if book is None:
                continue
            if verdict.state is HealthState.EJECTED:
                ejections = self.lifecycle.stats.ejections
                ejections[verdict.reason] = ejections.get(verdict.reason, 0) + 1
                if verdict.reason == LYING:
                    self._abandon(book, now)
                    counts = verdict.wrong, verdict.asked
                    actions.accusations.append(
                        EjectionNotice(book.replica_id, cell.cell_id, *counts)
                    )
            elif verdict.state is HealthState.HALF_OPEN:
                ready = cell.fleet.ready()
                book.speed.adopt([peer.speed for peer in ready if peer is not book])
            cell.update(book)

    def _abandon(self, book: ReplicaBook, now: float) -> None:
        """Cancel and retry all requests of a replica with wrong answers."""
        what = " gives wrong answers"
        for dispatch in list(book.dispatches.values()):
            if dispatch.is_open:
                self.lifecycle.cancels.setdefault(book.replica_id, []).append(dispatch.sequence)
                self.lifecycle.retry(dispatch, ErrorCode.REPLICA_LOST, what, now)

    # --- the end ----------------------------------------------------------------------------

    def take_stats(self) -> Stats:
        """Return the statistics since the last call."""
        stats, self.lifecycle.stats = self.lifecycle.stats, Stats()
        return stats

    def drain(self) -> None:
        """Reject all new requests from now on, while accepted requests are served to their end."""
        self.is_draining = True
        for cell in self.cells.values():
            cell.is_dirty = True

    @property
    def live_requests(self) -> int:
        """Number of accepted requests that have not ended."""
        return self.lifecycle.live

    def end_all(self) -> None:
        """End all requests that are still live when the drain time is over."""
        for gateway in self.gateways.values():
            for request in list(gateway.requests.values()):
                has_emitted = request.output or (
                    request.dispatch is not None and request.dispatch.emitted
                )
                ending = Ending(
                    wire.OUTCOME_KIND_LOST if has_emitted else wire.OUTCOME_KIND_EVICTED,
                    ErrorCode.DRAINING,
                    "this router is shutting down; try again",
                    retry_after_s=admission.DRAINING_RETRY_S,
                )
                self.lifecycle.withdraw(request, ending)
