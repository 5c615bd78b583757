"""Applies the frames of engines to the records of replicas and to requests."""

from router.core import frames
from router.core.cell import CellBook
from router.core.dispatch import QueueDispatcher
from router.core.fleet.replica import ReplicaBook
from router.core.lifecycle import RequestLifecycle
from router.core.types.config import CoreConfig
from router.core.types.ending import FINISHED, Ending
from router.core.types.request import Dispatch
from sluice.errors import EngineRefusal, ErrorCode, policy_of
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire


class EngineNews:
    """Records the step frames of all replicas, and ends the requests that engines have ended."""

    def __init__(
        self, config: CoreConfig, lifecycle: RequestLifecycle, dispatcher: QueueDispatcher
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._busy: dict[str, ReplicaBook] = {}  # replicas that are paused after a "busy" reply

    def take(self, book: ReplicaBook, cell: CellBook, frame: engine.StepFrame, now: float) -> bool:
        """Record one frame of an attached replica.

        Returns:
            Whether the frame has news for the router. An idle engine has none.

        Raises:
            ValueError: The frame contradicts itself, so that the caller must end the attachment.
        """
        is_at_rest = book.is_at_rest(frame)
        if is_at_rest and not frame.steps:
            return False
        state = frame.state
        if frame.admitted:
            self._admitted(book, cell, frame, now)
        book.progress(frame)
        frames.file_frame(book, frame, self._lifecycle.stats, now)
        if frame.finished:
            self._finish(book, cell, frame, now)
        if frame.HasField("kv_events"):
            cell.fleet.cached(book.replica_id, frame.kv_events, now)
        if state.adapters_changed:
            cell.fleet.residency.resident(book.replica_id, state.adapters_resident)
        if frame.steps and state.step_us:  # heartbeats repeat the last step, and are skipped
            cell.fleet.health.stepped(
                book.replica_id,
                state.step_us * 1e-6,
                now,
                prompt_tokens=state.step_prompt_tokens,
                decodes=state.running - state.prefilling,
                kv_blocks=state.kv_blocks_used,
            )
        book.observe(frame, now)
        for dispatch in book.take_unlisted():
            book.finish(dispatch)
            cell.fleet.released(dispatch)
            if dispatch.is_open:
                self._lifecycle.retry(dispatch, ErrorCode.REPLICA_LOST, " did not get it", now)
        cell.update(book)
        return not is_at_rest

    def _admitted(
        self, book: ReplicaBook, cell: CellBook, frame: engine.StepFrame, now: float
    ) -> None:
        step_s = frame.state.step_us * 1e-6
        for entry in frame.admitted:
            dispatch = book.dispatches.get(entry.sequence)
            if dispatch is None:
                continue
            if frame.steps == 1 and step_s:
                lag_s = now - dispatch.dispatched_at - entry.queue_us * 1e-6 - step_s
                book.speed.observe_lag(lag_s)
            book.admitted(dispatch, entry.cached_tokens)
            if dispatch.request.adapter:
                cell.fleet.residency.loaded(
                    book.replica_id,
                    dispatch.request.adapter,
                    queue_s=entry.queue_us * 1e-6,
                    read_s=entry.load_us * 1e-6,
                )
            if dispatch.is_open:
                frames.place(dispatch, entry.queue_us, self._lifecycle.stats, entry.load_us)

    def _finish(
        self, book: ReplicaBook, cell: CellBook, frame: engine.StepFrame, now: float
    ) -> None:
        for entry in frame.finished:
            dispatch = book.dispatches.get(entry.sequence)
            if dispatch is None:
                continue
            book.finish(dispatch)
            cell.fleet.released(dispatch)
            kind = FINISHED.get(entry.reason)
            if dispatch.is_prefill and entry.reason == engine.FINISH_REASON_LENGTH:
                cell.fleet.health.succeeded(book.replica_id, now)
                if dispatch.is_open:
                    self._dispatcher.hand_over(cell, dispatch, now)
                continue
            if kind is not None:
                cell.finished(dispatch, now)
                self._lifecycle.stats.count_mismatches += dispatch.emitted != entry.output_tokens
            if not dispatch.is_open:
                continue
            if kind is not None:
                tokens, prefill_us = entry.output_tokens, entry.prefill_us
                drafts = entry.drafts if entry.HasField("drafts") else None
                score = entry.score if entry.HasField("score") else None
                ending = Ending(
                    kind, output_tokens=tokens, prefill_us=prefill_us, drafts=drafts, score=score
                )
                self._lifecycle.end(dispatch.request, ending)
            else:
                self._finish_badly(book, cell, dispatch, entry, now)

    def _finish_badly(
        self,
        book: ReplicaBook,
        cell: CellBook,
        dispatch: Dispatch,
        entry: engine.Finished,
        now: float,
    ) -> None:
        message = entry.message or entry.code
        what = f": {message}"
        if entry.reason == engine.FINISH_REASON_REFUSED:  # every engine would refuse this request
            policy = policy_of(entry.code)
            is_known = policy is not None and policy.is_of_engine
            code = ErrorCode(entry.code) if is_known else ErrorCode.ENGINE_REFUSED
            kind, tokens = wire.OUTCOME_KIND_FAILED, dispatch.emitted
            ending = Ending(kind, code, message, param=entry.param, output_tokens=tokens)
            self._lifecycle.end(dispatch.request, ending)
        elif entry.reason == engine.FINISH_REASON_UNKNOWN_SPAN:
            self._lifecycle.retry(dispatch, None, " lacks a part of the prompt", now)
        elif entry.reason == engine.FINISH_REASON_BUSY:
            policy = policy_of(entry.code)
            drains = policy is not None and policy.from_engine is EngineRefusal.DRAINING
            pause_s = self._config.draining_pause_s if drains else self._config.busy_pause_s
            book.busy_until = now + pause_s
            self._busy[book.replica_id] = book
            self._lifecycle.retry(dispatch, None, what, now)
        else:
            cell.fleet.health.failed(book.replica_id, now)
            self._lifecycle.retry(dispatch, ErrorCode.ENGINE_FAILED, what, now)

    def rested(self, now: float) -> list[ReplicaBook]:
        """Return the replicas whose pause after a "busy" reply is over."""
        found = [book for book in self._busy.values() if book.busy_until <= now]
        for book in found:
            del self._busy[book.replica_id]
        return found

    def next_at(self) -> float:
        """Return the time at which the next pause is over, or inf if no replica is paused."""
        return min((book.busy_until for book in self._busy.values()), default=float("inf"))
