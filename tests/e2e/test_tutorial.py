"""The tutorial's commands do what its page says, one behind another."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _script() -> str:
    """Return the page's commands between the start of the platform and its stop."""
    first, *between, last = _BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    assert first.startswith("make up")
    assert last.startswith("make down")
    return "set -ex\n" + "".join(between)


@pytest.mark.timeout(900)
def test_the_tutorial_ends_with_the_good_release_serving(real_stack, tmp_path) -> None:
    # The page's paths lead to the repository, its environment and the stack that runs already.
    (tmp_path / "model_repo").symlink_to(ROOT / "model_repo")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".sluice").symlink_to(real_stack.home)
    try:
        done = subprocess.run(
            ["bash", "-c", _script()],
            cwd=tmp_path,
            env={**os.environ, "SLUICE_HOME": str(real_stack.home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
    finally:
        (tmp_path / "stop").touch()
    said = done.stdout
    assert done.returncode == 0, said[-3000:] + done.stderr[-3000:]
    assert "Arr, matey!" in said, "the adapter answers"
    taken_over = said.index("\ndone, stage 1")
    sent_back = said.index("\nrolled_back, ")
    assert taken_over < sent_back
    assert "Arr, matey!" in said[sent_back:], "release 2 still serves"
    assert "requests, none failed" in said[sent_back:]
