"""Values that are split, spelt and encoded: those that rules find, and those that docs admit to.

Each text is looked at whole and one character at a time; both have to agree.
"""
# ruff: noqa: RUF001 - letters that look alike are the subject

import base64
import codecs
import urllib.parse
from pathlib import Path

import pytest

from sluice.guard.matcher import GuardedText, RuleMatcher
from sluice.guard.rules import rules_from

MATCHER = RuleMatcher(
    rules_from(
        [
            *[
                {"id": it, "action": "rewrite", "named": it}
                for it in ("card", "iban", "email", "phone", "cloud_key")
            ],
            {"id": "words", "action": "rewrite", "words": ["falcon", "blue heron"]},
        ]
    )
)
CARD = "4111111111111111"
DIGITS = "0123456789"

CAUGHT = {
    "a card in groups": "4111 1111 1111 1111",
    "a card with dashes": "4111-1111-1111-1111",
    "a card with unusual blanks": "4111\u00a01111\u20091111\u202f1111",
    "a card, each digit apart": " ".join(CARD),
    "a card with invisible characters": "\u200b".join(CARD),
    "a card with soft hyphens": "\u00ad".join(CARD),
    "a card with tags": "\U000e0041".join(CARD),
    "a card, written from right to left": f"\u202e{CARD}\u202c",
    "a card in full width": CARD.translate(str.maketrans(DIGITS, "０１２３４５６７８９")),
    "a card in bold": "".join(chr(0x1D7CE + int(it)) for it in CARD),
    "a card in Arabic digits": "".join(chr(0x660 + int(it)) for it in CARD),
    "a card in superscript": CARD.translate(str.maketrans(DIGITS, "⁰¹²³⁴⁵⁶⁷⁸⁹")),
    "an account in groups": "DE89 3704 0044 0532 0130 00",
    "an account in small letters": "de89-3704-0044-0532-0130-00",
    "an address in full width": "ann＠example．com",
    "an address in a link": "[write](mailto:ann@example.com)",
    "an address with an invisible character": "ann\u200b@example.com",
    "an address in another alphabet": "ann@bücher.example",
    "a number of a phone": "+1 (415) 555-2671",
    "a key of a cloud": "AKIAIOSFODNN7EXAMPLE",
    "a word in capitals": "FALCON",
    "a word in full width": "ｆａｌｃｏｎ",
    "a word in circles": "ⓕⓐⓛⓒⓞⓝ",
    "a word in script letters": "𝓯𝓪𝓵𝓬𝓸𝓷",
    "a word with an invisible character": "fal\u200dcon",
    "words over two lines": "blue\nheron",
    "words with many blanks": "blue \t  heron",
}
# By the line of docs/guarding.md that admits to it.
MISSED = {
    "Base64": base64.b64encode(CARD.encode()).decode(),
    "hexadecimal": CARD.encode().hex(),
    "ROT13": codecs.encode("falcon", "rot13"),
    "percent signs": urllib.parse.quote("ann@example.com"),
    "HTML entities": "ann&#64;example.com",
    "reversed": "noclaf",
    "spelt out": "four one one one, and eleven more ones, and one",
    "translated": "faucon",
    "`[at]`": "ann [at] example [dot] com",
    "Leetspeak": "f4lc0n",
    "Cyrillic": "f\u0430lcon",
    "small capitals": "ꜰᴀʟᴄᴏɴ",
    "regional indicators": "🇫🇦🇱🇨🇴🇳",
    "accents": "fa\u0301lcon",
    "keycaps": "".join(f"{it}\ufe0f\u20e3" for it in CARD),
    "several characters": "ﬀalcon ﬁ",
    "full stops": "4111.1111.1111.1111",
    "line breaks": "4111\n1111\n1111\n1111",
    "Markdown": "fal**con** **4111** **1111** **1111** **1111**",
    "other text": "4111 1111, then 1111 1111",
    "letters apart": "f a l c o n",
    "another form": "falcons",
}


def shown(text: str) -> str:
    found = list[str]()
    for pieces in ([text], list(text)):
        guarded = GuardedText(MATCHER)
        found.append("".join(guarded.push(it) for it in pieces) + guarded.flush())
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", CAUGHT)
def test_a_disguise_is_seen_through(name: str) -> None:
    left = shown(f"Take {CAUGHT[name]} now")
    assert left.startswith("Take ")
    assert left.endswith(" now")
    assert CAUGHT[name] not in left


@pytest.mark.parametrize("name", MISSED)
def test_a_disguise_that_hides_a_value_is_named_in_the_docs(name: str) -> None:
    assert shown(MISSED[name]) == MISSED[name], "now it is caught: move it, and change the docs"
    page = (Path(__file__).parents[3] / "docs" / "guarding.md").read_text()
    _, _, admitted = page.partition("## What is not caught")
    assert name in admitted
