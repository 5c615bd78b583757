"""The loop of model and tools: never beyond a budget, and every call is answered exactly once."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.loop import (
    AnswerCall,
    AskModel,
    CallFailure,
    CallMode,
    EndLoop,
    LoopAction,
    LoopBudget,
    LoopCall,
    LoopEnd,
    StartCall,
    StopCall,
    ToolLoop,
)

LARGE = LoopBudget(calls=100, tokens=1_000_000, seconds=1000.0, micros=1_000_000)


def loop_of(**changes: float) -> ToolLoop:
    values = {"calls": 100, "tokens": 1_000_000, "seconds": 1000.0, "micros": 1_000_000} | changes
    return ToolLoop(LoopBudget(**values), began_at_s=0.0)  # pyright: ignore[reportArgumentType]


def test_a_model_without_calls_ends_the_loop() -> None:
    loop = loop_of()
    assert loop.begin((), 0.0) == [AskModel()]
    assert loop.on_round((), 10, 1.0) == [EndLoop(None)]


def test_calls_run_at_once_and_the_model_is_asked_when_all_are_answered() -> None:
    loop = loop_of()
    loop.begin((), 0.0)
    started = loop.on_round([LoopCall("a"), LoopCall("b", timeout_s=3.0)], 10, 1.0)
    assert started == [StartCall("a", 1, 10.0), StartCall("b", 1, 3.0)]
    assert loop.on_result("b", 2.0) == [AnswerCall("b", None, True, 1, 1.0)]
    assert loop.on_failure("a", CallFailure("status 500"), 3.0) == [
        AnswerCall("a", "status 500", True, 1, 2.0),
        AskModel(),
    ]
    assert loop.on_result("a", 4.0) == []  # it is over


def test_only_idempotent_calls_are_tried_again() -> None:
    loop = loop_of()
    loop.begin((), 0.0)
    loop.on_round([LoopCall("a", is_idempotent=True)], 10, 1.0)
    lost = CallFailure("it hung up", may_repeat=True)
    assert loop.on_failure("a", lost, 2.0) == [StartCall("a", 2, 10.0, 0.2)]
    assert loop.on_failure("a", lost, 3.0) == [StartCall("a", 3, 10.0, 0.4)]
    assert loop.on_failure("a", lost, 4.0)[-1] == AskModel()
    loop.on_round([LoopCall("b")], 10, 5.0)
    assert loop.on_failure("b", lost, 6.0)[-1] == AskModel()
    loop.on_round([LoopCall("c", is_idempotent=True)], 10, 7.0)
    assert loop.on_failure("c", CallFailure("status 400"), 8.0)[-1] == AskModel()


@pytest.mark.parametrize(
    ("budget", "end"),
    [
        ({"calls": 1}, LoopEnd.CALLS),
        ({"micros": 7}, LoopEnd.COST),
        ({"tokens": 10}, LoopEnd.TOKENS),
    ],
)
def test_a_used_up_budget_ends_the_loop_with_its_reason(
    budget: dict[str, float], end: LoopEnd
) -> None:
    loop = loop_of(**budget)
    loop.begin((), 0.0)
    actions = loop.on_round([LoopCall("a", price_micros=5), LoopCall("b", price_micros=5)], 10, 1.0)
    if end is not LoopEnd.TOKENS:
        assert actions[0] == StartCall("a", 1, 10.0)
        assert isinstance(actions[1], AnswerCall)
        assert str(end) in (actions[1].failure or "")
    else:
        loop.on_result("b", 2.0)
    assert loop.on_result("a", 3.0)[-1] == EndLoop(end)


def test_the_time_limit_of_all_tools_ends_running_ones() -> None:
    loop = loop_of(seconds=5.0)
    loop.begin((), 0.0)
    loop.on_round([LoopCall("a"), LoopCall("b")], 10, 1.0)
    assert loop.on_time(4.0) == []
    actions = loop.on_time(5.0)
    assert [type(it) for it in actions] == [StopCall, AnswerCall, StopCall, AnswerCall, EndLoop]
    assert actions[-1] == EndLoop(LoopEnd.SECONDS)


def test_a_decision_of_the_client_ends_the_loop_behind_running_calls() -> None:
    loop = loop_of()
    loop.begin((), 0.0)
    calls = [LoopCall("a"), LoopCall("b", CallMode.CLIENT), LoopCall("c", CallMode.APPROVE)]
    assert loop.on_round(calls, 10, 1.0) == [StartCall("a", 1, 10.0)]
    assert loop.on_result("a", 2.0) == [AnswerCall("a", None, True, 1, 1.0), EndLoop(None)]


def test_calls_of_an_answer_that_was_cut_are_not_run() -> None:
    loop = loop_of()
    loop.begin((), 0.0)
    (answer, end) = loop.on_round([LoopCall("a")], 10, 1.0, is_cut=True)
    assert isinstance(answer, AnswerCall)
    assert not answer.was_run
    assert end == EndLoop(None)


def test_a_model_that_makes_nothing_but_bad_calls_is_not_asked_for_ever() -> None:
    loop = loop_of(calls=3)
    loop.begin((), 0.0)
    bad = [LoopCall("a", CallMode.REFUSE, "no such tool")]
    ends = [loop.on_round(bad, 1, 1.0)[-1] for _ in range(4)]
    assert ends == [AskModel()] * 3 + [EndLoop(LoopEnd.CALLS)]


def test_approved_calls_run_before_the_model_is_asked() -> None:
    loop = loop_of()
    denied = LoopCall("no", CallMode.REFUSE, "denied")
    actions = loop.begin([LoopCall("yes"), denied], 0.0)
    assert actions == [StartCall("yes", 1, 10.0), AnswerCall("no", "denied", False)]
    assert loop.on_result("yes", 1.0)[-1] == AskModel()


# --- any sequence -------------------------------------------------------------------------------


@dataclass
class Run:
    """A shell under a virtual clock: does what the actions say, and checks each of them."""

    loop: ToolLoop
    now_s: float = 0.0
    calls: dict[str, LoopCall] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    started: int = 0
    cost: int = 0
    asks: bool = False
    end: EndLoop | None = None

    def take(self, actions: list[LoopAction]) -> None:
        budget = self.loop.budget
        for action in actions:
            assert self.end is None, "nothing follows the end"
            match action:
                case StartCall(call_id, attempt, timeout_s, after_s):
                    call = self.calls[call_id]
                    assert self.now_s + after_s < self.loop.ends_at_s
                    assert 0 < timeout_s <= call.timeout_s
                    assert self.now_s + after_s + timeout_s <= self.loop.ends_at_s + 1e-6
                    assert attempt == self.running.get(call_id, 0) + 1
                    assert attempt == 1 or call.is_idempotent
                    if attempt == 1:
                        self.started += 1
                        self.cost += call.price_micros
                    self.running[call_id] = attempt
                    assert self.started <= budget.calls
                    assert self.cost <= budget.micros
                case StopCall(call_id):
                    assert call_id in self.running
                case AnswerCall(call_id, _, was_run):
                    self.answers[call_id] += 1
                    assert self.answers[call_id] == 1
                    assert was_run == (self.running.pop(call_id, None) is not None)
                case AskModel():
                    assert not self.running
                    assert self.loop.tokens < budget.tokens
                    assert self.now_s < self.loop.ends_at_s
                    self.asks = True
                case EndLoop():
                    assert not self.running
                    self.end = action

    def check_answered(self) -> None:
        ours = [it for it in self.calls.values() if it.mode in (CallMode.RUN, CallMode.REFUSE)]
        assert all(self.answers[it.call_id] == 1 for it in ours)


def drawn_call(data: st.DataObject, call_id: str) -> LoopCall:
    draw = data.draw
    return LoopCall(
        call_id,
        draw(st.sampled_from([*CallMode, CallMode.RUN, CallMode.RUN])),
        "refused",
        timeout_s=draw(st.floats(0.1, 20)),
        is_idempotent=draw(st.booleans()),
        price_micros=draw(st.integers(0, 20)),
    )


@given(st.data())
def test_any_loop_keeps_to_its_budget_and_answers_every_call_once(data: st.DataObject) -> None:
    draw = data.draw
    budget = LoopBudget(
        calls=draw(st.integers(1, 6)),
        tokens=draw(st.integers(1, 400)),
        seconds=draw(st.floats(0.1, 60)),
        micros=draw(st.integers(0, 50)),
    )
    run = Run(ToolLoop(budget, 0.0))

    def calls() -> list[LoopCall]:
        made = [drawn_call(data, f"c{len(run.calls)}.{n}") for n in range(draw(st.integers(0, 4)))]
        run.calls |= {it.call_id: it for it in made}
        return made

    approved = [it for it in calls() if it.mode in (CallMode.RUN, CallMode.REFUSE)]
    run.calls = {it.call_id: it for it in approved}
    run.take(run.loop.begin(approved, 0.0))
    for _ in range(60):
        if run.end is not None:
            break
        run.now_s += draw(st.floats(0, 10))
        run.take(run.loop.on_time(run.now_s))
        if run.end is not None:
            break
        if run.asks:
            run.asks = False
            cut = draw(st.booleans()) and draw(st.booleans())
            tokens = draw(st.integers(1, 100))
            made = calls()
            if cut:
                run.calls |= {
                    it.call_id: LoopCall(it.call_id, CallMode.REFUSE)
                    for it in made
                    if it.mode is not CallMode.CLIENT
                }
            run.take(run.loop.on_round(made, tokens, run.now_s, is_cut=cut))
            continue
        call_id = draw(st.sampled_from(sorted(run.running)))
        if draw(st.booleans()):
            run.take(run.loop.on_result(call_id, run.now_s))
        else:
            failure = CallFailure("lost", may_repeat=draw(st.booleans()))
            run.take(run.loop.on_failure(call_id, failure, run.now_s))
    else:
        raise AssertionError("the loop never ends")
    run.check_answered()
