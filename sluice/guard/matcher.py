"""Applies rules to a text that arrives in pieces, and releases text that cannot match. Pure.

The result does not depend on the boundaries of the pieces.

- All matches of all rules are found. Overlapping matches form one run.
- With `rewrite`, each run is replaced once, by the replacement of its first rule in the set.
- With `block`, the text ends as soon as a match is complete. It ends before the earliest position
  at which any match was still possible.

So all text is released at once, except its longest suffix that can still become part of a match. No
character of a match is ever released.
"""

from collections.abc import Callable, Sequence

from sluice.guard.automaton import Automaton, Find
from sluice.guard.checks import CHECKS
from sluice.guard.dictionaries import Dictionary
from sluice.guard.expressions import compiled
from sluice.guard.named_sets import CHECKED_SETS, NAMED_SETS
from sluice.guard.places import Ends, Forks, Holds, PlaceCondition, Places, Spells
from sluice.guard.rules import PLACES_MAX, GuardAction, GuardRule

# Most compiled places, for all expressions and a few for the words of each rule.
_PLACES_MAX = PLACES_MAX + 10_000


class RuleMatcher:
    """The compiled rules of one kind of text.

    Attributes:
        rules: Rules in the order of their set.
        automaton: Automaton that finds their matches.
        checks: Further checks that a match must pass, by index of the rule.
        blocks: Whether a rule ends the text, by index of the rule.
    """

    def __init__(self, rules: Sequence[GuardRule]) -> None:
        """Compile rules that have passed `rules.check`."""
        self.rules = tuple(rules)
        self.checks: list[Callable[[str], bool] | None] = [
            CHECKS[CHECKED_SETS[it.named]] if it.named in CHECKED_SETS else None for it in rules
        ]
        self.blocks = [it.action is GuardAction.BLOCK for it in rules]
        places, starts, dictionaries = Places(_PLACES_MAX), list[int](), list[Dictionary]()
        for number, rule in enumerate(rules):
            end = places.add(Ends(number))
            if rule.words:
                start = _words(rule, places, end, len(dictionaries))
                dictionary = Dictionary(rule.words, ignores_case=not rule.is_case_sensitive)
                dictionaries.append(dictionary)
                starts.append(start)
                continue
            for expression in NAMED_SETS.get(rule.named, (rule.expression,)):
                ignores_case = not rule.is_case_sensitive and not rule.named
                starts.append(compiled(expression, places, end, ignores_case=ignores_case))
        checked = frozenset([number for number, it in enumerate(self.checks) if it is not None])
        self.automaton = Automaton(places, starts, dictionaries, checked)


def _words(rule: GuardRule, places: Places, end: int, dictionary: int) -> int:
    """Add the words of a rule as a dictionary, and return its first place."""
    if rule.is_within_words:
        return places.add(Spells(dictionary, places.add(Forks((end,)))))
    edge = places.add(Holds(PlaceCondition.EDGE, end))
    return places.add(Holds(PlaceCondition.EDGE, places.add(Spells(dictionary, edge))))


class MatchRun:
    """A run of overlapping matches.

    Attributes:
        start: Index of the run's first character in the text.
        end: Index after the run's last character in the text.
        rules: Indices of the matching rules, as a bit set.
    """

    __slots__ = ("end", "rules", "start")

    def __init__(self, start: int, end: int, rules: int) -> None:
        """Create a run of one match."""
        self.start = start
        self.end = end
        self.rules = rules


class GuardedText:
    """A text to which rules are applied. `push` and `flush` return the released text.

    Attributes:
        counts: Number of runs with a match of a rule, by the index of the rule.
        blocked_by: Index of the rule that ended the text, or None if the text is not blocked.
        rewritten: Number of replaced runs.
        length: Number of characters pushed so far.
    """

    __slots__ = (
        *("_held", "_matcher", "_origins", "_runs", "_start", "_state"),
        *("blocked_by", "counts", "length", "rewritten"),
    )

    def __init__(self, matcher: RuleMatcher) -> None:
        """Begin a text without any character."""
        self._matcher = matcher
        self._state = matcher.automaton.start
        self._origins: Sequence[int] = ()  # start indices of the open candidates
        self._runs: list[MatchRun] = []  # runs that an open candidate may still extend
        self._held = ""
        self._start = 0  # index in the text of the first unreleased character
        self.length = self.rewritten = 0
        self.counts: dict[int, int] = {}
        self.blocked_by: int | None = None

    @property
    def rules(self) -> Sequence[GuardRule]:
        """The rules of the text, by their index."""
        return self._matcher.rules

    @property
    def released(self) -> int:
        """Number of characters that were released or replaced."""
        return self._start

    @property
    def held(self) -> str:
        """The unreleased text, which may become part of a match."""
        return self._held

    def push(self, text: str) -> str:
        """Process the next piece, and return the released text."""
        state = self._state
        leap = state.leaps.get(text)
        if leap is None:
            leap = self._matcher.automaton.leap(state, text)
        if leap.finds:
            return self._push_finds(text)
        self._state = leap.state
        if not leap.is_same:
            origins, length = self._origins, self.length
            self._origins = [origins[it] if it >= 0 else length - 1 - it for it in leap.origins]
        self.length += len(text)
        if self._held:
            text = self._held + text
        elif not self._origins:
            self._start = self.length
            return text
        if self._runs:
            self._held = text
            return self._released()
        keep = self.length - self._origins[0] if self._origins else 0
        self._start = self.length - keep
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """End the text, and return the rest that may now be released."""
        if self.blocked_by is not None:
            return ""
        self._take(self._matcher.automaton.end(self._state), self.length)
        self._origins, self._state = (), self._matcher.automaton.start
        return "" if self.blocked_by is not None else self._released()

    def _push_finds(self, text: str) -> str:
        """Process a piece with matches by character, so that its boundaries do not matter."""
        automaton, released = self._matcher.automaton, list[str]()
        for character in text:
            step = automaton.step(self._state, character)
            self._held += character
            if step.finds:
                self._take(step.finds, self.length)
                if self.blocked_by is not None:
                    break
            origins, length = self._origins, self.length
            self._origins = [origins[it] if it >= 0 else length for it in step.origins]
            self._state = step.state
            self.length += 1
            released.append(self._released())
        return "".join(released)

    def _take(self, finds: Sequence[Find], at: int) -> None:
        """Record matches. A match that blocks the text drops the unreleased part."""
        matcher, runs = self._matcher, self._runs
        for it in finds:
            start = self._origins[it.origin] if it.origin >= 0 else at - 1 - it.origin
            end = at + it.end
            check = matcher.checks[it.rule]
            if check is not None and not check(self._held[start - self._start : end - self._start]):
                continue
            if matcher.blocks[it.rule]:
                self.blocked_by = it.rule
                self._count(1 << it.rule)
                self._held, self._origins, runs[:] = "", (), []
                return
            run = MatchRun(start, end, 1 << it.rule)
            while runs and runs[-1].end > run.start:
                last = runs.pop()
                run.start, run.end = min(last.start, run.start), max(last.end, run.end)
                run.rules |= last.rules
            runs.append(run)

    def _released(self) -> str:
        """Return the text that is released now, with each complete run replaced."""
        border = self._origins[0] if self._origins else self.length
        if not self._runs:
            return self._left(border)
        parts, runs = list[str](), self._runs
        while runs:
            run = runs[0]
            if run.end > border:
                border = min(border, run.start)
                break
            parts += (self._left(run.start), self._replaced(run))
            del runs[0]
        parts.append(self._left(border))
        return "".join(parts)

    def _replaced(self, run: MatchRun) -> str:
        self._left(run.end)
        self._count(run.rules)
        self.rewritten += 1
        first = (run.rules & -run.rules).bit_length() - 1
        return self._matcher.rules[first].replacement

    def _left(self, border: int) -> str:
        """Remove and return the unreleased text before a position."""
        count = border - self._start
        left, self._held, self._start = self._held[:count], self._held[count:], border
        return left

    def _count(self, rules: int) -> None:
        while rules:
            lowest = rules & -rules
            number = lowest.bit_length() - 1
            self.counts[number] = self.counts.get(number, 0) + 1
            rules -= lowest
