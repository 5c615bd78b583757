"""The loop of a model and its server tools, as a state machine of events, actions and time. Pure.

A round is one answer of the model. Its server tool calls run concurrently. When all of them have
been answered, the next round of the model starts. The loop ends when the model calls no more tools,
when the client has to run a call, or when a budget is used up. Each call is answered exactly
once, with the tool's output or with the reason why it was not run. A shell around this module
performs the actions and reports their results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_ATTEMPTS_MAX = 3  # maximum number of attempts of an idempotent call
_RETRY_S = 0.2  # Seconds before the second attempt. The pause is doubled for each further attempt.

_SKIPPED = "The tool was not run: "


class LoopEnd(StrEnum):
    """The budget that ended a loop early, by its name in `incomplete_details.reason`."""

    CALLS = "max_tool_calls"
    TOKENS = "max_tool_tokens"
    SECONDS = "max_tool_seconds"
    COST = "max_tool_cost"


@dataclass(frozen=True, slots=True)
class LoopBudget:
    """The upper bounds of one loop.

    Attributes:
        calls: Number of calls, not counting repeated attempts. A loop has at most one round more
            than calls.
        tokens: Prompt and output tokens of all rounds, checked between rounds.
        seconds: Seconds since the start of the loop.
        micros: Price of all calls, in millionths of the ledger's currency.
    """

    calls: int
    tokens: int
    seconds: float
    micros: int


class CallMode(StrEnum):
    """The executor of a call, which is this worker (also after approval), the client, or none."""

    RUN = "run"
    APPROVE = "approve"  # a person has to approve the call first
    CLIENT = "client"  # the client runs it
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class LoopCall:
    """A call that the model requested or a person approved.

    Attributes:
        call_id: Id, unique in the loop.
        mode: Executor of the call.
        refusal: Reason for the model why the call is not run, in mode `REFUSE`.
        timeout_s: Seconds for one attempt.
        is_idempotent: Whether a failed attempt may be repeated.
        price_micros: Price of the call, independent of its number of attempts.
    """

    call_id: str
    mode: CallMode = CallMode.RUN
    refusal: str = ""
    timeout_s: float = 10.0
    is_idempotent: bool = False
    price_micros: int = 0


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A failed attempt, with the text for the model and whether another attempt may succeed."""

    message: str
    may_repeat: bool = False


# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskModel:
    """The action that starts the model's next round, with all results so far."""


@dataclass(frozen=True, slots=True)
class StartCall:
    """The action that starts an attempt of a call after `after_s` seconds.

    The shell has to report the end of the attempt.
    """

    call_id: str
    attempt: int
    timeout_s: float
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StopCall:
    """The action that cancels the running attempt of a call. The shell does not report its end."""

    call_id: str


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """The action that sends the answer of an ended call to the client and the model.

    Attributes:
        call_id: Id of the call.
        failure: Failure text for the model, or None if the tool answered.
        was_run: Whether an attempt was started.
        attempts: Number of attempts.
        duration_s: Seconds since the first attempt.
    """

    call_id: str
    failure: str | None
    was_run: bool
    attempts: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndLoop:
    """The action that ends the loop.

    Attributes:
        reason: The used-up budget, or None if the model has finished or the client has to act.
    """

    reason: LoopEnd | None


LoopAction = AskModel | StartCall | StopCall | AnswerCall | EndLoop


@dataclass(slots=True)
class _Running:
    call: LoopCall
    began_at_s: float
    attempt: int = 1


@dataclass(slots=True)
class ToolLoop:
    """The loop of one response. Every method returns the actions to perform, in order.

    Attributes:
        budget: Bounds of the loop.
        calls: Number of started calls.
        tokens: Tokens of all ended rounds.
        micros: Price of the started calls.
        rounds: Number of the model's answers so far.
    """

    budget: LoopBudget
    began_at_s: float
    calls: int = 0
    tokens: int = 0
    micros: int = 0
    rounds: int = 0
    _running: dict[str, _Running] = field(default_factory=dict[str, _Running])
    _end: EndLoop | None = None
    _has_ended: bool = False

    @property
    def ends_at_s(self) -> float:
        """Time of the loop's deadline, at which `on_time` has to be called."""
        return self.began_at_s + self.budget.seconds

    def begin(self, approved: Sequence[LoopCall], now_s: float) -> list[LoopAction]:
        """Start the approved calls, or the first round if there are none."""
        return self._take(approved, now_s) + self._advance(now_s)

    def on_round(
        self, calls: Sequence[LoopCall], tokens: int, now_s: float, *, is_cut: bool = False
    ) -> list[LoopAction]:
        """Process an answer of the model.

        Args:
            calls: Calls of the answer, in order.
            tokens: Tokens of the round's prompt and answer.
            now_s: The time.
            is_cut: Whether the answer was cut by a bound, so that its last call may be incomplete.
        """
        assert not self._running, "a round begins when all calls are answered"
        self.tokens += tokens
        self.rounds += 1
        if is_cut:
            self._end = EndLoop(None)
            calls = [_refused(it, "the answer was cut.") for it in calls if _is_server_call(it)]
        elif not calls or not all(it.mode in (CallMode.RUN, CallMode.REFUSE) for it in calls):
            self._end = EndLoop(None)
        return self._take(calls, now_s) + self._advance(now_s)

    def on_result(self, call_id: str, now_s: float) -> list[LoopAction]:
        """Process the result of a tool call."""
        running = self._running.pop(call_id, None)
        if running is None:
            return []
        return [_answer(running, None, now_s), *self._advance(now_s)]

    def on_failure(self, call_id: str, failure: CallFailure, now_s: float) -> list[LoopAction]:
        """Process a failed attempt, and repeat the call or report the failure to the model."""
        running = self._running.get(call_id)
        if running is None:
            return []
        wait_s = _RETRY_S * 2 ** (running.attempt - 1)
        may_repeat = (
            failure.may_repeat and running.call.is_idempotent and running.attempt < _ATTEMPTS_MAX
        )
        if may_repeat and now_s + wait_s < self.ends_at_s:
            running.attempt += 1
            timeout_s = min(running.call.timeout_s, self.ends_at_s - now_s - wait_s)
            return [StartCall(call_id, running.attempt, timeout_s, wait_s)]
        del self._running[call_id]
        return [_answer(running, failure.message, now_s), *self._advance(now_s)]

    def on_time(self, now_s: float) -> list[LoopAction]:
        """Check the loop's deadline. After the deadline, all running calls are cancelled."""
        if now_s < self.ends_at_s or not self._running:
            return []
        actions: list[LoopAction] = []
        for running in self._running.values():
            text = "The tool did not answer within the time for all tools."
            actions += [StopCall(running.call.call_id), _answer(running, text, now_s)]
        self._running.clear()
        self._end = self._end or EndLoop(LoopEnd.SECONDS)
        return [*actions, *self._advance(now_s)]

    def _take(self, calls: Sequence[LoopCall], now_s: float) -> list[LoopAction]:
        """Start the calls that fit into the budget, and answer the calls that are not run."""
        actions: list[LoopAction] = []
        for call in calls:
            if call.mode is CallMode.REFUSE:
                actions.append(AnswerCall(call.call_id, call.refusal, was_run=False))
            elif call.mode is CallMode.RUN and (used_up := self._used_up(call, now_s)):
                self._end = EndLoop(used_up)
                text = f"{_SKIPPED}the budget is used up ({used_up})."
                actions.append(AnswerCall(call.call_id, text, was_run=False))
            elif call.mode is CallMode.RUN:
                self.calls += 1
                self.micros += call.price_micros
                self._running[call.call_id] = _Running(call, now_s)
                timeout_s = min(call.timeout_s, self.ends_at_s - now_s)
                actions.append(StartCall(call.call_id, 1, timeout_s))
        return actions

    def _used_up(self, call: LoopCall, now_s: float) -> LoopEnd | None:
        """Return the budget that one more call would exceed, or None."""
        if self.calls >= self.budget.calls:
            return LoopEnd.CALLS
        if self.micros + call.price_micros > self.budget.micros:
            return LoopEnd.COST
        return LoopEnd.SECONDS if now_s >= self.ends_at_s else None

    def _advance(self, now_s: float) -> list[LoopAction]:
        if self._running or self._has_ended:
            return []
        end = self._end
        if end is None and now_s >= self.ends_at_s:
            end = EndLoop(LoopEnd.SECONDS)
        if end is None and self.rounds > self.budget.calls:
            end = EndLoop(LoopEnd.CALLS)  # all calls of the rounds so far were refused
        if end is None and self.tokens >= self.budget.tokens:
            end = EndLoop(LoopEnd.TOKENS)
        if end is None:
            return [AskModel()]
        self._has_ended = True
        return [end]


def _is_server_call(call: LoopCall) -> bool:
    return call.mode is not CallMode.CLIENT


def _refused(call: LoopCall, why: str) -> LoopCall:
    return LoopCall(call.call_id, CallMode.REFUSE, _SKIPPED + why)


def _answer(running: _Running, failure: str | None, now_s: float) -> AnswerCall:
    duration_s = max(0.0, now_s - running.began_at_s)
    return AnswerCall(
        running.call.call_id,
        failure,
        was_run=True,
        attempts=running.attempt,
        duration_s=duration_s,
    )
