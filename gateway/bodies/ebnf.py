"""Translates a client's grammar, in Lark's syntax or in GBNF, into the engine's Lark. Pure.

GBNF (`root ::= "yes" | "no"`) is the form in vLLM's documentation. Names of special tokens are
refused, because special tokens never appear in an answer. The engine decides later whether the
grammar compiles. If it does not, the client receives status 400 as well.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gateway.bodies.mistakes import bad_value
from sluice.errors import BadRequestError

# Maximum bytes of a grammar, slightly below the engine's 16 KiB (replica/engine/grammar_source.py).
GRAMMAR_BYTES_MAX = 16_000
# Maximum number of rules. With more overlapping terminals, a grammar compiles for over a second.
_RULES_MAX = 200
_PARAM = "grammar"
_ROOTS = {"gbnf": "root", "lark": "start"}
_LARK_TOKEN = re.compile(
    r"""
    (?P<text> "(?:[^"\\\n]|\\.)*" | /(?:[^/\\\n]|\\.)+/[a-z]* )
    | (?P<comment> //.* | \#.* )
    | (?P<directive> %\s*\w* )
    | (?P<name> [A-Za-z_]\w* )
    | (?P<special> [<@] )
    | (?P<open> ["/] )
    | (?P<rest> [\s\S] )
    """,
    re.VERBOSE | re.ASCII,
)
# Matches the name at the beginning of a rule, which a priority or attributes may follow.
_LARK_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)(?=[ \t]*[:.\[])", re.MULTILINE | re.ASCII)
_LARK_DIRECTIVES = frozenset({"%ignore", "%import"})
_GBNF_TOKEN = re.compile(
    r"""
    (?P<string> "(?:[^"\\\n]|\\.)*" )
    | (?P<set> \[\^?(?:[^\]\\\n]|\\.)*\] )
    | (?P<comment> \#.* )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<define> ::= )
    | (?P<times> \{\s*\d+\s*(?:,\s*\d*\s*)?\} )
    | (?P<mark> [|()*+?] )
    | (?P<any> \. )
    | (?P<line> [\r\n]+ )
    | (?P<space> [ \t]+ )
    | (?P<rest> [\s\S] )
    """,
    re.VERBOSE | re.ASCII,
)
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE | re.ASCII)
_UNREAD = ("space", "comment", "line")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\s\S]))|([\s\S])"
)
_NAMED_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = r"/(.|\n)/"


def lark_grammar(text: str) -> str:
    """Return a client's grammar in Lark's syntax, whose first rule is `start`.

    Raises:
        BadRequestError: The grammar is too large, has no first rule, or uses a refused construct.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > GRAMMAR_BYTES_MAX:
        raise bad_value(_PARAM, f"it has {size} bytes; at most {GRAMMAR_BYTES_MAX}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise bad_value(_PARAM, "it has half a surrogate pair")
    return _from_gbnf(text) if _GBNF_RULE.search(text) else _checked_lark(text)


def answer_rules(grammar: str) -> str:
    """Return the rules of a Lark grammar, renamed for use in a larger grammar.

    The rule `answer` is first. It stands for the whole given grammar.

    Args:
        grammar: Grammar from `lark_grammar`.
    """
    names = set(_LARK_RULE.findall(grammar))
    parts = [
        _apart(found.group()) if found.lastgroup == "name" and found.group() in names
        else found.group()
        for found in _LARK_TOKEN.finditer(grammar)
    ]  # fmt: skip
    return f"answer: {_apart('start')}\n" + "".join(parts)


def _apart(name: str) -> str:
    """Return a rule's name with a prefix that no rule of an answer's dialect has."""
    return f"G_{name}" if name.isupper() else f"g_{name}"


def _checked_lark(text: str) -> str:
    _check_rules(_LARK_RULE.findall(text), _ROOTS["lark"])
    for found in _LARK_TOKEN.finditer(text):
        part = found.group()
        match found.lastgroup:
            case "special":
                raise _misplaced(found, "it may not name special tokens or other grammars")
            case "open":
                raise _misplaced(found, "a string or an expression is not closed")
            case "directive" if part.replace(" ", "") not in _LARK_DIRECTIVES:
                raise _misplaced(found, "its directives can be %ignore and %import")
            case _:
                pass
    return text


class _Part(NamedTuple):
    """A piece of a rule: either its text in Lark, or the name of another rule."""

    text: str
    name: str = ""


@dataclass(slots=True)
class _Rule:
    """A rule of GBNF, stored as the pieces of its right side."""

    parts: list[_Part]

    @property
    def references(self) -> set[str]:
        return {part.name for part in self.parts if part.name}


def _from_gbnf(text: str) -> str:
    rules = _gbnf_rules(text)
    _check_rules(rules, _ROOTS["gbnf"])
    for rule in rules.values():
        if unknown := rule.references - rules.keys():
            raise bad_value(_PARAM, f"there is no rule '{min(unknown)}'")
    names = _lark_names(rules)
    lark = "\n".join(
        f"{names[name]}: " + " ".join([names.get(part.name, part.text) for part in rule.parts])
        for name, rule in rules.items()
    )
    if (size := len(lark.encode())) > GRAMMAR_BYTES_MAX:
        raise bad_value(
            _PARAM, f"in Lark's syntax it has {size} bytes; at most {GRAMMAR_BYTES_MAX}"
        )
    return lark


def _gbnf_rules(text: str) -> dict[str, _Rule]:
    """Return the rules by name."""
    rules, parts, depth = dict[str, _Rule](), list[_Part](), 0
    pieces = [it for it in _GBNF_TOKEN.finditer(text) if it.lastgroup not in _UNREAD]
    kinds = [it.lastgroup for it in pieces]
    for found, kind, following in zip(pieces, kinds, [*kinds[1:], None], strict=True):
        part = found.group()
        if kind == "name" and following == "define":
            if depth:
                raise _misplaced(found, "a bracket in front of this rule is not closed")
            if part in rules:
                raise bad_value(_PARAM, f"there are two rules '{part}'")
            parts = list[_Part]()
            rules[part] = _Rule(parts)
        elif kind == "rest" or not rules:
            raise _misplaced(found, "this cannot be read")
        elif kind == "name":
            parts.append(_Part("", part))
        elif kind != "define":
            depth += {"(": 1, ")": -1}.get(part, 0)
            parts.append(_Part(_lark_of(found)))
    return rules


def _lark_of(found: re.Match[str]) -> str:
    """Return a piece of GBNF in Lark's syntax."""
    part = found.group()
    match found.lastgroup:
        case "string":
            literal = json.dumps("".join(_characters(part[1:-1], found)), ensure_ascii=False)
            # A plain percent sign could make the literal look like a directive.
            return literal.replace("%", r"\u0025")
        case "set":
            return _set(part, found)
        case "any":
            return _ANY
        case "times":
            return re.sub(r"\s", "", part)
        case _:
            return part


def _set(part: str, found: re.Match[str]) -> str:
    """Return a character set as a regular expression."""
    inner = part[1:-1]
    mark, inner = ("^", inner[1:]) if inner.startswith("^") else ("", inner)
    if not inner:
        raise _misplaced(found, "a set without characters matches nothing")
    # A dash between two characters is a range. At an end, or escaped, it is a plain dash.
    pieces = [it.group() for it in _ESCAPE.finditer(inner)]
    characters = list(_characters(inner, found))
    written = [
        "-" if piece == "-" and 0 < index < len(pieces) - 1 else _code(character)
        for index, (piece, character) in enumerate(zip(pieces, characters, strict=True))
    ]
    return f"/[{mark}{''.join(written)}]/"


def _code(character: str) -> str:
    """Return a character escaped for use in a set of a regular expression."""
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def _characters(text: str, found: re.Match[str]) -> Iterator[str]:
    for it in _ESCAPE.finditer(text):
        code, named, plain = it[1] or it[2] or it[3], it[4], it[5]
        if code is None:
            yield plain or _NAMED_ESCAPES.get(named, named)
            continue
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise _misplaced(found, f"\\{it.group()[1:]} is no character")
        yield chr(number)


def _lark_names(rules: Mapping[str, _Rule]) -> dict[str, str]:
    """Return each rule's name in Lark. Terminals have upper case, by which Lark recognizes them."""
    names, taken = {_ROOTS["gbnf"]: _ROOTS["lark"]}, {_ROOTS["lark"]}
    terminals = _terminals(rules)
    for name in rules.keys() - names.keys():
        plain = re.sub(r"\W|-", "_", name)
        plain = plain.upper() if name in terminals else plain.lower()
        number, found = 1, plain
        while found in taken:
            number += 1
            found = f"{plain}_{number}"
        taken.add(found)
        names[name] = found
    return names


def _terminals(rules: Mapping[str, _Rule]) -> set[str]:
    """Return the terminals, which refer to no rules but terminals, and never to themselves."""
    missing = {name: rule.references for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, references in missing.items():
        for reference in references:
            users[reference].append(name)
    ready = [name for name, references in missing.items() if not references]
    found = set[str]()
    while ready:
        name = ready.pop()
        if name == _ROOTS["gbnf"]:
            continue
        found.add(name)
        for user in users[name]:
            missing[user].discard(name)
            if not missing[user]:
                ready.append(user)
    return found


def _check_rules(names: Collection[str], root: str) -> None:
    if root not in names:
        raise bad_value(_PARAM, f"it needs a rule '{root}', where an answer begins")
    if len(names) > _RULES_MAX:
        raise bad_value(_PARAM, f"it has {len(names)} rules; at most {_RULES_MAX}")


def _misplaced(found: re.Match[str], message: str) -> BadRequestError:
    line = found.string.count("\n", 0, found.start()) + 1
    return bad_value(_PARAM, f"{message}: line {line}, at {found.group()[:20]!r}")
