"""The required form of an answer: JSON, a schema, a regular expression, texts or a grammar. Pure.

Forms that are hostile by size or depth are refused here, before they are queued. The engine decides
later whether a schema or an expression compiles. If it does not, the client receives status 400 as
well.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from gateway.bodies.ebnf import GRAMMAR_BYTES_MAX, answer_rules, lark_grammar
from gateway.bodies.fields import Flag, Text
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Strict
from gateway.bodies.schema_keywords import enforceable
from gateway.dialects.call_grammar import JSON_OPTIONS
from sluice.errors import BadRequestError
from sluice.wire.engine.v1 import engine_pb2 as engine

# Bounds of the engine for each kind of guide. See replica/engine/grammar_source.py.
_SCHEMA_BYTES_MAX = 65_536
_CHOICES_BYTES_MAX = 65_536
_REGEX_BYTES_MAX = 8_192
_CHOICE_CHARACTERS_MAX = 4_096
# Maximum number of nested objects and arrays, slightly below the limit of the engine's parser.
_SCHEMA_LEVELS_MAX = 120


class TextFormat(Strict):
    """Format of an answer without any required form."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Format of an answer that is any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON schema that the answer must match. Name and description have no effect.

    Attributes:
        strict: Whether a schema with keywords that no grammar can enforce is refused. Without
            `strict`, these keywords are ignored.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None


class JsonSchemaFormat(Strict):
    """Format of an answer that is JSON and matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
Regex = Annotated[str, Field(min_length=1, max_length=_REGEX_BYTES_MAX)]
# Matches a directive of Lark, which is refused even inside a quoted text.
_DIRECTIVE = r"%(?=\s*(?:json|regex|lark|llguidance))"
# Matches parts of a regular expression that mean something else inside Lark.
_UNLIKE = re.compile(rf"\\?{_DIRECTIVE}|\\(?:.|\n)|[/\n]")
_LIKE = {
    **dict.fromkeys(("/", r"\/"), r"\/"),  # a plain slash would end the expression
    **dict.fromkeys(("%", r"\%"), r"\x25"),  # a percent sign could look like a directive
    **dict.fromkeys(("\n", "\\\n"), r"\n"),  # a rule of Lark is one line
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\S": r"[^ \t\n\r\f\v]",
    r"\w": "[0-9a-zA-Z_]",
    r"\W": "[^0-9a-zA-Z_]",
}

GrammarText = Annotated[str, Field(min_length=1, max_length=GRAMMAR_BYTES_MAX)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_CHOICE_CHARACTERS_MAX)]],
    Field(fail_fast=True, min_length=1),
]


def guide_of(
    response_format: ResponseFormat | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None = None,
) -> engine.Grammar | None:
    """Return the grammar that these fields require, or None if they require no form.

    Raises:
        BadRequestError: Two of the fields are set, or a field is invalid. The error names the
            field.
    """
    is_free = response_format is None or isinstance(response_format, TextFormat)
    wanted = [
        name
        for name, is_given in (
            ("response_format", not is_free),
            ("regex", regex is not None),
            ("choice", choice is not None),
            ("grammar", grammar is not None),
        )
        if is_given
    ]
    if len(wanted) > 1:
        raise bad_value(wanted[-1], f"it cannot be combined with '{wanted[0]}'; choose one")
    if regex is not None:
        return _of_regex(regex)
    if choice is not None:
        return _of_choice(choice)
    if grammar is not None:
        return engine.Grammar(kind=engine.Grammar.KIND_EBNF, text=lark_grammar(grammar))
    if isinstance(response_format, JsonSchemaFormat):
        wanted_schema = response_format.json_schema
        if wanted_schema.content is not None:
            text = schema_text(wanted_schema.content, "response_format.json_schema.schema")
            if not wanted_schema.strict:
                text = orjson.dumps(enforceable(wanted_schema.content)[0]).decode()
            return engine.Grammar(kind=engine.Grammar.KIND_JSON_SCHEMA, text=text)
    return None if is_free else engine.Grammar(kind=engine.Grammar.KIND_JSON)


def lark_of(guide: engine.Grammar) -> str:
    """Return a guide in the engine's Lark, either as one expression or as several rules."""
    match guide.kind:
        case engine.Grammar.KIND_EBNF:
            return answer_rules(guide.text)
        case engine.Grammar.KIND_REGEX:
            regex = _UNLIKE.sub(lambda it: _LIKE.get(it.group(), it.group()), guide.text)
            return f"/{regex}/"
        case engine.Grammar.KIND_CHOICE:
            choices: list[str] = orjson.loads(guide.text)
            texts = "|".join([orjson.dumps(choice).decode() for choice in choices])
            return "(" + re.sub(_DIRECTIVE, r"\\u0025", texts) + ")"
        case _:
            schema = orjson.loads(guide.text or '{"type":"object"}')
            return f"%json {orjson.dumps(schema | {'x-guidance': JSON_OPTIONS}).decode()}"


def schema_text(schema: dict[str, Any], param: str) -> str:
    """Return a schema as JSON text, or raise BadRequestError if it is too large or too deep."""
    try:
        text = orjson.dumps(schema)
    # A valid schema fails only at the library's own limit of depth.
    except orjson.JSONEncodeError:
        raise _too_deep(param) from None
    if len(text) > _SCHEMA_BYTES_MAX:
        size = f"a schema has at most {_SCHEMA_BYTES_MAX} bytes; this one has {len(text)}"
        raise bad_value(param, size)
    # Each level has at least two characters, so a shorter schema cannot be too deep.
    if len(text) > 2 * _SCHEMA_LEVELS_MAX and _is_deep(schema):
        raise _too_deep(param)
    return text.decode()


def _too_deep(param: str) -> BadRequestError:
    return bad_value(param, f"a schema has at most {_SCHEMA_LEVELS_MAX} levels")


def _is_deep(schema: dict[str, Any]) -> bool:
    level: list[Any] = [schema]
    for _ in range(_SCHEMA_LEVELS_MAX):
        level = [
            below
            for node in level
            if isinstance(node, dict | list)
            for below in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _of_regex(regex: str) -> engine.Grammar:
    if len(regex.encode()) > _REGEX_BYTES_MAX:
        raise bad_value("regex", f"it has at most {_REGEX_BYTES_MAX} bytes")
    return engine.Grammar(kind=engine.Grammar.KIND_REGEX, text=regex)


def _of_choice(choices: Sequence[str]) -> engine.Grammar:
    text = orjson.dumps(choices)
    if len(text) > _CHOICES_BYTES_MAX:
        raise bad_value("choice", f"all choices together have at most {_CHOICES_BYTES_MAX} bytes")
    for index, choice in enumerate(choices):
        if any(character < " " for character in choice):
            raise _control_character(index)
    return engine.Grammar(kind=engine.Grammar.KIND_CHOICE, text=text.decode())


def _control_character(index: int) -> BadRequestError:
    return bad_value(f"choice[{index}]", "a choice has no line breaks or other control characters")
