"""Attached routers and their sequences; data of the step loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from replica.engine.types import Finish, FinishedEvent, RefusedError
from replica.host.frames import micros
from replica.host.news import Outbox, SequenceEnd, SequenceRecord, StepNews
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

Reply = Callable[[wire.HostFrame], None]  # sends the only answer to a request

_REASONS = {
    Finish.STOP: wire.FINISH_REASON_STOP,
    Finish.LENGTH: wire.FINISH_REASON_LENGTH,
    Finish.CANCELLED: wire.FINISH_REASON_CANCELLED,
    Finish.REFUSED: wire.FINISH_REASON_REFUSED,
    Finish.BUSY: wire.FINISH_REASON_BUSY,
    Finish.FAILED: wire.FINISH_REASON_FAILED,
}
# Refusals that say nothing about the request: it can be served elsewhere, or later.
_NOT_ITS_FAULT = {
    ErrorCode.ENGINE_BUSY: Finish.BUSY,
    ErrorCode.DRAINING: Finish.BUSY,
    ErrorCode.ENGINE_FAILED: Finish.FAILED,
}


@dataclass(slots=True, eq=False)
class HostAttachment:
    """One router's view of the engine.

    Attributes:
        router_id: Id of the attached router.
        epoch: Epoch of the attachment; a router's epochs increase.
        outbox: News that were not sent yet.
        sequences: Living sequences, by the router's ids.
        adapters_told: Adapters that the router knows as resident from the start.
        news: News of the step in progress.
        told_step: Last step that was posted.
        told_at_s: Time of the last post.
        silence_max_s: Seconds without a confirmation after which a router counts as frozen; 0:
            never.
        silent_s: Seconds without a confirmation, while news were unconfirmed.
        grants: Number of grants at the router's last confirmation.
        orphaned_at_s: Time at which the stream was found dead; None while it lives.
        unconfirmed: Ends of an orphan's sequences that the router may not know.
    """

    router_id: str
    epoch: int
    outbox: Outbox
    sequences: dict[int, "Hosted"] = field(default_factory=dict[int, "Hosted"])
    adapters_told: tuple[str, ...] = ()
    news: StepNews = field(default_factory=StepNews)
    told_step: int = 0
    told_at_s: float = 0.0
    silence_max_s: float = 0.0
    silent_s: float = 0.0
    grants: int | None = None
    orphaned_at_s: float | None = None
    unconfirmed: list[SequenceEnd] = field(default_factory=list[SequenceEnd])

    def note_silence(self, passed_s: float) -> bool:
        """Count time without a confirmation; return whether the router is frozen."""
        grants = self.outbox.unconfirmed_since_grant
        self.silent_s = self.silent_s + passed_s if grants == self.grants is not None else 0.0
        self.grants = grants
        return 0.0 < self.silence_max_s <= self.silent_s

    def finish(
        self, sequence: int, finished: wire.Finished, told: SequenceRecord | None = None
    ) -> None:
        """Note that a sequence has ended."""
        self.sequences.pop(sequence, None)
        self.news.ended.append(SequenceEnd(finished, told))


@dataclass(slots=True, eq=False)
class Probe:
    """A canary inference in progress.

    Attributes:
        reply: Takes the answer.
        started_at_s: Monotonic seconds.
        until_s: Deadline of the prober; infinite: the probe runs to its end.
        is_late: Whether the probe is being cancelled after its deadline.
    """

    reply: Reply
    started_at_s: float
    until_s: float = inf
    is_late: bool = False


@dataclass(slots=True, eq=False)
class Hosted:
    """A living sequence: its owner, the owner's id for it, and its output.

    Attributes:
        key: Key in the driver.
        id: The router's id of the sequence, unique in its attachment.
        owner: Attachment of the sequence; changes when the router resumes.
        is_parked: Whether the driver does not have it yet: its adapter or grammar is being
            prepared.
        load_us: Microseconds of waiting for its adapter; 0: none was needed, or it was loaded.
    """

    key: int
    id: int
    owner: HostAttachment | Probe
    told: SequenceRecord = field(default_factory=SequenceRecord)
    is_parked: bool = False
    load_us: int = 0


def refused_frame(error: RefusedError) -> wire.HostFrame:
    """Return the answer to a request that cannot be served."""
    return wire.HostFrame(refused=wire.Refused(code=error.code, message=error.message))


def refusal(key: int, error: RefusedError, prompt_tokens: int = 0) -> FinishedEvent:
    """Return the end of a sequence that was not taken."""
    reason = _NOT_ITS_FAULT.get(error.code, Finish.REFUSED)
    return FinishedEvent(key, reason, error.code, error.message, prompt_tokens, param=error.param)


def finished_message(sequence: int, event: FinishedEvent) -> wire.Finished:
    """Return the end of a sequence for its router."""
    message = wire.Finished(
        sequence=sequence,
        reason=_REASONS[event.reason],
        code=event.code,
        message=event.message,
        prompt_tokens=event.prompt_tokens,
        output_tokens=event.output_tokens,
        prefill_us=micros(event.prefill_s),
        param=event.param,
    )
    if event.drafts.tried:
        message.drafts.CopyFrom(wire.Drafts(**event.drafts._asdict()))
    if event.score is not None:
        message.score.logprob, message.score.entropy = event.score.logprob, event.score.entropy
    return message
