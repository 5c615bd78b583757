"""The endings of requests, their outcome messages, and the mapping from engine finish reasons."""

from router.core.types.actions import Stats
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

FINISHED = {
    engine.FINISH_REASON_STOP: wire.OUTCOME_KIND_STOP,
    engine.FINISH_REASON_LENGTH: wire.OUTCOME_KIND_LENGTH,
}
NAMES = {
    wire.OUTCOME_KIND_STOP: "stop",
    wire.OUTCOME_KIND_LENGTH: "length",
    wire.OUTCOME_KIND_CANCELLED: "cancelled",
    wire.OUTCOME_KIND_REJECTED: "rejected",
    wire.OUTCOME_KIND_EVICTED: "evicted",
    wire.OUTCOME_KIND_FAILED: "failed",
    wire.OUTCOME_KIND_LOST: "lost",
}


class Ending:
    """The ending of a request, which is sent to the gateway as an `Outcome`."""

    __slots__ = (
        "code",
        "drafts",
        "kind",
        "message",
        "output_tokens",
        "param",
        "prefill_us",
        "retry_after_s",
        "score",
    )

    def __init__(
        self,
        kind: wire.OutcomeKind,
        code: ErrorCode | None = None,
        message: str = "",
        *,
        param: str = "",
        retry_after_s: float = 0.0,
        output_tokens: int = 0,
        prefill_us: int = 0,
        drafts: engine.Drafts | None = None,
        score: engine.Score | None = None,
    ) -> None:
        self.kind = kind
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.output_tokens = output_tokens
        self.prefill_us = prefill_us
        self.drafts = drafts
        self.score = score

    def outcome(self, handle: int) -> wire.Outcome:
        """Return the message for the gateway."""
        outcome = wire.Outcome(handle=handle, kind=self.kind)
        # Most endings have few of these fields, and setting a default value costs as much time as
        # setting any other value.
        if self.code is not None:
            outcome.code = self.code
        if self.message:
            outcome.message = self.message
        if self.param:
            outcome.param = self.param
        if self.retry_after_s:
            outcome.retry_after_ms = round(self.retry_after_s * 1000)
        if self.output_tokens:
            outcome.output_tokens = self.output_tokens
        if self.prefill_us:
            outcome.prefill_us = self.prefill_us
        if self.drafts is not None:
            outcome.drafts.CopyFrom(self.drafts)
        if self.score is not None:
            outcome.score.CopyFrom(self.score)
        return outcome


def count(ending: Ending, stats: Stats) -> None:
    """Add an ending to the totals."""
    key = (NAMES[ending.kind], ending.code or "")
    stats.outcomes[key] = stats.outcomes.get(key, 0) + 1
