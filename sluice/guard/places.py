"""The compiled form of expressions, whose places are states of a nondeterministic automaton. Pure.

A place consumes a character, checks a condition on the neighbouring characters, or marks the match
of a rule. Transitions without a character are resolved when the automaton is built.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from sluice.guard.characters import Before, is_word


class PlaceCondition(Enum):
    """A condition on the position between two characters."""

    BOUNDARY = auto()  # between a word character and another character
    NO_BOUNDARY = auto()
    EDGE = auto()  # not between two word characters
    BEGIN = auto()
    END = auto()
    LINE_BEGIN = auto()
    LINE_END = auto()

    def holds(self, left: Before, right: str | None) -> bool:
        """Return whether the condition is true.

        `right` is the next character, or None at the end.
        """
        return _HOLDS[self](left, right)


def _joins(left: Before, right: str | None) -> tuple[bool, bool]:
    """Return whether the left and whether the right neighbour is a word character."""
    return left is Before.WORD, right is not None and is_word(right)


_HOLDS: dict[PlaceCondition, Callable[[Before, str | None], bool]] = {
    PlaceCondition.BOUNDARY: lambda left, right: len(set(_joins(left, right))) == 2,
    PlaceCondition.NO_BOUNDARY: lambda left, right: len(set(_joins(left, right))) == 1,
    PlaceCondition.EDGE: lambda left, right: not all(_joins(left, right)),
    PlaceCondition.BEGIN: lambda left, _: left is Before.NOTHING,
    PlaceCondition.END: lambda _, right: right is None,
    PlaceCondition.LINE_BEGIN: lambda left, _: left in {Before.NOTHING, Before.LINE_BREAK},
    PlaceCondition.LINE_END: lambda _, right: right is None or right == "\n",
}


class Eats(NamedTuple):
    """A place that consumes one character of a set."""

    has: Callable[[str], bool]
    behind: int


class Holds(NamedTuple):
    """A place that leads to the place `behind` if its condition is true."""

    condition: PlaceCondition
    behind: int


class Forks(NamedTuple):
    """A place that leads to several places without consuming a character."""

    behind: tuple[int, ...]


class Ends(NamedTuple):
    """A place at which a rule has matched."""

    rule: int


class Spells(NamedTuple):
    """A place that consumes a word of a dictionary. Positions within words are `Spelt`."""

    dictionary: int
    behind: int


Place = Eats | Holds | Forks | Ends | Spells


class TooLargeError(ValueError):
    """Raised if the expressions need more places than permitted."""


class Places:
    """The places of one automaton, built from the end of each expression to its begin."""

    def __init__(self, most: int) -> None:
        """Create an empty list of places, of which there may be at most `most`."""
        self._most = most
        self.all: list[Place] = []

    def add(self, place: Place) -> int:
        """Add a place, and return its index. Too many places raise TooLargeError."""
        if len(self.all) >= self._most:
            raise TooLargeError
        self.all.append(place)
        return len(self.all) - 1

    def closure(self, start: int) -> tuple[int, ...]:
        """Return all places reached from `start` without a character or condition, except forks."""
        found, waiting = dict[int, None](), [start]
        forks = set[int]()
        while waiting:
            number = waiting.pop()
            place = self.all[number]
            if not isinstance(place, Forks):
                found[number] = None
            elif number not in forks:
                forks.add(number)
                waiting += place.behind
        return tuple(found)

    def may_be_empty(self, starts: Sequence[int]) -> bool:
        """Return whether a rule could match the empty text in some surroundings."""
        seen, waiting = set[int](), list(starts)
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            match self.all[number]:
                case Ends():
                    return True
                case Holds(_, behind):
                    waiting.append(behind)
                case Forks(behind):
                    waiting += behind
                case _:
                    pass
        return False
