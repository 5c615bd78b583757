"""The meaning of rules on texts, told in another way: all pairs of begin and end.

Expressions are Python's own here; the platform's automaton has nothing to do with it.
"""

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache

from sluice.guard.rules import GuardRule


def matches_of(rules: Sequence[GuardRule], text: str) -> list[tuple[int, int, int]]:
    """Return begin, end and the number of its rule, of every match."""
    pairs = itertools.combinations(range(len(text) + 1), 2)
    return [
        (start, end, number)
        for start, end in pairs
        for number, rule in enumerate(rules)
        if _is_match(rule, text, start, end)
    ]


def rewritten(rules: Sequence[GuardRule], text: str) -> str:
    """Return the text with each run of matches replaced, as if all rules rewrite."""
    runs = list[list[int]]()
    for start, end, number in sorted(matches_of(rules, text)):
        if runs and start < runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
            runs[-1][2] = min(runs[-1][2], number)
        else:
            runs.append([start, end, number])
    parts, at = list[str](), 0
    for start, end, number in runs:
        parts += (text[at:start], rules[number].replacement)
        at = end
    return "".join(parts) + text[at:]


def _is_match(rule: GuardRule, text: str, start: int, end: int) -> bool:
    if rule.words:
        is_in = any(_word(it).fullmatch(text, start, end) for it in rule.words)
        is_free = rule.is_within_words or not (_joins(text, start) or _joins(text, end))
        return is_in and is_free
    return _bounded(rule.expression, len(text) - end).match(text, start) is not None


@lru_cache(maxsize=4096)
def _word(word: str) -> re.Pattern[str]:
    """Return a word whose blanks stand for any white space; the last one ends with its first."""
    blanks = re.sub(r"\s+", lambda it: r"\s" if it.end() == len(word) else r"\s+", word)
    parts = re.split(r"(\\s\+?)", blanks)
    return re.compile(
        "".join(it if it.startswith("\\s") else re.escape(it) for it in parts), re.IGNORECASE
    )


@lru_cache(maxsize=4096)
def _bounded(expression: str, rest: int) -> re.Pattern[str]:
    """Return what matches only up to `rest` characters before the end, and sees what is behind."""
    return re.compile(f"(?:{expression})(?=(?s:.{{{rest}}})\\Z)", re.IGNORECASE)


def _joins(text: str, at: int) -> bool:
    return 0 < at < len(text) and all(it.isalnum() or it == "_" for it in text[at - 1 : at + 1])
