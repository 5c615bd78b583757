"""OpenAI's Agents SDK on the real engine, in an environment of its own.

Its lock file is separate, because it needs older versions of packages that other tests use.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import uv

pytestmark = pytest.mark.real

PROJECT = Path(__file__).parent / "agents"


def _uv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [uv.find_uv_bin(), "--quiet", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """An interpreter with the packages of the lock file."""
    home = tmp_path / "agents"
    python = home / "bin" / "python"
    lock = PROJECT / "requirements.lock"
    for ran in (
        _uv("venv", "--python", sys.executable, home),
        _uv("pip", "install", "--python", python, "--require-hashes", "-r", lock),
    ):
        if ran.returncode:
            reason = f"the Agents SDK could not be installed: {ran.stderr}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)  # a laptop without a network; -ra shows it
    return python


def test_an_agent_calls_a_tool_and_goes_on(interpreter: Path, real_stack) -> None:
    ran = subprocess.run(
        [interpreter, PROJECT / "loop.py"],
        check=False,
        env={"OPENAI_BASE_URL": real_stack.base_url, "OPENAI_API_KEY": real_stack.api_key},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
