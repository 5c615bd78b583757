"""Runs approved calls only once, by a lease in Valkey that the call's outcome later replaces.

A client that disconnects while an approved call runs may send its approval again. The call is then
not repeated. The new response has the output of the first call, or is refused while that call runs.
If the outcome is unknown, the model is informed, or an idempotent call is repeated.
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import orjson

from gateway.content.seals import ContentGoneError, ContentSeals
from gateway.limits.valkey_commands import ValkeyCommands, ValkeyDownError
from sluice.errors import ErrorCode, PlatformError, RejectedError

_KEY = b"sluice:approval:"
_KEPT_MS = 24 * 3_600_000
_SETTLE_MS = 5000  # milliseconds between a call's deadline and the storage of its outcome
_UNKNOWN = "The call began before, and its result is unknown. It is not repeated."

# Claims a lease that is free or belongs to this response already. Otherwise returns the lease.
_CLAIM = (
    b"local known = redis.call('GET', KEYS[1])"
    b" if known and known ~= ARGV[1] then return known end"
    b" redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) return false"
)


@dataclass(frozen=True, slots=True)
class ApprovedWork:
    """An approved call with the facts that identify its lease.

    Attributes:
        tenant_id: Tenant of the call.
        request_id: Id of the approval request's item.
        call: Server, tool and arguments, so that a forged id cannot name another call.
        is_idempotent: Whether the call may be repeated.
    """

    tenant_id: str
    request_id: str
    call: Sequence[str]
    is_idempotent: bool

    @property
    def place(self) -> str:
        """Key that identifies the call's lease in Valkey."""
        named = orjson.dumps([self.tenant_id, self.request_id, *self.call])
        return hashlib.sha256(named).hexdigest()


@dataclass(frozen=True, slots=True)
class KnownOutcome:
    """The outcome of a call that ran before, which is either an output or a failure."""

    output: str | None = None
    failure: str | None = None


class ApprovalLeases:
    """The leases of approved calls, for one worker."""

    def __init__(self, commands: ValkeyCommands, seals: ContentSeals) -> None:
        """`seals` encrypts the outputs in Valkey."""
        self._commands, self._seals = commands, seals

    async def claim(
        self, work: ApprovedWork, response_id: str, timeout_s: float
    ) -> KnownOutcome | None:
        """Claim the lease of a call, and return its stored outcome or None if the call must run.

        Args:
            work: The call.
            response_id: Id of the response.
            timeout_s: Seconds within which the call has to end.

        Raises:
            PlatformError: CONFLICT if another response is running the call.
            RejectedError: UNAVAILABLE if Valkey is down and the call is not idempotent.
        """
        until_ms = _now_ms() + round(timeout_s * 1000) + _SETTLE_MS
        mine = orjson.dumps({"by": response_id, "until_ms": until_ms})
        try:
            words = (b"EVAL", _CLAIM, 1, _key(work), mine, _KEPT_MS)
            found = cast("bytes | None", await self._commands.call(words))
        except ValkeyDownError:
            if work.is_idempotent:
                return None
            text = "An approved call cannot be made now; try again shortly."
            raise RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0) from None
        return None if found is None else self._known(work, found)

    def _known(self, work: ApprovedWork, found: bytes) -> KnownOutcome | None:
        try:
            known = orjson.loads(self._seals.opened(work.tenant_id, work.place, found))
        except ContentGoneError:
            known = {}
        if "output" in known or "failure" in known:
            return KnownOutcome(known.get("output"), known.get("failure"))
        if known.get("until_ms", 0) > _now_ms():
            text = (
                f"The call of '{work.request_id[:100]}' is made for response '{known['by']}'; try"
                " again when it has ended."
            )
            raise PlatformError(ErrorCode.CONFLICT, text, param="input")
        return None if work.is_idempotent else KnownOutcome(failure=_UNKNOWN)

    def settle(self, work: ApprovedWork, outcome: KnownOutcome) -> None:
        """Store the outcome of a call, without waiting for Valkey."""
        known = {"failure": outcome.failure}
        told = {"output": outcome.output} if outcome.failure is None else known
        with suppress(RejectedError):  # without the key, the outcome stays unknown
            sealed = self._seals.sealed(work.tenant_id, work.place, orjson.dumps(told))
            self._commands.send_only((b"SET", _key(work), sealed, b"PX", _KEPT_MS))

    def cut(self, work: ApprovedWork) -> None:
        """Record that a call was abandoned with unknown outcome, without waiting for Valkey."""
        given_up = orjson.dumps({"by": "", "until_ms": 0})
        self._commands.send_only((b"SET", _key(work), given_up, b"PX", _KEPT_MS))

    def release(self, work: ApprovedWork) -> None:
        """Release the lease of a call that was not started, without waiting for Valkey."""
        self._commands.send_only((b"DEL", _key(work)))


def _key(work: ApprovedWork) -> bytes:
    return _KEY + work.place.encode()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
