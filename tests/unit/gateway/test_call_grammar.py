"""What a grammar of calls lets a model write, its dialect's parser reads; all else it refuses."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from jsonschema import validate
from tokenizers import AddedToken, Tokenizer

from gateway.bases.assets import load_base
from gateway.bodies.guides import lark_of
from gateway.dialects.dialect import Dialect
from gateway.dialects.forms import CALL_MARKS, REASONING_MARKS, CallForm, ReasoningForm
from gateway.dialects.tools import ToolSpec
from gateway.text.detokenizer import token_table
from replica.engine.grammar import GrammarCompiler, Matcher
from replica.engine.types import Grammar, GrammarKind, RefusedError
from sluice.errors import BadRequestError
from sluice.wire.engine.v1 import engine_pb2 as engine
from tests.unit.gateway.test_dialect_parsers import Answer, parse

BASE = Path(__file__).resolve().parents[3] / "model_repo" / "default"
EOS = frozenset({0, 2})

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
        "unit": {"enum": ["C", "F", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "boolean"}},
}
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x"]}, "c": {}},
}
TOOLS = (
    ToolSpec("get_weather", WEATHER, is_strict=True),
    ToolSpec("geo.find", None),
    ToolSpec("opt", {**OPTIONAL, "properties": {k: OPTIONAL["properties"][k] for k in "ab"},
                     "additionalProperties": False}),
)  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "get_weather": WEATHER,
    "geo.find": {"maxProperties": 0},
    "opt": TOOLS[2].parameters,
}
NAMES = [tool.name for tool in TOOLS]
CASES = {
    f"{form}-{reasoning}": (form, reasoning)
    for form in CallForm
    for reasoning in ReasoningForm
    if form is not CallForm.NONE
}


class Subject:
    """A dialect with a vocabulary that has its marks: ours, with some tokens added."""

    def __init__(
        self, folder: Path, form: CallForm, reasoning: ReasoningForm, *, is_special: bool
    ) -> None:
        tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
        marks = [*CALL_MARKS[form], *REASONING_MARKS.get(reasoning, ())]
        tokenizer.add_tokens([AddedToken(m, special=is_special, normalized=False) for m in marks])
        path = folder / f"{form}-{reasoning}-{is_special}.json"
        tokenizer.save(str(path))
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        ids = {mark: vocabulary[mark] for mark in marks}
        self.dialect = Dialect(form, reasoning, ids)
        self.table = token_table(tokenizer, EOS).showing(ids.values())
        self.compiler = GrammarCompiler(path, tokenizer.get_vocab_size(), EOS)
        size = -(-tokenizer.get_vocab_size() // 32) * 32
        self.closing = np.zeros(size, np.uint8)  # tokens that bring what is open to its end
        for text, token in vocabulary.items():
            self.closing[token] = text in marks or bool(set(text) & set('"}])'))

    def matcher(self, text: str) -> Matcher:
        return self.compiler.matcher(Grammar(GrammarKind.EBNF, text))

    def text(self, ids: list[int]) -> str:
        stream = self.table.stream()
        return stream.push(ids) + stream.flush()

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self.matcher(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            if not self.allowed(matcher)[token]:
                return False
            matcher.advance([token])
        return bool(self.allowed(matcher)[sorted(EOS)].any())

    def allowed(self, matcher: Matcher) -> Any:
        mask = self.compiler.fill([(matcher, 0, [])], 1)[0]
        mask &= matcher.text_mask | self.compiler.eos_mask
        return np.unpackbits(mask.view(np.uint8), bitorder="little")

    def written(self, grammar: str, seed: int, tokens_max: int = 400) -> list[int]:
        """Return what a model writes that knows nothing but wants to come to an end."""
        rng, matcher, ids = random.Random(seed), self.matcher(grammar), list[int]()
        for _ in range(tokens_max):
            allowed = self.allowed(matcher)
            ends = allowed[sorted(EOS)].any()
            allowed[sorted(EOS)] = 0
            if ends and (rng.random() < 0.5 or not allowed.any()):
                return ids
            wanted = allowed & self.closing if rng.random() < 0.6 else allowed
            possible = np.flatnonzero(wanted if wanted.any() else allowed)
            ids.append(int(rng.choice(possible)))
            matcher.advance(ids[-1:])
        raise AssertionError(f"no end: {self.text(ids)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def check(answer: Answer, *, count_max: int = 16) -> None:
    assert answer.content.strip() == ""
    assert 1 <= len(answer.calls) <= count_max
    for name, arguments in answer.calls:
        validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("case", CASES)
def test_forced_calls_are_parsed(folder: Path, case: str) -> None:
    subject = Subject(folder, *CASES[case], is_special=True)
    for is_parallel in (True, False):
        for is_reasoning in (False, True):
            grammar = subject.dialect.call_grammar(
                TOOLS, is_parallel=is_parallel, is_reasoning=is_reasoning
            )
            for seed in range(2):
                text = subject.text(subject.written(grammar, seed))
                answer = parse(
                    subject.dialect,
                    text,
                    range(len(text)),
                    tools=NAMES,
                    is_parallel=is_parallel,
                    is_reasoning=is_reasoning,
                )
                check(answer, count_max=16 if is_parallel else 1)
                assert answer.is_complete is not is_parallel


C = '<tool_call>\n{"name": "geo.find", "arguments": {}}\n</tool_call>'
WRITTEN: dict[str, tuple[CallForm, list[str], list[str]]] = {
    "hermes": (
        CallForm.HERMES,
        [
            C,
            f"{C}\n{C}",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom", "days":1}}\n'
            "</tool_call>",
        ],
        [
            "",
            "hello",
            f"{C} and",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>',
            '<tool_call>\n{"name": "get_wether", "arguments": {}}\n</tool_call>',
        ],
    ),
    "llama": (
        CallForm.LLAMA_JSON,
        ['{"name": "geo.find", "parameters": {}}; {"name": "opt", "parameters": {"a": 3}}'],
        ['{"name": "geo.find", "parameters": {"x": 1}}', '{"name": "geo.find", "arguments": {}}'],
    ),
    "pythonic": (
        CallForm.LLAMA_PYTHONIC,
        ['[geo.find(), opt(b="x"), opt(a=1, b="x"), get_weather(city="a", days=3, unit=null)]'],
        ["[]", "[geo.find(1)]", '[opt(b="x", a=1)]', '[get_weather(city="a")]', "[opt(a=1"],
    ),
    "mistral": (
        CallForm.MISTRAL,
        ['[TOOL_CALLS] [{"name": "geo.find", "arguments": {}}]', '[TOOL_CALLS][{"name": "opt", '
         '"arguments": {}}, {"name": "opt", "arguments": {"b": "x"}}]'],
        ["[TOOL_CALLS] []", "[TOOL_CALLS]opt[ARGS]{}", '[{"name": "opt", "arguments": {}}]'],
    ),
    "mistral named": (
        CallForm.MISTRAL_NAMED,
        ["[TOOL_CALLS]opt[ARGS]{}", '[TOOL_CALLS]opt[ARGS]{"b": "x"}[TOOL_CALLS]geo.find[ARGS]{}'],
        ["[TOOL_CALLS]opt{}", "[TOOL_CALLS]opt[ARGS][]", "opt[ARGS]{}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_forced_forms(folder: Path, name: str) -> None:
    form, right, wrong = WRITTEN[name]
    subject = Subject(folder, form, ReasoningForm.NONE, is_special=name != "hermes")
    grammar = subject.dialect.call_grammar(TOOLS, is_parallel=True)
    for text in right:
        assert subject.accepts(grammar, text), text
        check(parse(subject.dialect, text, tools=NAMES))
    for text in wrong:
        assert not subject.accepts(grammar, text), text
    single = subject.dialect.call_grammar(TOOLS, is_parallel=False)
    assert [subject.accepts(single, text) for text in right].count(False) == 1


@pytest.mark.parametrize("form", [CallForm.HERMES, CallForm.MISTRAL, CallForm.MISTRAL_NAMED])
def test_calls_keep_to_their_schemas_where_the_model_is_free(folder: Path, form: CallForm) -> None:
    subject = Subject(folder, form, ReasoningForm.THINK, is_special=True)
    grammar = subject.dialect.strict_grammar(TOOLS, is_parallel=True)
    assert grammar is not None
    _, right, wrong = next(case for case in WRITTEN.values() if case[0] is form)
    thought = "<think>\nhm\n</think>\n\n"
    for text in ("", "Hello.", thought + "Hello.", *right, f"{thought}Well.\n{right[0]}\nSo."):
        assert subject.accepts(grammar, text), text
    single = subject.dialect.strict_grammar(TOOLS, is_parallel=False)
    assert single is not None
    assert not subject.accepts(single, right[0] + right[0])
    bad = [text for text in wrong if text.startswith(("<tool_call>", "[TOOL_CALLS]"))]
    bad = [text for text in bad if not text.startswith(C)]  # text may follow
    assert bad
    for text in bad:
        assert not subject.accepts(grammar, text), text


FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
ANSWERS: dict[str, tuple[engine.Grammar, list[str], list[str]]] = {
    "schema": (
        engine.Grammar(kind=engine.Grammar.KIND_JSON_SCHEMA, text=json.dumps(FORM)),
        ['{"sum": 42}'],
        ['{"sum": 420}', "[]", "42"],
    ),
    "choice": (
        engine.Grammar(kind=engine.Grammar.KIND_CHOICE, text='["yes", "no"]'),
        ["yes", "no"],
        ["yesno", "maybe"],
    ),
    "regex": (
        engine.Grammar(kind=engine.Grammar.KIND_REGEX, text="[a-f]+"),
        ["abc"],
        ["xyz", "abc!"],
    ),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_or_an_answer_in_its_format(folder: Path, name: str, answer: str) -> None:
    form, calls, _ = WRITTEN[name]
    guide, right, wrong = ANSWERS[answer]
    subject = Subject(folder, form, ReasoningForm.THINK, is_special=name != "hermes")
    grammar = subject.dialect.calls_or_answer(
        TOOLS, lark_of(guide), is_parallel=True, is_reasoning=False
    )
    thought = "<think>\nhm\n</think>\n\n"
    for text in (*calls, *right):
        assert subject.accepts(grammar, text), text
        assert subject.accepts(grammar, thought + text), text
    for text in (*wrong, "", "Hello.", calls[0] + right[0], right[0] + calls[0]):
        assert not subject.accepts(grammar, text), text
    for text in calls:
        check(parse(subject.dialect, text, tools=NAMES))
    for text in right:
        read = parse(subject.dialect, text, tools=NAMES)
        assert (read.content, list(read.calls)) == (text, [])


def test_without_a_mark_that_is_a_token_the_model_stays_free() -> None:
    for form in (CallForm.LLAMA_JSON, CallForm.LLAMA_PYTHONIC, CallForm.HERMES):
        assert Dialect(form).strict_grammar(TOOLS, is_parallel=True) is None


def test_schemas_that_python_cannot_say_are_written_as_json() -> None:
    for parameters in (
        {"properties": 5},
        {"properties": {"class": {}}},
        {"properties": {"a-b": {}}},
        {"anyOf": [{"required": ["a"]}, {}]},
        {"properties": {f"p{i}": {} for i in range(40)}},
        {"properties": {}, "required": ["missing"]},
        {"properties": {"a": False}},
        {"properties": {"below": {"type": "array", "items": {"$ref": "#"}}}},
        {"properties": {"a": {}, "b": {"anyOf": [{"$ref": "#/properties/a"}]}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"items": {"$ref": "#"}}}},
    ):
        grammar = Dialect(CallForm.LLAMA_PYTHONIC).call_grammar(
            [ToolSpec("f", parameters)], is_parallel=True
        )
        assert r"\"parameters\"" in grammar


def test_definitions_equal_the_whole_schema(folder: Path) -> None:
    number, text = {"type": "integer", "maximum": 9}, {"enum": ["x"]}
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/it", "$defs": {"it": text}}},
        "required": ["a"],
        "$defs": {"it": number},
    }
    for form in (CallForm.LLAMA_PYTHONIC, CallForm.LLAMA_JSON):
        subject = Subject(folder, form, ReasoningForm.NONE, is_special=True)
        grammar = subject.dialect.call_grammar([ToolSpec("f", parameters)], is_parallel=False)
        is_python = form is CallForm.LLAMA_PYTHONIC
        call = "[f(a={})]" if is_python else '{{"name": "f", "parameters": {{"a": {}}}}}'
        assert subject.accepts(grammar, call.format("3"))
        assert not subject.accepts(grammar, call.format('"x"'))


def test_only_strict_tools_are_refused_for_unknown_schema_parts() -> None:
    assets = load_base(BASE)
    compiler = GrammarCompiler(BASE / "tokenizer.json", len(assets.table.fragments), EOS)
    schema = {"properties": {"a": {"type": "string"}}, "dependentSchemas": {"a": {}}}
    for is_strict in (False, True):
        text = assets.dialect.call_grammar(
            [ToolSpec("f", schema, is_strict=is_strict)], is_parallel=True
        )
        grammar = Grammar(GrammarKind.EBNF, text)
        if is_strict:
            with pytest.raises(RefusedError, match="dependentSchemas"):
                compiler.check(grammar)
        else:
            compiler.check(grammar)


@pytest.mark.parametrize("form", [CallForm.HERMES, CallForm.LLAMA_PYTHONIC])
def test_a_refused_schema_is_told_by_its_tool_without_our_grammar(
    folder: Path, form: CallForm
) -> None:
    subject = Subject(folder, form, ReasoningForm.THINK, is_special=True)
    schema = {"properties": {"day": {"type": "string", "pattern": "(?=a)b"}}}
    tools = [*TOOLS, ToolSpec("plan", schema)]
    text = subject.dialect.call_grammar(tools, is_parallel=True)
    with pytest.raises(RefusedError, match="look-ahead") as refused:
        subject.matcher(text)
    message = str(refused.value)
    assert ('"plan": ' if form is CallForm.HERMES else '"day=": ') in message
    assert " | " not in message
    assert "%json" not in message


def test_as_many_tools_as_a_request_may_have_fit() -> None:
    assets = load_base(BASE)
    assert assets.dialect.calls is CallForm.HERMES
    compiler = GrammarCompiler(BASE / "tokenizer.json", len(assets.table.fragments), EOS)
    tools = [ToolSpec(f"{'n' * 60}_{i}", OPTIONAL) for i in range(128)]
    for form in (CallForm.HERMES, CallForm.LLAMA_JSON, CallForm.LLAMA_PYTHONIC):
        dialect = Dialect(form, mark_ids=assets.dialect.mark_ids)
        text = dialect.call_grammar(tools, is_parallel=True)
        compiler.check(Grammar(GrammarKind.EBNF, text))


def test_schemas_that_are_too_large_together_are_refused() -> None:
    schema = {"properties": {f"property_{i}": {"type": "string"} for i in range(800)}}
    tools = [ToolSpec(f"f{i}", schema) for i in range(3)]
    with pytest.raises(BadRequestError, match="64 KiB") as refused:
        Dialect().call_grammar(tools, is_parallel=True)
    assert refused.value.param == "tools"


GUIDES: dict[str, tuple[engine.Grammar, list[str], list[str]]] = {
    "json": (
        engine.Grammar(kind=engine.Grammar.KIND_JSON),
        ['{"a": 1}', "{}"],
        ["[1]", "hello", '{"a": 1} and', '{\n "a": 1}'],
    ),
    "schema": (
        engine.Grammar(kind=engine.Grammar.KIND_JSON_SCHEMA, text=json.dumps(OPTIONAL)),
        ['{"a": 3}', '{"b": "x"}', '{"b":"x"}'],
        ['{"a": 10}', '{"b": "y"}', '{"a":  3}'],
    ),
    "regex": (
        engine.Grammar(kind=engine.Grammar.KIND_REGEX, text=r"a/b|c\/d|[0-9]{2}\n"),
        ["a/b", "c/d", "42\n"],
        ["a", "4", "a/b "],
    ),
    "regex of escapes": (
        engine.Grammar(kind=engine.Grammar.KIND_REGEX, text=r"\\/\d%\%[/%\d]{2}|%json"),
        [r"\/7%%/%", r"\/0%%09", "%json"],
        ["\\/\u0663%%//", r"\/7%%ab"],
    ),
    "choice": (
        engine.Grammar(kind=engine.Grammar.KIND_CHOICE, text='["yes", "no \\"no\\"", "100% json"]'),
        ["yes", 'no "no"', "100% json"],
        ["maybe", "yesno"],
    ),
}


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("reasoning", list(REASONING_MARKS))
@pytest.mark.parametrize("is_special", [True, False])
def test_a_guide_binds_the_answer_not_the_reasoning(
    folder: Path, kind: str, reasoning: ReasoningForm, is_special: bool
) -> None:
    subject = Subject(folder, CallForm.HERMES, reasoning, is_special=is_special)
    marks = REASONING_MARKS[reasoning]
    guide, good, bad = GUIDES[kind]
    for is_open in (True, False):
        grammar = subject.dialect.behind_reasoning(lark_of(guide), is_reasoning=is_open)
        assert grammar is not None
        thought = f"{'' if is_open else marks.opening}I think of it.{marks.closing}\n"
        for text in good:
            assert subject.accepts(grammar, thought + text)
            assert subject.accepts(grammar, text) is not is_open
        for text in bad:
            assert not subject.accepts(grammar, thought + text)


def test_an_answer_behind_reasoning_keeps_the_space_that_its_guide_asks_for(folder: Path) -> None:
    subject = Subject(folder, CallForm.HERMES, ReasoningForm.THINK, is_special=True)
    for guide, answers in (
        (choice_of(" yes", " no"), (" yes", " no")),
        (regex_of(" {4}x"), ["    x"]),
    ):
        grammar = subject.dialect.behind_reasoning(lark_of(guide), is_reasoning=True)
        assert grammar is not None
        text = subject.text(subject.written(grammar, 1))
        assert parse(subject.dialect, text, is_reasoning=True).content in answers


def regex_of(text: str) -> engine.Grammar:
    return engine.Grammar(kind=engine.Grammar.KIND_REGEX, text=text)


def choice_of(*choices: str) -> engine.Grammar:
    return engine.Grammar(kind=engine.Grammar.KIND_CHOICE, text=orjson.dumps(choices).decode())


@pytest.mark.parametrize(
    ("guide", "larger"),
    [
        (regex_of("%" * 8192), None),
        (regex_of(r"\d" * 3200), regex_of(r"\d" * 3201)),
        (regex_of(r"\w" * 1333), regex_of(r"\w" * 1334)),
        (choice_of(*["100%" * 665] * 6), choice_of(*["100%" * 666] * 6)),
        (choice_of(*(chr(0x4E00 + i) for i in range(3999))), choice_of(*"ab" * 2001)),
    ],
    ids=["8 KiB", "digits", "words", "percent signs", "many"],
)
def test_a_guide_too_long_behind_reasoning_is_refused_in_the_callers_words(
    folder: Path, guide: engine.Grammar, larger: engine.Grammar | None
) -> None:
    subject = Subject(folder, CallForm.HERMES, ReasoningForm.THINK, is_special=True)
    grammar = subject.dialect.behind_reasoning(lark_of(guide), is_reasoning=False)
    assert grammar is not None
    subject.compiler.check(Grammar(GrammarKind.EBNF, grammar))
    if larger is None:
        return
    with pytest.raises(BadRequestError, match="at most 16000 characters") as refused:
        subject.dialect.behind_reasoning(lark_of(larger), is_reasoning=False)
    is_regex = guide.kind == engine.Grammar.KIND_REGEX
    assert refused.value.param == ("regex" if is_regex else "choice")


def test_without_reasoning_a_guide_stays_unchanged() -> None:
    assert Dialect().behind_reasoning("/a/", is_reasoning=False) is None
