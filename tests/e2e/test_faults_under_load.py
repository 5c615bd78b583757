"""Any one process is killed or frozen under 64 streams: every answer ends as if nothing had been.

Two replicas of the real engine, greedy answers of every kind; what an undisturbed run says is what
each disturbed run has to say: text, calls, log probabilities, token by token. Run with -rP for the
pauses that clients saw.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import aiohttp
import httpx
import openai
import psutil
import pytest
import structlog

from cli.stack.health import find_engines
from tests import sse
from tests.e2e.conftest import Stack, started_stack

pytestmark = pytest.mark.real

log = structlog.get_logger(__name__)

TARGETS = ("triton", "stub", "router", "valkey", "control-plane", "broker", "agent")
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
MODEL = "sluice-tiny"
STREAMS = 64
WORDS = [
    "river",
    "gate",
    "stone",
    "lamp",
    "bird",
    "tree",
    "cloud",
    "road",
    "bridge",
    "harbour",
    "mill",
    "tower",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "words": {
            "type": "array",
            "items": {"type": "string", "minLength": 12, "maxLength": 24},
            "minItems": 4,
            "maxItems": 4,
        }
    },
    "required": ["words"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
KINDS: list[dict] = [
    {"max_tokens": 100, "ignore_eos": True},
    {"max_tokens": 70, "ignore_eos": True, "logprobs": True, "top_logprobs": 1},
    {"max_tokens": 100, "ignore_eos": True, "stop": ["zebra crossing"]},
    {
        "max_tokens": 400,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "words", "schema": SCHEMA},
        },
    },
    {"max_tokens": 400, "tools": [TOOL], "tool_choice": "required"},
    {"max_tokens": 50, "ignore_eos": True, "n": 2},
    {"max_tokens": 70, "ignore_eos": True, "presence_penalty": 1.0},
    {"max_tokens": 70, "ignore_eos": True, "temperature": 0.8, "seed": 5},
]


# By choice: text (of calls: their arguments), finish reason, log probabilities.
Answers = tuple[dict[int, str], dict[int, str], dict[int, list[float]]]


class Load:
    """The same 64 requests, as often as wanted."""

    def __init__(self, stack: Stack, key: str) -> None:
        self._stack, self._key = stack, key
        self.pause_s = 0.0
        self._begun = 0

    async def run(self, disturb: Callable[[], None] | None = None) -> list[Answers]:
        """Return what all clients got; `disturb` is called when half of them have begun."""
        self.pause_s, self._begun = 0.0, 0
        session = sse.session(self._stack.base_url, self._key, 60)
        async with session as http, asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self._one(http, number)) for number in range(STREAMS)]
            while self._begun < STREAMS // 2:  # noqa: ASYNC110 - counted by 64 tasks
                await asyncio.sleep(0.005)
            if disturb is not None:
                disturb()
        return [call.result() for call in calls]

    async def _one(self, http: aiohttp.ClientSession, number: int) -> Answers:
        body = {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": f"A story, a {WORDS[number % 12]}, {number}."}
            ],
            "temperature": 0,
        }
        texts: dict[int, str] = {}
        told: dict[int, list[float]] = {}
        reasons: dict[int, str] = {}
        last_at = 0.0
        async for chunk in sse.chunks(http, body | KINDS[number % len(KINDS)]):
            now = time.monotonic()
            if last_at:
                self.pause_s = max(self.pause_s, now - last_at)
            else:
                self._begun += 1
            last_at = now
            for choice in chunk["choices"]:
                index, delta = choice["index"], choice["delta"]
                calls = delta.get("tool_calls") or ()
                texts.setdefault(index, "")
                texts[index] += delta.get("content") or ""
                texts[index] += "".join(call["function"].get("arguments", "") for call in calls)
                if choice.get("logprobs"):
                    entries = choice["logprobs"]["content"]
                    told.setdefault(index, []).extend(entry["logprob"] for entry in entries)
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
        return texts, reasons, told


def differences(got: list[Answers], wanted: list[Answers]) -> list[int]:
    """Return the clients that got something else.

    Log probabilities may differ a little: the order of additions is another one when a prompt was
    cached, or batched with others.
    """
    return [
        number
        for number, (one, other) in enumerate(zip(got, wanted, strict=True))
        if one[:2] != other[:2]
        or one[2].keys() != other[2].keys()
        or any(values != pytest.approx(other[2][i], abs=0.02) for i, values in one[2].items())
    ]


def children(stack: Stack, name: str) -> list[psutil.Process]:
    agent = psutil.Process(stack.pid("agent"))
    found = [p for p in agent.children(recursive=True) if p.name().startswith(name)]
    # One stub per Triton serves the model; the newest is not half dead.
    return sorted(found, key=lambda process: process.create_time())


def pid_of(stack: Stack, what: str) -> int:
    if what == "triton":
        return children(stack, "tritonserver")[0].pid
    if what == "stub":
        return children(stack, "triton_python")[0].pid
    return stack.pid(what)


def admin(stack: Stack) -> httpx.Client:
    return httpx.Client(
        base_url=stack.admin_url, headers={"authorization": f"Bearer {stack.admin_key}"}, timeout=10
    )


def wait_whole(stack: Stack, replicas: int = 2) -> None:
    """Wait until both replicas serve, and everybody knows."""
    end = time.monotonic() + 240
    seen: object = None
    while time.monotonic() < end:
        with (
            suppress(httpx.HTTPError, openai.APIError, KeyError, psutil.Error),
            admin(stack) as http,
        ):
            seen = http.get("/v1/replicas").json()["data"]
            ready = [it for it in seen if it["state"] == "ready"]
            with openai.OpenAI(
                base_url=stack.base_url, api_key=stack.api_key, max_retries=0, timeout=10
            ) as client:
                model = client.models.retrieve(MODEL).model_dump()
                capacity = model.get("capacity") or {}
                if len(ready) == replicas and capacity.get("replicas_ready") == replicas:
                    client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2
                    )
                    return
        time.sleep(0.2)
    pytest.fail(f"the stack did not get whole again: {json.dumps(seen)[:2000]}")


@pytest.fixture(scope="module")
def pair():
    """A stack with two replicas of the real engine, and what it says when nobody disturbs it."""
    with started_stack("openvino") as stack:
        with admin(stack) as http:
            pool = next(
                it for it in http.get("/v1/pools").json()["data"] if it["engine"] != "embed"
            )
            body = {
                k: v for k, v in pool.items() if k in ("base_digest", "engine", "engine_options")
            }
            # In bf16 the same tokens in another batch are not the same numbers.
            options = body.get("engine_options") or {}
            body |= {"replicas_wanted": 2, "engine_options": options | {"precision": "f32"}}
            http.put(f"/v1/pools/{pool['id']}", json=body).raise_for_status()
        wait_whole(stack)
        # A tenant has two retries per open request in ten seconds. On a fast machine several faults
        # come within them, so that each has a tenant of its own.
        tier = {"ttft_deadline_ms": 60_000}
        keys = {it: stack.new_key("-".join(it), tier=tier) for it in product(TARGETS, SIGNALS)}
        load = Load(stack, stack.api_key)
        wanted = asyncio.run(load.run())
        assert not differences(asyncio.run(load.run()), wanted), "without a fault, the same twice"
        log.info("longest_pause", what="nothing", how="undisturbed", pause_s=round(load.pause_s, 2))
        yield stack, keys, wanted


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("what", TARGETS)
def test_no_token_is_lost_or_doubled(pair, what: str, how: str) -> None:
    stack, keys, wanted = pair
    load = Load(stack, keys[what, how])
    wait_whole(stack)
    pid = pid_of(stack, what)
    thaw_after_s = 4.0

    async def run() -> list[Answers]:
        if how == "frozen":
            loop = asyncio.get_running_loop()
            loop.call_later(thaw_after_s, lambda: _signal(pid, signal.SIGCONT))
        return await load.run(lambda: _signal(pid, SIGNALS[how]))

    try:
        got = asyncio.run(run())
    finally:
        _signal(pid, signal.SIGCONT)
    different = differences(got, wanted)
    assert not different, (different, got[different[0]], wanted[different[0]])
    log.info("longest_pause", what=what, how=how, pause_s=round(load.pause_s, 2))


def test_the_loss_of_all_replicas_hangs_no_client(pair) -> None:
    stack, _, _ = pair
    wait_whole(stack)
    asked = [f"alone-{os.urandom(8).hex()}" for _ in range(8)]

    async def one(client: openai.AsyncOpenAI, request_id: str, begun: asyncio.Semaphore) -> str:
        tokens = 0
        try:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "A story about a river and a gate."}],
                max_tokens=400,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
                extra_headers={"x-request-id": request_id},
            )
            begun.release()
            async for chunk in stream:
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
        except openai.APIError as error:
            begun.release()  # it may have been refused
            return f"error {error.code}"
        return "whole" if tokens == 400 else f"cut at {tokens}"

    async def run() -> list[str]:
        client = openai.AsyncOpenAI(
            base_url=stack.base_url, api_key=stack.api_key, max_retries=0, timeout=60
        )
        begun = asyncio.Semaphore(0)
        async with client, asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(one(client, request_id, begun)) for request_id in asked]
            for _ in calls:
                await begun.acquire()
            # After the death of an agent, its engines are no children of the next one.
            tritons = find_engines(stack.pid("agent"))
            assert len(tritons) == 2
            for triton in tritons:
                triton.kill()
        return [call.result() for call in calls]

    ends = asyncio.run(run())
    assert all(end == "whole" or end.startswith("error ") for end in ends), ends
    wait_whole(stack)
    deadline = time.monotonic() + 60
    while not all(stack.trace(request_id) for request_id in asked):
        assert time.monotonic() < deadline, "no event of a request was ingested"
        time.sleep(0.2)
    traces = [stack.trace(request_id) for request_id in asked]
    again = [it for it in traces if it["request"]["resumes"] or len(it["attempts"]) > 1]
    assert again, "answers were interrupted"
    assert {it["attempts"][0]["outcome"] for it in again} == {"replica_lost"}


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
