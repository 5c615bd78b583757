"""Docs are short sentences about nouns: see docs/style.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS_MAX = 25
# Sentences of a page that are still longer. A number only gets smaller.
STILL_LONG: dict[str, int] = {
    "docs/alerts.md": 6,
    "docs/api.md": 12,
    "docs/console.md": 1,
    "docs/scaling.md": 5,
    "docs/tools.md": 5,
}
# Pages with sentences whose subject is no noun. The list only gets shorter.
STILL_WITHOUT_NOUN: set[str] = {
    "docs/api.md",
    "docs/scaling.md",
    "docs/status.md",
    "docs/tools.md",
}
# Made by `make docs`, or rows of a table alone.
MADE = {"docs/promises.md", "docs/benchmarks.md"}
NO_NOUN = re.compile(r"\W*(What|Who|Whoever|Whatever|Nobody|Those)\b")
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
    allowed = STILL_LONG.get(page, 0)
    text = "\n".join(long)
    assert len(long) <= allowed, f"more than {WORDS_MAX} words; {allowed} may be left:\n{text}"


@pytest.mark.parametrize("page", PAGES)
def test_the_subject_of_a_sentence_is_a_noun(page: str) -> None:
    found = [it for it in sentences((ROOT / page).read_text()) if NO_NOUN.match(it)]
    questions = [it for it in found if not it.endswith("?")]
    assert not questions or page in STILL_WITHOUT_NOUN, "\n".join(questions)


def test_the_lists_only_get_shorter() -> None:
    texts = {page: sentences((ROOT / page).read_text()) for page in PAGES}
    assert set(STILL_LONG) | STILL_WITHOUT_NOUN <= set(PAGES)
    done = {
        page
        for page in STILL_WITHOUT_NOUN
        if not any(NO_NOUN.match(it) and not it.endswith("?") for it in texts[page])
    }
    assert not done, "take these pages off the list"
