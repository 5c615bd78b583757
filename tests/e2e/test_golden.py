"""A golden prompt from the command line to the engine and back, on the CPU engine."""

import json
import time

import pytest

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
WAIT_S = 120


def test_a_replica_answers_a_golden_prompt_as_it_answers_people(
    real_stack, real_client, tmp_path
) -> None:
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(MESSAGES))
    answer = real_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0
    )
    text = answer.choices[0].message.content
    added = real_stack.sluice(
        *("golden", "add", MODEL, "--messages", str(path), "--expect", text),
        *("--every", "5s", "--json"),
    )
    assert added.returncode == 0, added.stderr
    (prompt,) = json.loads(added.stdout)
    try:
        listed = real_stack.sluice("golden", "list", MODEL, "--json")
        assert [one["id"] for one in json.loads(listed.stdout)] == [prompt["id"]]
        found = _result(real_stack, prompt["id"])
        assert found["error"] == ""
        assert len(found["token_ids"]) == 16
        assert len(found["logprobs"]) == 16, "the CPU engine tells them"
        told = real_client.post(
            "/detokenize",
            body={"model": MODEL, "tokens": found["token_ids"]},
            cast_to=object,
        )
        assert told["prompt"].startswith(text)
        assert _result(real_stack, "default")["error"] == "", "every base is asked one"
    finally:
        removed = real_stack.sluice("golden", "remove", prompt["id"])
    assert removed.returncode == 0, removed.stderr
    quarantined = real_stack.sluice("fleet", "quarantines", "--json")
    assert json.loads(quarantined.stdout) == [], "nobody was taken out"


def _result(stack, prompt_id: str) -> dict:
    """Wait for an answer to a prompt."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        shown = stack.sluice("golden", "results", "--json")
        assert shown.returncode == 0, shown.stderr
        for one in json.loads(shown.stdout):
            if one["asking_id"].startswith(f"{prompt_id}/"):
                return one
        time.sleep(1)
    raise AssertionError(f"nobody answered {prompt_id}")
