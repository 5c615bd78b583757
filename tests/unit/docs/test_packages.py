"""The page of a package names each of its folders, and no other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("package", ["gateway", "control_plane"])
def test_the_page_of_a_package_names_all_of_its_folders(package: str) -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / package / "README.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    named = sorted(name for row in rows for name in re.findall(r"`(\w+)/`", row))
    folders = sorted(file.parent.name for file in (ROOT / package).glob("*/__init__.py"))
    assert named == folders
