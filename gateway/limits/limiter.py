"""A tenant's and a key's limits, shared by all gateways: reserve before, settle after.

The truth is in Valkey, one atomic script per call. When Valkey does not answer in time, this
process grants a share of each limit by itself: a bounded allowance, never an outage.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from gateway.directory import Principal
from gateway.limits.buckets import (
    MINUTE_S,
    RESERVE_SCRIPT,
    SETTLE_SCRIPT,
    LocalBuckets,
    Scope,
    Verdict,
)
from gateway.limits.valkey import ValkeyClient, ValkeyError
from sluice.errors import ErrorCode, RejectedError

_RESERVE_SHA = hashlib.sha1(RESERVE_SCRIPT.encode()).hexdigest()  # noqa: S324 - Valkey's name for it
_SETTLE_SHA = hashlib.sha1(SETTLE_SCRIPT.encode()).hexdigest()  # noqa: S324 - Valkey's name for it

# Reserved for callers who set no bound on the answer; the settlement corrects it.
_EXPECTED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was taken, and the headers that tell the client about it.

    Attributes:
        scopes: Where; empty for callers without limits.
        tokens: How many tokens.
        is_local: Granted without Valkey, so to be settled without it.
        headers: `x-ratelimit-*`.
    """

    scopes: Sequence[Scope]
    tokens: int
    is_local: bool
    headers: dict[str, str]


class LimitExceededError(RejectedError):
    """The caller is over its own limit; `headers` are the `x-ratelimit-*` to send."""

    def __init__(
        self, code: ErrorCode, message: str, wait_s: float, headers: dict[str, str]
    ) -> None:
        super().__init__(code, message, retry_after_s=wait_s)
        self.headers = headers


class Limiter:
    """Reserves and settles."""

    def __init__(
        self,
        valkey: ValkeyClient,
        *,
        local_share: float,
        clock: Callable[[], float],
    ) -> None:
        """Prepare.

        Args:
            valkey: The shared truth.
            local_share: Of each limit, what may be granted while Valkey is away.
            clock: Monotonic seconds.
        """
        self._valkey = valkey
        self._local = LocalBuckets(share=local_share)
        self._clock = clock
        self.local_decisions = 0
        self.lost_settlements = 0

    async def reserve(
        self,
        principal: Principal,
        model_id: str,  # noqa: ARG002 - limits by model follow
        *,
        prompt_tokens: int,
        output_tokens_max: int,
        is_bounded: bool,
    ) -> Reservation:
        """Take one request and its expected tokens; LimitExceededError when there is no room.

        Args:
            principal: The caller.
            model_id: What is asked for.
            prompt_tokens: Known.
            output_tokens_max: All choices together.
            is_bounded: Whether the caller itself set that bound.
        """
        expected = output_tokens_max if is_bounded else min(output_tokens_max, _EXPECTED_TOKENS)
        tokens = prompt_tokens + expected
        scopes = scopes_of(principal)
        if not scopes:
            return Reservation((), tokens, is_local=True, headers={})
        try:
            verdict = await self._shared_verdict(scopes, tokens)
            is_local = False
        except ValkeyError:
            self.local_decisions += 1
            verdict = self._local.reserve(scopes, tokens, self._clock())
            is_local = True
        headers = _headers(scopes, verdict)
        if verdict.is_granted:
            return Reservation(scopes, tokens, is_local, headers)
        code, noun = (
            (ErrorCode.RATE_LIMIT_REQUESTS, "requests")
            if verdict.is_request_limit
            else (ErrorCode.RATE_LIMIT_TOKENS, "tokens")
        )
        raise LimitExceededError(
            code,
            f"Rate limit reached for {noun} per minute. Try again in {verdict.wait_s:.1f} s.",
            verdict.wait_s,
            headers,
        )

    def settle(
        self, reservation: Reservation, *, prompt_tokens: int, output_tokens: int, was_served: bool
    ) -> None:
        """Replace the estimate by what was used; one that was not served costs no request."""
        used = prompt_tokens + output_tokens
        if not reservation.scopes:
            return
        requests = 0 if was_served else 1
        if reservation.is_local:
            self._local.settle(
                reservation.scopes, reservation.tokens, used, requests, self._clock()
            )
        else:
            head = (reservation.tokens, used, requests)
            arguments = _arguments(reservation.scopes, head)
            self._send_settlement(("EVALSHA", _SETTLE_SHA, *arguments), arguments)

    def _send_settlement(
        self, command: tuple[str | int, ...], arguments: Sequence[str | int]
    ) -> None:
        """Send without waiting; once more with the whole script when Valkey does not know it."""

        def answered(future: asyncio.Future[object]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is None:
                return
            if command[0] == "EVALSHA" and _is_unknown_script(error):
                self._send_settlement(("EVAL", SETTLE_SCRIPT, *arguments), arguments)
            else:
                self.lost_settlements += 1

        try:
            self._valkey.call(*command).add_done_callback(answered)
        except ValkeyError:
            # The reservation stands: the caller is short of it for a minute at most.
            self.lost_settlements += 1

    async def _shared_verdict(self, scopes: Sequence[Scope], tokens: int) -> Verdict:
        try:
            reply = await self._ask_for("EVALSHA", _RESERVE_SHA, scopes, tokens)
        except ValkeyError as error:
            if not _is_unknown_script(error):
                raise
            reply = await self._ask_for("EVAL", RESERVE_SCRIPT, scopes, tokens)
        values = cast("list[int]", reply)
        left = [(values[3 + 2 * i], values[4 + 2 * i]) for i in range(len(scopes))]
        return Verdict(values[0] == 1, values[1] == 1, values[2] / 1000, left)

    async def _ask_for(
        self, command: str, script: str, scopes: Sequence[Scope], tokens: int
    ) -> object:
        """Send a reservation; when its client leaves meanwhile, what it was granted goes back."""

        def give_back(future: asyncio.Future[object]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            if cast("list[int]", future.result())[0] == 1:
                taken = Reservation(scopes, tokens, is_local=False, headers={})
                self.settle(taken, prompt_tokens=0, output_tokens=0, was_served=False)

        reply = self._valkey.call(command, script, *_arguments(scopes, (tokens,)))
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            reply.add_done_callback(give_back)
            raise


def scopes_of(principal: Principal) -> Sequence[Scope]:
    """Return what limits a caller: the tenant by its tier, and the key when it has its own limits.

    The braces keep a tenant's scopes on one shard of a cluster.
    """
    tenant, tier, key = principal.tenant.id, principal.tier, principal.key
    scopes = (
        Scope(f"lim:{{{tenant}}}", tier.rpm, tier.tpm),
        Scope(f"lim:{{{tenant}}}:{key.id}", key.rpm, key.tpm),
    )
    return tuple(scope for scope in scopes if scope.rpm or scope.tpm)


def _arguments(scopes: Sequence[Scope], head: tuple[int, ...]) -> list[str | int]:
    """Return what follows the script's name: the number of keys, the keys, then the arguments."""
    limits = (limit for scope in scopes for limit in (scope.rpm, scope.tpm))
    return [len(scopes), *(scope.name for scope in scopes), *head, *limits]


def _is_unknown_script(error: BaseException) -> bool:
    return isinstance(error, ValkeyError) and str(error).startswith("NOSCRIPT")


def _headers(scopes: Sequence[Scope], verdict: Verdict) -> dict[str, str]:
    """Return `x-ratelimit-*`: of each kind, the limit with the least left."""
    headers: dict[str, str] = {}
    for index, kind in enumerate(("requests", "tokens")):
        limits = [
            (left[index], limit)
            for scope, left in zip(scopes, verdict.left, strict=True)
            if (limit := (scope.rpm, scope.tpm)[index])
        ]
        if limits:
            left, limit = min(limits)
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(left)))
            headers[f"x-ratelimit-reset-{kind}"] = duration((limit - left) * MINUTE_S / limit)
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI's headers write it: 120ms, 7.5s, 1m30s."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return (f"{int(minutes)}m" if minutes else "") + f"{rest:g}s"
