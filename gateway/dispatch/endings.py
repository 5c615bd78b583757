"""The ways in which attempts to generate an answer end. Pure."""

from enum import Enum, auto
from typing import NamedTuple

from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire


class EndKind(Enum):
    """The kind of an ending."""

    STOP = auto()
    LENGTH = auto()
    FILTERED = auto()  # a rule of the tenant has ended the answer
    # The request was rejected, evicted, or failed for good. The field `code` names the reason.
    REFUSED = auto()
    # The replica, router or connection was lost, so another attempt can continue the answer.
    LOST = auto()


class GenerationEnd(NamedTuple):
    """The end of an attempt. The fields after `kind` describe endings other than success.

    Attributes:
        param: The invalid field of the engine's request, or empty if no field is known.
    """

    kind: EndKind
    code: ErrorCode = ErrorCode.INTERNAL
    message: str = ""
    retry_after_s: float | None = None
    param: str = ""

    @property
    def outcome(self) -> str:
        """The outcome by its name in events."""
        if self.kind is EndKind.STOP:
            return "stop"
        return "length" if self.kind is EndKind.LENGTH else self.code


_KINDS = {
    wire.OUTCOME_KIND_STOP: EndKind.STOP,
    wire.OUTCOME_KIND_LENGTH: EndKind.LENGTH,
    wire.OUTCOME_KIND_REJECTED: EndKind.REFUSED,
    wire.OUTCOME_KIND_EVICTED: EndKind.REFUSED,
    wire.OUTCOME_KIND_FAILED: EndKind.REFUSED,
    # The gateway ignores outcomes after its own cancels, so this cancel has another cause.
    wire.OUTCOME_KIND_CANCELLED: EndKind.LOST,
    wire.OUTCOME_KIND_LOST: EndKind.LOST,
}


_CODES = {code.value: code for code in ErrorCode}


def ending_of(outcome: wire.Outcome) -> GenerationEnd:
    """Translate a router's outcome into an ending."""
    kind = _KINDS.get(outcome.kind, EndKind.REFUSED)
    code = _CODES.get(outcome.code)
    if code is None:  # a success, or a code that only a newer router defines
        code = ErrorCode.REPLICA_LOST if kind is EndKind.LOST else ErrorCode.ENGINE_FAILED
    retry_after_s = outcome.retry_after_ms / 1000 if outcome.retry_after_ms else None
    return GenerationEnd(kind, code, outcome.message, retry_after_s, outcome.param)
