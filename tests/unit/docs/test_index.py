"""The README can be read in a minute, and every page of the documentation is found from its index."""

import hashlib
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


def test_each_picture_is_drawn_from_its_source_and_shown() -> None:
    sources = sorted((DOCS / "pictures").glob("*.dot"))
    assert sources
    shown = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for source in sources:
        told = source.with_suffix(".svg").read_text().split("\n", 1)[0]
        drawn_from = hashlib.sha256(source.read_bytes()).hexdigest()
        assert told == f"<!-- {drawn_from} -->", f"{source.name}: run docs/pictures/draw"
        assert f"(pictures/{source.stem}.svg)" in shown


def test_decisions_are_numbered_and_listed() -> None:
    pages = sorted(page.name for page in (DOCS / "decisions").glob("0*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    listed = re.findall(r"\]\((0\d{3}-[\w-]+\.md)\)", (DOCS / "decisions/README.md").read_text())
    assert listed == pages
    for name in pages:
        headings = re.findall(r"^## (.+)$", (DOCS / "decisions" / name).read_text(), re.MULTILINE)
        assert headings == ["Decision", "Why", "Measured", "What would overturn it"], name


def test_lines_of_pages_are_short() -> None:
    for page in DOCS.rglob("*.md"):
        is_code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code and not line.startswith(("|", "    ")):
                assert len(line) <= 120, f"{page.relative_to(ROOT)}:{number}"
