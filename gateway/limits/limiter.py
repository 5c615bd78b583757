"""Limits per account, key and model, shared by all gateways.

Tokens are reserved before a request and settled after its end. The levels are in Valkey. If Valkey
misses its deadline, this process alone grants a share of each limit. An outage of Valkey is
therefore no outage of the gateway.
"""

import asyncio
from collections.abc import Callable, Sequence

from gateway.directory import Principal
from gateway.limits.buckets import UNSIGNED_MAX, BucketScope, decide_locally, part
from gateway.limits.forecast import AnswerForecast
from gateway.limits.headers import headers
from gateway.limits.scopes import Binding, Scopes
from gateway.limits.shared import SharedBuckets
from gateway.limits.valkey import ValkeyClient
from gateway.limits.verdict import Verdict
from sluice.errors import ErrorCode, RejectedError
from sluice.limits import BY_NUMBER, Counted


class Reservation:
    """The reservation of one request in its limits.

    Attributes:
        scopes: Scopes of the reservation, empty for callers without limits.
        caps: Largest number of tokens that each scope could grant at the time of the reservation.
        tokens: Reserved tokens.
        forecast: Forecast that learns the lengths of the answers.
        answers: Number of requested answers.
        is_local: Whether the reservation was granted without Valkey.
    """

    __slots__ = (
        "_verdict",
        "answers",
        "caps",
        "forecast",
        "is_local",
        "is_settled",
        "scopes",
        "tokens",
    )

    def __init__(  # positional for speed, because each request creates one
        self,
        scopes: Sequence[BucketScope],
        caps: Sequence[int],
        tokens: int,
        forecast: AnswerForecast,
        answers: int,
        verdict: Verdict | None,
        is_local: bool,
    ) -> None:
        self.scopes = scopes
        self.caps = caps
        self.tokens = tokens
        self.forecast = forecast
        self.answers = answers
        self.is_local = is_local
        self.is_settled = False
        self._verdict = verdict

    @property
    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` headers at the time of the grant, empty without limits."""
        return {} if self._verdict is None else headers(self.scopes, self._verdict)


class LimitExceededError(RejectedError):
    """The caller is over its own limit. The `headers` are the answer's `x-ratelimit-*` headers."""

    def __init__(
        self, code: ErrorCode, message: str, wait_s: float, headers: dict[str, str]
    ) -> None:
        super().__init__(code, message, retry_after_s=wait_s)
        self.headers = headers


def _no_budgets(tenant_id: str, model_id: str) -> None:
    pass


class Limiter:
    """Reserves and settles the limits of requests.

    Attributes:
        local_decisions: Reservations that were decided without Valkey.
    """

    def __init__(
        self,
        valkey: ValkeyClient,
        *,
        local_share: float,
        clock: Callable[[], float],
        require_budget: Callable[[str, str], None] = _no_budgets,
    ) -> None:
        """All gateways share the buckets in Valkey.

        Args:
            valkey: Client of the shared buckets.
            local_share: Share of each limit that may be granted while Valkey is unreachable.
            clock: Monotonic seconds.
            require_budget: Raises if a budget is exhausted. Its arguments are the ids of tenant and
                model.
        """
        self._require_budget = require_budget
        self._shared = SharedBuckets(valkey)
        self._scopes = Scopes()
        self._local_share = local_share
        self._clock = clock
        self.local_decisions = 0

    @property
    def is_shared(self) -> bool:
        """Whether reservations wait for Valkey now."""
        return self._shared.is_up

    @property
    def lost_settlements(self) -> int:
        """Number of settlements that Valkey may not have received."""
        return self._shared.lost_settlements

    async def reserve(
        self,
        principal: Principal,
        model_id: str,
        *,
        prompt_tokens: int,
        output_tokens_max: int,
        is_bounded: bool,
        answers: int = 1,
    ) -> Reservation:
        """Reserve one request and its expected tokens.

        Raises LimitExceededError if the request or its tokens exceed a limit. If a budget is
        exhausted, BudgetExhaustedError is raised instead, except for a request without tokens.

        Args:
            principal: The caller.
            model_id: Id of the requested model.
            prompt_tokens: Tokens of the prompt.
            output_tokens_max: Bound of all answers together, or 0 if no output is generated.
            is_bounded: Whether the caller itself set the bound.
            answers: Number of generated answers.
        """
        binding = self._scopes.of(principal, model_id)
        _, tenant_id, scopes, forecast = binding
        if prompt_tokens or output_tokens_max:
            self._require_budget(tenant_id, model_id)
        if not output_tokens_max:
            answers = 0
        if not scopes:
            return Reservation(scopes, (), 0, forecast, answers, None, True)
        tokens = prompt_tokens
        if answers:
            tokens += forecast.tokens(output_tokens_max, answers, is_bounded=is_bounded)
        tokens = min(tokens, UNSIGNED_MAX)
        caps = [scope.tokens_max for scope in scopes]  # limits may change before Valkey replies
        answer = self._shared.reserve(scopes, caps, tokens)
        if answer is not None:
            try:
                verdict = await answer
            except asyncio.CancelledError:
                self._shared.abandon(answer, scopes, caps, tokens)
                raise
            if verdict is not None:
                if not verdict[0]:
                    return Reservation(scopes, caps, tokens, forecast, answers, verdict, False)
                raise _exceeded(scopes, tokens, verdict)
        return self._reserve_locally(binding, tokens, answers)

    async def count(self, principal: Principal, model_id: str) -> Reservation:
        """Reserve one request before its tokens are counted, because tokenizing itself is costly.

        `reserve_counted` or `settle` must follow. A request that is refused later stays counted.
        """
        return await self.reserve(
            principal, model_id, prompt_tokens=0, output_tokens_max=0, is_bounded=True
        )

    async def reserve_counted(
        self,
        counted: Reservation,
        principal: Principal,
        model_id: str,
        *,
        prompt_tokens: int,
        output_tokens_max: int,
        is_bounded: bool,
        answers: int = 1,
    ) -> Reservation:
        """Reserve the expected tokens of a counted request, with arguments as in `reserve`.

        A refusal leaves the request counted, since its prompt was tokenized.
        """
        # The same batch returns the counted request and reserves the request again with its tokens.
        self.settle(counted, prompt_tokens=0, output_tokens=0, was_served=False)
        try:
            return await self.reserve(
                principal,
                model_id,
                prompt_tokens=prompt_tokens,
                output_tokens_max=output_tokens_max,
                is_bounded=is_bounded,
                answers=answers,
            )
        except (RejectedError, asyncio.CancelledError):
            for scope in counted.scopes:
                scope.owe_request()
            self._shared.send_changes(counted.scopes)
            raise

    def settle(
        self, reservation: Reservation, *, prompt_tokens: int, output_tokens: int, was_served: bool
    ) -> None:
        """Replace the estimate by the actual usage. A request that was not served costs nothing.

        An answer without tokens does not change the forecast. Only the first settlement of a
        reservation counts.
        """
        if reservation.is_settled:
            return
        reservation.is_settled = True
        if was_served and output_tokens and reservation.answers:
            reservation.forecast.learn(output_tokens, reservation.answers)
        reserved, used = reservation.tokens, prompt_tokens + output_tokens
        for scope, cap in zip(reservation.scopes, reservation.caps, strict=True):
            if reservation.is_local:
                taken = min(reserved, part(cap, self._local_share))
                scope.settle_local(taken, used, was_served=was_served)
            else:
                scope.settle(min(reserved, cap), used, was_served=was_served)
        self._shared.send_changes(reservation.scopes)

    async def flush(self) -> None:
        """Send the last settlements before this process ends, if Valkey answers in time."""
        await self._shared.flush()

    def _reserve_locally(self, binding: Binding, tokens: int, answers: int) -> Reservation:
        _, _, scopes, forecast = binding
        self.local_decisions += 1
        verdict = decide_locally(scopes, tokens, self._local_share, self._clock() * 1000)
        if verdict[0]:
            raise _exceeded(scopes, tokens, verdict)
        self._shared.hold(scopes)
        caps = [scope.tokens_max for scope in scopes]
        return Reservation(scopes, caps, tokens, forecast, answers, verdict, True)


def _exceeded(scopes: Sequence[BucketScope], tokens: int, verdict: Verdict) -> LimitExceededError:
    kind, scope, wait_s = BY_NUMBER[verdict[0]], scopes[verdict[1]], verdict[2] / 1000
    value = scope.limits.get(kind.name, 0)  # the limit may have changed meanwhile
    reached = f"Rate limit reached for {scope.label}: {value} {kind.text}"
    again = f"Try again in {wait_s:.1f} s"
    if kind.counted is Counted.REQUESTS:
        message = f"{reached}. {again}."
    elif kind.counted is Counted.TOKENS:
        message = (
            f"{reached}, and this request"
            f" is expected to need {tokens}. {again}, shorten the prompt or lower max_tokens."
        )
    else:
        message = (
            f"Too many requests at once for {scope.label}: at most {value} may be"
            " open. Wait for an answer before you send more."
        )
    return LimitExceededError(kind.code, message, wait_s, headers(scopes, verdict))
