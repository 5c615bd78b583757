"""Measures the CPU time of guard rules on 500 streamed answers: 200 expressions, 20,000 words.

One operation passes one token of an answer through the answer's rules. The texts of the answers are
the repository's documents, as tokens of the default model. As in engine steps, each of the 500
answers receives one token, then each receives the next. The automaton of the rules adds states when
a text first needs them, so its cost falls with time. "first" is the cost per token of the first
20,000 tokens. "last" is that of the last 20,000, about the ninth such group, from other documents.
"known" is the cost of the first 20,000 tokens in a repetition, the better of two. The case "named"
has only the rules that the platform ships, and "words" only the dictionary. Figures are CPU time of
one core. Not measured: the rest of the gateway, which sends the released text.
Run: `python -m benchmarks.micro.guarding`.
"""

import random
import time
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.results import write_result
from sluice.guard.matcher import GuardedText, RuleMatcher
from sluice.guard.named_sets import NAMED_SETS
from sluice.guard.rules import GuardRule, check, rules_from

STREAMS, TOKENS = 500, 40
EXPRESSIONS, WORDS = 200, 20_000
CHARACTERS = 400_000
_TOKENIZER = Path("model_repo/default/tokenizer.json")
_SYLLABLES = [
    "ba",
    "cor",
    "del",
    "en",
    "fi",
    "gra",
    "hu",
    "il",
    "ka",
    "lo",
    "mer",
    "no",
    "pe",
    "qui",
    "ra",
    "sto",
]


def _word(chance: random.Random) -> str:
    return "".join(chance.choices(_SYLLABLES, k=chance.randint(1, 4)))


def _named() -> list[dict[str, object]]:
    return [{"id": name, "action": "rewrite", "named": name} for name in NAMED_SETS]


def _dictionary(chance: random.Random) -> list[dict[str, object]]:
    words = sorted({_word(chance) + "x" + _word(chance) for _ in range(WORDS + 2_000)})[:WORDS]
    return [{"id": "words", "action": "block", "words": words}]


def _expressions(chance: random.Random) -> list[dict[str, object]]:
    forms = [
        "{0}[ -]?{1}",
        r"\b{0}\d{{4,8}}\b",
        "{0}(?:{1}|{2})+z",
        r"\b(?:{0}|{1}) {2}y\b",
        r"{0}-\w+-{1}",
    ]
    return [
        {
            "id": f"e{number}",
            "action": "rewrite",
            "expression": forms[number % len(forms)].format(*[_word(chance) + "q" for _ in "012"]),
        }
        for number in range(EXPRESSIONS)
    ]


def _texts() -> list[list[str]]:
    """Return texts of streams as tokens of the default model, several from each document."""
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    text = "\n".join([it.read_text() for it in sorted(Path("docs").glob("*.md"))])
    ids = tokenizer.encode(text[:CHARACTERS]).ids
    tokens = [tokenizer.decode([it], skip_special_tokens=False) for it in ids]
    assert len(tokens) > 5 * STREAMS * TOKENS, "the documents are too short"
    return [tokens[at : at + TOKENS] for at in range(0, len(tokens) - TOKENS, TOKENS)]


def _us_per_token(matcher: RuleMatcher, columns: list[list[str]]) -> float:
    texts = [GuardedText(matcher) for _ in range(STREAMS)]
    began_s = time.process_time()
    for row in zip(*columns, strict=True):
        for text, token in zip(texts, row, strict=True):
            text.push(token)
    took_s = time.process_time() - began_s
    assert all(it.blocked_by is None for it in texts)
    return took_s / STREAMS / TOKENS * 1e6


def measure(documents: list[dict[str, object]], texts: list[list[str]]) -> dict[str, float]:
    """Return the cost of a set of rules, in µs per token and in seconds to compile it."""
    rules: tuple[GuardRule, ...] = rules_from(documents)
    began_s = time.process_time()
    check(rules)
    checked_s = time.process_time() - began_s
    matcher = RuleMatcher(rules)
    compiled_s = time.process_time() - began_s - checked_s
    ends = range(STREAMS, len(texts) + 1, STREAMS)
    rounds = [_us_per_token(matcher, texts[end - STREAMS : end]) for end in ends]
    known = min([_us_per_token(matcher, texts[:STREAMS]) for _ in range(2)])
    return {
        "check_ms": round(checked_s * 1e3, 1),
        "compile_ms": round(compiled_s * 1e3, 1),
        "first_us_per_token": round(rounds[0], 2),
        "last_us_per_token": round(rounds[-1], 2),
        "known_us_per_token": round(known, 2),
        "remembered": matcher.automaton.remembered,
    }


def main() -> None:
    """Measure and write the result."""
    chance, texts = random.Random(7), _texts()
    words, expressions, named = _dictionary(chance), _expressions(chance), _named()
    cases = {"named": named, "words": words, "expressions": expressions}
    result = {name: measure(it, texts) for name, it in cases.items()}
    result["all"] = measure([*named, *words, *expressions], texts)
    operation = "a token's way through the rules; 500 streams of 40 tokens, in turn"
    write_result("guarding", operation, result)
    for name, figures in result.items():
        print(name, figures)


if __name__ == "__main__":
    main()
