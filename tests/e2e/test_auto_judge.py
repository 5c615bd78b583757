"""Kept answers of `auto` are graded by a model, on an engine that holds replies to a schema."""

import re
import time

import httpx
import pytest

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
ASKED = [{"role": "user", "content": "And what is kept?"}]
BODY = {"model": "auto", "max_tokens": 8, "messages": ASKED}


def test_a_model_judges_kept_answers_and_its_verdicts_count(
    real_stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = "sdk-judged"
    key = real_stack.new_key(tenant)
    monkeypatch.setenv("OPENAI_BASE_URL", real_stack.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert real_stack.sluice("auto", "set", tenant, "--model", f"{MODEL}=1,1").returncode == 0
    judging = ("auto", "judge", tenant, "--model", MODEL, "--sample", "2")
    nothing = real_stack.sluice(*judging)
    assert nothing.returncode == 1
    assert f"sluice tenants texts set {tenant} --on" in nothing.stderr
    assert real_stack.sluice("tenants", "texts", "set", tenant, "--on").returncode == 0
    headers, deadline_s = {"authorization": f"Bearer {key}"}, time.monotonic() + 120
    done = nothing
    with httpx.Client(base_url=real_stack.base_url, headers=headers, timeout=60) as client:
        while not done.stdout and time.monotonic() < deadline_s:
            told = client.post("/chat/completions", json=BODY)  # 401, 404: not known yet
            assert told.status_code in (200, 401, 404), told.text
            time.sleep(1.0)
            done = real_stack.sluice(*judging)
    found = re.fullmatch(r"answers with kept texts: (\d+) \((.*)\)\n", done.stdout)
    assert found is not None, done.stdout + done.stderr
    counts = [it.split(" ", 1) for it in found[2].split(", ")]
    assert {name for _, name in counts} <= {"good", "bad"}
    assert sum(int(count) for count, _ in counts) == int(found[1])
