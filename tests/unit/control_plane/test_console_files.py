"""The console's files: what is vendored, what the policy lets run, how much there is."""

import gzip
import hashlib
import re

import pytest

from control_plane.console.files import POLICY, folder

LINES_MAX = 4000
WIRE_BYTES_MAX = 150_000
COLUMNS_MAX = 120
OWN = [it for it in folder().rglob("*") if it.is_file() and "vendor" not in it.parts]
SCRIPTS = [it for it in OWN if it.suffix == ".js"]


def test_vendored_modules_equal_their_list() -> None:
    told = (folder() / "vendor" / "README.md").read_text()
    listed = dict(re.findall(r"\| `([\w.-]+\.js)` \|.*\| `([0-9a-f]{64})` \|", told))
    held = {
        it.name: hashlib.sha256(it.read_bytes()).hexdigest()
        for it in (folder() / "vendor").glob("*.js")
    }
    assert listed == held
    for licence in re.findall(r"`(LICENSE\.\w+)`", told):
        assert (folder() / "vendor" / licence).exists()


def test_it_stays_small() -> None:
    assert sum(it.read_text().count("\n") for it in OWN) <= LINES_MAX
    assert sum(len(gzip.compress(it.read_bytes())) for it in OWN) <= WIRE_BYTES_MAX


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda it: it.name)
def test_lines_of_scripts_can_be_read(script) -> None:
    long = [
        at for at, line in enumerate(script.read_text().split("\n"), 1) if len(line) > COLUMNS_MAX
    ]
    assert not long


def test_nothing_needs_a_resource_forbidden_by_the_policy() -> None:
    assert "unsafe" not in POLICY
    page = (folder() / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda it: it.name)
def test_scripts_insert_text_as_text_and_call_no_other_host(script) -> None:
    text = script.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    assert not re.search(r"localStorage|sessionStorage|document\.cookie", text)
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    for imported in re.findall(r'from "([^"]+)"', text):
        assert (script.parent / imported).is_file(), imported
