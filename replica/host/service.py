"""Runs the engine host, which answers HostRequest bytes with HostFrame bytes.

Each object is used by one thread only. The *step loop* uses driver and state. One *sender* thread
per attachment uses the attachment's responder. One *replier* thread uses the responders of all
requests with one answer. A few *workers* read adapters, check bytes and compile grammars. Another
thread requests missing adapters from the node's agent. The step loop is the only source of
heartbeats, and a *watchdog* logs when it is stuck. No thread uses a responder after `finish`,
because in Triton that would crash the whole server.
"""

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from google.protobuf.message import DecodeError

from replica.engine.driver import Driver
from replica.engine.types import AdapterState, EngineLoad, RefusedError
from replica.host.attachments import HostAttachment, refused_frame
from replica.host.core import HostCore
from replica.host.counters import HostCounters
from replica.host.frames import FrameEncoder
from replica.host.node_artifacts import NodeArtifacts
from replica.host.watchdog import StepWatch, Watchdog
from replica.host.workers import HostWorkers
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

log = logging.getLogger(__name__)

# Largest number of sequences in the engine's queue, which is short because routers have their own
# queues.
WAITING_MAX = 1024
INBOX_SEQUENCES_MAX = 8192  # largest number of arrived sequences before the step loop accepts them
INBOX_COMMANDS_MAX = 16384
INBOX_BYTES_MAX = 256 << 20
# Kinds of requests that receive an answer -> largest number of open requests of that kind.
ANSWERED_MAX = {
    "attach": 256,
    "probe": 8,
    "adapters": 64,
    "export_kv": 4,
    "import_kv": 4,
    "rest": 4,
}
WORKERS = 2
JOBS_MAX = 128
POLL_S = 0.05  # seconds between a sender's checks whether its stream is still open
ADAPTERS_LOOK_S = 0.25  # seconds between two copies of the adapters' list, which the metrics read
JOIN_S = 2.0


class Responder(Protocol):
    """The answering side of one request, used by one thread at a time."""

    def send(self, frame: bytes) -> None:
        """Send one HostFrame. Any error may be raised if the caller has disconnected."""
        ...

    def finish(self) -> None:
        """End the answer, after which no method may be called."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the caller has disconnected."""
        ...


def _refused(code: ErrorCode, message: str) -> bytes:
    return refused_frame(RefusedError(code, message)).SerializeToString()


def _answer(responder: Responder, frame: bytes) -> None:
    """Send the only frame of an answer, and end the answer."""
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
        artifacts_dir: Path | None = None,
        agent_socket: Path | None = None,
        waiting_max: int = WAITING_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a host, which `start` must start before the first `handle`.

        Args:
            driver: Driver of the engine, which only this host may use from now on.
            base_digest: Digest of the base.
            artifacts_dir: Directory of adapters by digest, or None if the engine has no artifacts.
            agent_socket: Socket of the node's agent, which fetches adapters, or None without an
                agent.
            waiting_max: Number of accepted sequences beyond the running ones. Further sequences end
                as BUSY.
            clock: Clock of the driver, in monotonic seconds.
        """
        self._workers = HostWorkers(self._deliver, threads=WORKERS, jobs_max=JOBS_MAX)
        self._compilers = HostWorkers(self._deliver, threads=WORKERS, jobs_max=JOBS_MAX)
        self._artifacts = agent_socket and NodeArtifacts(agent_socket, self._deliver)
        self._core = HostCore(
            driver,
            base_digest,
            waiting_max=waiting_max,
            entropy=lambda: secrets.randbits(63),
            background=self._workers,
            compilers=self._compilers,
            artifacts_dir=artifacts_dir,
            shelf=self._artifacts,
            clock=clock,
        )
        self._rereads_adapters = driver.capabilities.rereads_adapters
        self._clock = clock
        self._kv_blocks = driver.limits.kv_blocks
        self._load = driver.load()
        self._adapters: tuple[AdapterState, ...] = ()
        self._adapters_at_s = clock()
        self._watch = StepWatch(clock)
        self._watchdog = Watchdog(self._watch)
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_sequences = self._inbox_bytes = 0
        # kind of request -> number of requests without an answer yet
        self._open: Counter[str] = Counter()
        self._answers: set[_Answer] = set()
        self._replies: SimpleQueue[tuple[Responder, bytes] | None] = SimpleQueue()
        self._senders: list[threading.Thread] = []
        self._drain_until_s: float | None = None
        self._failure = ""
        self._loop = threading.Thread(target=self._steps, name="steps", daemon=True)
        self._replier = threading.Thread(target=self._reply, name="replies", daemon=True)

    @property
    def load(self) -> EngineLoad:
        """Load of the engine after its last step, for metrics in any thread."""
        return self._load

    @property
    def adapters(self) -> tuple[AdapterState, ...]:
        """Adapters of the engine, at most ADAPTERS_LOOK_S old, for metrics in any thread."""
        return self._adapters

    @property
    def counters(self) -> HostCounters:
        """Counters of the host's work, for metrics in any thread."""
        return self._core.counters

    @property
    def step_age_s(self) -> float:
        """Seconds since the present step began, or 0 between steps.

        The age grows while a step is stuck.
        """
        return self._watch.look()[0]

    def start(self) -> None:
        """Start all threads of the host."""
        self._workers.start()
        self._compilers.start()
        if self._artifacts is not None:
            self._artifacts.start()
        self._replier.start()
        self._loop.start()
        self._watchdog.start()

    def handle(self, payload: bytes, responder: Responder) -> None:
        """Handle one request without waiting.

        The responder of a request with an answer is stored until the answer is sent. Any other
        responder is finished here.
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
        elif kind == "credit" and (known := self._core.outbox(request.credit.epoch)) is not None:
            # a grant of credit needs no step, so the step loop is not woken
            known.add_credit(request.credit.frames)
            responder.finish()
        elif not self._enqueue(kind, request, len(payload), responder):
            text = f"too many requests wait for the step loop, or for a {kind}; try again"
            _answer(responder, _refused(ErrorCode.ENGINE_BUSY, text))
        elif kind not in ANSWERED_MAX:
            responder.finish()

    def close(self, drain_s: float) -> None:
        """Accept no new sequences, wait up to `drain_s` for running ones, then end every stream."""
        with self._arrived:
            if self._drain_until_s is None:
                self._drain_until_s = self._clock() + drain_s
            self._arrived.notify()
        self._loop.join(drain_s + JOIN_S)
        for sender in self._senders:
            sender.join(JOIN_S)
        self._watchdog.close(JOIN_S)
        self._workers.close(JOIN_S)
        self._compilers.close(JOIN_S)
        if self._artifacts is not None:
            self._artifacts.close(JOIN_S)
        self._replies.put(None)
        self._replier.join(JOIN_S)

    def _enqueue(
        self, kind: str, request: wire.HostRequest, payload_bytes: int, responder: Responder
    ) -> bool:
        seen_at_s = self._clock()
        with self._arrived:
            if (
                self._failure
                or len(self._inbox) >= INBOX_COMMANDS_MAX
                or self._inbox_bytes + payload_bytes > INBOX_BYTES_MAX
            ):
                return False
            if kind == "submit":
                self._inbox.append(self._submission(request.submit, seen_at_s))
            elif kind in ANSWERED_MAX:
                if self._open[kind] >= ANSWERED_MAX[kind]:
                    return False
                self._open[kind] += 1
                answer = _Answer(self, kind, responder)
                self._answers.add(answer)
                self._inbox.append(lambda: self._carry_out(kind, request, answer, seen_at_s))
            else:
                self._inbox.append(lambda: self._apply(request))
            self._inbox_bytes += payload_bytes
            self._arrived.notify()
        return True

    def _submission(self, submit: wire.Submit, seen_at_s: float) -> Callable[[], None]:
        """Return the step loop's action for a submit. If the inbox is full, the action refuses."""
        core = self._core
        count = len(submit.sequences)
        if self._inbox_sequences + count > INBOX_SEQUENCES_MAX:
            turned = dict.fromkeys(
                number
                for sequence in submit.sequences
                for number in (sequence.id, *(fork.id for fork in sequence.forks))
            )
            return lambda: core.busy(submit.epoch, turned)
        self._inbox_sequences += count
        return lambda: core.submit(submit.epoch, submit.sequences, seen_at_s)

    def _deliver(self, action: Callable[[], None]) -> None:
        """Queue a function, which the step loop runs soon."""
        with self._arrived:
            self._inbox.append(action)
            self._arrived.notify()

    def _reply(self) -> None:
        """Send short answers, each to its own responder, until the host is closed."""
        while (item := self._replies.get()) is not None:
            _answer(*item)

    def _steps(self) -> None:
        """Run the step loop, which owns the driver, until the host is closed or fails."""
        core = self._core
        try:
            while not self._is_over():
                actions = self._take_actions()
                self._watch.begin(self._load)
                for action in actions:
                    action()
                events = core.step()
                self._load = core.load()
                now_s = self._clock()
                core.publish(events, now_s)
                if now_s - self._adapters_at_s >= ADAPTERS_LOOK_S:
                    self._look_at_adapters(now_s)
                self._watch.end()
            self._failure = "the engine host has stopped"
            core.drain_all()
        except BaseException as error:
            # The cause is a bug, or an engine that cannot recover. All attachments receive an
            # error, and the host refuses every later request, including the agent's probe. So the
            # agent replaces the process.
            log.exception("step_loop_failed")
            self._failure = f"the engine stopped: {error!r}"
            core.fail_all(self._failure)
        self._watch.end()
        self._turn_rest_away()

    def _look_at_adapters(self, now_s: float) -> None:
        self._adapters, self._adapters_at_s = tuple(self._core.adapters()), now_s
        if self._artifacts is not None:
            self._artifacts.hold(
                frozenset(
                    adapter.digest
                    for adapter in self._adapters
                    if adapter.sequences or self._rereads_adapters
                )
            )

    def _turn_rest_away(self) -> None:
        """Refuse all open requests. Later requests are refused because `_failure` is set."""
        with self._arrived:
            self._inbox.clear()
            rest = list(self._answers)
        for answer in rest:
            answer(refused_frame(RefusedError(ErrorCode.ENGINE_FAILED, self._failure)))

    def _is_over(self) -> bool:
        if self._drain_until_s is None:
            return False
        self._core.sequences.is_draining = True
        return len(self._core.sequences) == 0 or self._clock() >= self._drain_until_s

    def _take_actions(self) -> list[Callable[[], None]]:
        """Return the actions that arrived. An idle loop first waits for one, or for a heartbeat."""
        with self._arrived:
            if not self._inbox and not self._core.has_work:
                now_s = self._clock()
                until_s = now_s + self._core.idle_s(now_s)
                if self._drain_until_s is not None:
                    until_s = min(until_s, self._drain_until_s)
                self._arrived.wait(max(0.0, until_s - now_s))
            actions = list(self._inbox)
            self._inbox.clear()
            self._inbox_sequences = self._inbox_bytes = 0
        return actions

    def _apply(self, request: wire.HostRequest) -> None:
        """Run a request without an answer."""
        if request.HasField("cancel"):
            self._core.cancel(request.cancel.epoch, request.cancel.sequences)
        elif request.HasField("credit"):
            self._core.credit(request.credit.epoch, request.credit.frames)
        else:
            self._core.detach(request.detach.epoch)

    def _carry_out(
        self, kind: str, request: wire.HostRequest, answer: "_Answer", seen_at_s: float
    ) -> None:
        """Run a request with an answer, at once or later."""
        control = self._core.control
        if kind == "attach":
            self._attach(request.attach, answer)
        elif kind == "probe":
            self._core.probe(request.probe, answer, seen_at_s)
        elif kind == "rest":
            self._core.rest(request.rest, answer)
        elif kind == "adapters":
            control.adapters(request.adapters, answer)
        elif kind == "export_kv":
            control.export_kv(request.export_kv, answer)
        else:
            control.import_kv(request.import_kv, answer)

    def _attach(self, message: wire.Attach, answer: "_Answer") -> None:
        try:
            attachment, attached = self._core.attach(message, self._clock())
        except RefusedError as error:
            answer(refused_frame(error))
            return
        if not self._close_answer(answer):
            return
        self._senders = [sender for sender in self._senders if sender.is_alive()]
        sender = threading.Thread(
            target=self._send,
            args=(answer.responder, attachment, attached),
            name="sender",
            daemon=True,
        )
        self._senders.append(sender)
        sender.start()

    def _send(
        self, responder: Responder, attachment: HostAttachment, attached: wire.Attached
    ) -> None:
        """Send the frames of one attachment until it ends. Only this thread uses its responder."""
        encoder = FrameEncoder(self._kv_blocks, attachment.adapters_told)
        outbox = attachment.outbox
        is_over = False
        try:
            responder.send(wire.HostFrame(attached=attached).SerializeToString())
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
            self._deliver(lambda: self._core.orphan(attachment.epoch, self._clock()))

    def answered(self, answer: "_Answer", frame: wire.HostFrame) -> None:
        """Send the only answer to a request.

        Any thread may call this method, which does not wait for the transport.
        """
        if self._close_answer(answer):
            self._replies.put((answer.responder, frame.SerializeToString()))

    def _close_answer(self, answer: "_Answer") -> bool:
        """Remove an open request, or return False if it was answered before."""
        with self._arrived:
            if answer not in self._answers:
                return False
            self._answers.remove(answer)
            self._open[answer.kind] -= 1
            return True


class _Answer:
    """Sends the answer to one request through the replier thread."""

    def __init__(self, host: EngineHost, kind: str, responder: Responder) -> None:
        self.kind = kind
        self.responder = responder
        self._host = host

    def __call__(self, frame: wire.HostFrame) -> None:
        """Send the only answer."""
        self._host.answered(self, frame)
