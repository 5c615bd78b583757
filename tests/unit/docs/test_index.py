"""The README can be read in a minute, and every page of the documentation is found from its index."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def test_the_readme_is_short_and_its_lines_are_too() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    long = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long


def test_the_index_names_every_page_once() -> None:
    named = re.findall(r"\]\((\w[\w-]*)\.md\)", (DOCS / "README.md").read_text())
    pages = sorted(page.stem for page in DOCS.glob("*.md") if page.name != "README.md")
    assert sorted(named) == pages


def test_the_glossary_has_each_word_once() -> None:
    text = (DOCS / "glossary.md").read_text()
    words = [
        word
        for word in re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
        if word not in ("word", "---")
    ]
    assert len(words) == len(set(words)) > 50
