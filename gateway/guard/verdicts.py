"""Decides verdicts on a text from the scores of classifiers, and splits long texts. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway.guard.findings import Findings, RuleMatch
from sluice.guard.rules import GuardAction, GuardRule

WINDOW_CHARACTERS = 2_000
_OVERLAP_CHARACTERS = 200
WINDOWS_MAX = 256  # windows per text, about half a million characters

# Scores between 0 and 1, by category.
Scores = Mapping[str, float]


class JudgedRule(NamedTuple):
    """A rule with a classifier.

    Attributes:
        is_closed: Whether a text is blocked if its classifier did not answer.
    """

    rule: GuardRule
    is_closed: bool


class GuardVerdict(NamedTuple):
    """The verdict of classifiers on a text.

    Attributes:
        blocked_by: Id of the rule that blocks the text, or empty.
        found: Matches by rule.
        unjudged: Names of classifiers that did not answer.
        is_refused: Whether the text is blocked only because a classifier did not answer.
    """

    blocked_by: str = ""
    found: Findings = Findings()
    unjudged: frozenset[str] = frozenset()
    is_refused: bool = False


def classifiers_of(rules: Iterable[JudgedRule]) -> frozenset[str]:
    """Return the names of the classifiers that rules use."""
    return frozenset([it.rule.classifier for it in rules])


def verdict(rules: Sequence[JudgedRule], scores: Mapping[str, Scores | None]) -> GuardVerdict:
    """Return the verdict on a text.

    `scores` has the scores of each classifier, or None for a missing answer.
    """
    found, blocked_by, refused_by = Findings(), "", ""
    for it in rules:
        rule, told = it.rule, scores.get(it.rule.classifier)
        blocks = rule.action is GuardAction.BLOCK
        if told is None:
            if blocks and it.is_closed:
                refused_by = refused_by or rule.id
            continue
        score = told.get(rule.category, 0.0) if rule.category else max(told.values(), default=0.0)
        if score >= rule.threshold:
            found[RuleMatch(rule.id, rule.action)] += 1
            blocked_by = blocked_by or (rule.id if blocks else "")
    unjudged = frozenset([it for it in classifiers_of(rules) if scores.get(it) is None])
    return GuardVerdict(
        blocked_by or refused_by, found, unjudged, bool(refused_by) and not blocked_by
    )


def windows(text: str) -> list[str]:
    """Return the overlapping windows of a text, without blank windows.

    Raises ValueError if the text is too long for `WINDOWS_MAX` windows.
    """
    if len(text) <= WINDOW_CHARACTERS:
        return [text] if text.strip() else []
    step = WINDOW_CHARACTERS - _OVERLAP_CHARACTERS
    if len(text) > WINDOWS_MAX * step:
        raise ValueError(f"{len(text)} characters; at most {WINDOWS_MAX * step} are judged")
    pieces = [text[at : at + WINDOW_CHARACTERS] for at in range(0, len(text), step)]
    return [it for it in pieces if it.strip()]


def highest(scores: Sequence[Scores]) -> Scores:
    """Return the highest score of each category over all windows of a text."""
    found = dict[str, float]()
    for one in scores:
        for name, score in one.items():
            found[name] = max(score, found.get(name, 0.0))
    return found
