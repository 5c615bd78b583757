"""Defines attached routers, their probes and their sequences, as data of the step loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from replica.engine.types import Finish, FinishedEvent, RefusedError
from replica.host.frames import micros
from replica.host.news import Outbox, SequenceEnd, SequenceRecord, StepNews
from sluice.errors import EngineRefusal
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
_FINISHES = {
    EngineRefusal.REQUEST: Finish.REFUSED,
    EngineRefusal.BUSY: Finish.BUSY,
    EngineRefusal.DRAINING: Finish.BUSY,
    EngineRefusal.FAILED: Finish.FAILED,
}


@dataclass(slots=True, eq=False)
class HostAttachment:
    """One router's connection to the engine, with the router's sequences and unsent `StepNews`.

    Attributes:
        router_id: Id of the attached router.
        epoch: Number of the attachment, greater than those of the router's earlier attachments.
        outbox: `StepNews` that are not sent yet.
        sequences: Living sequences, by the router's ids.
        adapters_told: Resident adapters of which the router was informed when it attached.
        news: News of the current step, before they are added to the outbox.
        told_step: Number of the last step whose news were added to the outbox.
        told_at_s: Monotonic seconds when news were last added to the outbox.
        silence_max_s: Seconds without a confirmation after which the router is treated as frozen,
            or 0 for never.
        silent_s: Seconds since the router last confirmed news, or 0 if all news are confirmed.
        grants: Number of the router's credit grants when `silent_s` was last computed.
        orphaned_at_s: Time when the stream was found broken, or None while the stream is intact.
        unconfirmed: Ends of the sequences that the router may not have received.
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
        """Add passed time to `silent_s`, and return whether the router now counts as frozen."""
        grants = self.outbox.unconfirmed_since_grant
        self.silent_s = self.silent_s + passed_s if grants == self.grants is not None else 0.0
        self.grants = grants
        return 0.0 < self.silence_max_s <= self.silent_s

    def finish(
        self, sequence: int, finished: wire.Finished, told: SequenceRecord | None = None
    ) -> None:
        """Record that a sequence has ended."""
        self.sequences.pop(sequence, None)
        self.news.ended.append(SequenceEnd(finished, told))


@dataclass(slots=True, eq=False)
class Probe:
    """A canary inference in progress.

    Attributes:
        reply: Function that sends the answer.
        started_at_s: Start of the probe in monotonic seconds.
        until_s: Deadline of the caller in monotonic seconds, or infinite without a deadline.
        is_late: Whether the deadline has passed, so that the driver is cancelling the sequence.
    """

    reply: Reply
    started_at_s: float
    until_s: float = inf
    is_late: bool = False


@dataclass(slots=True, eq=False)
class Hosted:
    """A living sequence, with its owner, the owner's id of the sequence, and its output.

    Attributes:
        key: Key of the sequence in the driver.
        id: Router's id of the sequence, unique in its attachment.
        owner: Attachment or probe that owns the sequence. When a router resumes, its new attachment
            becomes the owner.
        is_parked: Whether the sequence still waits for its adapter or its grammar, before it is
            added to the driver.
        load_us: Microseconds that the sequence waited for its adapter, or 0 without a load.
    """

    key: int
    id: int
    owner: HostAttachment | Probe
    told: SequenceRecord = field(default_factory=SequenceRecord)
    is_parked: bool = False
    load_us: int = 0


def refused_frame(error: RefusedError) -> wire.HostFrame:
    """Return the answer to a request that is refused."""
    return wire.HostFrame(refused=wire.Refused(code=error.code, message=error.message))


def refusal(key: int, error: RefusedError, prompt_tokens: int = 0) -> FinishedEvent:
    """Return the end event of a sequence that was not accepted."""
    reason = _FINISHES[error.code.policy.from_engine]
    return FinishedEvent(key, reason, error.code, error.message, prompt_tokens, param=error.param)


def finished_message(sequence: int, event: FinishedEvent) -> wire.Finished:
    """Return the message that reports the end of a sequence to its router."""
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
