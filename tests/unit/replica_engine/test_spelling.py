"""Tests grammar literals that are written like special tokens, with a model that prefers these."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from gateway.bases.assets import load_base
from gateway.dialects.tools import ToolSpec
from replica.engine.grammar import GrammarCompiler
from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.sampler import Sampler
from replica.engine.types import Grammar, GrammarKind, Sampling, SequenceRequest

BASE = Path(__file__).resolve().parents[3] / "model_repo" / "default"
SHIPPED = {
    token["content"]: token["id"]
    for token in json.loads((BASE / "tokenizer.json").read_text())["added_tokens"]
}
EOS = frozenset({0, 2})
TOOL_CALL, TOOL_CALL_END = 3, 4


class Subject:
    """A base whose model prefers special tokens, and has no other preference."""

    def __init__(self, path: Path, eos_ids: frozenset[int], special_ids: Iterable[int]) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self._vocabulary = self.tokenizer.get_vocab_size()
        self._eos_ids = eos_ids
        self._special_ids = sorted(special_ids)
        compiler = GrammarCompiler(path, self._vocabulary, eos_ids)
        self._sampler = Sampler(self._vocabulary, eos_ids, compiler)

    def written(self, grammar: Grammar, seed: int = 0) -> list[int]:
        """Return a greedy answer without its end token."""
        request = SequenceRequest(1, [5, 6], 400, sampling=Sampling(grammar=grammar))
        one = ScheduledSequence(request, 0, b"", self._eos_ids)
        self._sampler.check(request)
        rng = np.random.default_rng(seed)
        for _ in range(request.output_tokens_max):
            logits = rng.normal(0, 3, (1, self._vocabulary)).astype(np.float32)
            logits[:, self._special_ids] += 30
            output = self._sampler.sample(logits, StepPlan([one], []))
            assert not output.failed
            one.tokens.extend(output.tokens)
            if one.tokens[-1] in self._eos_ids:
                return one.tokens[one.prompt_tokens : -1]
        raise AssertionError("no end")

    def text(self, grammar: Grammar, seed: int = 0) -> str:
        """Return an answer for which special tokens are not available."""
        ids = self.written(grammar, seed)
        assert not set(ids) & set(self._special_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def schema_of(name: str, value: Any) -> Grammar:
    schema = {
        "type": "object",
        "properties": {name: value},
        "required": [name],
        "additionalProperties": False,
    }
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def value_of(text: str) -> Any:
    return json.loads(text)["t"]


def as_it_is(text: str) -> str:
    return text


LITERALS: dict[str, tuple[Callable[[str], Grammar], Callable[[str], Any]]] = {
    "const": (lambda text: schema_of("t", {"const": text}), value_of),
    "enum": (lambda text: schema_of("t", {"enum": [text]}), value_of),
    "key": (
        lambda text: schema_of(text, {"const": 1}),
        lambda text: next(iter(json.loads(text))),
    ),
    "pattern": (
        lambda text: schema_of("t", {"type": "string", "pattern": f"^{re.escape(text)}$"}),
        value_of,
    ),
    "regex": (lambda text: Grammar(GrammarKind.REGEX, re.escape(text)), as_it_is),
    "choice": (lambda text: Grammar(GrammarKind.CHOICE, json.dumps([text])), as_it_is),
    "ebnf": (lambda text: Grammar(GrammarKind.EBNF, f"start: {json.dumps(text)}"), as_it_is),
}


@pytest.fixture(scope="module")
def shipped() -> Subject:
    return Subject(BASE / "tokenizer.json", EOS, SHIPPED.values())


@pytest.mark.parametrize("kind", LITERALS)
@pytest.mark.parametrize("mark", SHIPPED)
def test_a_special_tokens_text_is_spelled(shipped: Subject, kind: str, mark: str) -> None:
    grammar_of, read = LITERALS[kind]
    for literal in (mark, f"a{mark}b"):
        assert read(shipped.text(grammar_of(literal))) == literal


@pytest.mark.parametrize("mark", SHIPPED)
def test_a_strict_call_has_its_marks_and_spells_its_arguments(shipped: Subject, mark: str) -> None:
    parameters = json.loads(schema_of("t", {"enum": [mark]}).text)
    text = load_base(BASE).dialect.call_grammar(
        [ToolSpec("f", parameters, is_strict=True)], is_parallel=False
    )
    ids = shipped.written(Grammar(GrammarKind.EBNF, text))
    assert (ids[0], ids[-1]) == (TOOL_CALL, TOOL_CALL_END)
    assert not set(ids[1:-1]) & set(SHIPPED.values())
    call = json.loads(shipped.tokenizer.decode(ids[1:-1], skip_special_tokens=False))
    assert call == {"name": "f", "arguments": {"t": mark}}


FREE: dict[str, dict[str, Any]] = {
    "string": {"type": "string", "maxLength": 40},
    # The length permits the names that added tokens receive here.
    "pattern": {"type": "string", "pattern": "^[0-9a-f-]{34}$"},
    "any pattern": {"type": "string", "pattern": "^.{0,40}$"},
}


@pytest.mark.parametrize("kind", FREE)
@given(seed=st.integers(0, 2**32))
def test_free_text_has_no_special_tokens(shipped: Subject, kind: str, seed: int) -> None:
    text = value_of(shipped.text(schema_of("t", FREE[kind]), seed))
    assert re.fullmatch(FREE[kind].get("pattern", ".*"), text, re.DOTALL)


PIECES = sorted({mark[:cut] for mark in SHIPPED for cut in range(1, len(mark) + 1)} | {">", "a "})


@given(literal=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join), seed=...)
def test_any_literal_is_written_as_it_is(shipped: Subject, literal: str, seed: int) -> None:
    for kind in ("const", "key", "choice"):
        grammar_of, read = LITERALS[kind]
        assert read(shipped.text(grammar_of(literal), abs(seed))) == literal


# The first three are special. The other tokens are only added, as a base may add any text.
MARKS = ["<unk>", "<s>", "</s>", "[INST]", "\n\n", '"}']


def sentence_pieces(path: Path) -> None:
    """Write a vocabulary with byte tokens and with merges that end in special tokens."""
    texts = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += sorted(set('</s>[INST]{}":,t1\u2581'))
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("[", "I"), ("N", "S"), ('"', "t")]
    texts += [left + right for left, right in merges if left + right not in texts]
    vocabulary = {text: token for token, text in enumerate(texts)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=index < 3, normalized=False) for index, text in enumerate(MARKS)]
    )
    tokenizer.save(str(path))


@pytest.mark.parametrize("kind", LITERALS)
# printable ones can be choices
@pytest.mark.parametrize("mark", [mark for mark in MARKS if mark.isprintable()])
@pytest.mark.parametrize("is_listed", [True, False])
def test_another_bases_marks_are_spelled(
    tmp_path: Path, kind: str, mark: str, is_listed: bool
) -> None:
    path = tmp_path / "tokenizer.json"
    sentence_pieces(path)
    if not is_listed:
        document = json.loads(path.read_text())
        document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != "</s>"]
        path.write_text(json.dumps(document))
    grammar_of, read = LITERALS[kind]
    assert read(Subject(path, frozenset({2}), range(len(MARKS))).text(grammar_of(mark))) == mark


@pytest.mark.parametrize("kind", FREE)
def test_another_bases_free_text_has_no_added_tokens(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    sentence_pieces(path)
    subject = Subject(path, frozenset({2}), range(len(MARKS)))
    for seed in range(5):
        value_of(subject.text(schema_of("t", FREE[kind]), seed))
