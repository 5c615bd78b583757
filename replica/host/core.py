"""Decides how a host treats its attachments, epochs and sequences, without threads.

Only the step loop uses this state. Each attachment belongs to one router and has its own sequences.
A router has at most one attachment at a time. `replica.host.service` transports the bytes.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from replica.engine.driver import Driver
from replica.engine.types import AdapterState, EngineLoad, RefusedError, StepEvents
from replica.host.adapters import AdapterDesk, AdapterShelf, Background
from replica.host.attachments import (
    HostAttachment,
    Reply,
    finished_message,
    refusal,
    refused_frame,
)
from replica.host.control import ControlDesk
from replica.host.counters import HostCounters
from replica.host.frames import encode_limits, encode_resumed, fill_adapters, fill_state
from replica.host.news import Outbox, StepNews
from replica.host.rest import ASLEEP_TOKENS, RestDesk
from replica.host.sequences import SequenceBook
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

log = structlog.get_logger(__name__)

HEARTBEAT_S = 0.2  # seconds between frames to an idle router, which expects a frame every 0.25 s
# Seconds that a router whose stream broke has to attach again, before its sequences are cancelled.
# A router starts to retry at once and retries for 0.3 s. The time is short because sequences
# without a router occupy slots for which other sequences may be waiting.
ORPHAN_GRACE_S = 1.0
# A router is frozen when it has confirmed no frame for this many times its promised interval. By
# then its gateways have sent the requests elsewhere, and other sequences need the occupied slots.
_SILENCE_FACTOR = 4
# Largest part of a step, in seconds, that counts as a router's silence. During a longer step the
# host itself may have been paused.
_STEP_COUNTED_S = 0.25
# Largest number of attached routers. Each costs a thread, and a cell needs only one router.
ATTACHMENTS_MAX = 64


class HostCore:
    """The state of an engine host, used by one thread."""

    def __init__(
        self,
        driver: Driver,
        base_digest: str,
        *,
        waiting_max: int,
        entropy: Callable[[], int],
        background: Background,
        compilers: Background,
        artifacts_dir: Path | None = None,
        shelf: AdapterShelf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an idle host.

        Args:
            driver: Driver of the engine, which only this core uses.
            base_digest: Digest of the base that the engine serves.
            waiting_max: Number of accepted sequences beyond the running ones. Further sequences end
                as BUSY.
            entropy: Source of seeds for sequences without a seed.
            background: Threads that read files and check bytes.
            compilers: Separate threads that compile grammars, which are foreign code.
            artifacts_dir: Directory of adapters, by digest.
            shelf: Shelf that fetches missing adapters onto the disk, or None if missing adapters
                are not found.
            clock: Clock of the driver, in monotonic seconds.
        """
        self._driver = driver
        self._base_digest = base_digest
        self._attachments: dict[int, HostAttachment] = {}
        self._resident: tuple[str, ...] = ()
        self._step = 0
        self._published_at_s = float("-inf")
        self.counters = HostCounters()
        adapters = AdapterDesk(driver, artifacts_dir, background, self.counters, shelf)
        self.control = ControlDesk(driver, base_digest, adapters, background, self.counters)
        self._rest = RestDesk(driver, background)
        self.sequences = SequenceBook(
            driver,
            base_digest,
            adapters,
            self.counters,
            compilers=compilers,
            living_max=driver.limits.sequences_max + waiting_max,
            entropy=entropy,
            clock=clock,
        )

    @property
    def has_work(self) -> bool:
        """Whether the next step would compute tokens or report events."""
        return self._driver.has_work

    def load(self) -> EngineLoad:
        """Return the present load of the engine."""
        return self._driver.load()

    def adapters(self) -> list[AdapterState]:
        """Return the adapters in the engine's slots and host memory."""
        return self._driver.adapters()

    def outbox(self, epoch: int) -> Outbox | None:
        """Return the outbox of an attachment. Any thread may call this."""
        attachment = self._attachments.get(epoch)
        return None if attachment is None else attachment.outbox

    def attach(self, message: wire.Attach, now_s: float) -> tuple[HostAttachment, wire.Attached]:
        """Open an attachment, and resume or close the same router's earlier attachment.

        Raises:
            RefusedError: The epoch is not greater than the router's last epoch. Or the epoch
                belongs to another router, or too many routers are attached.
        """
        mine: list[HostAttachment] = []
        for known in self._attachments.values():
            if known.router_id == message.router_id and known.epoch < message.epoch:
                mine.append(known)
            elif known.router_id == message.router_id or known.epoch == message.epoch:
                raise RefusedError(
                    ErrorCode.CONFLICT,
                    f"epoch {message.epoch} of router {message.router_id}: router"
                    f" {known.router_id} is attached with epoch {known.epoch}; use a greater one",
                )
        if not mine and len(self._attachments) >= ATTACHMENTS_MAX:
            text = f"{len(self._attachments)} routers are attached; detach one that is not needed"
            raise RefusedError(ErrorCode.ENGINE_BUSY, text)
        attachment = HostAttachment(message.router_id, message.epoch, Outbox(message.credit_frames))
        attachment.silence_max_s = _SILENCE_FACTOR * message.credit_every_ms * 1e-3
        attachment.told_step = self._step
        attachment.told_at_s = now_s
        attachment.news.kv = dict.fromkeys(self._driver.cached_blocks(), True)
        attachment.news.kv_reset = True
        attached = wire.Attached(epoch=message.epoch)
        for old in mine:
            if message.resumed_epoch and old.epoch == message.resumed_epoch:
                attached.resumed.extend(self._resume(old, attachment))
            else:
                self.detach(old.epoch)
        limits, load = self._driver.limits, self._driver.load()
        attached.limits.CopyFrom(
            encode_limits(self._driver.name, self._base_digest, limits, self._driver.capabilities)
        )
        fill_state(attached.state, load, limits.kv_blocks)
        fill_adapters(attached.state, load.adapters_resident)
        attachment.adapters_told = load.adapters_resident
        self._attachments[message.epoch] = attachment
        return attachment, attached

    def detach(self, epoch: int) -> None:
        """Close an attachment, whose sequences end as cancelled."""
        attachment = self._attachments.pop(epoch, None)
        if attachment is None:
            return
        self.sequences.cancel_all(attachment)
        self._post(attachment, self._driver.load(), attachment.told_at_s)
        attachment.outbox.close()

    def orphan(self, epoch: int, now_s: float) -> None:
        """Record that an attachment's stream broke, so that it is closed after `ORPHAN_GRACE_S`."""
        attachment = self._attachments.get(epoch)
        if attachment is not None and attachment.orphaned_at_s is None:
            attachment.orphaned_at_s = now_s
            attachment.unconfirmed = attachment.outbox.abandon()

    def credit(self, epoch: int, frames: int) -> None:
        """Permit the host to send this many more frames to an attachment's router."""
        outbox = self.outbox(epoch)
        if outbox is not None:
            outbox.add_credit(frames)

    def submit(self, epoch: int, sequences: Iterable[wire.Sequence], seen_at_s: float) -> None:
        """Accept sequences, whose progress and ends are reported in frames.

        Sequences of an unknown epoch are ignored, because their router has closed its attachment or
        has vanished.
        """
        attachment = self._attachments.get(epoch)
        if attachment is None:
            return
        # The router sent these sequences before it learned of the sleep, or before its request to
        # wake the engine arrived.
        if self._rest.is_asleep:
            self._rest.wake()
            self._turn_away(attachment, [it.id for it in sequences], "the engine is asleep")
        else:
            self.sequences.take(attachment, sequences, seen_at_s)

    def rest(self, message: wire.Rest, reply: Reply) -> None:
        """Put the engine to sleep or wake it. An engine with routers' sequences stays awake."""
        held = sum(len(it.sequences) for it in self._attachments.values())
        self._rest.rest(message, reply, held)

    def probe(self, message: wire.Probe, reply: Reply, seen_at_s: float) -> None:
        """Start a probe.

        A sleeping engine retains few KV blocks. If a probe is too long for them, the engine refuses
        the probe and wakes up.
        """
        if self._rest.is_asleep and len(message.prompt) + message.tokens > ASLEEP_TOKENS:
            self._rest.wake()
            error = RefusedError(ErrorCode.ENGINE_BUSY, "the engine is asleep; it wakes")
            reply(refused_frame(error))
        else:
            self.sequences.probe(message, reply, seen_at_s)

    def busy(self, epoch: int, sequences: Iterable[int]) -> None:
        """End sequences as BUSY because they did not fit into the inbox."""
        attachment = self._attachments.get(epoch)
        if attachment is not None:
            self._turn_away(attachment, sequences, "the engine's inbox is full")

    @staticmethod
    def _turn_away(attachment: HostAttachment, sequences: Iterable[int], text: str) -> None:
        event = refusal(0, RefusedError(ErrorCode.ENGINE_BUSY, text))
        for sequence in sequences:
            if sequence not in attachment.sequences:
                attachment.finish(sequence, finished_message(sequence, event))

    def cancel(self, epoch: int, sequences: Iterable[int]) -> None:
        """Cancel sequences. Unknown ids are ignored, because their sequences have ended already."""
        attachment = self._attachments.get(epoch)
        if attachment is None:
            return
        for sequence in sequences:
            hosted = attachment.sequences.get(sequence)
            if hosted is not None:
                self.sequences.cancel(hosted)

    def idle_s(self, now_s: float) -> float:
        """Return the seconds that an idle host may wait until the next heartbeat is due."""
        told_at_s = [a.told_at_s for a in self._attachments.values() if a.orphaned_at_s is None]
        return max(0.0, min(told_at_s, default=now_s) + HEARTBEAT_S - now_s)

    def step(self) -> StepEvents:
        """Compute one step with the driver, if the driver has work."""
        self._rest.look()
        if not self._driver.has_work:
            return StepEvents()
        self._step += 1
        return self._driver.step()

    def publish(self, events: StepEvents, now_s: float) -> None:
        """Send every attachment its news of a step, or its heartbeat if one is due."""
        load = self._driver.load()
        self._count(events, load)
        passed_s = min(now_s - self._published_at_s, _STEP_COUNTED_S)
        self._published_at_s = now_s
        attachments = list(self._attachments.values())
        self.sequences.distribute(events, attachments[0] if len(attachments) == 1 else None, now_s)
        for attachment in attachments:
            if attachment.orphaned_at_s is not None:
                self._keep(attachment, attachment.orphaned_at_s, now_s)
                continue
            if attachment.sequences and attachment.note_silence(passed_s):
                self._turn_out(attachment)
            news = attachment.news
            if events.kv:
                news.kv.update(events.kv)
            is_due = now_s - attachment.told_at_s >= HEARTBEAT_S or not news.is_heartbeat
            if is_due and not self._post(attachment, load, now_s):
                self.detach(attachment.epoch)  # the router has stopped reading

    def fail_all(self, message: str) -> None:
        """End all sequences and attachments because the engine has failed."""
        self._end_all(RefusedError(ErrorCode.ENGINE_FAILED, message))

    def drain_all(self) -> None:
        """End all sequences and attachments because the engine stops. Routers retry elsewhere."""
        for attachment in self._attachments.values():
            for hosted in attachment.sequences.values():
                self._driver.cancel(hosted.key)
        self._end_all(RefusedError(ErrorCode.DRAINING, "the replica is draining"))

    def _end_all(self, error: RefusedError) -> None:
        self.sequences.end_all(error)
        for attachment in self._attachments.values():
            self._post(attachment, EngineLoad(), attachment.told_at_s)
            attachment.outbox.close()
        self._attachments.clear()

    def _resume(self, old: HostAttachment, new: HostAttachment) -> list[wire.Resumed]:
        """Move the sequences of an attachment to a newer attachment, and return their whole output.

        The whole output includes the tokens that the old attachment had not sent, so its outbox is
        dropped. Ends that the router has not confirmed may have been lost, so they are sent again.
        """
        del self._attachments[old.epoch]
        ended = old.unconfirmed + old.outbox.abandon() + old.news.ended
        new.sequences = old.sequences
        told = [(hosted.id, hosted.told) for hosted in new.sequences.values()]
        for hosted in new.sequences.values():
            hosted.owner = new
        told += [(end.finished.sequence, end.told) for end in ended if end.told is not None]
        new.news.ended = ended
        new.news.admitted = [all_.admitted for _, all_ in told if all_.admitted is not None]
        return [encode_resumed(sequence, all_) for sequence, all_ in told]

    def _turn_out(self, attachment: HostAttachment) -> None:
        """End a frozen router's sequences as BUSY. If it wakes up, it can submit them again."""
        text = f"router {attachment.router_id} took nothing for {attachment.silent_s:.1f} s"
        log.warning("router_frozen", router=attachment.router_id, count=len(attachment.sequences))
        self.sequences.turn_out(attachment, RefusedError(ErrorCode.ENGINE_BUSY, text))
        attachment.silent_s = 0.0

    def _keep(self, orphan: HostAttachment, since_s: float, now_s: float) -> None:
        """Store the output of a detached router's sequences, or cancel them after the grace."""
        orphan.unconfirmed += orphan.news.ended
        orphan.news = StepNews()
        if now_s - since_s >= ORPHAN_GRACE_S:
            self.detach(orphan.epoch)

    def _post(self, attachment: HostAttachment, load: EngineLoad, now_s: float) -> bool:
        news = attachment.news
        news.step = self._step
        news.steps = self._step - attachment.told_step
        news.load = load
        attachment.news = StepNews()
        attachment.told_step = self._step
        attachment.told_at_s = now_s
        return attachment.outbox.post(news)

    def _count(self, events: StepEvents, load: EngineLoad) -> None:
        counters = self.counters
        counters.output_tokens += len(events.tokens)
        if counters.steps != self._step:
            counters.steps = self._step
            counters.step_s.append(load.step_s)
        if load.adapters_resident is not self._resident:
            before, now = set(self._resident), set(load.adapters_resident)
            self._resident = load.adapters_resident
            counters.adapter_loads += len(now - before)
            counters.adapter_evictions += len(before - now)
