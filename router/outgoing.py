"""Bounded output to sockets: of one gateway, and of one replica."""

import asyncio

from router import wire as convert
from router.closing import Accounts
from router.core.types.batch import GatewayBatch
from router.core.types.request import Dispatch
from sluice.wire.engine.v1 import engine_pb2 as engine

PENDING_TOKENS_MAX = 500_000  # for one gateway; about 10 s of 500 fast streams
PENDING_EVENTS_MAX = 50_000  # placements and outcomes
# Between two messages to one gateway. Each costs both sides more than a hundred tokens in it, and
# a gateway may hear of as many steps as there are engines behind us.
PAUSE_S = 0.003
_TIMER_S = 0.001  # a timer of the loop may come so much early


def leaves_at(left_at: float, now: float) -> float:
    """Return when a gateway's message leaves: now, unless the last one left just before.

    Args:
        left_at: Time at which the last message left.
        now: Time.
    """
    return max(now, left_at + PAUSE_S)


class GatewayLink:
    """The messages that wait to be written to one gateway.

    The steps of many engines share a message, which leaves after a short pause; two steps of one
    stream do not: the first leaves when the second comes. Steps that the socket does not take at
    once are merged.

    Attributes:
        cut: Whether the gateway reads too slowly and is cut.
        writing_since: Begin of the present write; None: there is none.
        ready: Set while a message may leave.
        accounts: Accounts to close if this gateway is lost.
        takes_closings: Whether the gateway takes closings of other gateways.
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
        self._held: GatewayBatch | None = None  # leaves by a timer
        self._held_handles: set[int] = set()
        self._is_armed = False

    def put(self, batch: GatewayBatch, now: float) -> None:
        """Add a tick's batch; a gateway with too many unread bytes is cut."""
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
        if at <= now or is_waiting:  # along with what the socket has not taken
            self._leave(batch, now)
            return
        self._held, self._held_handles = batch, set(batch.handles)
        if not self._is_armed:
            self._is_armed = True
            self._loop.call_at(at, self._look)

    def _look(self) -> None:
        """Release the held message, unless another one has left since the timer was set."""
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
        """Whether this gateway can take closings, and has passed on earlier ones."""
        return self.takes_closings and not self._closings and not self.cut.is_set()

    def carry(self, closings: list[bytes], now: float) -> None:
        """Let this gateway carry closings of another one to the broker."""
        self.accounts.carried(closings, now)
        self._closings += closings
        self.ready.set()

    def take(self) -> bytes | None:
        """Return all due output as one serialized message; None when none is due.

        A keep-alive is an empty message.
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
        """Whether the output is empty."""
        is_empty = self._leaving is None and self._held is None and not self._closings
        return is_empty and self.writing_since is None


class HostOutbox:
    """The messages that wait to be written to one replica.

    The core bounds them by its work in flight.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.ready = asyncio.Event()
        self._request = engine.HostRequest()  # the submit in the making
        self._cancels: list[int] = []
        self._credit = 0
        self.probe_wanted = asyncio.Event()

    def resume(self, epoch: int) -> None:
        """Continue under a new epoch.

        Unwritten submits are dropped: the core sees that the host does not know them, and
        dispatches them elsewhere. Cancels still count.
        """
        self.epoch = epoch
        self._request = engine.HostRequest()
        self._credit = 0

    def dispatch(self, dispatches: list[Dispatch]) -> None:
        """Add sequences, converted now: their requests may end before they are written."""
        for dispatch in dispatches:
            convert.add_sequence(self._request.submit, dispatch)
        self.ready.set()

    def cancel(self, sequences: list[int]) -> None:
        """Add cancels."""
        self._cancels += sequences
        self.ready.set()

    def credit(self, frames: int) -> None:
        """Allow the host more frames."""
        self._credit += frames
        self.ready.set()

    def take(self) -> list[engine.HostRequest]:
        """Return the messages to write now: submits before cancels, which may name them."""
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
