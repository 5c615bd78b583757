"""Reads the text of a grammar, and refuses unsafe text before it is compiled.

A grammar is foreign text, and llguidance bounds neither its time nor its stack. A chain of a
thousand references crashes the process, and a large `multipleOf` never ends. So the text is checked
before. An accepted text typically compiles in one or two milliseconds, or in 0.2 s if it is large.
The worst case, a product of many `anyOf` in one `allOf`, is refused after less than two seconds.
The slowest step takes 30 ms, and a few such steps end the answer with an error.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from replica.engine.grammar_numbers import (
    changed_bounds,
    is_kept,
    numeric_bounds,
    overflows,
    read_float,
)
from replica.engine.lark import read_lark
from replica.engine.types import Grammar, GrammarKind, RefusedError
from sluice.errors import ErrorCode

_TEXT_BYTES_MAX = {
    GrammarKind.JSON: 0,
    GrammarKind.JSON_SCHEMA: 65_536,
    GrammarKind.CHOICE: 65_536,
    GrammarKind.REGEX: 8_192,  # a step of a long expression takes 0.3 ms per KiB
    GrammarKind.EBNF: 16_384 + 65_536,
}
# Largest numbers of bytes of the rules, and of the schemas, in one grammar in Lark's syntax
_LARK_BYTES_MAX, _SCHEMAS_BYTES_MAX = 16_384, 65_536
# Largest number of characters of a string in a schema or a choice. Long ones slow down each step.
_STRING_CHARACTERS_MAX = 4_096
# Limits on nesting, because the compiler follows references and rules recursively. A stack of 8 MiB
# suffices for 3,000 to 4,000 levels of a schema, and for chains of 2,000 rules.
_LEVELS_MAX = 1_000
_RULES_MAX = 500
# Largest number of optional properties of one object. The parser aborts near this number after
# 150 ms, and its time grows with the square of the number.
_OPTIONAL_MAX = 500
_PATTERNS_MAX = 20  # patterns are compared in pairs, and 400 patterns took far too long
# Largest value of a `multipleOf`. Its automaton has as many states, and 10,000 take 40 ms.
_MULTIPLE_MAX = 10_000
_CONSTANTS = ("const", "enum")
# Keywords whose value maps names to schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DIRECTIVES = re.compile(r"%\s*(json|regex|lark|llguidance)")
# The key for the format of JSON. The platform's choice replaces the value in a client's schema.
_OPTIONS_KEY, _OPTIONS_CHARACTERS_MAX = "x-guidance", 200
# Special tokens are written by number, because their names could also occur as text.
_TOKEN = re.compile(r"<\[([0-9]{1,7})\]>")
_UNQUOTABLE = re.compile("[\x00-\x1f\ud800-\udfff]")
# A space may follow a comma or a colon, but no other spaces are permitted. With free spaces, a weak
# model would emit spaces endlessly. Without any, its answers become worse than with the usual ones.
_SPACED: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_MESSAGE_CHARACTERS = 300
# llguidance's messages begin with the place, and end with lines of the grammar or internal state.
_BEHIND_MESSAGE = re.compile(r"\n(?:<|\s*[0-9]+ \| )")
_PLACE = re.compile(r"at ([0-9]+)\([0-9]+\): ")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def grammar_source(grammar: Grammar) -> str:
    """Return the grammar in llguidance's form. Raises RefusedError if compiling it is unsafe."""
    _check_size(grammar)
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.JSON:
        text = '{"type":"object"}'
    if kind is GrammarKind.REGEX:
        # \\d, \\w and \\s match ASCII only, because a client that writes \\d does not expect the
        # digits of other scripts.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, use_ascii='dws')}/")
    if kind is GrammarKind.EBNF:
        return LLMatcher.grammar_from_lark(_checked_lark(grammar))
    try:
        document = json.loads(text, parse_float=read_float)
    except (ValueError, RecursionError) as error:
        raise refused(grammar, f"it is not JSON: {error}") from None
    if kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark(_choice(grammar, document))
    _check_schema(grammar, document)
    try:
        # The parsed schema is compiled, not its text. With duplicate keys, a check of the parsed
        # schema would not apply to the text.
        return LLMatcher.grammar_from_json_schema(json.dumps(document | {_OPTIONS_KEY: _SPACED}))
    # Python's JSON reader accepts NaN and surrogates, but llguidance does not
    except ValueError as error:
        raise refused(grammar, shortened(str(error))) from None


def refused(grammar: Grammar, reason: str) -> RefusedError:
    """Return the error that reports to a client why a grammar is refused."""
    message = f"the grammar ({grammar.kind.value}) cannot be used: {reason}"
    return RefusedError(ErrorCode.INVALID_REQUEST, message, param="grammar")


def shortened(message: str) -> str:
    """Return an llguidance message without the internal state at its end."""
    return _BEHIND_MESSAGE.split(message, 1)[0].strip()[:_MESSAGE_CHARACTERS]


def located(grammar: Grammar, message: str) -> str:
    """Return a message that names a literal as the place, not a line unknown to the client."""
    message = shortened(message)
    place = _PLACE.match(message)
    if place is None:
        return message
    literal = None
    if grammar.kind is GrammarKind.EBNF:  # only this kind is compiled with the client's own lines
        rule = grammar.text.split("\n")[int(place[1]) - 1].partition("%json")[0]
        literal = _LITERAL.search(rule)
    name = "" if literal is None else f"{literal[0]}: "
    return name + message[place.end() :]


def _check_size(grammar: Grammar) -> None:
    try:
        size, allowed = len(grammar.text.encode()), _TEXT_BYTES_MAX[grammar.kind]
    except UnicodeEncodeError:
        raise refused(grammar, "it has half a surrogate pair") from None
    if size > allowed:
        raise refused(grammar, f"it has {size} bytes; at most {allowed}")
    if not size and allowed:
        raise refused(grammar, "it is empty")


def _choice(grammar: Grammar, document: Any) -> str:
    """Return a grammar with one terminal, which matches exactly the given strings."""
    if not isinstance(document, list) or not document:
        raise refused(grammar, "it must be a JSON array of at least one string")
    for choice in document:
        if not isinstance(choice, str) or not 0 < len(choice) <= _STRING_CHARACTERS_MAX:
            raise refused(
                grammar, f"each choice must be a string of 1 to {_STRING_CHARACTERS_MAX} characters"
            )
        if _UNQUOTABLE.search(choice):
            raise refused(grammar, "a choice has a control character or half a surrogate pair")
    # JSON's quotes are valid here, because Lark's strings have the same escapes.
    return "start: CHOICE\nCHOICE: " + " | ".join(
        json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(document)
    )


def named_tokens(grammar: Grammar) -> frozenset[int]:
    """Return the ids of the tokens that a grammar names by number."""
    if grammar.kind is not GrammarKind.EBNF:
        return frozenset()
    return frozenset(int(number) for number in _TOKEN.findall(grammar.text))


def _checked_lark(grammar: Grammar) -> str:
    """Check a grammar in Lark's syntax, and return it with the replaced bounds in its schemas."""
    try:
        lark = read_lark(grammar.text)
    except (ValueError, RecursionError) as error:
        raise refused(grammar, f"a schema in it is not JSON: {error}") from None
    # after an unclosed string, the compiler would read the following text as part of it
    if lark.is_open or "/" in lark.bare:
        raise refused(grammar, "a string or an expression is not closed on its line")
    if "<" in _TOKEN.sub("", lark.bare):
        raise refused(grammar, "special tokens can only be written by their number, as <[3]>")
    text = "".join(lark.texts)
    if len(_DIRECTIVES.findall(text)) > len(lark.schemas):
        raise refused(grammar, "%regex, %lark and %llguidance are not supported, nor a bare %json")
    # Every rule has a colon after its name, so the colons bound the number of rules.
    if lark.bare.count(":") > _RULES_MAX:
        raise refused(grammar, f"it has more than {_RULES_MAX} rules (colons)")
    _check_schemas(grammar, text, lark.schemas)
    try:
        return lark.joined()
    except ValueError as error:
        raise refused(grammar, shortened(str(error))) from None


def _check_schemas(grammar: Grammar, text: str, schemas: list[Any]) -> None:
    for part, allowed in ((text, _LARK_BYTES_MAX), (json.dumps(schemas), _SCHEMAS_BYTES_MAX)):
        if len(part) > allowed:
            raise refused(grammar, f"it has {len(part)} bytes; at most {allowed}")
    for schema in schemas:
        _check_schema(grammar, schema)
        if len(json.dumps(schema.get(_OPTIONS_KEY))) > _OPTIONS_CHARACTERS_MAX:
            raise refused(grammar, f"{_OPTIONS_KEY} has more than {_OPTIONS_CHARACTERS_MAX} bytes")
    _check_sums(grammar, _survey(schemas))


class _Place(Enum):
    SCHEMA = auto()
    NAMES = auto()
    CONSTANT = auto()

    def below(self, key: str) -> "_Place":
        """Return the kind of place below a key."""
        if self is _Place.SCHEMA and key in _NAMED:
            return _Place.NAMES
        is_constant = self is _Place.SCHEMA and key in _CONSTANTS
        return _Place.CONSTANT if is_constant or self is _Place.CONSTANT else _Place.SCHEMA


@dataclass(slots=True)
class _Survey:
    """The features of a schema that determine the time and stack of its compilation.

    Attributes:
        depth: Levels of nested objects and arrays.
        optional: Sum over all objects of the squared number of optional properties.
        patterns: Sum over all objects of the squared number of `patternProperties`.
        string: Length of the longest string.
        bounds: Tuples (object, key, number). The number must replace the object's value of the key.
        lost: Numbers that the compiler would change and that cannot be replaced.
    """

    depth: int = 0
    optional: int = 0
    patterns: int = 0
    string: int = 0
    multiples: list[Fraction] = field(default_factory=list[Fraction])
    references: set[str] = field(default_factory=set[str])
    bounds: list[tuple[dict[str, Any], str, float]] = field(default_factory=list[Any])
    lost: list[float] = field(default_factory=list[float])

    def add(self, node: Any, place: _Place) -> Iterable[tuple[Any, _Place]]:
        """Record one node, and return the nodes below it, with their places."""
        if isinstance(node, str):
            self.string = max(self.string, len(node))
        if isinstance(node, int | float):
            self._add_number(node, place)
        if isinstance(node, list):
            return [(below, place) for below in node]
        if not isinstance(node, dict):
            return ()
        reference = node.get("$ref")
        if isinstance(reference, str):
            self.references.add(reference)
        self.multiples += _number(node.get("multipleOf"))
        self.optional += _optional(node) ** 2
        self.patterns += len(_mapping(node.get("patternProperties"))) ** 2
        bounds = {} if place is _Place.CONSTANT else numeric_bounds(node)
        if bounds:
            self._add_bounds(node, bounds)
        rest = [(value, place.below(key)) for key, value in node.items() if key not in bounds]
        return [*((key, place) for key in node), *rest]

    def _add_number(self, number: float, place: _Place) -> None:
        # A reference may use any node as a constant, so numbers that overflow are always refused.
        if overflows(number) or (place is _Place.CONSTANT and not is_kept(number)):
            self.lost.append(number)

    def _add_bounds(self, schema: dict[str, Any], bounds: dict[str, float]) -> None:
        changed = dict(changed_bounds(schema))
        for key, value in bounds.items():
            kept = changed.get(key, value)
            # A bound that has no effect here may be a constant of a schema that refers to it.
            if kept is None or overflows(kept):
                self.lost.append(value)
            elif key in changed:
                self.bounds.append((schema, key, kept))


def _survey(document: Any) -> _Survey:
    survey = _Survey()
    level: list[tuple[Any, _Place]] = [(document, _Place.SCHEMA)]
    while level:
        survey.depth += 1
        level = [below for node, place in level for below in survey.add(node, place)]
    return survey


def _check_schema(grammar: Grammar, document: Any) -> None:
    """Refuse schemas whose compilation is too costly, and replace inexact bounds in place."""
    if not isinstance(document, dict):
        raise refused(grammar, "a schema is a JSON object")
    survey = _survey(document)
    if survey.string > _STRING_CHARACTERS_MAX:
        raise refused(grammar, f"a string has more than {_STRING_CHARACTERS_MAX} characters")
    if survey.lost:
        number = shortened(str(survey.lost[0]))
        raise refused(grammar, f"a number is too large and not kept exactly: {number}")
    for schema, key, kept in survey.bounds:
        schema[key] = kept
    _check_sums(grammar, survey)
    if survey.depth * (1 + len(survey.references)) > _LEVELS_MAX:
        raise refused(
            grammar,
            f"{survey.depth} levels and {len(survey.references)} different $ref may nest too"
            f" deeply; levels times references may be {_LEVELS_MAX}",
        )


def _check_sums(grammar: Grammar, survey: _Survey) -> None:
    """Refuse a grammar if the sums over all its schemas are too large."""
    if survey.optional > _OPTIONAL_MAX**2:
        raise refused(
            grammar, f"it has more than {_OPTIONAL_MAX} optional properties; require or remove some"
        )
    if survey.patterns > _PATTERNS_MAX**2:
        raise refused(grammar, f"it has more than {_PATTERNS_MAX} patternProperties")
    if _common_multiple(survey.multiples) > _MULTIPLE_MAX:
        raise refused(
            grammar,
            f"all its multipleOf, as whole numbers, have a common multiple above {_MULTIPLE_MAX}",
        )


def _optional(schema: dict[str, Any]) -> int:
    """Return the number of optional properties of an object schema."""
    properties, required = _mapping(schema.get("properties")), schema.get("required")
    names = required if isinstance(required, list) else []
    return len(properties.keys() - {name for name in names if isinstance(name, str)})


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> list[Fraction]:
    """Return a list with the exact value of a number, or empty for 0 and infinite values."""
    if isinstance(value, float) and math.isfinite(value) and value:
        return [Fraction(str(value))]
    return [Fraction(value)] if type(value) is int and value else []


def _common_multiple(values: list[Fraction]) -> int:
    """Return the least common multiple, after a power of ten has made all values whole."""
    for places in range(20):
        shifted = [value * 10**places for value in values]
        if all(value.denominator == 1 for value in shifted):
            return math.lcm(*(value.numerator for value in shifted))
    return _MULTIPLE_MAX + 1
