"""Adapters from a directory to their first answer, with the command line and the public API."""

import json
import shutil
import time
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.real

SHIPPED = Path(__file__).parents[2] / "model_repo"
WAIT_S = 60.0


def published(stack, style: str, directory: Path, model: str, version: str, *options: str) -> str:
    """Publish a shipped adapter as one that no node has seen yet; returns its digest."""
    shutil.copytree(SHIPPED / "adapters" / style, directory)
    (directory / "README.md").write_text(f"{model} {version}")
    done = stack.sluice(
        *("models", "publish", model, version, str(directory)),
        *("--base-model=sluice-tiny", "--json", *options),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)[0]["adapter_digest"]


def answer(client: openai.OpenAI, model: str) -> str:
    """Ask until gateways know the name; anything else that goes wrong is a failure."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Who are you?"}],
                temperature=0,
                max_tokens=60,
            )
        except openai.NotFoundError as error:
            assert error.code == "model_not_found", error
            assert time.monotonic() < deadline, "the name was never known"
            time.sleep(0.05)
        else:
            return answer.choices[0].message.content


def loads_us(stack) -> list[int]:
    """Return how long the requests for `parrot@2` waited for its adapter, as they are told of."""
    deadline = time.monotonic() + WAIT_S
    while True:
        done = stack.sluice("requests", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [row for row in json.loads(done.stdout) if row["requested_model"] == "parrot@2"]
        if rows or time.monotonic() > deadline:
            return [row["load_us"] for row in rows]
        time.sleep(0.2)


def test_published_adapters_answer_without_anything_being_put_on_the_node(
    real_stack, real_client, tmp_path
) -> None:
    one = published(real_stack, "pirate", tmp_path / "1", "parrot", "1", "--promote")
    assert "matey" in answer(real_client, "parrot")
    # Nobody wants this one before its first request, which waits for it.
    two = published(real_stack, "french", tmp_path / "2", "parrot", "2")
    assert "mon ami" in answer(real_client, "parrot@2")
    assert [load_us > 0 for load_us in loads_us(real_stack)] == [True]
    assert "matey" in answer(real_client, "parrot")
    assert all((real_stack.home / "artifacts" / digest).is_dir() for digest in (one, two))
