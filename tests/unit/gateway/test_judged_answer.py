"""Answers behind a release fence: any order of verdicts, failures, late ones; no leak."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.delta import NOTHING, AnswerDelta, CallDelta
from gateway.guard.findings import RuleMatch
from gateway.guard.judged_answer import JudgedAnswer
from gateway.guard.plan import GuardPlan
from gateway.guard.verdicts import WINDOWS_MAX, GuardVerdict, JudgedRule, highest, verdict, windows
from gateway.text.answer import ChoiceText
from sluice.guard.rules import GuardAction, GuardFence, GuardRule, GuardTarget
from sluice.wire.control.v1 import control_pb2 as wire

TEXT = "It is fine. All of it! Is it? This is bad here. And more follows"
BAD = wire.GuardRule(id="bad", action="block", classifier="c", targets=["answer"])


def _plan(*rules: wire.GuardRule, **fields: object) -> GuardPlan:
    return GuardPlan(
        [wire.GuardSet(id="s", version=1, rules=rules, active_version=1, active_rules=rules,
                       **fields)]
    )  # fmt: skip


class Bench:
    """Judges that answer when a test says so."""

    def __init__(self, plan: GuardPlan) -> None:
        self.asked = list[tuple[str, Callable[[GuardVerdict], None]]]()
        self.shown, self.guard = ChoiceText(), JudgedAnswer(plan, ask=self.judge)
        self.guard.on_release = lambda delta, entries: self.shown.add(delta, entries)

    def judge(self, rules, text: str, on_verdict: Callable[[GuardVerdict], None]) -> None:
        self.asked.append((text, on_verdict))

    def push(self, *deltas: AnswerDelta) -> None:
        for number, it in enumerate(deltas, 1):
            self.shown.add(*self.guard.passed(it, (), number))

    def finish(self, tokens: int) -> None:
        self.shown.add(*self.guard.finished(NOTHING, (), tokens))

    def answer(self, at: int = 0) -> None:
        text, on_verdict = self.asked.pop(at)
        on_verdict(GuardVerdict("s/bad") if "bad" in text else GuardVerdict())


def _cut(text: str, places: list[int]) -> list[AnswerDelta]:
    ends = sorted({it % (len(text) + 1) for it in places})
    return [AnswerDelta(text[a:b]) for a, b in itertools.pairwise([0, *ends, len(text)])]


@given(
    st.lists(st.integers(0, 100), max_size=12),
    st.sampled_from([it for it in GuardFence if it is not GuardFence.NONE]),
    st.randoms(use_true_random=False),
)
def test_nothing_leaves_before_it_is_clear_in_any_order_of_verdicts(places, kind, chance) -> None:
    bench = Bench(_plan(BAD, fence=kind, fence_tokens=3))
    for number, it in enumerate(_cut(TEXT, places), 1):
        bench.shown.add(*bench.guard.passed(it, (), number))
        while bench.asked and chance.random() < 0.4:
            bench.answer(chance.randrange(len(bench.asked)))
        assert "bad" not in bench.shown.content
        assert TEXT.startswith(bench.shown.content)
    bench.finish(99)
    while bench.asked:
        bench.answer(chance.randrange(len(bench.asked)))
        assert "bad" not in bench.shown.content
    assert bench.guard.blocked_by == "s/bad"
    assert not bench.guard.is_pending


@given(st.lists(st.integers(0, 100), max_size=12), st.sampled_from(list(GuardFence)))
def test_a_clean_answer_leaves_whole_behind_any_fence(places: list[int], kind: GuardFence) -> None:
    bench, text = Bench(_plan(BAD, fence=kind, fence_tokens=2)), TEXT.replace("bad", "good")
    bench.push(*_cut(text, places))
    bench.finish(99)
    while bench.asked:
        bench.answer(-1)
    assert bench.shown.content == text
    assert bench.guard.withheld_tokens(99) == 0


def test_a_sentence_leaves_when_it_is_judged_and_is_judged_with_the_one_before() -> None:
    bench = Bench(_plan(BAD))
    bench.push(AnswerDelta("One"), AnswerDelta(". Two"))
    assert bench.shown.content == ""
    bench.answer()
    assert bench.shown.content == "One. Two"
    bench.push(AnswerDelta(" more."), AnswerDelta(" Three"))
    assert [text for text, _ in bench.asked] == ["One. Two more."]
    bench.answer()
    assert bench.shown.content == "One. Two more."


def test_without_a_fence_text_leaves_at_once_and_a_verdict_ends_it_later() -> None:
    bench = Bench(_plan(BAD, fence="none"))
    bench.push(AnswerDelta("bad. "), AnswerDelta("more"))
    assert bench.shown.content == "bad. more"
    bench.answer()
    assert bench.guard.blocked_by == "s/bad"
    assert bench.guard.passed(AnswerDelta("x"), (), 3) == (NOTHING, [])


def test_verdicts_behind_the_end_change_nothing() -> None:
    bench = Bench(_plan(BAD))
    bench.push(AnswerDelta("bad. "))
    bench.guard.close()
    bench.answer()
    assert bench.shown.content == ""
    assert not bench.guard.blocked_by


def test_arguments_of_tools_wait_and_unjudged_parts_do_not() -> None:
    rule = wire.GuardRule(id="bad", action="block", classifier="c", targets=["tool_arguments"])
    bench = Bench(_plan(rule))
    bench.push(AnswerDelta("Let me see"), AnswerDelta(calls=(CallDelta(0, "{}", "call_1", "f"),)))
    assert bench.shown.content == "Let me see"
    assert not bench.shown.calls
    bench.finish(2)
    bench.answer()
    assert bench.shown.calls[0]["function"] == {"name": "f", "arguments": "{}"}


def test_a_block_by_a_text_rule_releases_the_clear_text_before_it() -> None:
    word = wire.GuardRule(id="word", action="block", words=["falcon"], targets=["answer"])
    bench = Bench(_plan(BAD, word))
    bench.push(AnswerDelta("It is a falcon, "))
    assert bench.shown.content == ""
    bench.answer()
    assert (bench.shown.content, bench.guard.blocked_by) == ("It is a ", "s/word")


def test_tokens_behind_the_last_clear_segment_are_withheld() -> None:
    bench = Bench(_plan(BAD))
    bench.push(AnswerDelta("Fine."), AnswerDelta(" This"), AnswerDelta(" is"), AnswerDelta(" bad."))
    bench.answer()
    bench.answer()
    assert bench.shown.content == "Fine."
    assert bench.guard.withheld_tokens(4) == 3


def test_rules_that_do_not_block_need_no_fence() -> None:
    mark = wire.GuardRule(id="m", action="mark", classifier="c", targets=["answer"])
    bench = Bench(_plan(mark))
    bench.push(AnswerDelta("bad. "))
    assert bench.shown.content == "bad. "
    _, on_verdict = bench.asked.pop()
    on_verdict(GuardVerdict(found={RuleMatch("s/m", GuardAction.MARK): 1}))
    [detail] = bench.guard.annotations()["custom_blocklists"]["details"]
    assert detail == {"id": "s/m", "filtered": False}


# --- verdicts -------------------------------------------------------------------------------------


def _judged(action: str, *, is_closed: bool = False, **fields: object) -> JudgedRule:
    rule = GuardRule("s/r", GuardAction(action), frozenset({GuardTarget.ANSWER}), **fields)
    return JudgedRule(rule, is_closed)


@pytest.mark.parametrize(
    ("rule", "scores", "blocked_by", "found"),
    [
        (_judged("block", classifier="c", category="hate"), {"c": {"hate": 0.5}}, "s/r", 1),
        (_judged("block", classifier="c", category="hate"), {"c": {"hate": 0.49}}, "", 0),
        (_judged("block", classifier="c"), {"c": {"hate": 0.1, "other": 0.9}}, "s/r", 1),
        (_judged("block", classifier="c", category="none"), {"c": {"hate": 1.0}}, "", 0),
        (_judged("count", classifier="c"), {"c": {"hate": 1.0}}, "", 1),
        (_judged("block", classifier="c"), {}, "", 0),
        (_judged("block", classifier="c", is_closed=True), {"c": None}, "s/r", 0),
        (_judged("count", classifier="c", is_closed=True), {"c": None}, "", 0),
    ],
)
def test_scores_become_verdicts(rule: JudgedRule, scores, blocked_by: str, found: int) -> None:
    told = verdict([rule], scores)
    assert (told.blocked_by, sum(told.found.values())) == (blocked_by, found)
    assert told.unjudged == (frozenset() if scores.get("c") else frozenset({"c"}))
    assert told.is_refused == (bool(blocked_by) and not found)


def test_long_texts_are_judged_in_windows_that_overlap() -> None:
    text = "".join([f"{it:04} " for it in range(2_000)])
    pieces = windows(text)
    assert all(len(it) <= 2_000 for it in pieces)
    assert all(b[:200] == a[-200:] for a, b in itertools.pairwise(pieces[:-1]))
    assert set(text.split()) <= {word for it in pieces for word in it.split()}
    assert windows(" \n") == []
    with pytest.raises(ValueError, match="at most"):
        windows("x" * (WINDOWS_MAX * 2_000))
    assert highest([{"a": 0.1, "b": 0.7}, {"a": 0.4}]) == {"a": 0.4, "b": 0.7}
