"""Sentences of docstrings and comments have nouns as subjects: see docs/style.md."""

import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "gateway",
    "router",
    "replica",
    "control_plane",
    "telemetry",
    "cli",
    "sim",
    "sluice",
    "benchmarks",
    "model_repo",
    "migrations",
    "requirements",
    "hatch_build.py",
)
# These keep the rules of subjects, but not yet those of length and semicolons.
ALL = (*PACKAGES, "training", "deploy")
NO_NOUN = re.compile(
    r"(What|Who|Whom|Whose|Whoever|Whatever|Nobody|Those|Such|Likewise)\b|\w+(ed|ing)\.$"
)
NO_PHRASE = re.compile(r"(Of|Likewise|What|Who|Whom|Whose|Whoever|Whatever|Nobody|Those|Such)\b")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
ENTRY = re.compile(r"    \w+(?: \([^)]*\))?: (.*)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A published migration stays as it is; the rest is made by protoc.
LEFT_OUT = {"wire", "versions"}


def sources(package: str) -> list[Path]:
    """Return the Python files of a package, or the file itself."""
    place = ROOT / package
    found = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [file for file in found if LEFT_OUT.isdisjoint(file.parts)]


@cache
def docstrings(package: str) -> list[tuple[str, str]]:
    """Return (place, docstring) for all of a package."""
    found = list[tuple[str, str]]()
    for file in sources(package):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                found.append((f"{file.relative_to(ROOT)}:{line}", text))
    return found


@pytest.mark.parametrize("package", ALL)
def test_a_docstring_begins_with_its_noun_or_verb(package: str) -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in docstrings(package)
        if NO_NOUN.match(text)
    ]
    assert not found, "\n".join(found)


def parts(text: str) -> tuple[list[str], list[str]]:
    """Return the sentences of a docstring, and the first words of its arguments and attributes."""
    paragraphs, entries, is_section = [""], list[str](), False
    for line in text.splitlines():
        is_section = bool(SECTION.match(line)) or (is_section and line.startswith(" "))
        if is_section and (entry := ENTRY.match(line)):
            entries.append(entry[1])
        elif not is_section and line.strip():
            paragraphs[-1] += " " + line
        else:
            paragraphs.append("")
    found = [
        it for part in paragraphs for it in re.split(r"(?<=[.!?:])\s+(?=[A-Z`])", part.strip())
    ]
    return found, entries


def breaches(package: str) -> list[str]:
    """Return what breaks the rule in a package."""
    found = list[str]()
    for place, text in docstrings(package):
        sentences, entries = parts(text)
        found += [f"{place}: {it}" for it in entries if NO_PHRASE.match(it)]
        found += [f"{place}: {it}" for it in sentences if NO_NOUN.match(it) and it[-1] != "?"]
    return found


@pytest.mark.parametrize("package", ALL)
def test_sentences_and_attributes_begin_with_nouns(package: str) -> None:
    found = breaches(package)
    assert not found, "\n".join(found)


def comments(package: str) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of a package's comments; lines that follow one another are one."""
    for file in sources(package):
        found, last = list[list[str]](), None
        with file.open() as lines:
            for token in tokenize.generate_tokens(lines.readline):
                if token.type != tokenize.COMMENT:
                    continue
                is_alone = token.line.lstrip().startswith("#")
                text, line = token.string.lstrip("#").strip(), token.start[0]
                if is_alone and last == line - 1:
                    found[-1].append(text)
                else:
                    found.append([f"{file.relative_to(ROOT)}:{line}", text])
                last = line if is_alone else None
        for place, *texts in found:
            yield place, " ".join(texts)


@pytest.mark.parametrize("package", ALL)
def test_sentences_of_comments_begin_with_nouns(package: str) -> None:
    found = [
        f"{place}: {part}"
        for place, text in comments(package)
        for part in re.split(r"(?<=[.!?:;])\s+", text)
        if NO_NOUN.match(part[:1].upper() + part[1:])
    ]
    assert not found, "\n".join(found)


QUOTED = re.compile(r"``?[^`]*``?|\"[^\"]*\"")
WORDS_MAX = 25


def glued(text: str) -> bool:
    """Return whether a semicolon joins two thoughts of a text."""
    return ";" in QUOTED.sub("code", text)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_thought_is_a_sentence_and_no_semicolon_joins_two(package: str) -> None:
    found = [place for place, text in docstrings(package) if glued(text)]
    found += [f"{place}: {text}" for place, text in comments(package) if glued(text)]
    assert not found, "\n".join(found)


def prose(text: str) -> list[str]:
    """Return the sentences of a docstring without its tables, formulas and sections."""
    lines = [it for it in text.splitlines() if not re.match(r"    |\||[\w./]+ {2,}", it)]
    items = re.split(r"\n\s*\n|\n *[-*] |\n *\d+\. ", "\n".join(lines))
    sentence = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"*<])")
    return [it for item in items for it in sentence.split(" ".join(item.split()))]


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_of_docstrings_are_short(package: str) -> None:
    found = [
        f"{place}: {it}"
        for place, text in docstrings(package)
        for it in prose(text)
        if len(QUOTED.sub("code", it).split()) > WORDS_MAX
    ]
    assert not found, "\n".join(found)


FOLDERS = ("console", "deploy", ".ci", "requirements", "training", "Makefile", "docker-compose.yml")
COMMENT = re.compile(r"\s*(?://|#) (.*)")


def test_comments_of_other_languages_begin_with_nouns() -> None:
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split() if "vendor" not in name]
    found, read = list[str](), 0
    for file in files:
        if file.suffix in (".py", ".md", ".json") or b"\0" in file.read_bytes():
            continue
        read += 1
        before = None
        for number, line in enumerate(file.read_text().splitlines(), 1):
            comment = COMMENT.match(line)
            # A line that continues a sentence may begin with any word.
            is_first = before is None or before.endswith((".", ":"))
            if comment and is_first and NO_PHRASE.match(comment[1]):
                found.append(f"{file.relative_to(ROOT)}:{number}: {comment[1]}")
            before = comment and comment[1]
    assert read > 100, "the folders have such files"
    assert not found, "\n".join(found)
