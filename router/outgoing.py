"""Bounded buffers of messages to one gateway and to one replica."""

import asyncio
from typing import TYPE_CHECKING

from router import wire as convert
from router.closing import Accounts
from router.core.types.batch import GatewayBatch
from router.core.types.request import Dispatch
from sluice.wire.engine.v1 import engine_pb2 as engine

if TYPE_CHECKING:
    from router.sent_spans import SentSpans

PENDING_TOKENS_MAX = 500_000  # most unsent tokens per gateway, about 10 s of 500 fast streams
PENDING_EVENTS_MAX = 50_000  # most unsent placements and outcomes per gateway
# Least seconds between two messages to one gateway. A message costs both sides more than a hundred
# tokens do. Without the pause, every step of every engine would cause a message to the gateway.
PAUSE_S = 0.003
_TIMER_S = 0.001  # seconds by which a timer of the event loop may fire early


def leaves_at(left_at: float, now: float) -> float:
    """Return the time at which the next message to a gateway may be sent.

    Args:
        left_at: Time at which the last message was sent.
        now: Time, in seconds.
    """
    return max(now, left_at + PAUSE_S)


class GatewayLink:
    """The unsent messages to one gateway.

    Steps of several engines are merged into one message, which is sent after a short pause. Two
    steps of the same stream are not merged. The arrival of the second step sends the first step.
    While the socket is busy, all steps are merged.

    Attributes:
        cut: Set when the gateway reads too slowly, so that its stream must be ended.
        writing_since: Start of the write in progress, or None if no write is in progress.
        ready: Set while a message may be sent.
        accounts: Accounts to close if this gateway is lost.
        takes_closings: Whether the gateway accepts closings of other gateways.
    """

    def __init__(
        self, key: int, gateway_id: str, accounts: Accounts, *, takes_closings: bool = False
    ) -> None:
        self.key = key
        self.takes_closings = takes_closings
        self.accounts = accounts
        self.gateway_id = gateway_id
        self.cut = asyncio.Event()
        self.writing_since: float | None = None
        self.ready = asyncio.Event()
        self._closings: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._left_at = float("-inf")
        self._leaving: GatewayBatch | None = None
        self._held: GatewayBatch | None = None  # the delayed message, sent by a timer
        self._held_handles: set[int] = set()
        self._is_armed = False

    def put(self, batch: GatewayBatch, now: float) -> None:
        """Add a tick's batch, or cut off a gateway with too many unsent tokens or events."""
        if self.cut.is_set():
            return
        held, is_waiting = self._held, self.ready.is_set()
        if held is not None:
            if self._held_handles.isdisjoint(batch.handles):
                self._held_handles.update(batch.handles)
                held.merge(batch)
                return
            self._leave(held, now)
        at = leaves_at(self._left_at, now)
        if at <= now or is_waiting:  # sent now, or merged with the message that waits to be written
            self._leave(batch, now)
            return
        self._held, self._held_handles = batch, set(batch.handles)
        if not self._is_armed:
            self._is_armed = True
            self._loop.call_at(at, self._look)

    def _look(self) -> None:
        """Send the delayed message, or set another timer if a message was sent in the meantime."""
        self._is_armed = False
        if self._held is not None:
            now = self._loop.time()
            at = leaves_at(self._left_at, now)
            if at <= now + _TIMER_S:
                self._leave(self._held, now)
            else:
                self._is_armed = True
                self._loop.call_at(at, self._look)

    def _leave(self, batch: GatewayBatch, now: float) -> None:
        self._held = None
        self._left_at = now
        self.ready.set()
        leaving = self._leaving
        if leaving is None:
            self._leaving = batch
            return
        leaving.merge(batch)
        events = len(leaving.placed) + len(leaving.outcomes)
        if leaving.entries > PENDING_TOKENS_MAX or events > PENDING_EVENTS_MAX:
            self.cut.set()

    @property
    def has_room(self) -> bool:
        """Whether this gateway accepts closings, and no earlier closings wait to be sent."""
        return self.takes_closings and not self._closings and not self.cut.is_set()

    def carry(self, closings: list[bytes], now: float) -> None:
        """Send closings of another gateway through this gateway to the broker."""
        self.accounts.carried(closings, now)
        self._closings += closings
        self.ready.set()

    def take(self) -> bytes | None:
        """Return all output that is due as one serialized message, or None if none is due.

        An empty batch becomes an empty message, which serves as a heartbeat.
        """
        batch, self._leaving = self._leaving, None
        self.ready.clear()
        if self._closings:
            message = convert.connect_response(batch or GatewayBatch())
            message.closings.extend(self._closings)
            self._closings.clear()
            return message.SerializeToString()
        return None if batch is None else convert.connect_response(batch).SerializeToString()

    @property
    def is_flushed(self) -> bool:
        """Whether all messages have been written."""
        is_empty = self._leaving is None and self._held is None and not self._closings
        return is_empty and self.writing_since is None


class HostOutbox:
    """The unsent messages to one replica, bounded because the core limits dispatches.

    Attributes:
        reads_prompt_ids: Whether the attached engine has the feature `PROMPT_IDS`.
        sent: Spans of prompts that the attached engine has, or None if it does not keep any.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.ready = asyncio.Event()
        self._request = engine.HostRequest()  # the submit that collects dispatches
        self._cancels: list[int] = []
        self._credit = 0
        self.probe_wanted = asyncio.Event()
        self.reads_prompt_ids = False
        self.sent: SentSpans | None = None

    def resume(self, epoch: int) -> None:
        """Continue under a new epoch after a resume.

        Unsent submits are dropped, because the core retries all sequences that the host does not
        list. Unsent cancels remain.
        """
        self.epoch = epoch
        self._request = engine.HostRequest()
        self._credit = 0
        self.lacks_span()  # unsent submits may have had the only copy

    def lacks_span(self) -> None:
        """Send whole prompts again, because the engine may lack a span."""
        if self.sent is not None:
            self.sent.clear()

    def dispatch(self, dispatches: list[Dispatch]) -> None:
        """Add sequences, which are converted now, as a request may end before the write."""
        for dispatch in dispatches:
            convert.add_sequence(
                self._request.submit,
                dispatch,
                reads_prompt_ids=self.reads_prompt_ids,
                sent=self.sent,
            )
        self.ready.set()

    def cancel(self, sequences: list[int]) -> None:
        """Add sequences to cancel."""
        self._cancels += sequences
        self.ready.set()

    def credit(self, frames: int) -> None:
        """Grant the host credit for further frames."""
        self._credit += frames
        self.ready.set()

    def take(self) -> list[engine.HostRequest]:
        """Return the messages to write now, with submits before cancels of the same sequences."""
        self.ready.clear()
        messages: list[engine.HostRequest] = []
        if self._credit:
            credit = engine.Credit(epoch=self.epoch, frames=self._credit)
            messages.append(engine.HostRequest(credit=credit))
        if self._request.HasField("submit"):
            self._request.submit.epoch = self.epoch
            messages.append(self._request)
            self._request = engine.HostRequest()
        if self._cancels:
            cancel = engine.Cancel(epoch=self.epoch, sequences=self._cancels)
            messages.append(engine.HostRequest(cancel=cancel))
        self._credit = 0
        self._cancels = []
        return messages
