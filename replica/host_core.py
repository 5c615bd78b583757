"""Attachments, epochs and sequences of an engine host; owned by its step loop, free of threads.

Every router that may use the replica has one attachment at a time, with sequences of its own. This
module says what becomes of them; `replica.host` moves the bytes.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from replica.engine.driver import Driver
from replica.engine.types import (
    URGENT_PRIORITY,
    EngineLoad,
    Finish,
    FinishedEvent,
    RefusedError,
    Sampling,
    SequenceRequest,
    StepEvents,
)
from replica.host_frames import Outbox, StepNews
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS
from sluice.wire.engine.v1 import engine_pb2 as wire

HEARTBEAT_S = 0.2  # routers expect a frame every 0.25 s
ORPHAN_GRACE_S = 2.0
_REASONS = {
    Finish.STOP: wire.FINISH_REASON_STOP,
    Finish.LENGTH: wire.FINISH_REASON_LENGTH,
    Finish.CANCELLED: wire.FINISH_REASON_CANCELLED,
    Finish.REFUSED: wire.FINISH_REASON_REFUSED,
    Finish.BUSY: wire.FINISH_REASON_BUSY,
    Finish.FAILED: wire.FINISH_REASON_FAILED,
}


class ProbeOwner(Protocol):
    """Where the answer to a probe goes."""

    def reply(self, frame: wire.HostFrame) -> None:
        """Send the only answer."""
        ...


@dataclass(slots=True, eq=False)
class Attachment:
    """One router's view of the engine.

    Attributes:
        router_id: Who.
        epoch: Names the attachment; a router's epochs grow.
        outbox: What it has not been told yet.
        keys: Sequence id of the router -> key in the driver; the living ones.
        news: Of the step in progress.
        told_step: Last step that was posted.
        told_at_s: When.
        orphaned_at_s: When its stream was found dead; None while it lives.
    """

    router_id: str
    epoch: int
    outbox: Outbox
    keys: dict[int, int] = field(default_factory=dict[int, int])
    news: StepNews = field(default_factory=StepNews)
    told_step: int = 0
    told_at_s: float = 0.0
    orphaned_at_s: float | None = None


@dataclass(slots=True, eq=False)
class Probe:
    """A canary inference in progress."""

    owner: ProbeOwner
    started_at_s: float
    news: StepNews = field(default_factory=StepNews)


@dataclass(slots=True, eq=False)
class Living:
    """A sequence in the driver: whose it is, and by which id its owner knows it."""

    owner: Attachment | Probe
    sequence: int


class HostCore:
    """The state of an engine host. One thread may use it."""

    def __init__(
        self,
        driver: Driver,
        base_digest: str,
        *,
        waiting_max: int,
        entropy: Callable[[], int],
    ) -> None:
        """Make an idle host.

        Args:
            driver: Used by nobody else.
            base_digest: What the engine serves.
            waiting_max: Sequences beyond the running ones that are taken; more are BUSY.
            entropy: Seeds of sequences that name none.
        """
        self._driver = driver
        self._base_digest = base_digest
        self._living_max = driver.limits.sequences_max + waiting_max
        self._entropy = entropy
        self._keys = itertools.count(1)
        self._living: dict[int, Living] = {}
        self._attachments: dict[int, Attachment] = {}
        self._probes: list[Probe] = []
        self._step = 0
        self.is_draining = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return self._driver.has_work

    @property
    def living(self) -> int:
        """Sequences in the driver."""
        return len(self._living)

    def load(self) -> EngineLoad:
        """Return the state of the engine."""
        return self._driver.load()

    def limits(self) -> wire.EngineLimits:
        """Return what routers must know about the engine."""
        limits = self._driver.limits
        return wire.EngineLimits(
            context_tokens_max=limits.context_tokens_max,
            sequences_max=limits.sequences_max,
            step_tokens_max=limits.step_tokens_max,
            kv_blocks=limits.kv_blocks,
            block_tokens=BLOCK_TOKENS,
            base_digest=self._base_digest,
            engine=self._driver.name,
        )

    def attach(self, message: wire.Attach, now_s: float) -> Attachment:
        """Open an attachment; an older one of the same router is closed.

        Raises:
            RefusedError: The epoch is not newer, or belongs to another router.
        """
        for old in list(self._attachments.values()):
            if old.router_id == message.router_id and old.epoch < message.epoch:
                self.detach(old.epoch)
            elif old.router_id == message.router_id or old.epoch == message.epoch:
                raise RefusedError(
                    ErrorCode.CONFLICT,
                    f"epoch {message.epoch} of router {message.router_id}: router"
                    f" {old.router_id} is attached with epoch {old.epoch}; use a greater one",
                )
        outbox = Outbox(message.credit_frames)
        attachment = Attachment(message.router_id, message.epoch, outbox)
        attachment.told_step = self._step
        attachment.told_at_s = now_s
        attachment.news.kv = dict.fromkeys(self._driver.cached_blocks(), True)
        attachment.news.kv_reset = True
        self._attachments[message.epoch] = attachment
        return attachment

    def detach(self, epoch: int) -> None:
        """Close an attachment; its sequences end as cancelled."""
        attachment = self._attachments.pop(epoch, None)
        if attachment is None:
            return
        for sequence, key in attachment.keys.items():
            self._driver.cancel(key)
            del self._living[key]
            _finish(attachment.news, sequence, Finish.CANCELLED)
        self._post(attachment, self._driver.load(), attachment.told_at_s)
        attachment.outbox.close()

    def orphan(self, epoch: int, now_s: float) -> None:
        """Note that the stream of an attachment is gone; it is detached after a grace."""
        attachment = self._attachments.get(epoch)
        if attachment is not None and attachment.orphaned_at_s is None:
            attachment.orphaned_at_s = now_s

    def credit(self, epoch: int, frames: int) -> None:
        """Allow so many more frames."""
        attachment = self._attachments.get(epoch)
        if attachment is not None:
            attachment.outbox.add_credit(frames)

    def submit(self, epoch: int, sequences: Iterable[wire.Sequence], seen_at_s: float) -> None:
        """Take sequences; what becomes of each is told in frames.

        An id that is alive is ignored, so that a submit can be repeated. An unknown epoch is
        ignored: its router has been told, or has gone.
        """
        attachment = self._attachments.get(epoch)
        if attachment is None:
            return
        for message in sequences:
            if message.id in attachment.keys:
                continue
            if self.is_draining:
                self._busy(attachment, message.id, ErrorCode.DRAINING, "the replica is draining")
            elif len(self._living) >= self._living_max:
                text = f"{len(self._living)} sequences are here already; at most {self._living_max}"
                self._busy(attachment, message.id, ErrorCode.ENGINE_BUSY, text)
            else:
                self._add(attachment, message.id, self._request(message, seen_at_s))

    def busy(self, epoch: int, sequences: Iterable[int]) -> None:
        """Turn sequences away that did not fit into the inbox."""
        attachment = self._attachments.get(epoch)
        if attachment is not None:
            for sequence in sequences:
                if sequence not in attachment.keys:
                    text = "the engine's inbox is full"
                    self._busy(attachment, sequence, ErrorCode.ENGINE_BUSY, text)

    def cancel(self, epoch: int, sequences: Iterable[int]) -> None:
        """Cancel sequences; unknown ids have ended already."""
        attachment = self._attachments.get(epoch)
        if attachment is not None:
            for sequence in sequences:
                key = attachment.keys.get(sequence)
                if key is not None:
                    self._driver.cancel(key)

    def probe(self, message: wire.Probe, owner: ProbeOwner, now_s: float) -> None:
        """Start a canary inference."""
        probe = Probe(owner, now_s)
        self._probes.append(probe)
        request = SequenceRequest(
            key=next(self._keys),
            prompt=list(message.prompt),
            output_tokens_max=message.tokens,
            priority=URGENT_PRIORITY,
            ignore_eos=True,
            submitted_at_s=now_s,
        )
        self._add(probe, 0, request)

    def idle_s(self, now_s: float) -> float:
        """Return how long an idle host may wait before somebody must hear that it lives."""
        told_at_s = [a.told_at_s for a in self._attachments.values() if a.orphaned_at_s is None]
        return max(0.0, min(told_at_s, default=now_s) + HEARTBEAT_S - now_s)

    def step(self) -> StepEvents:
        """Let the driver compute a step, if it has anything to do."""
        if not self._driver.has_work:
            return StepEvents()
        self._step += 1
        return self._driver.step()

    def publish(self, events: StepEvents, now_s: float) -> None:
        """Tell every attachment what a step brought it; also that the engine lives, when idle."""
        self._distribute(events)
        load = self._driver.load()
        for attachment in list(self._attachments.values()):
            if attachment.orphaned_at_s is not None:
                if now_s - attachment.orphaned_at_s >= ORPHAN_GRACE_S:
                    self.detach(attachment.epoch)
                continue
            news = attachment.news
            if events.kv:
                news.kv.update(events.kv)
            is_due = now_s - attachment.told_at_s >= HEARTBEAT_S or not news.is_heartbeat
            if is_due and not self._post(attachment, load, now_s):
                self.detach(attachment.epoch)  # its router does not read
        for probe in [probe for probe in self._probes if probe.news.finished]:
            self._probes.remove(probe)
            probe.owner.reply(self._probe_reply(probe, now_s))

    def fail_all(self, message: str) -> None:
        """End everything because the engine cannot go on."""
        finished = [
            FinishedEvent(key, Finish.FAILED, ErrorCode.ENGINE_FAILED, message)
            for key in self._living
        ]
        self._end_all(StepEvents(finished=finished))

    def drain_all(self) -> None:
        """End everything because the engine stops; routers go on elsewhere."""
        finished = [
            FinishedEvent(key, Finish.BUSY, ErrorCode.DRAINING, "the replica is draining")
            for key in self._living
        ]
        for key in self._living:
            self._driver.cancel(key)
        self._end_all(StepEvents(finished=finished))

    def _end_all(self, events: StepEvents) -> None:
        self._distribute(events)
        load = EngineLoad()
        for attachment in self._attachments.values():
            self._post(attachment, load, attachment.told_at_s)
            attachment.outbox.close()
        self._attachments.clear()
        for probe in self._probes:
            probe.owner.reply(self._probe_reply(probe, probe.started_at_s))
        self._probes.clear()

    def _post(self, attachment: Attachment, load: EngineLoad, now_s: float) -> bool:
        news = attachment.news
        news.step = self._step
        news.steps = self._step - attachment.told_step
        news.load = load
        attachment.news = StepNews()
        attachment.told_step = self._step
        attachment.told_at_s = now_s
        return attachment.outbox.post(news)

    def _distribute(self, events: StepEvents) -> None:
        living = self._living
        for key, token in zip(events.keys, events.tokens, strict=True):
            entry = living.get(key)
            if entry is not None:  # None: detached while the step ran
                news = entry.owner.news
                news.ids.append(entry.sequence)
                news.tokens.append(token)
        for fact in events.admitted:
            entry = living.get(fact.key)
            if entry is not None:
                entry.owner.news.admitted.append(
                    wire.Admitted(
                        sequence=entry.sequence,
                        queue_us=int(fact.queue_s * 1e6),
                        cached_tokens=fact.cached_tokens,
                    )
                )
        for event in events.finished:
            entry = living.pop(event.key, None)
            if entry is not None:
                if isinstance(entry.owner, Attachment):
                    del entry.owner.keys[entry.sequence]
                _finish(entry.owner.news, entry.sequence, event.reason, event)

    def _add(self, owner: Attachment | Probe, sequence: int, request: SequenceRequest) -> None:
        try:
            self._driver.add(request)
        except RefusedError as error:
            event = FinishedEvent(
                request.key, Finish.REFUSED, error.code, error.message, len(request.prompt)
            )
            _finish(owner.news, sequence, Finish.REFUSED, event)
            return
        self._living[request.key] = Living(owner, sequence)
        if isinstance(owner, Attachment):
            owner.keys[sequence] = request.key

    def _busy(self, attachment: Attachment, sequence: int, code: ErrorCode, message: str) -> None:
        event = FinishedEvent(0, Finish.BUSY, code, message)
        _finish(attachment.news, sequence, Finish.BUSY, event)

    def _request(self, message: wire.Sequence, seen_at_s: float) -> SequenceRequest:
        sampling = message.sampling
        return SequenceRequest(
            key=next(self._keys),
            prompt=list(message.prompt),
            output_tokens_max=message.output_tokens_max,
            stop_token_ids=frozenset(message.stop_token_ids),
            sampling=Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p or 1.0,
                top_k=sampling.top_k,
                seed=sampling.seed if sampling.HasField("seed") else self._entropy(),
            ),
            cache_root=message.cache_root,
            adapter_digest=message.adapter_digest,
            priority=min(message.priority, URGENT_PRIORITY - 1),
            ignore_eos=message.ignore_eos,
            submitted_at_s=seen_at_s,
        )

    def _probe_reply(self, probe: Probe, now_s: float) -> wire.HostFrame:
        ended = probe.news.finished[0] if probe.news.finished else wire.Finished()
        if ended.reason in (wire.FINISH_REASON_LENGTH, wire.FINISH_REASON_STOP):
            return wire.HostFrame(
                probe=wire.ProbeReply(
                    tokens=probe.news.tokens,
                    elapsed_us=int((now_s - probe.started_at_s) * 1e6),
                    engine=self._driver.name,
                    base_digest=self._base_digest,
                    active=sum(isinstance(it.owner, Attachment) for it in self._living.values()),
                )
            )
        code = ended.code or ErrorCode.ENGINE_FAILED
        return wire.HostFrame(refused=wire.Refused(code=code, message=ended.message))


def _finish(
    news: StepNews, sequence: int, reason: Finish, event: FinishedEvent | None = None
) -> None:
    finished = wire.Finished(sequence=sequence, reason=_REASONS[reason])
    if event is not None:
        finished.code = event.code
        finished.message = event.message
        finished.prompt_tokens = event.prompt_tokens
        finished.output_tokens = event.output_tokens
        finished.prefill_us = int(event.prefill_s * 1e6)
    news.finished.append(finished)
