"""How attempts to get an answer end. Pure."""

from enum import Enum, auto
from typing import NamedTuple

from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire


class EndKind(Enum):
    """The kind of an ending."""

    STOP = auto()
    LENGTH = auto()
    FILTERED = auto()  # a rule of the tenant has ended the answer
    REFUSED = auto()  # the request was rejected, evicted, or failed for good; `code` has the reason
    LOST = auto()  # the replica, the router or the connection was lost; the answer can be resumed


class GenerationEnd(NamedTuple):
    """The end of an attempt; the fields besides `kind` describe endings other than success.

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
    wire.OUTCOME_KIND_CANCELLED: EndKind.LOST,  # not by this gateway, which awaits no cancelled end
    wire.OUTCOME_KIND_LOST: EndKind.LOST,
}


_CODES = {code.value: code for code in ErrorCode}


def ending_of(outcome: wire.Outcome) -> GenerationEnd:
    """Return the ending that a router's outcome means."""
    kind = _KINDS.get(outcome.kind, EndKind.REFUSED)
    code = _CODES.get(outcome.code)
    if code is None:  # a success, or a code that only a newer router has
        code = ErrorCode.REPLICA_LOST if kind is EndKind.LOST else ErrorCode.ENGINE_FAILED
    retry_after_s = outcome.retry_after_ms / 1000 if outcome.retry_after_ms else None
    return GenerationEnd(kind, code, outcome.message, retry_after_s, outcome.param)
