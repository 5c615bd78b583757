"""What an attachment has not been told yet: merged by step, bounded by state, encoded as a frame.

The step loop posts, the attachment's sender takes. Without credit nothing is queued: the news of
further steps are merged into the same pending ones. This is a per-token path: columns are extended
and encoded as a whole, never token by token.
"""

import threading
from dataclasses import dataclass, field

from replica.engine.types import EngineLoad
from sluice.wire.engine.v1 import engine_pb2 as wire

_IDLE = EngineLoad()
# Of a router that takes no frames. Some ten minutes of a fast engine, and some 100 MB.
PENDING_TOKENS_MAX = 2_000_000


@dataclass(slots=True)
class StepNews:
    """What one attachment learns from one step, or from several merged ones.

    Attributes:
        step: Number of the last step covered.
        steps: Steps covered.
        ids: Column: sequence ids of the router; a sequence may appear once per merged step.
        tokens: Column: the token of `ids[i]`.
        admitted: Facts, once per sequence.
        finished: Facts, once per sequence.
        kv: Block hash -> whether it is cached now.
        kv_reset: `kv` is the whole truth, not a change.
        load: State of the engine after the last step.
    """

    step: int = 0
    steps: int = 0
    ids: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    admitted: list[wire.Admitted] = field(default_factory=list[wire.Admitted])
    finished: list[wire.Finished] = field(default_factory=list[wire.Finished])
    kv: dict[bytes, bool] = field(default_factory=dict[bytes, bool])
    kv_reset: bool = False
    load: EngineLoad = _IDLE

    @property
    def is_heartbeat(self) -> bool:
        """Whether it says nothing but that the engine lives."""
        return not (self.ids or self.admitted or self.finished or self.kv or self.kv_reset)

    def merge(self, later: "StepNews") -> None:
        """Add what a later step brought."""
        self.step = later.step
        self.steps += later.steps
        self.ids += later.ids
        self.tokens += later.tokens
        self.admitted += later.admitted
        self.finished += later.finished
        if later.kv_reset:
            self.kv, self.kv_reset = later.kv, True
        else:
            self.kv.update(later.kv)
        self.load = later.load


class FrameEncoder:
    """Encodes the news of one attachment; numbers its KV events."""

    def __init__(self, kv_blocks: int) -> None:
        self._kv_blocks = kv_blocks
        self._kv_number = 0

    def encode(self, news: StepNews) -> bytes:
        """Return the HostFrame."""
        host_frame = wire.HostFrame()
        frame = host_frame.step
        frame.step = news.step
        frame.steps = news.steps
        if news.ids:
            _fill_columns(frame, news)
        if news.admitted:
            frame.admitted.extend(news.admitted)
        if news.finished:
            frame.finished.extend(news.finished)
        if news.kv or news.kv_reset:
            self._fill_kv(frame.kv_events, news)
        fill_state(frame.state, news.load, self._kv_blocks)
        return host_frame.SerializeToString()

    def _fill_kv(self, events: wire.KvEvents, news: StepNews) -> None:
        stored = [key for key, is_cached in news.kv.items() if is_cached]
        removed = [key for key, is_cached in news.kv.items() if not is_cached]
        if news.kv_reset:
            removed = []
        self._kv_number += len(stored) + len(removed)
        events.number = self._kv_number
        events.stored = b"".join(stored)
        events.removed = b"".join(removed)
        events.reset = news.kv_reset


def fill_state(state: wire.EngineState, load: EngineLoad, kv_blocks: int) -> None:
    """Copy the load into its message."""
    state.running = load.running
    state.waiting = load.waiting
    state.kv_blocks_used = load.kv_blocks_used
    state.kv_blocks_total = kv_blocks
    state.prefill_tokens_owed = load.prefill_tokens_owed
    state.step_us = int(load.step_s * 1e6)


def _fill_columns(frame: wire.StepFrame, news: StepNews) -> None:
    if news.steps <= 1:  # a step has at most one token per sequence
        frame.sequence.extend(news.ids)
        frame.count.extend([1] * len(news.ids))
        frame.token.extend(news.tokens)
        return
    grouped: dict[int, list[int]] = {}
    for sequence, token in zip(news.ids, news.tokens, strict=True):
        own = grouped.get(sequence)
        if own is None:
            grouped[sequence] = [token]
        else:
            own.append(token)
    frame.sequence.extend(grouped)
    frame.count.extend(map(len, grouped.values()))
    for own in grouped.values():
        frame.token.extend(own)


class Outbox:
    """Pending news and credit of one attachment; the only thing its two threads share."""

    def __init__(self, credit_frames: int) -> None:
        self._changed = threading.Condition()
        self._credit = credit_frames
        self._pending: StepNews | None = None
        self._is_closed = False

    def post(self, news: StepNews) -> bool:
        """Add the news of a step; the outbox owns `news` from now on.

        Returns False when the router has left more unread than we keep.
        """
        with self._changed:
            if self._pending is None:
                self._pending = news
            else:
                self._pending.merge(news)
            if self._credit:
                self._changed.notify()
            return len(self._pending.ids) <= PENDING_TOKENS_MAX

    def add_credit(self, frames: int) -> None:
        """Allow so many more frames."""
        with self._changed:
            self._credit += frames
            if self._pending is not None:
                self._changed.notify()

    def close(self) -> None:
        """No more news; what is pending goes out if there is credit."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, timeout_s: float) -> tuple[StepNews | None, bool]:
        """Return (news to send now for one credit, or None; whether nothing follows).

        Waits up to `timeout_s` for news with credit, or the close.
        """
        with self._changed:
            if not (self._is_closed or self._sendable()):
                self._changed.wait(timeout_s)
            if not self._sendable():
                return None, self._is_closed
            news, self._pending = self._pending, None
            self._credit -= 1
            return news, self._is_closed

    def _sendable(self) -> bool:
        return self._pending is not None and self._credit > 0
