"""A slow base is rolled out by replacing replicas, and goes back by itself under load.

The whole way on the CPU engine: a base is uploaded, gets replicas of its own beside those that
serve, gets its share of the streams, is found to be slower, and loses its replicas again.
"""

import asyncio
import json
import os
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from replica.engine.safetensors import read_safetensors, write_safetensors

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

SHIPPED = Path(__file__).parents[2] / "model_repo" / "default"
MODEL, POOL = "roll-base", "roll-base-slow"
# Of the feed-forward layers; 43 times the shipped one. A step takes some ten times as long, and the
# engine starts nearly as fast: replicas that start must not make control slow, too.
WIDTH = int(os.environ.get("SLUICE_E2E_WIDTH", "16384"))
# SLUICE_E2E_SHARE=100 is the first stage of the default plan, and takes minutes.
SHARE = int(os.environ.get("SLUICE_E2E_SHARE", "4000"))  # of 10,000
# Only a gate ends the first stage: nobody waits for an hour.
PLAN = {
    "stages": [
        {"share_percent": SHARE / 100, "duration_min_s": 3600, "duration_max_s": 7200},
        {"share_percent": 100, "duration_min_s": 2},
    ],
}
QUESTIONS = ("Who are you?", "What is 3 + 4?", "Spell the word river", "Say hello")
CLIENTS = 4
TOKENS_MAX = 32
WAIT_S = 300 * 4000 // SHARE


def write_slow_base(directory: Path) -> None:
    """Write the shipped base with wider layers that add nothing: its answers, at a higher cost."""
    shutil.copytree(SHIPPED, directory)
    config = json.loads((directory / "config.json").read_text())
    more = WIDTH - config["intermediate_size"]
    tensors = dict[str, Any]()
    for name, values in read_safetensors(SHIPPED / "model.safetensors").items():
        match name.split(".")[-2]:
            case "gate_proj" | "up_proj":
                tensors[name] = np.pad(values, ((0, more), (0, 0)))
            case "down_proj":
                tensors[name] = np.pad(values, ((0, 0), (0, more)))
            case _:
                tensors[name] = values
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": WIDTH}))


class Streams:
    """Clients that read one stream after the other, each in a new session, and what they saw.

    Attributes:
        served: Whole streams by the release that a split chose; empty: there was none.
        broken: Everything that was no whole stream, in words.
        token_ms: Of whole streams, the mean time between tokens, by release.
    """

    def __init__(self, stack) -> None:
        self._stack = stack
        self._stop = Event()
        self.served: Counter[str] = Counter()
        self.broken: list[str] = []
        self.token_ms: defaultdict[str, list[float]] = defaultdict(list)

    async def _client(self, client: openai.AsyncOpenAI, chosen: random.Random) -> None:
        while not self._stop.is_set():
            try:
                raw = await client.chat.completions.with_raw_response.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": chosen.choice(QUESTIONS)}],
                    temperature=0,
                    max_tokens=TOKENS_MAX,
                    stream=True,
                    extra_body={"session_id": f"{chosen.random()}"},
                )
                reason, times = None, list[float]()
                async for chunk in raw.parse():
                    times.append(time.perf_counter())
                    for choice in chunk.choices:
                        reason = choice.finish_reason or reason
            except openai.APIError as error:
                self.broken.append(repr(error))
                continue
            if reason in {"stop", "length"}:
                release = raw.headers.get("x-sluice-release", "")
                self.served[release] += 1
                self.token_ms[release].append((times[-1] - times[0]) / len(times) * 1e3)
            else:
                self.broken.append(f"ended with {reason}")

    async def _run(self) -> None:
        async with (
            openai.AsyncOpenAI(
                base_url=self._stack.base_url,
                api_key=self._stack.api_key,
                max_retries=0,
                timeout=60,
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(CLIENTS):
                tasks.create_task(self._client(client, random.Random(number)))

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


@pytest.fixture(scope="module")
def old_pool(real_stack, tmp_path_factory) -> str:
    """The model on the shipped base, and a pool without replicas for the slow one."""
    folder = tmp_path_factory.mktemp("slow") / "base"
    write_slow_base(folder)
    pushed = real_stack.sluice("artifacts", "push", str(folder), "--json")
    assert pushed.returncode == 0, pushed.stdout + pushed.stderr
    digest = json.loads(pushed.stdout)["digest"]
    with real_stack.admin() as admin:
        shipped = admin.get("/v1/models/sluice-tiny").json()
        pool = admin.get(f"/v1/pools/{shipped['pool_id']}").json()
        model = {key: shipped[key] for key in ("base_digest", "pool_id")} | {"release": "1"}
        slow = {"base_digest": digest, "engine": pool["engine"], "replicas_wanted": 0}
        for path, body in (
            (f"bases/{digest}", {"name": "slow", "context_tokens_max": 4096}),
            (f"pools/{POOL}", slow),
            (f"models/{MODEL}", model),
            (f"models/{MODEL}/rollout-plan", PLAN),
        ):
            admin.put(f"/v1/{path}", json=body).raise_for_status()
        return shipped["pool_id"]


def test_a_slow_base_gets_replicas_and_its_share_and_goes_back(real_stack, old_pool) -> None:
    streams = Streams(real_stack)
    with real_stack.admin() as admin, streams.running():
        until(lambda: streams.served[""] >= 50, "control is known", streams)
        done = real_stack.sluice("models", "publish", MODEL, "2", "--pool", POOL, "--staged")
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: len(replicas(admin, POOL)) == 2, "one for its share, and one more", streams)
        until(lambda: streams.served["2"], "the base serves", streams)
        until(lambda: ready(admin, old_pool), "beside the one that was there", streams)
        ended = until(lambda: over(admin), "the rollout ends", streams)
        before = streams.served.total()
        until(lambda: not replicas(admin, POOL), "its replicas are gone", streams)
        until(lambda: streams.served.total() > before, "streams go on", streams)
    token_ms = {release: round(median(taken), 1) for release, taken in streams.token_ms.items()}
    print(dict(streams.served), token_ms, ended["verdict"])  # noqa: T201 - for -s
    assert ended["phase"] == "rolled_back", ended
    assert ended["verdict"]["metric"] in {"slow_tokens", "slow_first_token"}, ended["verdict"]
    assert streams.broken == []
    assert 0 < ended["sample"] <= streams.served["2"], "those that it was judged by were exposed"
    with real_stack.admin() as admin:
        assert admin.get(f"/v1/models/{MODEL}").json()["release"] == "1"
        assert admin.get(f"/v1/pools/{POOL}").json()["replicas_wanted"] == 0


def replicas(admin: httpx.Client, pool: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin.get("/v1/replicas", params={"pool_id": pool}).json()["data"]
    assert {it["pool_id"] for it in found} <= {pool}
    return found


def ready(admin: httpx.Client, pool: str) -> list[dict[str, Any]]:
    return [it for it in replicas(admin, pool) if it["state"] == "ready"]


def over(admin: httpx.Client) -> dict[str, Any] | None:
    (rollout,) = admin.get("/v1/rollouts", params={"model_id": MODEL}).json()["data"]
    found = admin.get(f"/v1/rollouts/{rollout['id']}").json()
    return None if found["is_live"] else found


def until(check: Callable[[], Any], what: str, streams: Streams) -> Any:
    for _ in range(WAIT_S * 4):
        if found := check():
            return found
        Event().wait(0.25)
    raise AssertionError(f"never: {what}; {dict(streams.served)}, broken: {streams.broken[:5]}")
