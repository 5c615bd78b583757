"""`auto` on a whole stack: chosen, judged, learned from, estimated, and switched to a new table."""

import json
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.real

TENANT = "sdk-auto"
SMALL, LARGE = "sluice-tiny", "sluice-tiny-pirate"
ASKED = 40
CHAT = {"model": "auto", "max_tokens": 1}


def ask(client: httpx.Client, text: str) -> httpx.Response:
    """Ask until the gateway knows key and policy."""
    body = CHAT | {"messages": [{"role": "user", "content": text}]}
    for _ in range(300):
        answer = client.post("/chat/completions", json=body)
        if answer.status_code not in (401, 404):
            break
        time.sleep(0.1)
    assert answer.status_code == 200, answer.text
    return answer


def wait_for_judged(stack, count: int) -> None:
    """Wait until the trace store has so many judged choices."""
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    with httpx.Client(base_url=stack.telemetry_url, headers=headers, timeout=60) as client:
        for _ in range(600):
            found = client.get("/v1/auto/turns", params={"tenant": TENANT}).json()["data"]
            if sum(it["good"] is not None for it in found) == count:
                return
            time.sleep(0.1)
    pytest.fail(f"never had {count} judged choices: {found}")


def test_a_table_is_learned_from_thumbs_estimated_and_used(stack, tmp_path: Path) -> None:
    def auto(*words: str) -> str:
        done = stack.sluice("auto", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    key, table = stack.new_key(TENANT), tmp_path / "table.json"
    prices = ("--model", f"{SMALL}=0.1,0.4", "--model", f"{LARGE}=1,4")
    auto("set", TENANT, *prices, "--explored", "50")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=stack.base_url, headers=headers, timeout=60) as client:
        models = set[str]()
        for number in range(ASKED):
            answer = ask(client, f"What is {number}?")
            model = answer.headers["x-sluice-model"]
            models.add(model)
            judged = {
                "id": answer.json()["id"] if number % 2 else answer.headers["x-request-id"],
                "rating": "good" if model == LARGE else "bad",
            }
            assert client.post("/feedback", json=judged).json() == {"object": "feedback", **judged}
        assert models == {SMALL, LARGE}
        wrong = client.post("/feedback", json={"id": "x" * 300, "rating": "good"})
        assert wrong.status_code == 400
        # Of another tenant's answer nothing is said and nothing counts.
        foreign = {"id": "chatcmpl-" + "0" * 32, "rating": "good"}
        assert client.post("/feedback", json=foreign).status_code == 200
        wait_for_judged(stack, ASKED)
        assert f"of {ASKED} judged" in auto("learn", TENANT, "--out", str(table))
        cells = {it["model"]: it for it in json.loads(table.read_text())["cells"]}
        assert cells[LARGE]["bad"] == cells[SMALL]["good"] == 0
        auto("set", TENANT, "--miss-price", "1", "--explored", "0")
        found = json.loads(auto("evaluate", TENANT, "--table", str(table), "--json"))
        assert found["turns"] == found["judged"] == ASKED
        assert found["good_ips"].startswith("1.000")  # it would send all to the one that is good
        assert found["cost_new"] > found["cost_logged"]
        auto("use", TENANT, "--table", str(table))
        for _ in range(100):
            answer = ask(client, "And now?")
            if answer.headers["x-sluice-model"] == LARGE:
                break
            time.sleep(0.1)
        assert answer.headers["x-sluice-model"] == LARGE
