"""Answers under rules: cuttings, calls, log probabilities; and what JSON text means."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.delta import AnswerDelta, CallDelta
from gateway.guard.answer import AnswerGuard
from gateway.guard.findings import Findings, RuleMatch, annotations, rule_ids
from gateway.guard.json_text import JsonReader, quoted, written
from gateway.guard.plan import GuardPlan
from gateway.guard.requests import look_at
from gateway.text.answer import ChoiceText
from gateway.text.logprobs import TokenLogprob
from sluice.guard.rules import GuardAction
from sluice.wire.control.v1 import control_pb2 as wire

MAIL = wire.GuardRule(
    id="mail", action="rewrite", named="email", targets=["answer", "tool_arguments"]
)
WORD = wire.GuardRule(id="word", action="block", words=["falcon"], targets=["answer", "prompt"])
TOOL = wire.GuardRule(id="tool", action="block", words=["falcon"], targets=["tool_results"])


def _plan(*rules: wire.GuardRule, shadow: tuple[wire.GuardRule, ...] = ()) -> GuardPlan:
    version = 2 if shadow else 1
    return GuardPlan(
        [wire.GuardSet(id="s", version=version, rules=shadow or rules, active_version=1,
                       active_rules=rules)]
    )  # fmt: skip


def _shown(plan: GuardPlan, deltas: list[AnswerDelta]) -> tuple[ChoiceText, AnswerGuard]:
    guard, shown = AnswerGuard(plan), ChoiceText()
    for it in deltas:
        shown.add(*guard.passed(it))
    shown.add(guard.flush())
    return shown, guard


def _cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({it % (len(text) + 1) for it in places})
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


_PLACES = st.lists(st.integers(0, 200), max_size=12)


@given(_PLACES)
def test_content_is_rewritten_however_it_is_cut(places: list[int]) -> None:
    text = "write to user@example.com or to a.b@c.org, please; not to @nobody."
    shown, guard = _shown(_plan(MAIL), [AnswerDelta(it) for it in _cut(text, places)])
    assert shown.content == "write to [mail] or to [mail], please; not to @nobody."
    assert guard.findings() == {RuleMatch("s/mail", GuardAction.REWRITE): 2}


@given(_PLACES)
def test_arguments_stay_json_and_escapes_hide_nothing(places: list[int]) -> None:
    plan = _plan(wire.GuardRule(id="mail", action="rewrite", named="email", replacement='a "b"\\',
                                targets=["tool_arguments"]))  # fmt: skip
    text = '{"to":\n"Dear\\nuser\\u0040example.com", "n": [1, "\\"x\\" \\\\ \\ud83d\\ude00"]}'
    calls = [CallDelta(0, "", "call_1", "send"), *[CallDelta(0, it) for it in _cut(text, places)]]
    calls.append(CallDelta(1, '{"to":"b@c.de"}', "call_2", "send"))
    shown, _ = _shown(plan, [AnswerDelta(calls=(it,)) for it in calls])
    first, second = [it["function"] for it in shown.calls]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert json.loads(first["arguments"]) == {
        "to": 'Dear\na "b"\\',
        "n": [1, '"x" \\ \U0001f600'],
    }
    assert json.loads(second["arguments"]) == {"to": 'a "b"\\'}


@given(st.recursive(st.text() | st.integers() | st.none(), lambda it: st.lists(it)), _PLACES)
def test_json_text_means_the_same_behind_a_reader(value: object, places: list[int]) -> None:
    reader = JsonReader()
    text = json.dumps(value, indent=1)
    read = "".join([reader.push(it) for it in _cut(text, places)]) + reader.flush()
    assert json.loads(written(read)) == value
    text = 'a\\b "c"'
    assert json.loads('"' + written(quoted(text)) + '"') == text


@given(_PLACES)
def test_nothing_of_a_blocked_answer_leaves_behind_the_block(places: list[int]) -> None:
    text = "the code name is falcon, as you know"
    shown, guard = _shown(_plan(WORD), [AnswerDelta(it) for it in _cut(text, places)])
    assert (shown.content, guard.blocked_by) == ("the code name is ", "s/word")


def test_a_word_at_the_very_end_blocks_when_the_text_ends() -> None:
    shown, guard = _shown(_plan(WORD), [AnswerDelta("it is falcon")])
    assert (shown.content, guard.blocked_by) == ("it is ", "s/word")


def test_rules_in_shadow_are_counted_and_do_nothing() -> None:
    shown, guard = _shown(_plan(MAIL, shadow=(WORD,)), [AnswerDelta("falcon: a@b.de")])
    assert shown.content == "falcon: [mail]"
    rewrites, counts = GuardAction.REWRITE, GuardAction.COUNT
    assert guard.findings() == {RuleMatch("s/mail", rewrites): 1, RuleMatch("s@2/word", counts): 1}


def test_marks_leave_the_text_and_are_told() -> None:
    mark = wire.GuardRule(id="said", action="mark", words=["falcon"], targets=["answer"])
    shown, guard = _shown(_plan(MAIL, mark), [AnswerDelta("a falcon: a@b.de")])
    assert shown.content == "a falcon: [mail]"
    assert guard.annotations() == {
        "custom_blocklists": {
            "filtered": True,
            "details": [{"id": "s/mail", "filtered": True}, {"id": "s/said", "filtered": False}],
        }
    }
    assert guard.request_annotations() is None


def test_annotations_are_added_on_request() -> None:
    guard = AnswerGuard(_plan(MAIL))
    guard.passed(AnswerDelta("a@b.de "))
    assert guard.annotations() is None
    guard = AnswerGuard(_plan(MAIL), is_told=True)
    assert guard.annotations() == {"custom_blocklists": {"filtered": False, "details": []}}
    assert guard.request_annotations() == guard.annotations()


def test_ids_of_rules_are_bounded_and_counted_rules_stay_hidden() -> None:
    found = Findings({RuleMatch(f"s/r{it:02}", GuardAction.COUNT): 1 for it in range(40)})
    assert rule_ids(found).split() == [f"s/r{it:02}" for it in range(16)]
    assert annotations(found) == {"custom_blocklists": {"filtered": False, "details": []}}


@pytest.mark.parametrize(
    ("pieces", "withheld"),
    [
        (["it ", "is ", "a ", "fal", "con", ", yes"], 3),
        (["it ", "is ", "a falcon "], 1),  # a part of it was shown
        (["it ", "is ", "an eagle"], 0),
        (["fal", "ling ", "fal", "con", " ", " more"], 3),
    ],
)
def test_tokens_behind_the_place_of_a_block_are_withheld(pieces: list[str], withheld: int) -> None:
    guard = AnswerGuard(_plan(WORD))
    for number, piece in enumerate(pieces, 1):
        guard.passed(AnswerDelta(piece), (), number)
        if guard.blocked_by:
            break
    else:
        guard.flush()
    assert guard.withheld_tokens(number) == withheld
    assert not guard.is_withheld_free


def test_withheld_tokens_are_free_where_the_set_says_so() -> None:
    free = wire.GuardSet(
        id="s", version=1, rules=[WORD], active_version=1, active_rules=[WORD],
        is_withheld_free=True,
    )  # fmt: skip
    guard = AnswerGuard(GuardPlan([free]))
    guard.passed(AnswerDelta("falcon "), (), 1)
    assert guard.is_withheld_free


def test_reasoning_leaves_before_the_answer_behind_it() -> None:
    guard = AnswerGuard(_plan(MAIL))
    assert guard.passed(AnswerDelta("", "I think of a@b"))[0] == AnswerDelta("", "I think of ")
    assert guard.passed(AnswerDelta("Well "))[0] == AnswerDelta("Well ", "a@b")


def test_log_probabilities_beside_a_match_never_leave() -> None:
    guard = AnswerGuard(_plan(MAIL))
    entries = [TokenLogprob(number, -1.0, ()) for number in range(6)]
    pieces = ["ok ", "us", "er@", "x.de", " an", "d "]
    told = [
        [one.token for one in guard.passed(AnswerDelta(piece), [entry])[1]]
        for piece, entry in zip(pieces, entries, strict=True)
    ]
    # " an" ends the match, and begins what might be the next: it waits with "d ".
    assert told[0] == [0]
    assert {it for one in told for it in one}.isdisjoint({1, 2, 3})


@pytest.mark.parametrize(
    ("message", "blocked_by"),
    [
        ({"role": "user", "content": "a falcon"}, "s/word"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a fal"}, {"text": "con"}]},
            "s/word",
        ),
        ({"role": "tool", "content": "a falcon"}, "s/tool"),
        ({"role": "tool", "content": "an eagle"}, ""),
        ("falcon", "s/word"),
        ({"role": "user", "content": "x" * 5000 + " falcon"}, "s/word"),
    ],
)
async def test_requests_are_looked_at(message: object, blocked_by: str) -> None:
    found = await look_at([("messages", [message])], _plan(WORD, TOOL))
    assert found.blocked_by == blocked_by
