"""The engine host: HostRequest bytes in, HostFrame bytes out, whatever carries them.

Threads, each with one thing to own: the *step loop* owns driver and state, one *sender* per
attachment owns its responder, one *replier* owns the responders of short answers. A responder is
never touched after `finish`: in Triton that would end the whole server.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from google.protobuf.message import DecodeError

from replica.engine.driver import Driver
from replica.engine.types import EngineLoad, RefusedError
from replica.host_core import Attachment, HostCore
from replica.host_frames import FrameEncoder, fill_state
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

log = logging.getLogger(__name__)

WAITING_MAX = 1024  # sequences in the engine's own queue; routers keep theirs
INBOX_SEQUENCES_MAX = 8192  # taken, but not yet seen by the step loop
INBOX_COMMANDS_MAX = 16384
PROBES_MAX = 8
POLL_S = 0.05  # how often a sender asks whether its stream still lives
JOIN_S = 2.0


class Responder(Protocol):
    """The answering side of one request; one thread at a time may use it."""

    def send(self, frame: bytes) -> None:
        """Send one HostFrame; raises anything when nobody listens any more."""
        ...

    def finish(self) -> None:
        """End the answer; nothing may be called afterwards."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the caller has gone."""
        ...


@dataclass(frozen=True, slots=True)
class _Command:
    """A request for the step loop; `responder` for those that it answers."""

    request: wire.HostRequest
    seen_at_s: float
    responder: Responder | None = None


@dataclass(frozen=True, slots=True)
class _Turned:
    """Sequences that did not fit into the inbox."""

    epoch: int
    sequences: list[int]


@dataclass(frozen=True, slots=True)
class _Orphaned:
    """The stream of an attachment is gone."""

    epoch: int


def _refused(code: ErrorCode, message: str) -> bytes:
    refused = wire.Refused(code=code, message=message)
    return wire.HostFrame(refused=refused).SerializeToString()


def _answer(responder: Responder, frame: bytes) -> None:
    """Send the only frame of an answer, and end it."""
    try:
        if not responder.is_cancelled():
            responder.send(frame)
    except Exception:  # noqa: BLE001 - a transport may raise anything when its peer is gone
        log.warning("reply_failed", exc_info=True)
    responder.finish()


class EngineHost:
    """Serves one driver to any number of routers until `close`."""

    def __init__(
        self,
        driver: Driver,
        base_digest: str,
        *,
        waiting_max: int = WAITING_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a host; `start` it before the first `handle`."""
        self._core = HostCore(
            driver,
            base_digest,
            waiting_max=waiting_max,
            entropy=lambda: secrets.randbits(63),
        )
        self._clock = clock
        self._limits = driver.limits
        self._load = driver.load()
        self._arrived = threading.Condition()
        self._inbox: deque[_Command | _Turned | _Orphaned] = deque()
        self._inbox_sequences = 0
        self._probes = 0
        self._live: dict[int, Attachment] = {}  # by epoch; written by the step loop
        self._replies: SimpleQueue[tuple[Responder, bytes] | None] = SimpleQueue()
        self._senders: list[threading.Thread] = []
        self._drain_until_s: float | None = None
        self._failure = ""
        self._loop = threading.Thread(target=self._steps, name="steps", daemon=True)
        self._replier = threading.Thread(target=self._reply, name="replies", daemon=True)

    @property
    def load(self) -> EngineLoad:
        """State of the engine after its last step; for metrics, from any thread."""
        return self._load

    def start(self) -> None:
        """Start the step loop."""
        self._replier.start()
        self._loop.start()

    def handle(self, payload: bytes, responder: Responder) -> None:
        """Take one request; returns at once.

        The responder of an attach or a probe is kept until its end; any other is finished here.
        """
        try:
            request = wire.HostRequest.FromString(payload)
        except DecodeError:
            _answer(responder, _refused(ErrorCode.INVALID_REQUEST, "not a HostRequest"))
            return
        kind = request.WhichOneof("kind")
        if kind is None:
            _answer(responder, _refused(ErrorCode.INVALID_REQUEST, "an empty HostRequest"))
        elif self._failure:
            _answer(responder, _refused(ErrorCode.ENGINE_FAILED, self._failure))
        elif kind == "credit" and (known := self._live.get(request.credit.epoch)) is not None:
            known.outbox.add_credit(request.credit.frames)  # not worth waking the step loop
            responder.finish()
        elif not self._enqueue(request, responder, keeps=kind in ("attach", "probe")):
            _answer(responder, _refused(ErrorCode.ENGINE_BUSY, "the engine's inbox is full"))
        elif kind not in ("attach", "probe"):
            responder.finish()

    def close(self, drain_s: float) -> None:
        """Stop: no new sequences, running ones get up to `drain_s`, then every stream ends."""
        with self._arrived:
            if self._drain_until_s is None:
                self._drain_until_s = self._clock() + drain_s
            self._arrived.notify()
        self._loop.join(drain_s + JOIN_S)
        for sender in self._senders:
            sender.join(JOIN_S)
        self._replies.put(None)
        self._replier.join(JOIN_S)

    def _enqueue(self, request: wire.HostRequest, responder: Responder, *, keeps: bool) -> bool:
        with self._arrived:
            if self._failure or len(self._inbox) >= INBOX_COMMANDS_MAX:
                return False
            if request.HasField("probe"):
                if self._probes >= PROBES_MAX:
                    return False
                self._probes += 1
            sequences = request.submit.sequences if request.HasField("submit") else ()
            if self._inbox_sequences + len(sequences) > INBOX_SEQUENCES_MAX:
                turned = [sequence.id for sequence in sequences]
                self._inbox.append(_Turned(request.submit.epoch, turned))
            else:
                self._inbox_sequences += len(sequences)
                kept = responder if keeps else None
                self._inbox.append(_Command(request, self._clock(), kept))
            self._arrived.notify()
        return True

    def _refuse_later(self, responder: Responder, code: ErrorCode, message: str) -> None:
        """Refuse from the step loop, which must not wait for a transport."""
        self._replies.put((responder, _refused(code, message)))

    def _reply(self) -> None:
        """Send short answers, each to a responder that nobody else uses."""
        while (item := self._replies.get()) is not None:
            _answer(*item)

    def _steps(self) -> None:
        """Own the driver until the end."""
        core = self._core
        try:
            while not self._is_over():
                for command in self._take_commands():
                    self._apply(command)
                events = core.step()
                self._load = core.load()
                core.publish(events, self._clock())
            self._failure = "the engine host has stopped"
            core.drain_all()
        except Exception as error:
            # A bug, or an engine beyond repair. Everybody is told, and the host answers nothing
            # any more; the agent's probe fails and the process is replaced.
            log.exception("step_loop_failed")
            self._failure = f"the engine stopped: {error!r}"
            core.fail_all(self._failure)
        self._turn_rest_away()

    def _turn_rest_away(self) -> None:
        """Answer what arrived after the last step; nothing can arrive once `_failure` is set."""
        with self._arrived:
            rest = list(self._inbox)
            self._inbox.clear()
        for command in rest:
            if isinstance(command, _Command) and command.responder is not None:
                self._refuse_later(command.responder, ErrorCode.ENGINE_FAILED, self._failure)

    def _is_over(self) -> bool:
        if self._drain_until_s is None:
            return False
        self._core.is_draining = True
        return self._core.living == 0 or self._clock() >= self._drain_until_s

    def _take_commands(self) -> list[_Command | _Turned | _Orphaned]:
        """Return what arrived; when there is nothing to compute, wait for it or for a heartbeat."""
        with self._arrived:
            if not self._inbox and not self._core.has_work and self._drain_until_s is None:
                self._arrived.wait(self._core.idle_s(self._clock()))
            commands = list(self._inbox)
            self._inbox.clear()
            self._inbox_sequences = 0
        return commands

    def _apply(self, command: _Command | _Turned | _Orphaned) -> None:
        core = self._core
        if isinstance(command, _Turned):
            core.busy(command.epoch, command.sequences)
            return
        if isinstance(command, _Orphaned):
            core.orphan(command.epoch, self._clock())
            return
        request = command.request
        if request.HasField("submit"):
            core.submit(request.submit.epoch, request.submit.sequences, command.seen_at_s)
        elif request.HasField("cancel"):
            core.cancel(request.cancel.epoch, request.cancel.sequences)
        elif request.HasField("credit"):
            core.credit(request.credit.epoch, request.credit.frames)
        elif request.HasField("detach"):
            self._live.pop(request.detach.epoch, None)
            core.detach(request.detach.epoch)
        elif command.responder is not None and request.HasField("attach"):
            self._attach(request.attach, command.responder)
        elif command.responder is not None:
            owner = _ProbeReplies(self, command.responder)
            core.probe(request.probe, owner, command.seen_at_s)

    def _attach(self, message: wire.Attach, responder: Responder) -> None:
        try:
            attachment = self._core.attach(message, self._clock())
        except RefusedError as error:
            self._refuse_later(responder, error.code, error.message)
            return
        attached = wire.Attached(epoch=message.epoch, limits=self._core.limits())
        fill_state(attached.state, self._core.load(), self._limits.kv_blocks)
        self._live = {
            epoch: known
            for epoch, known in self._live.items()
            if known.router_id != message.router_id
        } | {message.epoch: attachment}
        self._senders = [sender for sender in self._senders if sender.is_alive()]
        first = wire.HostFrame(attached=attached).SerializeToString()
        sender = threading.Thread(
            target=self._send, args=(responder, attachment, first), name="sender", daemon=True
        )
        self._senders.append(sender)
        sender.start()

    def _send(self, responder: Responder, attachment: Attachment, first: bytes) -> None:
        """Own the responder of one attachment until its end."""
        encoder = FrameEncoder(self._limits.kv_blocks)
        outbox = attachment.outbox
        is_over = False
        try:
            responder.send(first)
            polled_at_s = self._clock()
            while not is_over:
                news, is_over = outbox.take(POLL_S)
                if news is not None:
                    responder.send(encoder.encode(news))
                if self._clock() - polled_at_s >= POLL_S:
                    polled_at_s = self._clock()
                    if responder.is_cancelled():
                        break
        except Exception:  # noqa: BLE001 - a transport may raise anything when its peer is gone
            log.warning("attachment_lost", exc_info=True)
        responder.finish()
        if not is_over:
            with self._arrived:
                self._inbox.append(_Orphaned(attachment.epoch))
                self._arrived.notify()

    def probe_ended(self, responder: Responder, frame: wire.HostFrame) -> None:
        """Answer a probe."""
        with self._arrived:
            self._probes -= 1
        self._replies.put((responder, frame.SerializeToString()))


@dataclass(frozen=True, slots=True)
class _ProbeReplies:
    """Answers one probe through the replier."""

    host: EngineHost
    responder: Responder

    def reply(self, frame: wire.HostFrame) -> None:
        """Send the only answer."""
        self.host.probe_ended(self.responder, frame)
