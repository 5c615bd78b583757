"""Attachments, epochs and sequences of an engine host; owned by its step loop, free of threads.

Every router that may use the replica has one attachment at a time, with sequences of its own. This
module says what becomes of them; `replica.host.service` moves the bytes.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from replica.engine.driver import Driver
from replica.engine.types import (
    URGENT_PRIORITY,
    AdapterState,
    EngineLoad,
    Finish,
    FinishedEvent,
    Fork,
    RefusedError,
    SequenceRequest,
    StepEvents,
)
from replica.host.adapters import AdapterDesk, Background
from replica.host.attachments import (
    Attachment,
    Hosted,
    Probe,
    Reply,
    finished_message,
    refusal,
    refused_frame,
)
from replica.host.control import ControlDesk
from replica.host.counters import HostCounters
from replica.host.frames import encode_limits, encode_resumed, fill_adapters, fill_state
from replica.host.news import Outbox, StepNews
from replica.host.requests import decode_sequence
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

HEARTBEAT_S = 0.2  # routers expect a frame every 0.25 s
# A router whose stream broke comes back within this, or its sequences are cancelled. It tries again
# after 0.1, 0.2, 0.4 s and so on; what it does not come back for is computed in vain meanwhile.
ORPHAN_GRACE_S = 5.0


class HostCore:
    """The state of an engine host. One thread may use it."""

    def __init__(
        self,
        driver: Driver,
        base_digest: str,
        *,
        waiting_max: int,
        entropy: Callable[[], int],
        background: Background,
        artifacts_dir: Path | None = None,
    ) -> None:
        """Make an idle host.

        Args:
            driver: Used by nobody else.
            base_digest: What the engine serves.
            waiting_max: Sequences beyond the running ones that are taken; more are BUSY.
            entropy: Seeds of sequences that name none.
            background: Reads files and checks bytes.
            artifacts_dir: Where adapters lie, by digest.
        """
        self._driver = driver
        self._base_digest = base_digest
        self._living_max = driver.limits.sequences_max + waiting_max
        self._entropy = entropy
        self._keys = itertools.count(1)
        self._living: dict[int, Hosted] = {}
        self._attachments: dict[int, Attachment] = {}
        self._probes: dict[int, Probe] = {}  # by key
        self._adapters = AdapterDesk(driver, artifacts_dir, background)
        self._resident: tuple[str, ...] = ()
        self._step = 0
        self.is_draining = False
        self.counters = HostCounters()
        self.control = ControlDesk(driver, base_digest, self._adapters, background, self.counters)

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return self._driver.has_work

    @property
    def living(self) -> int:
        """Sequences of routers and probes, those that wait for an adapter among them."""
        return len(self._living)

    def load(self) -> EngineLoad:
        """Return the state of the engine."""
        return self._driver.load()

    def adapters(self) -> list[AdapterState]:
        """Return the adapters that the engine holds."""
        return self._driver.adapters()

    def outbox(self, epoch: int) -> Outbox | None:
        """Return the outbox of an attachment; any thread may ask."""
        attachment = self._attachments.get(epoch)
        return None if attachment is None else attachment.outbox

    def attach(self, message: wire.Attach, now_s: float) -> tuple[Attachment, wire.Attached]:
        """Open an attachment; an older one of the same router is resumed or closed.

        Raises:
            RefusedError: The epoch is not newer, or belongs to another router.
        """
        mine: list[Attachment] = []
        for known in self._attachments.values():
            if known.router_id == message.router_id and known.epoch < message.epoch:
                mine.append(known)
            elif known.router_id == message.router_id or known.epoch == message.epoch:
                raise RefusedError(
                    ErrorCode.CONFLICT,
                    f"epoch {message.epoch} of router {message.router_id}: router"
                    f" {known.router_id} is attached with epoch {known.epoch}; use a greater one",
                )
        attachment = Attachment(message.router_id, message.epoch, Outbox(message.credit_frames))
        attachment.told_step = self._step
        attachment.told_at_s = now_s
        attachment.news.kv = dict.fromkeys(self._driver.cached_blocks(), True)
        attachment.news.kv_reset = True
        attached = wire.Attached(epoch=message.epoch)
        for old in mine:
            if old.epoch == message.resumed_epoch:
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
        """Close an attachment; its sequences end as cancelled."""
        attachment = self._attachments.pop(epoch, None)
        if attachment is None:
            return
        for hosted in list(attachment.sequences.values()):
            self._driver.cancel(hosted.key)
            self._end(hosted, _cut(hosted, FinishedEvent(hosted.key, Finish.CANCELLED)))
        self._post(attachment, self._driver.load(), attachment.told_at_s)
        attachment.outbox.close()

    def orphan(self, epoch: int, now_s: float) -> None:
        """Note that the stream of an attachment is gone; it is detached after a grace."""
        attachment = self._attachments.get(epoch)
        if attachment is not None and attachment.orphaned_at_s is None:
            attachment.orphaned_at_s = now_s
            attachment.unconfirmed = attachment.outbox.abandon()

    def credit(self, epoch: int, frames: int) -> None:
        """Allow so many more frames."""
        outbox = self.outbox(epoch)
        if outbox is not None:
            outbox.add_credit(frames)

    def submit(self, epoch: int, sequences: Iterable[wire.Sequence], seen_at_s: float) -> None:
        """Take sequences; what becomes of each is told in frames.

        An id that is alive is ignored, so that a submit can be repeated. An unknown epoch is
        ignored: its router has been told, or has gone.
        """
        attachment = self._attachments.get(epoch)
        if attachment is None:
            return
        for message in sequences:
            if message.id not in attachment.sequences:
                try:
                    self._take(attachment, message, seen_at_s)
                except RefusedError as error:
                    self._refuse(attachment, message, error)

    def busy(self, epoch: int, sequences: Iterable[int]) -> None:
        """Turn sequences away that did not fit into the inbox."""
        attachment = self._attachments.get(epoch)
        if attachment is None:
            return
        event = refusal(0, RefusedError(ErrorCode.ENGINE_BUSY, "the engine's inbox is full"))
        for sequence in sequences:
            if sequence not in attachment.sequences:
                attachment.finish(sequence, finished_message(sequence, event))

    def cancel(self, epoch: int, sequences: Iterable[int]) -> None:
        """Cancel sequences; unknown ids have ended already."""
        attachment = self._attachments.get(epoch)
        if attachment is None:
            return
        for sequence in sequences:
            hosted = attachment.sequences.get(sequence)
            if hosted is None:
                continue
            if hosted.is_parked:
                self._end(hosted, FinishedEvent(hosted.key, Finish.CANCELLED))
            else:
                self._driver.cancel(hosted.key)

    def probe(self, message: wire.Probe, reply: Reply, now_s: float) -> None:
        """Start a canary inference."""
        request = SequenceRequest(
            key=next(self._keys),
            prompt=list(message.prompt),
            output_tokens_max=message.tokens,
            priority=URGENT_PRIORITY,
            ignore_eos=True,
            submitted_at_s=now_s,
        )
        try:
            self._driver.add(request)
        except RefusedError as error:
            reply(refused_frame(error))
            return
        probe = Probe(reply, now_s)
        self._probes[request.key] = probe
        self._living[request.key] = Hosted(request.key, 0, probe)

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
        load = self._driver.load()
        self._count(events, load)
        self._distribute(events, now_s)
        for attachment in list(self._attachments.values()):
            if attachment.orphaned_at_s is not None:
                self._keep(attachment, attachment.orphaned_at_s, now_s)
                continue
            news = attachment.news
            if events.kv:
                news.kv.update(events.kv)
            is_due = now_s - attachment.told_at_s >= HEARTBEAT_S or not news.is_heartbeat
            if is_due and not self._post(attachment, load, now_s):
                self.detach(attachment.epoch)  # its router does not read

    def fail_all(self, message: str) -> None:
        """End everything because the engine cannot go on."""
        self._end_all(RefusedError(ErrorCode.ENGINE_FAILED, message))

    def drain_all(self) -> None:
        """End everything because the engine stops; routers go on elsewhere."""
        for key in self._living:
            self._driver.cancel(key)
        self._end_all(RefusedError(ErrorCode.DRAINING, "the replica is draining"))

    def _take(self, attachment: Attachment, message: wire.Sequence, seen_at_s: float) -> None:
        """Take a sequence and its forks; an adapter that is not here is read first."""
        ids = [message.id, *(fork.id for fork in message.forks)]
        self._check_room(attachment, ids)
        keys = [next(self._keys) for _ in ids]
        request = decode_sequence(
            message,
            keys,
            base_digest=self._base_digest,
            seen_at_s=seen_at_s,
            entropy=self._entropy,
        )
        for key, sequence in zip(keys, ids, strict=True):
            hosted = Hosted(key, sequence, attachment, is_parked=True)
            self._living[key] = attachment.sequences[sequence] = hosted
        if request.adapter_digest and self._driver.capabilities.adapter_slots:
            self._adapters.fetch(request.adapter_digest, partial(self._start, request))
        else:
            self._start(request, None)

    def _check_room(self, attachment: Attachment, ids: list[int]) -> None:
        if self.is_draining:
            raise RefusedError(ErrorCode.DRAINING, "the replica is draining")
        most = self._driver.limits.sequences_max
        if len(ids) > most:
            message = f"{len(ids)} answers to one prompt; this engine runs {most} sequences"
            raise RefusedError(ErrorCode.INVALID_REQUEST, message)
        if len(self._living) + len(ids) > self._living_max:
            message = f"{len(self._living)} sequences are here already; at most {self._living_max}"
            raise RefusedError(ErrorCode.ENGINE_BUSY, message)
        if len(ids) > 1 and (
            len(set(ids)) < len(ids) or not attachment.sequences.keys().isdisjoint(ids)
        ):
            message = "a fork has the id of another sequence; give each an id of its own"
            raise RefusedError(ErrorCode.INVALID_REQUEST, message)

    def _refuse(self, attachment: Attachment, message: wire.Sequence, error: RefusedError) -> None:
        """End a sequence that was not taken, and its forks."""
        event = refusal(0, error, len(message.prompt))
        for sequence in dict.fromkeys([message.id, *(fork.id for fork in message.forks)]):
            if sequence not in attachment.sequences:
                attachment.finish(sequence, finished_message(sequence, event))

    def _start(self, request: SequenceRequest, error: RefusedError | None) -> None:
        """Give the driver what is still wanted of a request, or end it with `error`."""
        keys = [request.key, *(fork.key for fork in request.forks)]
        wanted = [key for key in keys if key in self._living]  # the rest was cancelled meanwhile
        if not wanted:
            return
        if error is None:
            try:
                self._driver.add(_for_keys(request, wanted))
            except RefusedError as refused:
                error = refused
        if error is None and request.sampling.grammar is not None:
            self.counters.grammars += 1
        for key in wanted:
            hosted = self._living[key]
            if error is None:
                hosted.is_parked = False
            else:
                self._end(hosted, refusal(key, error, len(request.prompt)))

    def _end(self, hosted: Hosted, event: FinishedEvent, now_s: float = 0.0) -> None:
        """Take a sequence off the books and tell its owner."""
        del self._living[hosted.key]
        self.counters.ended[event.reason.name.lower()] += 1
        owner = hosted.owner
        if isinstance(owner, Attachment):
            owner.finish(hosted.id, finished_message(hosted.id, event), hosted.told)
        else:
            del self._probes[hosted.key]
            owner.reply(self._probe_reply(owner, hosted, event, now_s))

    def _end_all(self, error: RefusedError) -> None:
        for hosted in list(self._living.values()):
            self._end(hosted, _cut(hosted, refusal(hosted.key, error)))
        for attachment in self._attachments.values():
            self._post(attachment, EngineLoad(), attachment.told_at_s)
            attachment.outbox.close()
        self._attachments.clear()

    def _resume(self, old: Attachment, new: Attachment) -> list[wire.Resumed]:
        """Move the sequences of an attachment to a newer one; return all that they have brought.

        What the old one has not sent is part of that, so it is dropped there; what it has sent may
        be lost, so ends that were not confirmed are told again.
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

    def _keep(self, orphan: Attachment, since_s: float, now_s: float) -> None:
        """Keep what the sequences of an orphan bring, and their ends, until its grace is over."""
        orphan.unconfirmed += orphan.news.ended
        orphan.news = StepNews()
        if now_s - since_s >= ORPHAN_GRACE_S:
            self.detach(orphan.epoch)

    def _post(self, attachment: Attachment, load: EngineLoad, now_s: float) -> bool:
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

    def _distribute(self, events: StepEvents, now_s: float) -> None:
        living = self._living
        if events.keys:
            self._file_tokens(events)
        for part in events.prompt_logprobs:
            hosted = living.get(part.key)
            if hosted is not None and isinstance(hosted.owner, Attachment):
                hosted.told.prompt_logprobs.append(part)
                hosted.owner.news.add_prompt_logprobs(hosted.id, part)
        for entry in events.logprobs:
            hosted = living.get(entry.key)
            if hosted is not None and isinstance(hosted.owner, Attachment):
                hosted.told.logprobs.append(entry)
                hosted.owner.news.add_logprobs(hosted.id, entry)
        for fact in events.admitted:
            hosted = living.get(fact.key)
            if hosted is not None and isinstance(hosted.owner, Attachment):
                hosted.told.admitted = wire.Admitted(
                    sequence=hosted.id,
                    queue_us=int(fact.queue_s * 1e6),
                    cached_tokens=fact.cached_tokens,
                )
                hosted.owner.news.admitted.append(hosted.told.admitted)
        for event in events.finished:
            hosted = living.get(event.key)
            if hosted is not None:
                self._end(hosted, event, now_s)

    def _file_tokens(self, events: StepEvents) -> None:
        """File the new tokens; the host's one piece of work per token."""
        keys, tokens = events.keys, events.tokens
        if len(self._attachments) == 1 and not self._probes:  # nearly always: columns stay whole
            try:
                hosted = list(map(self._living.__getitem__, keys))
            except KeyError:
                pass  # of a sequence that was detached while the step ran
            else:
                for one, token in zip(hosted, tokens, strict=True):
                    one.told.output.append(token)
                (attachment,) = self._attachments.values()
                attachment.news.has_runs |= events.has_runs
                attachment.news.add_tokens([one.id for one in hosted], tokens)
                return
        columns: dict[Attachment, tuple[list[int], list[int]]] = {}
        for key, token in zip(keys, tokens, strict=True):
            one = self._living.get(key)
            if one is None:
                continue
            one.told.output.append(token)
            if isinstance(one.owner, Attachment):
                ids, own = columns.setdefault(one.owner, ([], []))
                ids.append(one.id)
                own.append(token)
        for attachment, (ids, own) in columns.items():
            attachment.news.has_runs |= events.has_runs
            attachment.news.add_tokens(ids, own)

    def _probe_reply(
        self, probe: Probe, hosted: Hosted, event: FinishedEvent, now_s: float
    ) -> wire.HostFrame:
        if event.reason not in (Finish.LENGTH, Finish.STOP):
            code = event.code or ErrorCode.ENGINE_FAILED
            return wire.HostFrame(refused=wire.Refused(code=code, message=event.message))
        return wire.HostFrame(
            probe=wire.ProbeReply(
                tokens=hosted.told.output,
                elapsed_us=int((now_s - probe.started_at_s) * 1e6),
                engine=self._driver.name,
                base_digest=self._base_digest,
                active=len(self._living) - len(self._probes),
            )
        )


def _for_keys(request: SequenceRequest, wanted: list[int]) -> SequenceRequest:
    """Return what is left of a request when only some of its sequences are wanted."""
    if len(wanted) == 1 + len(request.forks):
        return request
    seeds = {request.key: request.sampling.seed, **{f.key: f.seed for f in request.forks}}
    first, *others = wanted
    return replace(
        request,
        key=first,
        sampling=replace(request.sampling, seed=seeds[first]),
        forks=tuple(Fork(key, seeds[key]) for key in others),
    )


def _cut(hosted: Hosted, event: FinishedEvent) -> FinishedEvent:
    """Return the end of a sequence that was running, with what it has brought."""
    return replace(event, output_tokens=len(hosted.told.output))
