"""Tests constrained answers of a model with random logits, by real grammars."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from replica.engine.grammar import GrammarCompiler
from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.sampler import Sampler
from replica.engine.types import Grammar, GrammarKind, RefusedError, Sampling, SequenceRequest
from sluice.errors import ErrorCode

EOS = frozenset({0, 2})
PADDING = 13
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "yes, but (a|b)*", 'quo"te \\d', "naïve 😀"]
LARK = 'start: "let " NAME " = " sum\nsum: NUMBER ("+" NUMBER)~0..3\nNAME: /[a-z]{1,4}/\nNUMBER: /[0-9]{1,3}/'
REGEX = r"[A-Z]{2}-\d{3}(/[a-f]+){0,2}"
GRAMMARS = {
    "json": Grammar(GrammarKind.JSON),
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Grammar(GrammarKind.REGEX, REGEX),
    "choice": Grammar(GrammarKind.CHOICE, json.dumps(CHOICES)),
    "ebnf": Grammar(GrammarKind.EBNF, LARK),
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 99
        and len(value.get("tags", [])) <= 3
        and all(tag in ("x", "yy", 3, None) for tag in value.get("tags", []))
    )


MATCHES: dict[str, Callable[[str], Any]] = {
    "json": lambda text: isinstance(json.loads(text), dict),
    "schema": is_person,
    "regex": lambda text: re.fullmatch(REGEX, text, re.ASCII),
    "choice": lambda text: text in CHOICES,
    "ebnf": lambda text: re.fullmatch(r"let [a-z]{1,4} = [0-9]{1,3}(\+[0-9]{1,3}){0,3}", text),
}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> int:
    return tokenizer.get_vocab_size() + PADDING


@pytest.fixture(scope="module")
def compiler(model_dir: Path, vocabulary: int) -> GrammarCompiler:
    return GrammarCompiler(model_dir / "tokenizer.json", vocabulary, EOS)


@pytest.fixture
def sampler(compiler: GrammarCompiler, vocabulary: int) -> Sampler:
    return Sampler(vocabulary, EOS, compiler)


def sequence(sampling: Sampling, prompt: list[int] = [5, 6], **options) -> ScheduledSequence:  # noqa: B006
    request = SequenceRequest(1, prompt, 400, sampling=sampling, **options)
    stops = frozenset() if request.ignore_eos else request.stop_token_ids | EOS
    return ScheduledSequence(request, 0, b"", stops)


class RandomModel:
    """A model whose logits depend only on position and row. End tokens are a little likelier than
    text, so that answers end. Special tokens and padding are likelier than all other tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, seed: int = 0) -> None:
        self._seed = seed
        self._bias = np.zeros(vocabulary, np.float32)
        closing = [token for text, token in tokenizer.get_vocab().items() if set(text) & set('}"]')]
        self._bias[closing] = 4.0
        self._bias[sorted(EOS)] = 6.0
        self._bias[[1, *range(vocabulary - PADDING, vocabulary)]] = 30.0

    def __call__(self, position: int, rows: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, position])
        noise = rng.normal(0, 3, (rows, len(self._bias)))
        return (noise + self._bias).astype(np.float32)


def generate(
    sampler: Sampler, batch: list[ScheduledSequence], model: RandomModel, steps: int = 300
) -> list[str]:
    """Run a batch, and return for each sequence why it failed, or an empty text."""
    failures = [""] * len(batch)
    living = dict(enumerate(batch))
    for step in range(steps):
        if not living:
            break
        plan = StepPlan(list(living.values()), [])
        sampler.prepare(plan)
        output = sampler.sample(model(step, len(batch))[list(living)], plan)
        for at, (index, one) in enumerate(list(living.items())):
            one.tokens.append(output.tokens[at])
            if at in output.failed:
                failures[index] = output.failed[at]
            if at in output.failed or one.tokens[-1] in one.stop_ids:
                del living[index]
    return failures


def text_of(tokenizer: Tokenizer, one: ScheduledSequence) -> str:
    assert one.tokens[-1] in one.stop_ids, "did not end"
    return tokenizer.decode(one.tokens[one.prompt_tokens : -1], skip_special_tokens=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match_their_grammars_in_one_batch_with_free_ones(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int, temperature: float
) -> None:
    kinds = [*GRAMMARS] * 6
    batch = [
        sequence(Sampling(temperature, seed=seed, grammar=GRAMMARS[kind]))
        for seed, kind in enumerate(kinds)
    ]
    free = sequence(Sampling(temperature, seed=99), ignore_eos=True)
    model = RandomModel(tokenizer, vocabulary)
    assert generate(sampler, [*batch, free], model) == [""] * (len(batch) + 1)
    texts = [text_of(tokenizer, one) for one in batch]
    for kind, text in zip(kinds, texts, strict=True):
        assert MATCHES[kind](text), (kind, text)
    assert len(set(texts)) > 12, "different rows get different answers"
    alone = sequence(free.request.sampling, ignore_eos=True)
    rows = [model(step, len(batch) + 1)[-1:] for step in range(20)]
    for row in rows:
        alone.tokens.extend(sampler.sample(row, StepPlan([alone], [])).tokens)
    assert free.tokens[:22] == alone.tokens


def test_stop_tokens_end_an_answer_only_where_it_is_complete(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    stop = tokenizer.token_to_id("a")
    sampling = Sampling(
        1.0,
        grammar=Grammar(GrammarKind.REGEX, "([ab]{2}c)+"),
        logit_bias=((stop, 100.0),),  # makes the stop token the first one, where permitted
    )
    for seed in range(4):
        one = sequence(sampling, stop_token_ids=frozenset({stop}))
        assert generate(sampler, [one], RandomModel(tokenizer, vocabulary, seed)) == [""]
        assert re.fullmatch("[ab]{2}c", text_of(tokenizer, one))
        assert one.tokens.index(stop) == len(one.tokens) - 1


def test_a_minimum_holds_until_nothing_else_is_left(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]+")
    word = Grammar(GrammarKind.CHOICE, '["yes"]')
    batch = [sequence(Sampling(grammar=grammar, tokens_min=7)) for grammar in (digits, word)]
    assert generate(sampler, batch, RandomModel(tokenizer, vocabulary)) == ["", ""]
    assert len(batch[0].tokens) - 3 >= 7
    assert text_of(tokenizer, batch[1]) == "yes"


def test_without_eos_an_answer_goes_on_while_it_can(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    one = sequence(
        Sampling(grammar=Grammar(GrammarKind.REGEX, "[0-9]{3,5}")),
        ignore_eos=True,
        stop_token_ids=frozenset({tokenizer.token_to_id("x")}),
    )
    assert generate(sampler, [one], RandomModel(tokenizer, vocabulary), steps=12) == [""]
    text = tokenizer.decode(one.tokens[2:], skip_special_tokens=True)
    assert re.fullmatch("[0-9]{5}", text)
    assert one.tokens[-1] in EOS


def test_drafts_are_verified_under_a_grammar(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    model = RandomModel(tokenizer, vocabulary, 3)
    sampling = Sampling(0.9, seed=5, grammar=GRAMMARS["schema"])
    truth = sequence(sampling)
    assert generate(sampler, [truth], model) == [""]
    answer = truth.tokens[2:].tolist()
    assert len(answer) > 8
    for wrong in range(7):
        one = sequence(sampling)
        one.tokens.extend(answer[:2])
        draft = answer[2:8]
        if wrong < 6:
            draft[wrong] = 1 if wrong % 2 else answer[0]  # a token that does not follow here
        plan = StepPlan([one], [])
        plan.drafts = {0: draft}
        logits = np.concatenate([model(step, 1) for step in range(2, 9)])
        output = sampler.sample(logits, plan)
        assert not output.failed
        assert output.tokens + output.more.get(0, []) == answer[2 : 2 + min(wrong, 6) + 1]
        one.tokens.extend(output.tokens + output.more.get(0, []))
        at = len(one.tokens) - 2
        assert sampler.sample(model(at, 1), StepPlan([one], [])).tokens == [answer[at]]


def test_a_drafted_end_that_is_not_chosen_leaves_the_matcher_as_it_was(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    digit = tokenizer.token_to_id("7")
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, "[0-9]{1,3}"), tokens_min=3)
    one = sequence(sampling)
    logits = np.zeros((3, vocabulary), np.float32)
    logits[:, digit] = 5.0
    logits[:, 2] = 9.0
    for draft in ([], [2, 2], [2, digit]):
        plan = StepPlan([one], [])
        plan.drafts = {0: draft} if draft else {}
        output = sampler.sample(logits[: 1 + len(draft)], plan)
        assert (output.tokens, output.more, output.failed) == ([digit], {}, {})
        one.tokens.append(digit)
    plan = StepPlan([one], [])
    plan.drafts = {0: [2, 2]}
    output = sampler.sample(logits, plan)
    assert (output.tokens, output.more) == ([2], {}), "nothing behind the end"


def test_forks_have_matchers_of_their_own(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    batch = [sequence(Sampling(1.5, seed=seed, grammar=GRAMMARS["regex"])) for seed in range(6)]
    model = RandomModel(tokenizer, vocabulary)
    plan = StepPlan([], [(batch[0], 2)], batch)
    plan.fork_of = dict.fromkeys(range(1, 6), 0)
    for one, token in zip(batch, sampler.sample(model(999, 1), plan).tokens, strict=True):
        one.tokens.append(token)
    assert generate(sampler, batch, model) == [""] * 6
    texts = {text_of(tokenizer, one) for one in batch}
    assert all(MATCHES["regex"](text) for text in texts)
    assert len(texts) > 3


def test_a_resumed_answer_goes_on_inside_its_grammar(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    model = RandomModel(tokenizer, vocabulary, 7)
    sampling = Sampling(1.0, seed=11, grammar=GRAMMARS["schema"])
    whole = sequence(sampling)
    generate(sampler, [whole], model)
    assert is_person(text_of(tokenizer, whole))
    for cut in range(3, len(whole.tokens) - 1):
        resumed = sequence(sampling, prompt=whole.tokens[:cut], resumed_tokens=cut - 2)
        output = sampler.sample(model(cut - 2, 1), StepPlan([resumed], []))
        assert output.tokens == [whole.tokens[cut]]


def test_a_matcher_in_error_fails_its_sequence_alone(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    model = RandomModel(tokenizer, vocabulary)
    prompt = [5, 6, *tokenizer.encode("zzz").ids]
    broken = sequence(
        Sampling(grammar=GRAMMARS["regex"]), prompt=prompt, resumed_tokens=len(prompt) - 2
    )
    unchecked = sequence(Sampling(grammar=Grammar(GrammarKind.REGEX, "(")))
    fine = sequence(Sampling(grammar=GRAMMARS["regex"]))
    plan = StepPlan([broken, fine, unchecked], [])
    output = sampler.sample(model(0, 3), plan)
    assert output.refused.keys() == output.failed.keys() == {0, 2}, "nor does another engine"
    failures = generate(sampler, [broken, fine, unchecked], model)
    assert "grammar cannot go on" in failures[0]
    assert failures[1] == ""
    assert "unclosed group" in failures[2]
    assert MATCHES["regex"](text_of(tokenizer, fine))


def test_a_grammar_that_no_token_can_follow_fails_its_sequence(
    compiler: GrammarCompiler, vocabulary: int
) -> None:
    sampler = Sampler(vocabulary, EOS, compiler)
    one = sequence(Sampling(grammar=Grammar(GrammarKind.REGEX, "ab")))
    logits = np.full((1, vocabulary), -np.inf, np.float32)
    logits[0, 1] = 0.0
    output = sampler.sample(logits, StepPlan([one], []))
    assert output.failed.keys() == {0}


def chain(references: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(references)
    }
    definitions[f"d{references}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def rules(count: int) -> str:
    lines = [f'r{i}: "a" r{i + 1} | "b" r{i + 1} r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "c"'])


SCHEMA = GrammarKind.JSON_SCHEMA
REFUSED: dict[str, tuple[GrammarKind, str, str]] = {
    "syntax": (GrammarKind.REGEX, "[0-9", "unclosed character class"),
    "look-around": (GrammarKind.REGEX, "(?=a)b", "look-around"),
    "empty": (GrammarKind.REGEX, "", "is empty"),
    "long regex": (GrammarKind.REGEX, "a" * 9000, "at most 8192"),
    "json with text": (GrammarKind.JSON, "{}", "at most 0"),
    "no schema": (SCHEMA, "[1]", "a schema is a JSON object"),
    "no json": (SCHEMA, '{"type":', "it is not JSON"),
    "nested json": (SCHEMA, "[" * 50_000, "it is not JSON"),
    "not a number": (SCHEMA, '{"const": NaN}', "cannot be used"),
    "surrogate": (SCHEMA, '{"const": "\\ud800"}', "cannot be used"),
    "surrogate in a regex": (GrammarKind.REGEX, "\ud800", "half a surrogate pair"),
    "unknown type": (SCHEMA, '{"type": "strnig"}', "strnig"),
    "external reference": (SCHEMA, '{"$ref": "http://a.b/c"}', "not fetch"),
    "nothing matches": (SCHEMA, '{"$ref": "#"}', "nothing matches"),
    "long schema": (SCHEMA, json.dumps({"enum": ["x" * 1000] * 100}), "at most 65536"),
    "long string": (SCHEMA, json.dumps({"const": "x" * 5000}), "more than 4096 characters"),
    "reference chain": (SCHEMA, json.dumps(chain(300)), "nest too deeply"),
    "multiple": (SCHEMA, '{"type": "integer", "multipleOf": 99400891}', "multipleOf"),
    "multiples": (
        SCHEMA,
        json.dumps({"allOf": [{"type": "integer", "multipleOf": k} for k in (97, 89, 83, 79)]}),
        "multipleOf",
    ),
    "zero beside a multiple": (
        SCHEMA,
        '{"allOf": [{"type": "integer", "multipleOf": 99400891}, {"multipleOf": 0}]}',
        "multipleOf",
    ),
    "huge multiple": (SCHEMA, '{"multipleOf": 1' + "0" * 400 + "}", "multipleOf"),
    "decimal multiple": (SCHEMA, '{"type": "integer", "multipleOf": 1.2345678}', "multipleOf"),
    "shifted multiples": (
        SCHEMA,
        '{"anyOf": [{"type": "number", "multipleOf": 0.0001}, {"multipleOf": 999.0}]}',
        "multipleOf",
    ),
    "hidden multiple": (
        SCHEMA,
        '{"type": "integer", "multipleOf": 99400891, "multipleOf": 7, "type": "frog"}',
        "frog",
    ),
    "patterns": (
        SCHEMA,
        json.dumps({"patternProperties": {f"^{c}.*{i}$": {} for c in "abcd" for i in range(6)}}),
        "more than 20 patternProperties",
    ),
    "ambiguous": (
        GrammarKind.EBNF,
        'start: "{" x\nx: ' + "|".join(f'"v{i}"' for i in range(2100)),
        "max is",
    ),
    "no choices": (GrammarKind.CHOICE, "[]", "at least one"),
    "choice of numbers": (GrammarKind.CHOICE, "[1]", "must be a string"),
    "empty choice": (GrammarKind.CHOICE, '["a", ""]', "1 to 4096"),
    "control character": (GrammarKind.CHOICE, '["a\\u0000"]', "control character"),
    "unknown rule": (GrammarKind.EBNF, "start: foo", "foo"),
    "rule chain": (GrammarKind.EBNF, rules(510), "rules"),
    "nesting": (GrammarKind.EBNF, "start: " + "(" * 900 + '"a"' + ")" * 900, "nested"),
    "special token": (GrammarKind.EBNF, 'start: "a" <|im_start|>', "special tokens"),
    "token range": (GrammarKind.EBNF, 'start: "a" <[1-5]>', "special tokens"),
    "special token that seems to be quoted": (
        GrammarKind.EBNF,
        "start: /\na/ <|im_start|> /b/",
        "not closed on its line",
    ),
    "open expression": (GrammarKind.EBNF, "start: /a\nb/", "not closed on its line"),
    "quotes without end": (GrammarKind.EBNF, '\\"' * 8000, "not closed on its line"),
    "directive": (GrammarKind.EBNF, 'start: %regex {"x": 1}', "not supported"),
    "directive behind a schema": (GrammarKind.EBNF, "start: %json {} %llguidance {}", "not supp"),
    "no schema in a grammar": (GrammarKind.EBNF, "start: %json [1]", "not supported"),
    "open schema in a grammar": (GrammarKind.EBNF, 'start: %json {"a": 1', "not JSON"),
    "nested schema in a grammar": (GrammarKind.EBNF, "start: %json " + '{"a":' * 9000, "not JSON"),
    "schema in a grammar": (
        GrammarKind.EBNF,
        'start: %json {"type": "integer", "multipleOf": 99400891}',
        "multipleOf",
    ),
    "schemas in a grammar": (
        GrammarKind.EBNF,
        "start: a b\na: %json "
        + json.dumps({"type": "integer", "multipleOf": 9973})
        + "\nb: %json "
        + json.dumps({"type": "integer", "multipleOf": 9967}),
        "multipleOf",
    ),
    "reference chain in a grammar": (
        GrammarKind.EBNF,
        "start: %json " + json.dumps(chain(300)),
        "nest too deeply",
    ),
    "how JSON is written": (
        GrammarKind.EBNF,
        "start: %json " + json.dumps({"x-guidance": {"item_separator": "a" * 300}}),
        "x-guidance",
    ),
    "token behind a schema": (GrammarKind.EBNF, 'start: %json {"const": "\\""} <|x|>', "special"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_cannot_be_compiled_safely_is_refused(sampler: Sampler, name: str) -> None:
    kind, text, fragment = REFUSED[name]
    with pytest.raises(RefusedError, match=re.escape(fragment)) as refused:
        sampler.check(sequence(Sampling(grammar=Grammar(kind, text))).request)
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SCHEMA, json.dumps(chain(160))),
        (SCHEMA, json.dumps({"type": "integer", "multipleOf": 9973})),
        (SCHEMA, json.dumps({"enum": [f"value-{i}" for i in range(4000)]})),
        (SCHEMA, json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(450)}})),
        (GrammarKind.EBNF, rules(490)),
        (GrammarKind.CHOICE, json.dumps([f"value-{i}" for i in range(4000)])),
        (GrammarKind.REGEX, "ab" * 4000),
        (GrammarKind.REGEX, "((a{0,100}){0,100}){0,100}"),
        (GrammarKind.EBNF, 'start: "<|im_start|>" /<b>/ // <c>\n'),
    ],
)
def test_the_largest_that_are_let_through_compile(
    sampler: Sampler, kind: GrammarKind, text: str
) -> None:
    """The compiler runs in a thread, which has the smallest stack of the process."""
    request = sequence(Sampling(grammar=Grammar(kind, text))).request
    with ThreadPoolExecutor(1) as threads:
        threads.submit(sampler.check, request).result()


def test_grammars_are_compiled_once_and_the_cache_is_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Grammar] = []
    original = GrammarCompiler._compile

    def count(self: GrammarCompiler, grammar: Grammar) -> Any:
        compiled.append(grammar)
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    first = Grammar(GrammarKind.CHOICE, '["once"]')
    for _ in range(3):
        compiler.check(first)
    assert compiled == [first]
    for index in range(260):
        compiler.check(Grammar(GrammarKind.CHOICE, f'["{index}"]'))
    compiler.check(first)
    assert compiled.count(first) == 2
    assert compiler.cached <= 256


def test_checks_run_from_many_threads(compiler: GrammarCompiler) -> None:
    grammars = [Grammar(GrammarKind.REGEX, f"[a-{end}]{{3}}") for end in "bcdefg"] * 5
    with ThreadPoolExecutor(6) as threads:
        matchers = list(threads.map(compiler.matcher, grammars))
    assert not any(matcher.error for matcher in matchers)


def test_without_grammars_they_are_refused(vocabulary: int) -> None:
    sampler = Sampler(vocabulary, EOS)
    sampler.check(sequence(Sampling()).request)
    with pytest.raises(RefusedError, match="cannot constrain"):
        sampler.check(sequence(Sampling(grammar=GRAMMARS["json"])).request)


def test_special_tokens_are_masked_but_where_a_grammar_names_them_by_number(
    sampler: Sampler, tokenizer: Tokenizer, vocabulary: int
) -> None:
    for text, pattern in (
        ('start: "a" | <[1]> "b"', r"<\|im_start\|>b"),
        ('start: %json {"const": 7} <[1]> "b" <[2]>', r"7<\|im_start\|>b"),
        ("start: /[^a]{2}/", "[^a]{2}"),
    ):
        one = sequence(Sampling(grammar=Grammar(GrammarKind.EBNF, text)))
        assert generate(sampler, [one], RandomModel(tokenizer, vocabulary)) == [""]
        assert re.fullmatch(pattern, text_of(tokenizer, one))
