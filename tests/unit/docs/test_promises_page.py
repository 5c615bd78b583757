"""docs/promises.md: every test that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROOFS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/promises.md").read_text())


@pytest.mark.parametrize(("path", "name"), PROOFS, ids=[name for _, name in PROOFS])
def test_the_proof_exists(path: str, name: str):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_each_promise_has_a_proof():
    rows = [
        line
        for line in (ROOT / "docs/promises.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| promise", "| ---"))
    ]
    assert len(rows) > 30
    assert all("::" in row.split("|")[2] for row in rows)
