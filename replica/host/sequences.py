"""Tracks the living sequences of an engine host in the step loop, from Submit to their end.

A sequence is registered when it arrives, before its grammar is compiled and its adapter is read. A
registered sequence can be cancelled and ends exactly once. If its router resumes, the sequence
moves to the router's new attachment.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf

from replica.engine.driver import ChecksGrammars, Driver
from replica.engine.types import (
    URGENT_PRIORITY,
    Finish,
    FinishedEvent,
    Fork,
    RefusedError,
    Sampling,
    SequenceRequest,
    StepEvents,
)
from replica.host.adapters import AdapterDesk, Background
from replica.host.attachments import (
    HostAttachment,
    Hosted,
    Probe,
    Reply,
    finished_message,
    refusal,
    refused_frame,
)
from replica.host.counters import HostCounters
from replica.host.frames import encode_prompt_logprobs, fill_logprobs, micros
from replica.host.received_spans import ReceivedSpans, UnknownSpanError
from replica.host.requests import decode_root, decode_sequence, prompt_tokens
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

# Bytes of a sequence's message without its prompt. A grammar has up to 64 KiB, and all other fields
# have a few thousand bytes.
_EXTRAS_BYTES_MAX = 1 << 18
_TOKEN_BYTES_MAX = 5  # largest size of a token in a message, as a varint


class SequenceBook:
    """The record of all sequences with their owners and outputs. It adds them to the driver."""

    def __init__(
        self,
        driver: Driver,
        base_digest: str,
        adapters: AdapterDesk,
        counters: HostCounters,
        *,
        compilers: Background,
        living_max: int,
        entropy: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """Create an empty record. More than `living_max` sequences at a time end as BUSY."""
        self._driver = driver
        self._base_digest = base_digest
        self._adapters = adapters
        self._counters = counters
        self._compilers = compilers
        self._living_max = living_max
        self._entropy = entropy
        self._clock = clock
        self._spans = ReceivedSpans(driver.limits.kv_blocks)
        self._keys = itertools.count(1)
        self._living: dict[int, Hosted] = {}
        self._probes = 0
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._living)

    def take(
        self, attachment: HostAttachment, sequences: Iterable[wire.Sequence], seen_at_s: float
    ) -> None:
        """Accept sequences. A sequence that cannot be served ends without effect on the others.

        A sequence whose id is living already is ignored, so a router may repeat a submit.
        """
        for message in sequences:
            if message.id not in attachment.sequences:
                try:
                    self._take(attachment, message, seen_at_s)
                except RefusedError as error:
                    _refuse(attachment, message, error)
                except UnknownSpanError:
                    _request_whole(attachment, message)

    def probe(self, message: wire.Probe, reply: Reply, now_s: float) -> None:
        """Load the adapter of a canary inference, and then start the inference."""
        tells = message.wants_logprobs and self._driver.capabilities.logprobs_max > 0
        try:
            root = decode_root(message.cache_root, self._base_digest, message.adapter_digest)
        except RefusedError as error:
            reply(refused_frame(error))
            return
        request = SequenceRequest(
            key=next(self._keys),
            prompt=list(message.prompt),
            output_tokens_max=message.tokens,
            sampling=Sampling(logprobs=0 if tells else -1),
            cache_root=root,
            adapter_digest=message.adapter_digest,
            priority=URGENT_PRIORITY,
            ignore_eos=True,
            submitted_at_s=now_s,
        )
        self._probes += 1
        until_s = now_s + message.timeout_ms / 1000 if message.timeout_ms else inf
        owner = Probe(reply, now_s, until_s)
        self._living[request.key] = Hosted(request.key, 0, owner, is_parked=True)
        self._equip(request)

    def cancel(self, hosted: Hosted) -> None:
        """End a sequence, at once before it is in the driver, else with the driver's last event."""
        if hosted.is_parked:
            self._end(hosted, FinishedEvent(hosted.key, Finish.CANCELLED))
        else:
            self._driver.cancel(hosted.key)

    def cancel_all(self, attachment: HostAttachment) -> None:
        """End all sequences of an attachment at once, and ignore their further output."""
        for hosted in list(attachment.sequences.values()):
            self._driver.cancel(hosted.key)
            self._end(hosted, _cut(hosted, FinishedEvent(hosted.key, Finish.CANCELLED)))

    def turn_out(self, attachment: HostAttachment, error: RefusedError) -> None:
        """End all sequences of a frozen router at once, and ignore their further output."""
        for hosted in list(attachment.sequences.values()):
            self._driver.cancel(hosted.key)
            self._end(hosted, _cut(hosted, refusal(hosted.key, error)))

    def end_all(self, error: RefusedError) -> None:
        """End all sequences and probes at once."""
        for hosted in list(self._living.values()):
            self._end(hosted, _cut(hosted, refusal(hosted.key, error)))

    def distribute(self, events: StepEvents, sole: HostAttachment | None, now_s: float) -> None:
        """Add a step's output to the news of the attachments that own the sequences.

        Args:
            events: Events of the step.
            sole: The only attachment, or None if there are several or none.
            now_s: Current time in monotonic seconds.
        """
        living = self._living
        if self._probes:
            self._drop_late(now_s)
        if events.keys:
            is_filed = sole is not None and not self._probes and self._file_all(events, sole)
            if not is_filed:
                self._file_each(events)
        if events.logprobs or events.prompt_logprobs:
            self._file_logprobs(events)
        for fact in events.admitted:
            hosted = living.get(fact.key)
            if hosted is not None and isinstance(hosted.owner, HostAttachment):
                hosted.told.admitted = wire.Admitted(
                    sequence=hosted.id,
                    queue_us=micros(fact.queue_s),
                    cached_tokens=fact.cached_tokens,
                )
                if hosted.load_us:
                    hosted.told.admitted.load_us = hosted.load_us
                hosted.owner.news.admitted.append(hosted.told.admitted)
        for event in events.finished:
            hosted = living.get(event.key)
            if hosted is not None:
                self._end(hosted, event, now_s)

    def _drop_late(self, now_s: float) -> None:
        """Cancel the probes whose deadline has passed."""
        for hosted in list(self._living.values()):
            probe = hosted.owner
            if isinstance(probe, Probe) and not probe.is_late and now_s >= probe.until_s:
                probe.is_late = True
                self.cancel(hosted)

    def _file_all(self, events: StepEvents, sole: HostAttachment) -> bool:
        """Record a step's tokens as whole columns. Returns False if a sequence has no owner."""
        try:
            hosted = list(map(self._living.__getitem__, events.keys))
        except KeyError:
            return False
        for one, token in zip(hosted, events.tokens, strict=True):
            one.told.output.append(token)
        sole.news.has_runs |= events.has_runs
        sole.news.add_tokens([one.id for one in hosted], events.tokens)
        return True

    def _file_each(self, events: StepEvents) -> None:
        """Record the tokens of a step one by one."""
        columns: dict[HostAttachment, tuple[list[int], list[int]]] = {}
        for key, token in zip(events.keys, events.tokens, strict=True):
            hosted = self._living.get(key)
            if hosted is None:  # the attachment of the sequence was closed while the step ran
                continue
            hosted.told.output.append(token)
            if isinstance(hosted.owner, HostAttachment):
                ids, tokens = columns.setdefault(hosted.owner, ([], []))
                ids.append(hosted.id)
                tokens.append(token)
        for attachment, (ids, tokens) in columns.items():
            attachment.news.has_runs |= events.has_runs
            attachment.news.add_tokens(ids, tokens)

    def _file_logprobs(self, events: StepEvents) -> None:
        for part in events.prompt_logprobs:
            hosted = self._living.get(part.key)
            if hosted is not None and isinstance(hosted.owner, HostAttachment):
                message = encode_prompt_logprobs(hosted.id, part)
                hosted.told.prompt_logprobs.append(message)
                hosted.owner.news.add_prompt_logprobs(message)
        for entry in events.logprobs:
            hosted = self._living.get(entry.key)
            if hosted is None:
                continue
            told = hosted.told
            if told.logprobs is None:
                told.logprobs = wire.Logprobs()
            fill_logprobs(told.logprobs, [(hosted.id, entry)])
            if isinstance(hosted.owner, HostAttachment):
                hosted.owner.news.add_logprobs(hosted.id, entry)

    def _take(self, attachment: HostAttachment, message: wire.Sequence, seen_at_s: float) -> None:
        """Register a sequence and its forks, then compile its grammar and load its adapter."""
        self._check_size(message)
        ids = [message.id, *(fork.id for fork in message.forks)]
        self._check_room(attachment, ids)
        keys = [next(self._keys) for _ in ids]
        request = decode_sequence(
            message,
            keys,
            base_digest=self._base_digest,
            spans=self._spans,
            seen_at_s=seen_at_s,
            entropy=self._entropy,
        )
        for key, sequence in zip(keys, ids, strict=True):
            hosted = Hosted(key, sequence, attachment, is_parked=True)
            self._living[key] = attachment.sequences[sequence] = hosted
        if request.sampling.grammar is None or not isinstance(self._driver, ChecksGrammars):
            self._equip(request)
            return
        check = partial(self._driver.check_grammar, request)
        if not self._compilers.run(check, partial(self._was_checked, request)):
            text = "too many grammars are being compiled; try again"
            self._start(request, RefusedError(ErrorCode.ENGINE_BUSY, text))

    def _was_checked(self, request: SequenceRequest, outcome: object) -> None:
        """Continue with a sequence after the compilation of its grammar succeeded or failed."""
        if isinstance(outcome, RefusedError):
            self._start(request, outcome)
        elif isinstance(outcome, Exception):
            text = f"the grammar could not be compiled: {outcome!r}"
            self._start(request, RefusedError(ErrorCode.ENGINE_FAILED, text))
        else:
            self._equip(request)

    def _equip(self, request: SequenceRequest) -> None:
        """Start a sequence, after its adapter is loaded if it has one."""
        digest = request.adapter_digest
        if not digest or not self._driver.capabilities.adapter_slots:
            self._start(request, None)
            return
        is_here = self._driver.has_adapter(digest)
        start = self._start if is_here else partial(self._was_loaded, asked_at_s=self._clock())
        self._adapters.fetch(digest, partial(start, request), lambda: bool(self._wanted(request)))

    def _was_loaded(
        self, request: SequenceRequest, error: RefusedError | None, *, asked_at_s: float
    ) -> None:
        """Record how long a sequence waited for its adapter, and start it."""
        wanted, waited_s = self._wanted(request), self._clock() - asked_at_s
        if wanted and error is None:
            self._counters.adapter_waits_s.append(waited_s)
        for key in wanted:
            self._living[key].load_us = micros(waited_s)
        self._start(request, error)

    def _check_size(self, message: wire.Sequence) -> None:
        """Refuse a message so large that its decoding would delay the step loop needlessly."""
        tokens = self._driver.limits.context_tokens_max * (2 if message.prediction else 1)
        limit = tokens * _TOKEN_BYTES_MAX + _EXTRAS_BYTES_MAX
        size = message.ByteSize()
        if size > limit:
            text = f"a sequence of {size} bytes; this engine's context fits into {limit}"
            raise RefusedError(ErrorCode.REQUEST_TOO_LARGE, text)

    def _check_room(self, attachment: HostAttachment, ids: list[int]) -> None:
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

    def _wanted(self, request: SequenceRequest) -> list[int]:
        """Return the keys of a request and of its forks, without cancelled sequences."""
        keys = [request.key, *(fork.key for fork in request.forks)]
        return [key for key in keys if key in self._living]

    def _start(self, request: SequenceRequest, error: RefusedError | None) -> None:
        """Add the request's sequences that still wait to the driver, or end them with `error`."""
        wanted = self._wanted(request)
        if not wanted:
            return
        if error is None:
            try:
                self._driver.add(_for_keys(request, wanted))
            except RefusedError as refused:
                error = refused
        if error is None and request.sampling.grammar is not None:
            self._counters.grammars += 1
        for key in wanted:
            hosted = self._living[key]
            if error is None:
                hosted.is_parked = False
            else:
                self._end(hosted, refusal(key, error, len(request.prompt)))

    def _end(self, hosted: Hosted, event: FinishedEvent, now_s: float = 0.0) -> None:
        """Remove a sequence and report its end to its owner."""
        del self._living[hosted.key]
        self._counters.ended[event.reason.name.lower()] += 1
        if event.reason in (Finish.STOP, Finish.LENGTH):
            self._counters.lengths.append((event.prompt_tokens, event.output_tokens))
        owner = hosted.owner
        if isinstance(owner, HostAttachment):
            owner.finish(hosted.id, finished_message(hosted.id, event), hosted.told)
        else:
            self._probes -= 1
            owner.reply(self._probe_reply(owner, hosted, event, now_s))

    def _probe_reply(
        self, probe: Probe, hosted: Hosted, event: FinishedEvent, now_s: float
    ) -> wire.HostFrame:
        if event.reason not in (Finish.LENGTH, Finish.STOP):
            if probe.is_late:
                event = replace(
                    event, code=ErrorCode.DEADLINE_EXCEEDED, message="its asker waits no longer"
                )
            code = event.code or ErrorCode.ENGINE_FAILED
            return wire.HostFrame(refused=wire.Refused(code=code, message=event.message))
        logprobs = hosted.told.logprobs
        return wire.HostFrame(
            probe=wire.ProbeReply(
                tokens=hosted.told.output,
                elapsed_us=micros(now_s - probe.started_at_s),
                engine=self._driver.name,
                base_digest=self._base_digest,
                active=len(self._living) - self._probes,
                logprobs=() if logprobs is None else logprobs.logprob,
            )
        )


def _refuse(attachment: HostAttachment, message: wire.Sequence, error: RefusedError) -> None:
    """End a sequence that was not accepted, and its forks."""
    event = refusal(0, error, prompt_tokens(message))
    for sequence in dict.fromkeys([message.id, *(fork.id for fork in message.forks)]):
        if sequence not in attachment.sequences:
            attachment.finish(sequence, finished_message(sequence, event))


def _request_whole(attachment: HostAttachment, message: wire.Sequence) -> None:
    """End a sequence that was not accepted, and its forks, until its whole prompt arrives."""
    for sequence in (message.id, *(fork.id for fork in message.forks)):
        end = wire.Finished(sequence=sequence, reason=wire.FINISH_REASON_UNKNOWN_SPAN)
        attachment.finish(sequence, end)


def _for_keys(request: SequenceRequest, wanted: list[int]) -> SequenceRequest:
    """Return a request without those sequences that have been cancelled."""
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
    """Return the end event of a running sequence with the number of its output tokens."""
    return replace(event, output_tokens=len(hosted.told.output))
