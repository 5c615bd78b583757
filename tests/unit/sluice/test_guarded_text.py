"""Rules on texts: any cutting gives the same, no character of a match leaves, no more is held."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.guard import automaton
from sluice.guard.matcher import GuardedText, RuleMatcher
from sluice.guard.rules import (
    CHARACTERS_MAX,
    GuardAction,
    GuardRule,
    GuardRuleError,
    check,
    rules_from,
)
from tests.support.guard_oracle import matches_of, rewritten

LETTERS = "ab- \n"


def _rules(*documents: Mapping[str, object]) -> tuple[GuardRule, ...]:
    rules = rules_from(
        [
            {"id": f"r{number}", "action": "rewrite"} | dict(it)
            for number, it in enumerate(documents)
        ]
    )
    check(rules)
    return rules


def _shown(rules: tuple[GuardRule, ...], pieces: list[str]) -> tuple[str, GuardedText]:
    text = GuardedText(RuleMatcher(rules))
    shown = ""
    for piece in pieces:
        shown += text.push(piece)
        if text.blocked_by is not None:
            return shown, text
    return shown + text.flush(), text


# --- random rules, texts and cuttings -------------------------------------------------------------

_ATOMS = st.sampled_from(["a", "b", "-", " ", ".", r"\w", "[ab]", "[^a]", r"\b", r"\B", "^", "$"])


def _with_repeats(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda it: f"(?:{it[0]}|{it[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(
            lambda it: f"(?:{it[0]}){it[1]}"
        ),
    )


def _compiles(expression: str) -> bool:
    try:
        check(rules_from([{"id": "r", "action": "count", "expression": expression}]))
    except ValueError:
        return False
    return True


_EXPRESSIONS = st.recursive(_ATOMS, _with_repeats, max_leaves=6).filter(_compiles)
_WORDS = st.lists(
    st.text("ab -", min_size=1, max_size=4).filter(lambda it: it.strip() != ""),
    min_size=1,
    max_size=4,
)
_DOCUMENTS: st.SearchStrategy[Mapping[str, object]] = st.one_of(
    _EXPRESSIONS.map(lambda it: {"expression": it}),
    st.tuples(_WORDS, st.booleans()).map(lambda it: {"words": it[0], "is_within_words": it[1]}),
)
_SETS = st.lists(_DOCUMENTS, min_size=1, max_size=3).map(lambda it: _rules(*it))
_TEXTS = st.text(LETTERS, max_size=12)


@st.composite
def _cut(draw: st.DrawFn) -> list[str]:
    text = draw(_TEXTS)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@given(_SETS, _cut())
def test_any_cutting_gives_the_rewriting_of_the_whole(
    rules: tuple[GuardRule, ...], pieces: list[str]
) -> None:
    assert _shown(rules, pieces)[0] == rewritten(rules, "".join(pieces))


@given(_SETS, _cut())
def test_blocked_texts_end_alike_and_before_the_match(
    rules: tuple[GuardRule, ...], pieces: list[str]
) -> None:
    blocking = tuple([replace(it, action=GuardAction.BLOCK) for it in rules])
    shown, text = _shown(blocking, pieces)
    whole = "".join(pieces)
    once, _ = _shown(blocking, [whole])
    matches = matches_of(rules, whole)
    assert shown == once
    assert (text.blocked_by is not None) == bool(matches)
    if matches:
        first_end = min(end for _, end, _ in matches)
        assert len(shown) <= min(start for start, end, _ in matches if end == first_end)
        assert whole.startswith(shown)
    else:
        assert shown == whole


_SHORT = st.lists(
    st.sampled_from(["a", "b", "-", r"\w", "[ab]", "(?:a|b-)"]), min_size=1, max_size=3
)
_FEW = st.lists(_SHORT.map(lambda it: {"expression": "".join(it)}), min_size=1, max_size=2)


@given(_FEW.map(lambda it: _rules(*it)), st.text("ab-", max_size=5))
def test_the_held_text_is_the_longest_that_may_still_be_covered(
    rules: tuple[GuardRule, ...], text: str
) -> None:
    guarded = GuardedText(RuleMatcher(rules))
    guarded.push(text)
    begin = len(text) - len(guarded.held)
    if begin == len(text):
        return
    more = ["".join(it) for count in range(5) for it in itertools.product("ab-", repeat=count)]
    assert any(
        start <= begin < end for it in more for start, end, _ in matches_of(rules, text + it)
    ), guarded.held


# --- what the sets that come with the platform find -----------------------------------------------


@pytest.mark.parametrize(
    ("named", "text", "shown"),
    [
        ("email", "to user@example.com, ok", "to [r0], ok"),
        ("email", "to user@example.co.uk.", "to [r0]."),
        ("email", "@home and a@b", "@home and a@b"),
        ("card", "4111 1111 1111 1111!", "[r0]!"),
        ("card", "4111-1111-1111-1112", "4111-1111-1111-1112"),
        ("card", "41111111111111112222", "41111111111111112222"),
        ("card", "0000 0000 0000 0000", "0000 0000 0000 0000"),
        ("card", "at 12 4111111111111111", "at 12 [r0]"),
        ("card", "\uff14\uff11\uff11\uff11 1111 1111 1111", "[r0]"),
        ("iban", "DE89 3704 0044 0532 0130 00.", "[r0]."),
        ("iban", "AB12 DE89 3704 0044 0532 0130 00", "AB12 [r0]"),
        ("iban", "DE88 3704 0044 0532 0130 00", "DE88 3704 0044 0532 0130 00"),
        ("phone", "call +49 30 901820 now", "call [r0] now"),
        ("phone", "call (555) 123-4567.", "call [r0]."),
        ("cloud_key", "AKIAIOSFODNN7EXAMPLE", "[r0]"),
        ("cloud_key", "ghp_" + "a1" * 18 + " end", "[r0] end"),
        ("cloud_key", "-----BEGIN RSA PRIVATE KEY-----\nMII=\n", "[r0]"),
    ],
)
def test_named_sets(named: str, text: str, shown: str) -> None:
    rules = _rules({"named": named})
    assert _shown(rules, [text])[0] == shown
    assert _shown(rules, [*text])[0] == shown


def test_invisible_characters_hide_nothing() -> None:
    rules = _rules({"words": ["secret"]})
    assert _shown(rules, ["a se\u200bcr\u00adet, \uff33ECRET and \U0001d530ecret"])[0] == (
        "a [r0], [r0] and [r0]"
    )


def test_a_word_leaves_as_soon_as_it_can_be_none_of_the_dictionary() -> None:
    text = GuardedText(RuleMatcher(_rules({"words": ["forbidden"]})))
    assert text.push("it is forb") == "it is "
    assert text.held == "forb"
    assert text.push("earing") == "forbearing"
    assert text.held == ""


def test_a_text_says_which_rules_took_part() -> None:
    rules = _rules({"words": ["one"]}, {"expression": "t[a-z]+o"}, {"expression": "one two"})
    shown, text = _shown(rules, ["one two ", "too"])
    assert shown == "[r0] [r1]"
    assert text.counts == {0: 1, 1: 2, 2: 1}


# --- what is refused, and what is harmless --------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(a)\\1", "references"),
        ("(?=a)b", "look-around"),
        ("(?>a+)b", "atomic"),
        ("a*", "empty"),
        (r"\b", "empty"),
        ("(a", "unterminated"),
        ("(a{1000}){1000}", "places"),
        ("a" * 1001, "longer"),
    ],
)
def test_expressions_that_cannot_be_used_are_refused(expression: str, reason: str) -> None:
    with pytest.raises(GuardRuleError, match=reason):
        _rules({"expression": expression})


def test_a_set_has_bounds() -> None:
    words = [f"{number:0100}" for number in range(CHARACTERS_MAX // 100 + 1)]
    with pytest.raises(GuardRuleError, match="split the set"):
        _rules({"words": words})
    with pytest.raises(GuardRuleError, match="at most 50000"):
        _rules({"words": [str(number) for number in range(50_001)]})
    with pytest.raises(GuardRuleError, match="named twice"):
        check(rules_from([{"id": "a", "action": "count", "words": ["x"]}] * 2))


@pytest.mark.parametrize(
    "expression", ["(a+)+b", "(a|a)*b", "(a|aa)+$", "(.*)*x", "(?:a?){60}a{60}b"]
)
def test_catastrophic_expressions_take_few_steps(expression: str) -> None:
    matcher = RuleMatcher(_rules({"expression": expression}))
    text = GuardedText(matcher)
    for _ in range(2_000):
        text.push("aaaaa")
    text.flush()
    # A state is made once: what is made does not grow with the text.
    assert matcher.automaton.made <= 500


def test_the_memory_of_a_guard_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "REMEMBERED_MAX", 50)
    rules = _rules({"words": ["secret", "plan"]}, {"expression": "[a-z]{3,9}[0-9]"})
    matcher = RuleMatcher(rules)
    texts = [GuardedText(matcher) for _ in range(3)]
    pieces = [f"word{number} secre" for number in range(300)]
    shown = ["".join([text.push(it) for it in pieces]) + text.flush() for text in texts]
    assert set(shown) == {_shown(rules, ["".join(pieces)])[0]}
    assert matcher.automaton.remembered <= 51
