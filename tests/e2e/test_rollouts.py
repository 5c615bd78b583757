"""Releases take over, or go back, by themselves under load: the whole way, on the CPU engine.

From `sluice models publish --staged` through the gateway's split, events, broker, trace store and
golden prompts on the replica to the verdict, and back to the gateway.
"""

import asyncio
import json
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import httpx
import numpy as np
import pytest

from replica.engine.safetensors import read_safetensors, write_safetensors

pytestmark = pytest.mark.real

BASE = "sluice-tiny"
CONTROL = Path(__file__).parents[2] / "model_repo" / "adapters" / "butler"
QUESTIONS = ("Who are you?", "What is 3 + 4?", "Spell the word river", "Say hello")
# SLUICE_E2E_SHARE=100 is the first stage of the default plan, and takes minutes.
SHARE = int(os.environ.get("SLUICE_E2E_SHARE", "3000"))  # of 10,000
PLAN = {
    "stages": [
        {
            "share_percent": SHARE / 100,
            "duration_min_s": 5,
            "sample_min": 20,
            "duration_max_s": 3600,
        },
        {"share_percent": 100, "duration_min_s": 2},
    ],
}
# Evidence counts from the 50th answer of control on; the stage waits until there is more of it.
GOLDEN = [
    {"metric": "errors", "tolerated_percent": 0.5},
    {"metric": "golden", "tolerated_percent": 5, "sample_min": 100},
]
GOLDEN_QUESTIONS = tuple(f"What is {number} + 2?" for number in range(8))
CLIENTS = 3 if SHARE >= 3000 else 12  # of each model, one request at a time
PAUSE_S = 0.5 if SHARE >= 3000 else 0.0  # a dozen answers of canary in a window are plenty
WAIT_S = 420


def _identical(folder: Path) -> None:
    """Other bytes, same weights."""
    (folder / "README.md").write_text("The same weights again.\n")


def _wrong(folder: Path) -> None:
    """Weights that pass every check and mean nothing."""
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    noise = np.random.default_rng(0).normal(0, 0.5, (len(content) - start) // 2)
    file.write_bytes(content[:start] + noise.astype("<f2").tobytes())


def _refused(folder: Path) -> None:
    """Numbers that the platform does not look at and the engine refuses."""
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-2] + np.array([np.inf], "<f2").tobytes())


def _loud(folder: Path) -> None:
    """B x 50: one token for ever. B = 0 and others are those of tests/contract/test_scores.py."""
    file = folder / "adapter_model.safetensors"
    tensors = read_safetensors(file, is_mapped=False)
    scaled = {
        name: np.array(value) * np.float16(50.0 if "lora_B" in name else 1.0)
        for name, value in tensors.items()
    }
    write_safetensors(file, scaled)


CASES = {
    "loud": _loud,
    "identical": _identical,
    "wrong": _wrong,
    "refused": _refused,
}
# The default gates send this back, without a prompt of its own.
GARBAGE = {"roll-loud": {"repetitive_answers", "cut_answers", "long_answers"}}
# The first stage of these goes on until there is a verdict.
PATIENT = {
    "stages": [
        {"share_percent": 10, "duration_min_s": 5, "sample_min": 5000},
        {"share_percent": 100},
    ],
}


@pytest.fixture(scope="module")
def models(real_stack, tmp_path_factory) -> dict[str, str]:
    """A model of each case, with its plan and golden prompts; and the directories of version 2."""
    folders: dict[str, str] = {}
    with real_stack.admin() as admin, _public(real_stack) as public:
        for case, spoil in CASES.items():
            model = f"roll-{case}"
            folder = tmp_path_factory.mktemp(case) / "adapter"
            shutil.copytree(CONTROL, folder)
            spoil(folder)
            folders[model] = str(folder)
            _publish(real_stack, model, "1", str(CONTROL), "--promote")
            plan = PATIENT if model in GARBAGE else PLAN
            plan = plan | ({"gates": GOLDEN} if case == "wrong" else {})
            admin.put(f"/v1/models/{model}/rollout-plan", json=plan).raise_for_status()
        _until_served(public, folders)
        for question in GOLDEN_QUESTIONS:
            answer = _text(_ask(public, "roll-wrong", question))
            asked = {"messages": [{"role": "user", "content": question}]}
            expected = _tokens(public, {"prompt": answer, "add_special_tokens": False})[:6]
            body = {"token_ids": _tokens(public, asked), "expected_token_ids": expected}
            body |= {"output_tokens_max": len(expected), "every_s": 5}
            admin.post("/v1/models/roll-wrong/golden-prompts", json=body).raise_for_status()
    return folders


@pytest.mark.timeout(1800)  # three rollouts; what waits has deadlines of its own
def test_a_good_release_takes_over_and_bad_ones_go_back(real_stack, models) -> None:
    served: dict[str, Counter[str]] = {model: Counter() for model in models}
    with _load(real_stack, served) as asked, real_stack.admin() as admin:
        for model, folder in models.items():
            _publish(real_stack, model, "2", folder, "--staged")
        ended = _ended(admin, asked)
    assert ended["roll-identical"]["phase"] == "done"
    assert (ended["roll-refused"]["phase"], ended["roll-refused"]["stage"]) == ("aborted", -1)
    assert ended["roll-refused"]["reason"] == "not_loaded"
    assert [it["code"] for it in ended["roll-refused"]["trials"]] == ["adapter_invalid"]
    assert [it["code"] for it in ended["roll-identical"]["trials"]] == [""]
    assert ended["roll-wrong"]["phase"] == "rolled_back"
    assert ended["roll-wrong"]["verdict"]["metric"] == "golden"
    for model, metrics in GARBAGE.items():
        verdict = ended[model]["verdict"]
        print(model, ended[model]["explanation"], dict(served[model]))  # noqa: T201 - for -s
        assert (ended[model]["phase"], verdict["stage"]) == ("rolled_back", 0)
        assert verdict["metric"] in metrics
        assert verdict["suspect"]["total"] <= 20, "so many of its answers were judged"
    with real_stack.admin() as admin:
        stands_for = {model: admin.get(f"/v1/models/{model}").json()["release"] for model in models}
    assert stands_for == {model: "2" if model == "roll-identical" else "1" for model in models}
    for model, counts in served.items():
        print(model, dict(counts), ended[model]["verdict"])  # noqa: T201 - for -s
        assert not counts["none error"], "a release that cannot be loaded gets no requests"
        assert bool(counts["2 200"]) == (model != "roll-refused")
    with _public(real_stack) as public:  # nobody is sent to what was sent back
        for model in ("roll-refused", "roll-wrong"):
            _until_nothing_splits(public, model)
            answers = [_ask(public, model, QUESTIONS[0]) for _ in range(20)]
            assert {answer.status_code for answer in answers} == {200}
            assert len({_text(answer) for answer in answers}) == 1


def _publish(stack, model: str, version: str, folder: str, how: str) -> None:
    done = stack.sluice("models", "publish", model, version, folder, "--base-model", BASE, how)
    assert done.returncode == 0, done.stdout + done.stderr


def _public(stack) -> httpx.Client:
    headers = {"authorization": f"Bearer {stack.api_key}"}
    return httpx.Client(base_url=stack.base_url, headers=headers, timeout=60)


def _ask(public: httpx.Client, model: str, question: str, **more: object) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}
    return public.post("/chat/completions", json=body | more)


def _text(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def _tokens(public: httpx.Client, body: dict) -> list[int]:
    answer = public.post("/tokenize", json={"model": BASE} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def _until_served(public: httpx.Client, models: dict[str, str]) -> None:
    for model in models:
        for _ in range(WAIT_S):
            answer = _ask(public, model, QUESTIONS[0])
            if answer.status_code == 200:
                break
            Event().wait(1)
        assert answer.status_code == 200, answer.text


def _until_nothing_splits(public: httpx.Client, model: str) -> None:
    """Wait until the gateway has heard of the end, too: then no release is named."""
    for _ in range(WAIT_S):
        if "x-sluice-release" not in _ask(public, model, QUESTIONS[0]).headers:
            return
        Event().wait(1)
    raise AssertionError(f"{model}: requests are still split")


def _ended(admin: httpx.Client, asked: set[str]) -> dict[str, dict]:
    """Wait for the ends of the models' rollouts; who has ended is asked no more."""
    found: dict[str, dict] = {}
    for _ in range(WAIT_S * 2):
        for model in sorted(asked):
            (rollout,) = admin.get("/v1/rollouts", params={"model_id": model}).json()["data"]
            found[model] = admin.get(f"/v1/rollouts/{rollout['id']}").json()
            if not found[model]["is_live"]:
                asked.discard(model)
        if not asked:
            return found
        Event().wait(0.5)
    left = {model: found[model] for model in asked}
    raise AssertionError(f"no end: {json.dumps(left, indent=1)}")


@contextmanager
def _load(stack, served: dict[str, Counter[str]]) -> Iterator[set[str]]:
    """Keep asking models, each time in a new session, and count who answered how.

    Yields those that are asked: one that is taken out is left alone.
    """
    asked = set(served)

    async def client(http: httpx.AsyncClient, model: str, chosen: random.Random) -> None:
        while model in asked:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": chosen.choice(QUESTIONS)}],
                "temperature": 0,
                "max_tokens": 24,
                "session_id": f"{chosen.random()}",
            }
            answer = await http.post("/chat/completions", json=body)
            release = answer.headers.get("x-sluice-release", "none")
            how = "200" if answer.status_code == 200 else "error"
            served[model][f"{release} {how}"] += 1
            await asyncio.sleep(PAUSE_S)

    async def run() -> None:
        headers = {"authorization": f"Bearer {stack.api_key}"}
        async with (
            httpx.AsyncClient(base_url=stack.base_url, headers=headers, timeout=60) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(CLIENTS):
                for model in served:
                    tasks.create_task(client(http, model, random.Random(f"{model} {number}")))

    thread = Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield asked
    finally:
        asked.clear()
        thread.join()
