"""Grammars of tool calls, in llguidance's Lark. Pure.

A mark is a text that begins or ends a call or reasoning. If a mark is one token of the base's
vocabulary, the grammar contains this token. The model does not recognise the mark if other tokens
spell it, and the engine would refuse the spelling.
"""

import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway.dialects.forms import CallForm
from gateway.dialects.marks import (
    ARGUMENTS,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    ReasoningMarks,
)
from gateway.dialects.tools import ToolSpec
from sluice.errors import BadRequestError, ErrorCode

# Bytes of a grammar that an engine accepts: 16 KiB of rules and 64 KiB of schemas
# (replica/engine/grammar_source.py).
_GRAMMAR_BYTES_MAX = 16_384 + 65_536
# Maximum number of characters of an answer's rule, which leaves space for the rules of reasoning.
_ANSWER_CHARACTERS_MAX = 16_000
# Maximum number of calls per forced answer. Without it, a weak model might never end the answer.
CALLS_MAX = 16

# White space of JSON as in training data. With free white space, a weak model may never stop.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NO_PARAMETERS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
# Keywords of schemas whose properties can be written as Python's keyword arguments.
_PLAIN_KEYS = {
    "$defs",
    "$schema",
    "additionalProperties",
    "definitions",
    "description",
    "properties",
    "required",
    "title",
    "type",
}
_DEFINITIONS = ("$defs", "definitions")  # keys that the schema of each property receives too
_TO_DEFINITIONS = tuple(f"#/{key}/" for key in _DEFINITIONS)
# Maximum number of arguments per tool, and of all tools, because the engine bounds the rules.
_KEYWORDS_MAX, _ALL_KEYWORDS_MAX = 16, 128
_TEXT = r"/(.|\n)+/"
# Marks that begin calls. Llama's calls may begin without a mark.
_OPENINGS = {
    CallForm.HERMES: TOOL_CALL,
    CallForm.MISTRAL: TOOL_CALLS,
    CallForm.MISTRAL_NAMED: TOOL_CALLS,
}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Writes the grammars of one dialect.

    Attributes:
        form: Form of the calls.
        marks: Token ids of those marks that are one token.
        reasoning: Marks around the reasoning before the calls, or None if the base never reasons.
    """

    form: CallForm
    marks: Mapping[str, int]
    reasoning: ReasoningMarks | None

    def forced(self, tools: Sequence[ToolSpec], *, is_parallel: bool, is_reasoning: bool) -> str:
        """Return a grammar that allows only calls, after optional reasoning.

        Raises BadRequestError if the schemas together are too large.
        """
        assert tools, "without tools there is nothing to call"
        calls, rules = self._calls(tools, is_parallel=is_parallel)
        thought, more = self._thought(is_reasoning=is_reasoning)
        return _lark(thought + calls, (*more, *rules))

    def behind_reasoning(self, answer: str, *, is_reasoning: bool) -> str:
        """Return a grammar of reasoning that is followed by `answer`, which is in Lark.

        Raises BadRequestError if an expression or a list of choices is too long.
        """
        name, rule = _answer(answer)
        thought, rules = self._thought(is_reasoning=is_reasoning)
        return _lark(thought + name, (*rules, rule))

    def calls_or_answer(
        self, tools: Sequence[ToolSpec], answer: str, *, is_parallel: bool, is_reasoning: bool
    ) -> str:
        """Return a grammar of optional reasoning, followed by either calls or an answer in Lark.

        Raises BadRequestError if the schemas together are too large, or the answer is too long.
        """
        name, rule = _answer(answer)
        calls, rules = self._calls(tools, is_parallel=is_parallel)
        thought, more = self._thought(is_reasoning=is_reasoning)
        return _lark(f"{thought}(call_list | {name})", (*more, f"call_list: {calls}", rule, *rules))

    def _thought(self, *, is_reasoning: bool) -> tuple[str, Sequence[str]]:
        """Return the reasoning as Lark, which may be empty, and the rules to which it refers."""
        if self.reasoning is None:
            return "", ()
        opening, closing = map(self._mark, self.reasoning)
        if self.reasoning.closing in self.marks:
            rules = ("thought: TEXT?", f"TEXT: {_TEXT}")
            thought = f"thought {closing}"
        else:
            rules = (f"thought[suffix={closing}]: {_TEXT}",)
            thought = "thought"
        thought += r' "\n"~0..2 '
        return thought if is_reasoning else f"({opening} {thought})? ", rules

    def guided(self, tools: Sequence[ToolSpec], *, is_parallel: bool) -> str | None:
        """Return a grammar of any text whose calls match their schemas.

        The result is None if calls begin without a mark that is one token. Any other mark may occur
        in text. Raises BadRequestError if the schemas together are too large.
        """
        opening = _OPENINGS.get(self.form)
        if opening not in self.marks:
            return None
        is_list = self.form is CallForm.MISTRAL
        calls, rules = self._calls(tools, is_parallel=is_parallel and is_list)
        own = [self._mark(mark) for mark in self.reasoning or () if mark in self.marks]
        text = f"text: {' | '.join(('TEXT', *own))}"
        start = f"text* (call_list text*){'*' if is_parallel else '?'}"
        return _lark(start, (f"call_list: {calls}", text, f"TEXT: {_TEXT}", *rules))

    def _calls(self, tools: Sequence[ToolSpec], *, is_parallel: bool) -> tuple[str, Sequence[str]]:
        """Return a list of calls as Lark, and the rules to which it refers.

        Rules that all tools share are written once, because the engine bounds the grammar's size.
        """
        form = self.form
        if form is CallForm.LLAMA_PYTHONIC and not _have_keywords(tools):
            form = CallForm.LLAMA_JSON  # the same parser reads both forms
        before, between, after = self._around(form)
        opening, to_arguments, closing = self._parts(form)
        one = " | ".join(f"c{number}" for number in range(len(tools)))
        rules = [f"call: {opening} ({one}) {closing}", f"a: {to_arguments}"]
        for number, tool in enumerate(tools):
            if form is CallForm.LLAMA_PYTHONIC:
                rules += _python_rules(number, tool)
            else:
                name = f'"{tool.name}"' if form is CallForm.LLAMA_JSON else tool.name
                rules.append(f"c{number}: {_quoted(name)} a %json {_schema(tool)}")
        more = f" ({between} call)~0..{CALLS_MAX - 1}" if is_parallel else ""
        return f"{before} call{more} {after}".strip(), rules

    def _around(self, form: CallForm) -> tuple[str, str, str]:
        """Return the text before, between and after calls, as Lark."""
        if form is CallForm.MISTRAL:
            return f'{self._mark(TOOL_CALLS)} " "? "["', '", "', '"]"'
        if form is CallForm.LLAMA_PYTHONIC:
            return '"["', '", "', '"]"'
        return "", {CallForm.HERMES: r'"\n"', CallForm.LLAMA_JSON: '"; "'}.get(form, ""), ""

    def _parts(self, form: CallForm) -> tuple[str, str, str]:
        """Return the Lark before a call's name, between name and arguments, and after the call."""
        if form is CallForm.LLAMA_PYTHONIC:
            return "", '"("', '")"'
        if form is CallForm.MISTRAL_NAMED:
            return self._mark(TOOL_CALLS), self._mark(ARGUMENTS), ""
        if form is CallForm.LLAMA_JSON:
            # The text is split into the same terminals as the engine's own JSON rules, because one
            # lexer must recognize both calls and answers.
            name, parameters = _quoted('"name"'), _quoted('"parameters"')
            return f'"{{" {name} /: ?/', f"/, ?/ {parameters} /: ?/", '"}"'
        opening, to_arguments, closing = _quoted('{"name": "'), _quoted('", "arguments": '), '"}"'
        if form is CallForm.HERMES:
            opening = rf'{self._mark(TOOL_CALL)} "\n" {opening}'
            closing = rf'{closing} "\n" {self._mark(TOOL_CALL_END)}'
        return opening, to_arguments, closing

    def _mark(self, mark: str) -> str:
        token = self.marks.get(mark)
        return _quoted(mark) if token is None else f"<[{token}]>"


def _answer(answer: str) -> tuple[str, str]:
    """Return the name of an answer's rule, and the rule itself.

    Raises BadRequestError if the rule is too long.
    """
    if answer.startswith("%json"):
        return "answer", f"answer: {answer}"
    is_grammar = answer.startswith("answer: ")
    if len(answer) - 2 > _ANSWER_CHARACTERS_MAX:
        own = "regex" if answer.startswith("/") else "choice"
        raise _too_long("grammar" if is_grammar else own)
    if is_grammar:
        return "answer", answer
    # A terminal is used, because the parser cannot handle thousands of choices as rules.
    return "ANSWER", f"ANSWER: {answer}"


def _lark(start: str, rules: Sequence[str]) -> str:
    text = "\n".join((f"start: {start}", *rules))
    if len(text) > _GRAMMAR_BYTES_MAX:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            "The tools of a call that is enforced have at most 64 KiB of schemas together: offer"
            " fewer, or leave 'strict' and 'tool_choice' out.",
            param="tools",
        )
    return text


def _too_long(param: str) -> BadRequestError:
    written = _WRITTEN[param]
    return BadRequestError(
        ErrorCode.INVALID_REQUEST,
        f"Invalid value for '{param}': behind the reasoning of this model it has at most"
        f" {_ANSWER_CHARACTERS_MAX} characters, {written}.",
        param=param,
    )


_WRITTEN = {
    "regex": r"with \d, \s and \w written out as classes",
    "choice": "as a JSON array of strings",
    "grammar": "in Lark's syntax, each of its names two characters longer",
}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # JSON's escapes are also those of Lark's strings


def _schema(tool: ToolSpec) -> str:
    """Return the schema of a tool's arguments, which are always an object.

    The engine enforces all keywords of a strict tool. For other tools, it ignores unknown keywords.
    """
    parameters = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    options = {**JSON_OPTIONS, "lenient": not tool.is_strict}
    return json.dumps({**parameters, "type": "object", "x-guidance": options})


def _have_keywords(tools: Sequence[ToolSpec]) -> bool:
    """Return whether calls of these tools can be written with Python's keyword arguments."""
    if not all(map(_has_keywords, tools)):
        return False
    count = sum(len((tool.parameters or {}).get("properties", ())) for tool in tools)
    return count <= _ALL_KEYWORDS_MAX


def _has_keywords(tool: ToolSpec) -> bool:
    """Return whether each parameter of a tool can be written as a keyword argument."""
    parameters = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    found = parameters.get("properties", {})
    if not isinstance(found, dict):
        return False
    properties = cast("dict[str, Any]", found)
    names = properties.keys()
    required = parameters.get("required", [])
    return (
        len(names) <= _KEYWORDS_MAX
        and parameters.keys() <= _PLAIN_KEYS
        and all(map(_is_keyword, names))
        and all(schema is True or isinstance(schema, dict) for schema in properties.values())
        and all(map(_is_to_definition, _references(parameters)))
        and isinstance(required, list)
        and all(name in names for name in cast("list[Any]", required))
        and all(part.isidentifier() for part in tool.name.split("."))
    )


def _is_keyword(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _references(schema: Any) -> Iterator[object]:
    """Yield all references (`$ref`) in a schema, at any depth."""
    if isinstance(schema, dict):
        items = cast("dict[str, Any]", schema)
        if "$ref" in items:
            yield items["$ref"]
        schema = list(items.values())
    if isinstance(schema, list):
        for below in cast("list[Any]", schema):
            yield from _references(below)


def _is_to_definition(reference: object) -> bool:
    """Return whether a reference is still valid if only a property's schema is written."""
    return not isinstance(reference, str) or reference.startswith(_TO_DEFINITIONS)


def _python_rules(number: int, tool: ToolSpec) -> Iterator[str]:
    """Yield the rules of a call in Python's syntax, in which required arguments come first."""
    parameters = tool.parameters or {}
    properties: dict[str, Any] = parameters.get("properties", {})
    required = [name for name in properties if name in parameters.get("required", [])]
    optional = [name for name in properties if name not in required]
    rules = {name: f"k{number}_{index}" for index, name in enumerate(properties)}
    for name, rule in rules.items():
        yield f"{rule}: {_quoted(name + '=')} %json {_property_schema(tool, properties[name])}"
    begun = ' ", " '.join(rules[name] for name in required)
    chains = [optional] if required else [optional[index:] for index in range(len(optional))]
    lists = [
        " ".join((*([begun] if required else [rules[chain[0]]]), *_tail(chain, rules, required)))
        for chain in chains
        if chain or required
    ]
    arguments = f"({' | '.join(lists)}){'' if required else '?'}" if lists else ""
    yield f"c{number}: {_quoted(tool.name)} a {arguments}"


def _tail(chain: list[str], rules: Mapping[str, str], required: list[str]) -> Iterator[str]:
    """Yield the optional arguments after the first argument, in the order of the schema."""
    for name in chain if required else chain[1:]:
        yield f'(", " {rules[name]})?'


def _property_schema(tool: ToolSpec, schema: Any) -> str:
    """Return the schema of one property, with the definitions to which it may refer."""
    parameters = tool.parameters or {}
    shared = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    own: dict[str, Any] = schema if isinstance(schema, dict) else {}
    options = {**JSON_OPTIONS, "lenient": not tool.is_strict}
    return json.dumps({**own, **shared, "x-guidance": options})
