"""Docs are short sentences about nouns: see docs/style.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS_MAX = 25
# Made by `make docs`, or rows of a table alone.
MADE = {"docs/promises.md", "docs/benchmarks.md"}
NO_NOUN = re.compile(r"\W*(What|Who|Whoever|Whatever|Nobody|Those|Such)\b")
PAGES = sorted(
    str(it.relative_to(ROOT))
    for it in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if str(it.relative_to(ROOT)) not in MADE and "reference" not in it.parts
)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose: no code, no tables, no headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(\||#|    ).*$", "", text, flags=re.MULTILINE)
    found = list[str]()
    for part in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text):
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", part))
        found += re.split(r"(?<=[.!?:])\s+(?=[A-Z*`\[])", " ".join(words.split()))
    return [it for it in found if it]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    long = [it for it in sentences((ROOT / page).read_text()) if len(it.split()) > WORDS_MAX]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_the_subject_of_a_sentence_is_a_noun(page: str) -> None:
    found = [it for it in sentences((ROOT / page).read_text()) if NO_NOUN.match(it)]
    questions = [it for it in found if not it.endswith("?")]
    assert not questions, "\n".join(questions)
