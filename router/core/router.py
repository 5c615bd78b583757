"""The router's decisions: admit, queue, place, and what every event means for every request.

Sans-I/O. The shell calls one method per event and then `tick`, which binds waiting requests to
replicas and returns everything that is to be sent. Nothing here reads a clock.

Invariants, asserted here or in `router.core.invariants`: every accepted request ends exactly once;
no replica is sent more than it holds; queues stay within their bounds; the books of a replica are
what was sent to it and has not been reported as ended.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from router.core import admission, frames
from router.core.cell_book import CellBook
from router.core.model import (
    Actions,
    Batch,
    CoreConfig,
    EngineLimits,
    Gateway,
    ReplicaPlan,
    Request,
    Slot,
    State,
    Stats,
)
from router.core.outcomes import FINISHED, Ending, count, end
from router.core.replica_book import ReplicaBook
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

SIGN_OF_LIFE_S = 1.0  # gateways take a router that says nothing for 2.5 s for frozen
_MOVED_RETRY_S = 0.2  # the gateway's next snapshot names the new owner


class RouterCore:
    """All cells, replicas, gateways and requests of one router process."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.cells: dict[str, CellBook] = {}
        self.replicas: dict[str, ReplicaBook] = {}
        self.gateways: dict[int, Gateway] = {}
        self.stats = Stats()
        self.is_draining = False
        self._orders = 0
        self._sequences = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._live = 0
        self._busy: dict[str, ReplicaBook] = {}  # said "busy" a moment ago
        self._actions = Actions()
        self._cells_told_at = self._alive_at = float("-inf")

    # --- gateways ---------------------------------------------------------------------------

    def on_gateway(self, key: int) -> None:
        """Begin a gateway connection; `key` is never used again."""
        gateway = self.gateways[key] = Gateway(key)
        gateway.batch.cells.extend(cell.state() for cell in self.cells.values() if cell.is_owned)

    def on_gateway_gone(self, key: int) -> None:
        """End a connection: nobody wants its answers any more."""
        gateway = self.gateways.pop(key)
        for request in list(gateway.requests.values()):
            self._withdraw(request, Ending(wire.OUTCOME_KIND_CANCELLED))

    def submit(self, key: int, submit: wire.Submit, now: float) -> None:
        """Queue a request or reject it at once.

        Raises:
            ValueError: The handle is in use; the gateway is broken.
        """
        gateway = self.gateways[key]
        if submit.handle in gateway.requests:
            raise ValueError(f"handle {submit.handle} is in use")
        cell = self.cells.get(submit.cell_id)
        rejection = admission.rejection(
            submit, cell, self.config, router_is_draining=self.is_draining
        )
        if rejection is not None:
            gateway.batch.outcomes.append(rejection.outcome(submit.handle))
            count(rejection, self.stats)
            return
        deadline_s = submit.deadline_ms / 1000 or self.config.deadline_default_s
        self._orders += 1
        request = Request(gateway, submit, order=self._orders, now=now, deadline_s=deadline_s)
        gateway.requests[request.handle] = request
        assert cell is not None, "without a cell it was rejected"
        cell.queue.push(request)
        cell.is_dirty = True
        self._live += 1
        heappush(self._deadlines, (request.deadline_at, request.order, request))

    def cancel(self, key: int, handle: int) -> None:
        """End a request on its gateway's wish; an unknown handle has already ended."""
        request = self.gateways[key].requests.get(handle)
        if request is not None:
            self._withdraw(request, Ending(wire.OUTCOME_KIND_CANCELLED))

    # --- cells and replicas -----------------------------------------------------------------

    def on_cells(self, owned: Iterable[str], plans: Iterable[ReplicaPlan], now: float) -> None:
        """Take over which cells are ours and which replicas they have; complete every time.

        Requests that wait for a cell that moved away are evicted, those that run there end here.
        """
        wanted = dict.fromkeys(owned)
        for cell_id in wanted:
            cell = self.cells.get(cell_id)
            if cell is None:
                cell = self.cells[cell_id] = CellBook(cell_id, self.config)
            cell.is_owned = cell.is_dirty = True
        planned = {plan.replica_id: plan for plan in plans if plan.cell_id in wanted}
        for plan in planned.values():
            book = self.replicas.get(plan.replica_id)
            if book is None:
                book = ReplicaBook(plan.replica_id, plan.cell_id)
                self.replicas[plan.replica_id] = book
                self.cells[plan.cell_id].replicas[plan.replica_id] = book
        for book in list(self.replicas.values()):
            plan = planned.get(book.replica_id)
            book.is_leaving = plan is None or plan.cell_id != book.cell_id
            book.is_draining = book.is_leaving or (plan is not None and plan.is_draining)
            self.cells[book.cell_id].update(book, self.config, now)
        for cell in self.cells.values():
            if cell.cell_id not in wanted and cell.is_owned:
                self._give_up_cell(cell)
        self._forget(wanted)

    def _give_up_cell(self, cell: CellBook) -> None:
        cell.is_owned = False
        ending = Ending(
            wire.OUTCOME_KIND_EVICTED,
            ErrorCode.NO_CAPACITY,
            f"cell {cell.cell_id} moved to another router; try again",
            retry_after_s=_MOVED_RETRY_S,
        )
        for request in cell.queue.drain():
            self._end(request, ending)

    def _forget(self, wanted: dict[str, None]) -> None:
        """Drop replicas and cells that are no longer planned and hold nothing."""
        for book in list(self.replicas.values()):
            if book.is_leaving and not book.slots and book.limits is None:
                del self.replicas[book.replica_id]
                del self.cells[book.cell_id].replicas[book.replica_id]
        for cell in list(self.cells.values()):
            if cell.cell_id not in wanted and not cell.replicas:
                del self.cells[cell.cell_id]

    def is_surplus(self, replica_id: str) -> bool:
        """Return whether a replica left its cell and runs nothing of ours: time to detach."""
        book = self.replicas.get(replica_id)
        return book is None or (book.is_leaving and not book.slots)

    def on_attached(self, replica_id: str, epoch: int, limits: EngineLimits, now: float) -> None:
        """Begin to use a replica: its engine holds nothing of ours."""
        book = self.replicas.get(replica_id)
        if book is None:
            return
        assert book.limits is None, "a replica has one attachment"
        book.attach(epoch, limits, now)
        cell = self.cells[book.cell_id]
        cell.relimit()
        cell.update(book, self.config, now)

    def on_replica_lost(self, replica_id: str, epoch: int, now: float) -> None:
        """Give up an attachment: what was not emitted goes elsewhere, the rest is LOST."""
        book = self.replicas.get(replica_id)
        if book is None or book.epoch != epoch or book.limits is None:
            return
        cell = self.cells[book.cell_id]
        slots = book.detach()
        cell.relimit()
        self._actions.cancels.pop(replica_id, None)
        message = f"replica {replica_id} was lost"
        for slot in slots:
            if slot.is_open:
                self._retry(slot, ErrorCode.REPLICA_LOST, message)
        cell.update(book, self.config, now)

    # --- frames -----------------------------------------------------------------------------

    def on_frame(self, replica_id: str, epoch: int, frame: engine.StepFrame, now: float) -> None:
        """Book one step frame and file its tokens by gateway. The hot path: per token.

        Raises:
            ValueError: It contradicts itself; the attachment is to be ended.
        """
        book = self.replicas.get(replica_id)
        if book is None or book.epoch != epoch or book.limits is None:
            return
        slots = book.slots
        for entry in frame.admitted:
            slot = slots.get(entry.sequence)
            if slot is not None:
                book.admitted(slot, entry.cached_tokens)
                if slot.is_open:
                    frames.place(slot, entry.queue_us, entry.cached_tokens, self.stats)
        if frame.sequence or frame.token:
            frames.file_tokens(book, frame, self.stats, now)
        if frame.finished:
            self._finish(book, frame, now)
        book.observe(frame, now)
        self.cells[book.cell_id].update(book, self.config, now)

    def _finish(self, book: ReplicaBook, frame: engine.StepFrame, now: float) -> None:
        cell = self.cells[book.cell_id]
        for entry in frame.finished:
            slot = book.slots.get(entry.sequence)
            if slot is None:
                continue
            book.finish(slot)
            kind = FINISHED.get(entry.reason)
            if kind is not None:
                cell.observe_output(slot.emitted)
                self.stats.count_mismatches += slot.emitted != entry.output_tokens
            if not slot.is_open:
                continue
            if kind is not None:
                ending = Ending(
                    kind, output_tokens=entry.output_tokens, prefill_us=entry.prefill_us
                )
                self._end(slot.request, ending)
            else:
                self._finish_badly(book, slot, entry, now)

    def _finish_badly(
        self, book: ReplicaBook, slot: Slot, entry: engine.Finished, now: float
    ) -> None:
        where = f"replica {book.replica_id}: {entry.message or entry.code}"
        if entry.reason == engine.FINISH_REASON_REFUSED:
            ending = Ending(
                wire.OUTCOME_KIND_FAILED,
                ErrorCode.ENGINE_REFUSED,
                where,
                output_tokens=slot.emitted,
            )
            self._end(slot.request, ending)
        elif entry.reason == engine.FINISH_REASON_BUSY:
            drains = entry.code == ErrorCode.DRAINING
            pause_s = self.config.draining_pause_s if drains else self.config.busy_pause_s
            book.busy_until = now + pause_s
            self._busy[book.replica_id] = book
            self._retry(slot, None, where)
        else:
            self._retry(slot, ErrorCode.ENGINE_FAILED, where)

    def _retry(self, slot: Slot, code: ErrorCode | None, message: str) -> None:
        """Queue an open slot's request again if nothing was emitted; end it otherwise.

        Without a code it is backpressure: that is nobody's failure and has no limit but the
        deadline.
        """
        request = slot.request
        cell = self.cells[request.cell_id]
        if slot.emitted:
            ending = Ending(
                wire.OUTCOME_KIND_LOST,
                code or ErrorCode.ENGINE_BUSY,
                message,
                output_tokens=slot.emitted,
            )
            self._end(request, ending)
            return
        if code is not None:
            request.attempts += 1
            request.avoid = slot.replica_id
            if request.attempts > self.config.retries_max:
                text = f"gave up after {request.attempts} attempts; last: {message}"
                self._end(request, Ending(wire.OUTCOME_KIND_FAILED, code, text))
                return
        if not cell.is_owned:
            text = f"cell {cell.cell_id} moved to another router; try again"
            ending = Ending(
                wire.OUTCOME_KIND_EVICTED,
                ErrorCode.NO_CAPACITY,
                text,
                retry_after_s=_MOVED_RETRY_S,
            )
            self._end(request, ending)
            return
        slot.is_open = False
        request.slot = None
        request.state = State.QUEUED
        cell.queue.push_front(request)
        self.stats.requeues += 1

    # --- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Expire, bind what can start soon, and return all that is to be sent since the last."""
        self._expire(now)
        if self._busy:
            self._wake_busy(now)
        for cell in self.cells.values():
            if cell.queue.requests:
                self._bind(cell, now)
        is_sign_of_life = now - self._alive_at >= SIGN_OF_LIFE_S
        self._tell_cells(now, everything=is_sign_of_life)
        if is_sign_of_life:
            self._alive_at = now
        actions, self._actions = self._actions, Actions()
        for gateway in self.gateways.values():
            if gateway.batch or is_sign_of_life:
                actions.batches.append((gateway.key, gateway.batch))
                gateway.batch = Batch()
        return actions

    def next_tick_at(self, now: float) -> float:
        """Return when `tick` is due even if nothing happens."""
        due = self._alive_at + SIGN_OF_LIFE_S
        while self._deadlines and self._deadlines[0][2].state is State.DONE:
            heappop(self._deadlines)
        if self._deadlines:
            due = min(due, self._deadlines[0][0])
        for cell in self.cells.values():
            if cell.is_dirty:
                due = min(due, self._cells_told_at + self.config.cell_state_interval_s)
        for book in self._busy.values():
            due = min(due, book.busy_until)
        return max(due, now)

    def _wake_busy(self, now: float) -> None:
        for book in list(self._busy.values()):
            if book.busy_until <= now:
                del self._busy[book.replica_id]
                if book.replica_id in self.replicas:
                    self.cells[book.cell_id].update(book, self.config, now)

    def _expire(self, now: float) -> None:
        """Evict what has no first token at its deadline."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            request = heappop(deadlines)[2]
            slot = request.slot
            if request.state is State.DONE or (slot is not None and slot.emitted):
                continue
            cell = self.cells[request.cell_id]
            waited_s = now - request.arrived_at
            if cell.replicas_ready():
                code = ErrorCode.DEADLINE_EXCEEDED
                message = f"no first token after {waited_s:.1f} s; try again later"
            else:
                code = ErrorCode.NO_CAPACITY
                message = f"no replica was ready for {waited_s:.1f} s; try again later"
            wait_s = cell.retry_after_s()
            ending = Ending(wire.OUTCOME_KIND_EVICTED, code, message, retry_after_s=wait_s)
            self._withdraw(request, ending)
        if len(deadlines) > 2 * self._live + 64:  # mostly of requests that have ended
            self._deadlines = [entry for entry in deadlines if entry[2].state is not State.DONE]
            heapify(self._deadlines)

    def _bind(self, cell: CellBook, now: float) -> None:
        """Late binding: dispatch in the queue's order while a replica can start soon."""
        queue = cell.queue
        while cell.available and (request := queue.peek()) is not None:
            book = cell.pick(request)
            if book is None:
                longest = cell.prompt_tokens_max
                if longest is None or request.prompt_tokens <= longest:
                    return
                queue.remove(request)
                message = f"the prompt has {request.prompt_tokens} tokens, {longest} fit"
                code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
                self._end(request, Ending(wire.OUTCOME_KIND_EVICTED, code, message))
                continue
            tenant = queue.take(request)
            self._sequences += 1
            slot = Slot(request, tenant, book.replica_id, sequence=self._sequences, now=now)
            request.slot = slot
            request.state = State.RUNNING
            book.add(slot, cell.output_expected(request.output_max))
            cell.update(book, self.config, now)
            self._actions.dispatches.setdefault(book.replica_id, []).append(slot)

    def _tell_cells(self, now: float, *, everything: bool) -> None:
        """Broadcast what changed, not too often."""
        if not everything and now - self._cells_told_at < self.config.cell_state_interval_s:
            return
        for cell in self.cells.values():
            if cell.is_dirty or everything:
                cell.is_dirty = False
                self._cells_told_at = now
                state = cell.state()
                if state == cell.told and not everything:
                    continue
                cell.told = state
                for gateway in self.gateways.values():
                    gateway.batch.cells.append(state)

    # --- ends -------------------------------------------------------------------------------

    def _end(self, request: Request, ending: Ending) -> None:
        self._live -= 1
        end(request, ending, self.stats)

    def _withdraw(self, request: Request, ending: Ending) -> None:
        """End a request wherever it is; a replica that runs it is told to stop."""
        cell = self.cells[request.cell_id]
        slot = request.slot
        if slot is None:
            cell.queue.remove(request)
            cell.is_dirty = True
        else:
            ending.output_tokens = slot.emitted
            self._actions.cancels.setdefault(slot.replica_id, []).append(slot.sequence)
        self._end(request, ending)

    def drain(self) -> None:
        """Accept nothing more; what was accepted goes on."""
        self.is_draining = True

    @property
    def live_requests(self) -> int:
        """Number of accepted requests that have not ended."""
        return self._live

    def end_all(self) -> None:
        """End what the drain time was too short for, so that no gateway waits in vain."""
        for gateway in self.gateways.values():
            for request in list(gateway.requests.values()):
                emitted = request.slot.emitted if request.slot is not None else 0
                ending = Ending(
                    wire.OUTCOME_KIND_LOST if emitted else wire.OUTCOME_KIND_EVICTED,
                    ErrorCode.DRAINING,
                    "this router is shutting down; try again",
                    retry_after_s=admission.DRAINING_RETRY_S,
                )
                self._withdraw(request, ending)
