"""The kinds of limits, shared by database, admin REST, messages, CLI and gateways. Pure.

A limit bounds one kind of quantity in one scope, which is an account, a key, or a model in an
account. A set of limits is a dictionary from names of kinds to values, where a missing kind or the
value 0 means no limit. A new kind needs one more entry of `KINDS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from sluice.errors import ErrorCode

if TYPE_CHECKING:  # imported for types only, so that the command line starts without protobuf
    from sluice.wire.control.v1 import control_pb2 as wire

VALUE_MAX = 2**31 - 1  # largest value that fits PostgreSQL's integer and protobuf's uint32
SLOT_WAIT_MS = 1000  # retry time at the concurrency limit, as the end of open requests is unknown

Limits = dict[str, int]
Holder: TypeAlias = "wire.Tier | wire.Tenant | wire.ApiKey"


class Counted(IntEnum):
    """A quantity that limits bound. Gateways count the first three in Valkey."""

    REQUESTS = 1
    TOKENS = 2  # tokens of prompts and answers
    OPEN = 3  # requests that have started and not ended
    LENGTH = 4  # tokens of a single request


_CODES = {
    Counted.REQUESTS: ErrorCode.RATE_LIMIT_REQUESTS,
    Counted.TOKENS: ErrorCode.RATE_LIMIT_TOKENS,
    Counted.OPEN: ErrorCode.RATE_LIMIT_CONCURRENCY,
    Counted.LENGTH: ErrorCode.CONTEXT_LENGTH_EXCEEDED,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LimitKind:
    """A kind of limit.

    Attributes:
        number: Number of the kind in Valkey, 1 to 255, which is never reused for another kind.
        name: Name of the kind in JSON, options and messages.
        counted: The limited quantity.
        text: Description of the unit, as it follows a number.
        window_s: Seconds in which an empty token bucket refills, or 0 without refill.
        header: Suffix of the kind's `x-ratelimit-*` headers, or empty without headers.
        event_name: Name in the events of requests, or empty if it equals `name`.
    """

    number: int
    name: str
    counted: Counted
    text: str
    window_s: int = 0
    header: str = ""
    event_name: str = ""

    @property
    def code(self) -> ErrorCode:
        """The error code of a request that exceeds the limit."""
        return _CODES[self.counted]

    @property
    def window_ms(self) -> int:
        """The window in milliseconds."""
        return self.window_s * 1000

    def help(self, of: str) -> str:
        """Return the help text of an option, where `of` names the owner of the limit."""
        return f"{self.text[0].upper()}{self.text[1:]} {of}"

    def ms_each(self, value: float) -> float:
        """Return the milliseconds in which one unit refills under a limit of `value`."""
        return self.window_ms / value if self.window_s else SLOT_WAIT_MS


_Kind = LimitKind
CONTEXT = _Kind(
    number=4,
    name="context_tokens_max",
    counted=Counted.LENGTH,
    text="tokens of one request and its answer",
)
KINDS = (
    _Kind(
        number=1,
        name="rpm",
        counted=Counted.REQUESTS,
        text="requests per minute",
        window_s=60,
        header="requests",
    ),
    _Kind(
        number=2,
        name="tpm",
        counted=Counted.TOKENS,
        text="tokens per minute",
        window_s=60,
        header="tokens",
    ),
    _Kind(
        number=5,
        name="rpd",
        counted=Counted.REQUESTS,
        text="requests per day",
        window_s=86_400,
        header="requests-day",
    ),
    _Kind(
        number=3,
        name="requests_max",
        counted=Counted.OPEN,
        text="requests at once",
        event_name="at_once",
    ),
    CONTEXT,
)
BY_NAME = {kind.name: kind for kind in KINDS}
BY_NUMBER = {kind.number: kind for kind in KINDS}
# Kinds that are sums over requests. Only these can be set for a key, because the length limit of a
# request does not depend on the key.
METERED = tuple(kind for kind in KINDS if kind.counted is not Counted.LENGTH)
NAMES = tuple(kind.name for kind in KINDS)
METERED_NAMES = tuple(kind.name for kind in METERED)


def metered(limits: Mapping[str, int]) -> Limits:
    """Return the limits of the kinds in `METERED`, in the order of `KINDS`."""
    return {name: limits[name] for name in METERED_NAMES if name in limits}


def narrowest(*all_limits: Mapping[str, int]) -> Limits:
    """Return the least limit of each kind."""
    found: Limits = {}
    for limits in all_limits:
        for name, value in limits.items():
            found[name] = min(value, found.get(name, value))
    return found


def limits_of(holder: Holder, model_id: str = "") -> Limits:
    """Return the limits in a message of the control plane. Unknown kinds are ignored.

    Args:
        holder: Message with the limits.
        model_id: Model whose limits are returned, or empty for the limits of all models together.
    """
    # Only tiers have limits per model. The limits of a tenant are in a nested message.
    if model_id:
        found = getattr(holder, "model_limits", {}).get(model_id)
    else:
        found = getattr(holder, "limits", holder)
    return {name: value for name in NAMES if (value := getattr(found, name, 0))}
