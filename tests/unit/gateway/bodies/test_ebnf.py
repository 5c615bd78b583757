"""A client's grammar: GBNF means the same in Lark, and what no client may say is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from gateway.bodies.chat import parse_chat_request
from gateway.bodies.completions import parse_completion_request
from gateway.bodies.ebnf import GRAMMAR_BYTES_MAX, lark_grammar
from gateway.bodies.guides import lark_of
from gateway.dialects.forms import CallForm, ReasoningForm
from gateway.dialects.tools import ToolSpec
from replica.engine.grammar import GrammarCompiler, bit_mask
from replica.engine.types import Grammar, GrammarKind, RefusedError
from sluice.errors import BadRequestError
from sluice.wire.engine.v1 import engine_pb2 as engine
from tests.unit.gateway.test_call_grammar import BASE, EOS, Subject

VOCABULARY = 4096
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SQL = r"""
# what vLLM's documents show
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
LARK_SQL = """
?start: select_statement
select_statement: "SELECT " column " from " table
column: "col_1" | "col_2"
table: "table_1" | NAME  // the rest
NAME: /[a-z]+/
"""
ARITHMETIC = """root ::= expr
expr ::= term ( [-+] term )*
term ::= digit+ |
  "(" expr ")"
digit ::= [0-9]
"""
ODD = r"""root ::= Key-Word{2,3} key_word? any [^a-c"\]] [\-x] "\x41\u00e4\"%json\n"
Key-Word ::= "k" | "é"
key_word ::= [\U0001F600] | [/%\\]
any ::= .
"""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BASE / "tokenizer.json", VOCABULARY, EOS)


def accepts(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer, in the longest of the tokens that may come."""
    matcher = compiler.matcher(Grammar(GrammarKind.EBNF, grammar))
    tokenizer, rest = compiler._load(), text.encode()
    eos = bit_mask(EOS, VOCABULARY)
    while rest:
        allowed = compiler.fill([(matcher, 0, [])], 1)[0] & ~eos
        tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        spelt = {int(it): tokenizer.decode_bytes([int(it)]) for it in tokens}
        fitting = [it for it, data in spelt.items() if data and rest.startswith(data)]
        if not fitting:
            return False
        token = max(fitting, key=lambda it: len(spelt[it]))
        matcher.advance([token])
        rest = rest[len(spelt[token]) :]
    return bool(np.any(compiler.fill([(matcher, 0, [])], 1)[0] & eos))


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (
            SQL,
            ["SELECT col_1  from table_2  where col_2 = 1 "],
            ["", "SELECT ", "SELECT col_3  from table_2  where col_2 = 1 "],
        ),
        (
            LARK_SQL,
            ["SELECT col_1 from table_1", "SELECT col_2 from other"],
            ["SELECT col_1 from Other", "SELECT"],
        ),
        (ARITHMETIC, ["1", "12+(3-45)", "((7))"], ["1+", "(1", "a", "1 + 2"]),
        (
            ODD,
            ['kk😀zd-Aä"%json\n', 'kék\nd-Aä"%json\n', 'kk/.\n-Aä"%json\n'],
            ['kk😀zd-Aä"%json', 'k😀zd-Aä"%json\n', 'kk😀za-Aä"%json\n', 'kk😀z]-Aä"%json\n'],
        ),
    ],
    ids=["sql", "lark", "arithmetic", "odd"],
)
def test_an_answer_keeps_to_the_grammar(
    compiler: GrammarCompiler, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = lark_grammar(text)
    for answer in good:
        assert accepts(compiler, grammar, answer), (answer, grammar)
    for answer in bad:
        assert not accepts(compiler, grammar, answer), (answer, grammar)


@pytest.mark.parametrize(
    "body",
    [{"grammar": SQL}, {"guided_grammar": SQL}, {"structured_outputs": {"grammar": SQL}}],
)
def test_all_its_names_mean_the_same(body: dict[str, object]) -> None:
    wanted = engine.Grammar(kind=engine.Grammar.KIND_EBNF, text=lark_grammar(SQL))
    chat = parse_chat_request(json.dumps(CHAT | body).encode())
    assert chat.guide == wanted
    assert chat.param_names["grammar"] == "grammar"
    completion = json.dumps({"model": "m", "prompt": "p"} | body).encode()
    assert parse_completion_request(completion).guide == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x" * (GRAMMAR_BYTES_MAX + 1), "at most 16000"),
        ("ä" * 9000, "at most 16000"),
        ("root ::= " + "[-] " * 2000, "in Lark's syntax it has"),
        ('begin ::= "a"', "needs a rule 'root'"),
        ('begin: "a"', "needs a rule 'start'"),
        ("root ::= other", "no rule 'other'"),
        ('root ::= "a\nroot2 ::= "b"', "line 1"),
        ('root ::= "a"\nroot ::= "b"', "two rules 'root'"),
        ('root ::= ( "a"\nb ::= "b"', "not closed: line 2"),
        ('"x"\nroot ::= "a"', "cannot be read: line 1"),
        ('root ::= "a" & "b"', "cannot be read: line 1"),
        (r'root ::= "\ud800"', "no character"),
        (r'root ::= "\UFFFFFFFF"', "no character"),
        ("root ::= []", "matches nothing"),
        ("root ::= x0\n" + "\n".join(f"x{i} ::= x{i + 1}" for i in range(200)), "at most 200"),
        ("start: <[3]>", "special tokens"),
        ("start: <|im_end|>", "special tokens"),
        ("start: @other", "other grammars"),
        ('start: "a', "not closed: line 1"),
        ("start: x\nx: /a", "not closed: line 2"),
        ('start: %json {"type": "object"}', "%ignore and %import"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%ignore and %import"),
        ("start: %lark { start: /a/ }", "%ignore and %import"),
    ],
)
def test_forbidden_grammars_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadRequestError, match=why) as caught:
        parse_chat_request(json.dumps(CHAT | {"grammar": text}).encode())
    assert caught.value.param == "grammar"


def test_one_guide_at_most() -> None:
    with pytest.raises(BadRequestError, match="cannot be combined with 'regex'"):
        parse_chat_request(json.dumps(CHAT | {"grammar": SQL, "regex": "a"}).encode())


@pytest.mark.parametrize(
    "text",
    [
        "root ::= ( root ",  # never closed
        "root ::= root",
        'root ::= "a"{99999999999999999999}',
        "root ::= [z-a]",
        "start: (((",
        "start: unknown",
        "start: INT\n%import secret.INT",
        "start: X\nX: " + "(" * 3000 + '"a"' + ")" * 3000,
        "start: X\nX: (/a/{1000}){1000}",
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_by_the_engine(
    compiler: GrammarCompiler, text: str
) -> None:
    grammar = lark_grammar(text)
    with pytest.raises(RefusedError) as caught:
        compiler.check(Grammar(GrammarKind.EBNF, grammar))
    assert caught.value.param == "grammar"


def test_a_grammar_stands_behind_reasoning_and_beside_calls(tmp_path: Path) -> None:
    subject = Subject(tmp_path, CallForm.HERMES, ReasoningForm.THINK, is_special=True)
    for text, answer in ((ARITHMETIC, "12+(3-45)"), (LARK_SQL, "SELECT col_1 from table_1")):
        guide = engine.Grammar(kind=engine.Grammar.KIND_EBNF, text=lark_grammar(text))
        thinking = subject.dialect.behind_reasoning(lark_of(guide), is_reasoning=False)
        assert thinking is not None
        assert subject.accepts(thinking, f"<think>\nHm.</think>\n{answer}")
        assert subject.accepts(thinking, answer)
        assert not subject.accepts(thinking, f"<think>\nHm.</think>\n{answer}!")
        either = subject.dialect.calls_or_answer(
            [ToolSpec("f", None)], lark_of(guide), is_parallel=False, is_reasoning=False
        )
        assert subject.accepts(either, answer)
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        assert subject.accepts(either, call)


def test_a_grammar_that_is_too_long_behind_reasoning_is_refused_by_name(tmp_path: Path) -> None:
    subject = Subject(tmp_path, CallForm.HERMES, ReasoningForm.THINK, is_special=True)
    text = "start: " + "x " * 7900 + '\nx: "a"'
    guide = engine.Grammar(kind=engine.Grammar.KIND_EBNF, text=lark_grammar(text))
    with pytest.raises(BadRequestError, match="at most 16000 characters") as caught:
        subject.dialect.behind_reasoning(lark_of(guide), is_reasoning=False)
    assert caught.value.param == "grammar"
