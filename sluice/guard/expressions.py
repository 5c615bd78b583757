"""Compiles regular expressions into places of an automaton. Pure.

The language is Python's, without look-around, references and atomic groups, which an automaton
cannot express. Greedy and lazy repeats are equivalent, because the automaton finds all matches.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from sluice.guard.characters import folded, is_word, lookalike
from sluice.guard.places import Eats, Forks, Holds, PlaceCondition, Places, TooLargeError

EXPRESSION_CHARACTERS_MAX = 1000
EXPRESSION_PLACES_MAX = 2000

# The standard library's own parser, because another parser could interpret expressions differently.
_reader: Any = importlib.import_module("re._parser")
_Has = Callable[[str], bool]

_CONDITIONS = {
    "AT_BEGINNING_STRING": PlaceCondition.BEGIN,
    "AT_BOUNDARY": PlaceCondition.BOUNDARY,
    "AT_NON_BOUNDARY": PlaceCondition.NO_BOUNDARY,
    "AT_END_STRING": PlaceCondition.END,
}
_CATEGORIES: dict[str, _Has] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": is_word,
}
_LEFT_OUT = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "references to groups",
    "GROUPREF_EXISTS": "references to groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repeats",
}


class ExpressionError(ValueError):
    """Raised for an unusable expression, with a message for its author that has the reason."""


def compiled(expression: str, places: Places, behind: int, *, ignores_case: bool = False) -> int:
    """Compile an expression into places.

    Args:
        expression: Regular expression in Python's syntax.
        places: Places of the automaton, extended by the places of the expression.
        behind: Place behind the expression.
        ignores_case: Whether letters match both cases.

    Returns:
        First place of the expression.

    Raises:
        ExpressionError: The text is no expression, uses an unsupported construct, is too large, or
            matches the empty text.
    """
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise ExpressionError(f"it is longer than {EXPRESSION_CHARACTERS_MAX} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about character sets whose meaning may change
            read = _reader.parse(expression)
        build = _Build(places, len(places.all) + EXPRESSION_PLACES_MAX, ignores_case=ignores_case)
        start = build.sequence(read, read.state.flags, behind)
    except (re.error, OverflowError) as error:
        raise ExpressionError(str(error)) from None
    except RecursionError:
        raise ExpressionError("its groups are nested too deeply") from None
    except TooLargeError:
        text = f"it comes to more than {EXPRESSION_PLACES_MAX} places; make its repeats smaller"
        raise ExpressionError(text) from None
    if places.may_be_empty([start]):
        raise ExpressionError("it matches the empty text")
    return start


class _Build:
    """Builds one expression."""

    def __init__(self, places: Places, most: int, *, ignores_case: bool) -> None:
        self._places = places
        self._most = most
        self._ignores_case = ignores_case

    def _add(self, place: Eats | Forks | Holds) -> int:
        if len(self._places.all) >= self._most:
            raise TooLargeError
        return self._places.add(place)

    def sequence(self, items: Iterable[Any], flags: int, behind: int) -> int:
        for name, value in reversed([*items]):
            behind = self._item(str(name), value, flags, behind)
        return behind

    def _item(self, name: str, value: Any, flags: int, behind: int) -> int:
        if name in _LEFT_OUT:
            raise ExpressionError(f"{_LEFT_OUT[name]} cannot be used: the time must stay linear")
        match name:
            case "SUBPATTERN":
                _, added, removed, inner = value
                return self.sequence(inner, (flags | added) & ~removed, behind)
            case "BRANCH":
                starts = [self.sequence(it, flags, behind) for it in value[1]]
                return self._add(Forks(tuple(starts)))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeat(least, most, inner, flags, behind)
            case "AT":
                return self._add(Holds(_condition(str(value), flags), behind))
            case _:
                return self._add(Eats(self._characters(name, value, flags), behind))

    def _repeat(self, least: int, most: Any, inner: Any, flags: int, behind: int) -> int:
        if str(most) == "MAXREPEAT":
            loop = self._add(Forks(()))
            start = self.sequence(inner, flags, loop)
            self._places.all[loop] = Forks((start, behind))
            rest = loop
        else:
            rest = behind
            for _ in range(int(most) - least):
                rest = self._add(Forks((self.sequence(inner, flags, rest), behind)))
        for _ in range(least):
            rest = self.sequence(inner, flags, rest)
        return rest

    def _characters(self, name: str, value: Any, flags: int) -> _Has:
        if name == "ANY":
            is_all = bool(flags & re.DOTALL)
            return lambda character: is_all or character != "\n"
        if name == "IN":
            return self._set([*value], flags)
        if name not in {"LITERAL", "NOT_LITERAL"}:
            raise ExpressionError(f"it uses an unsupported construct ({name.lower()})")
        has = self._in_any_case(frozenset(chr(value)).__contains__, flags)
        return has if name == "LITERAL" else _without(has)

    def _set(self, items: list[tuple[Any, Any]], flags: int) -> _Has:
        is_negated = str(items[0][0]) == "NEGATE"
        parts = [_part(str(name), value) for name, value in items[is_negated:]]
        has = self._in_any_case(lambda it: any(part(it) for part in parts), flags)
        return _without(has) if is_negated else has

    def _in_any_case(self, has: _Has, flags: int) -> _Has:
        if not (self._ignores_case or flags & re.IGNORECASE):
            return lambda it: has(it) or has(lookalike(it))

        def in_any(character: str) -> bool:
            form = folded(character)
            return has(character) or has(form) or has(form.upper())

        return in_any


def _without(has: _Has) -> _Has:
    return lambda character: not has(character)


def _part(name: str, value: Any) -> _Has:
    """Return the test of a character for one part of a character set."""
    if name == "LITERAL":
        return frozenset(chr(value)).__contains__
    if name == "RANGE":
        first, last = value
        return lambda character: first <= ord(character) <= last
    category = str(value).removeprefix("CATEGORY_")
    has = _CATEGORIES[category.removeprefix("NOT_")]
    return _without(has) if category.startswith("NOT_") else has


def _condition(name: str, flags: int) -> PlaceCondition:
    is_by_line = bool(flags & re.MULTILINE)
    if name == "AT_BEGINNING":
        return PlaceCondition.LINE_BEGIN if is_by_line else PlaceCondition.BEGIN
    if name == "AT_END":
        return PlaceCondition.LINE_END if is_by_line else PlaceCondition.END
    return _CONDITIONS[name]
