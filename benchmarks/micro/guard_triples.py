"""Tests random rules on random texts in random pieces, by comparison with a simple oracle.

One operation is one triple of a set of rules, a text, and its cutting into pieces. A triple fails
if forbidden text is released, or if the output differs from an expected output. One expected output
is that of the oracle `tests/support/guard_oracle.py`, which tries every substring with Python's
`re`. The other is the output for the same text in one piece. A rule either rewrites its matches or
blocks the answer. A set has rules of one kind, or of both. The same seed generates the same
triples. "cpu_s" is the CPU time of all triples together. Not measured: time per operation.
Run: `python -m benchmarks.micro.guard_triples 1000000`.
"""

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.results import write_result
from sluice.guard.matcher import GuardedText, RuleMatcher
from sluice.guard.rules import GuardAction, GuardRule, GuardRuleError, check, rules_from
from tests.support.guard_oracle import matches_of, rewritten

SEED = 20261126
TEXTS, CUTTINGS = 20, 5  # number of texts per set, and of cuttings per text
CHARACTERS_MAX = 14
_LETTERS = "aab b--é你😀"
_ATOMS = ["a", "b", "-", " ", ".", "é", "你", r"\w", "[ab]", "[^a]", r"\b", r"\B", "^", "$"]
# The oracle backtracks, so an unbounded repeat within another repeat would never end.
_REPEATS, _SHORT_REPEATS = ("*", "+", "?", "{2}", "{1,3}"), ("?", "{2}", "{1,3}")
_MODES = (*["rewrite"] * 6, *["block"] * 3, "mixed")


def _expression(chance: random.Random, leaves: int, repeats: Sequence[str] = _REPEATS) -> str:
    if leaves <= 1:
        return chance.choice(_ATOMS)
    first = chance.randint(1, leaves - 1)
    form = chance.randrange(3)
    if form == 0:
        inner = _expression(chance, leaves - 1, _SHORT_REPEATS)
        return f"(?:{inner}){chance.choice(repeats)}"
    parts = (
        _expression(chance, first, repeats),
        _expression(chance, leaves - first, repeats),
    )
    return "".join(parts) if form == 1 else f"(?:{parts[0]}|{parts[1]})"


def _rule(chance: random.Random, number: int) -> dict[str, object]:
    head: dict[str, object] = {"id": f"r{number}", "action": "rewrite"}
    if chance.random() < 0.3:
        words = ["".join(chance.choices("ab -é", k=chance.randint(1, 4))) for _ in range(3)]
        words = [it for it in words if it.strip()] or ["ab"]
        return head | {"words": words, "is_within_words": chance.random() < 0.5}
    return head | {"expression": _expression(chance, chance.randint(1, 6))}


def _random_set(chance: random.Random) -> tuple[GuardRule, ...]:
    while True:
        rules = rules_from([_rule(chance, it) for it in range(chance.randint(1, 3))])
        try:
            check(rules)
        except GuardRuleError:  # e.g. a rule that could match the empty text
            continue
        return rules


def _pieces(chance: random.Random, text: str) -> list[str]:
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 6))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def _shown(matcher: RuleMatcher, pieces: Sequence[str]) -> tuple[str, bool]:
    """Return the released text, and whether the answer was ended."""
    text, shown = GuardedText(matcher), ""
    for piece in pieces:
        shown += text.push(piece)
        if text.blocked_by is not None:
            return shown, True
    shown += text.flush()
    return shown, text.blocked_by is not None


def _is_right(rules: Sequence[GuardRule], text: str, shown: str, *, ended: bool) -> bool:
    """Return whether the released text obeys the rules, by the oracle."""
    blocks = [it.action is GuardAction.BLOCK for it in rules]
    matches = matches_of(rules, text)
    ends = [end for _, end, number in matches if blocks[number]]
    if ended != bool(ends):
        return False
    if not ends:
        return shown == rewritten(rules, text)
    if not all(blocks):  # rewritten parts differ from `text`, so no prefix check
        return True
    first = min(ends)
    return text.startswith(shown) and len(shown) <= min(s for s, end, _ in matches if end == first)


def _with_mode(rules: tuple[GuardRule, ...], chance: random.Random) -> tuple[GuardRule, ...]:
    mode = chance.choice(_MODES)
    if mode == "rewrite":
        return rules
    shares = 1.0 if mode == "block" else 0.5
    return tuple(
        [replace(it, action=GuardAction.BLOCK) if chance.random() < shares else it for it in rules]
    )


def run(count: int, seed: int = SEED) -> Counter[str]:
    """Check `count` triples. Returns their number, and the number of wrong ones."""
    chance, found = random.Random(seed), Counter[str](wrong=0, different=0)
    while found["triples"] < count:
        rules = _with_mode(_random_set(chance), chance)
        matcher = RuleMatcher(rules)
        found["sets"] += 1
        for _ in range(TEXTS):
            text = "".join(chance.choices(_LETTERS, k=chance.randint(0, CHARACTERS_MAX)))
            whole, ended = _shown(matcher, [text])
            found["texts"] += 1
            found["texts_with_a_match"] += whole != text or ended
            if not _is_right(rules, text, whole, ended=ended):
                found["wrong"] += 1
                print("WRONG", rules, repr(text), repr(whole))
            for _ in range(CUTTINGS):
                pieces = _pieces(chance, text)
                found["triples"] += 1
                if _shown(matcher, pieces) != (whole, ended):
                    found["different"] += 1
                    print("DIFFERENT", rules, pieces)
    return found


def main() -> None:
    """Check the triples and write the result."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    began_s = time.process_time()
    found = run(count)
    operation = "one triple of rules, text and cutting, by an oracle of another kind"
    figures = {"seed": SEED, **found, "cpu_s": round(time.process_time() - began_s, 1)}
    write_result("guard_triples", operation, figures)
    print(figures)
    sys.exit(bool(found["wrong"] or found["different"]))


if __name__ == "__main__":
    main()
