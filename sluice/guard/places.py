"""The compiled form of expressions: places of a nondeterministic automaton. Pure.

A place eats a character, holds a condition on the characters at its left and right, or marks the
match of a rule. Transitions that eat nothing are followed when places are made.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from sluice.guard.characters import Before, is_word


class PlaceCondition(Enum):
    """On a place between two characters."""

    BOUNDARY = auto()  # of a word
    NO_BOUNDARY = auto()
    EDGE = auto()  # no word goes on across it; unlike a boundary, it may stand beside a sign
    BEGIN = auto()
    END = auto()
    LINE_BEGIN = auto()
    LINE_END = auto()

    def holds(self, left: Before, right: str | None) -> bool:
        """Return whether it holds; `right` is the next character, None: the text has ended."""
        return _HOLDS[self](left, right)


def _joins(left: Before, right: str | None) -> tuple[bool, bool]:
    """Return whether words stand on the left and on the right."""
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
    """Takes one of certain characters."""

    has: Callable[[str], bool]
    behind: int


class Holds(NamedTuple):
    """Goes on where a condition holds."""

    condition: PlaceCondition
    behind: int


class Forks(NamedTuple):
    """Goes on at several places."""

    behind: tuple[int, ...]


class Ends(NamedTuple):
    """A rule matches."""

    rule: int


class Spells(NamedTuple):
    """Takes words of a dictionary; places within them are `Spelt`."""

    dictionary: int
    behind: int


Place = Eats | Holds | Forks | Ends | Spells


class TooLargeError(ValueError):
    """The expressions come to more places than the bound."""


class Places:
    """Places of one automaton; expressions are built from their end to their begin."""

    def __init__(self, most: int) -> None:
        """Prepare; `most`: so many places at most."""
        self._most = most
        self.all: list[Place] = []

    def add(self, place: Place) -> int:
        """Return the number of a new place. TooLargeError: there are too many."""
        if len(self.all) >= self._most:
            raise TooLargeError
        self.all.append(place)
        return len(self.all) - 1

    def closure(self, start: int) -> tuple[int, ...]:
        """Return all places, but forks, that a place leads to without a character or condition."""
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
        """Return whether a rule could match a text of no characters, whatever stands around it."""
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
