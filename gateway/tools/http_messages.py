"""Messages exchanged with tools over HTTP: requests and replies. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.tools.failures import ToolCallError

_RETRYABLE = frozenset({408, 425, 429})  # every status from 500 on is retryable, too


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request to a tool, whose `repr` omits secret headers."""

    method: str
    url: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class OutgoingReply:
    """The complete reply of a tool, with header names in lower case."""

    status: int
    kind: str  # media type, without parameters
    headers: Mapping[str, str]
    body: bytes


def require_ok(reply: OutgoingReply, said: str = "") -> None:
    """Raise ToolCallError unless the status is a success. `said` is the tool's error text."""
    if reply.status < 300:
        return
    may_repeat = reply.status in _RETRYABLE or reply.status >= 500
    text = f"status {reply.status}" + (f": {said}" if said else "")
    raise ToolCallError(text, may_repeat=may_repeat, is_fault=may_repeat)
