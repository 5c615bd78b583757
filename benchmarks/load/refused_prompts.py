"""Measures how another tenant's oversized prompts slow one tenant's requests with tools.

One operation is one chat completion of one token, with one tool. The other tenant has a limit of
three requests per minute. On three connections from another process it sends prompts of 4 MB
without a pause. The gateway refuses every prompt. `plain_chat` has no tool. `tokenize` counts the
tokens of a conversation with a tool call. Rounds with and without the other tenant alternate. Both
clients share the cores with the stack, and the figures include the steps of the `sim` driver. Not
measured: a network, an engine that computes. Run: `python -m benchmarks.load.refused_prompts`.
"""

import http.client
import json
import multiprocessing
import statistics
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.load.stack import started
from benchmarks.results import write_result

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

ROUNDS = 5
REQUESTS = 60
CONNECTIONS = 3
_TENANT = "oversized"
_TEXT = "the river and the gate " * 177_800
_TIMEOUT_S = 60.0
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
_HELLO = {"role": "user", "content": "How is the weather in Oslo?"}
_CHAT = {"model": "default", "max_tokens": 1, "messages": [_HELLO], "tools": [_TOOL]}
_HISTORY = [
    _HELLO,
    {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
]
_COUNT = {"model": "default", "messages": _HISTORY, "tools": [_TOOL]}
_PLAIN = {"model": "default", "max_tokens": 1, "messages": [_HELLO]}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", _CHAT),
    "plain_chat": ("/v1/chat/completions", _PLAIN),
    "tokenize": ("/v1/tokenize", _COUNT),
}


def _send(
    address: tuple[str, int], key: str, body: bytes, ended: Event, told: Counter[str]
) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    while not ended.is_set():
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            told[json.loads(answer.read())["error"]["code"]] += 1
        except (OSError, http.client.HTTPException):  # refused before the whole body was sent
            told["closed"] += 1
            connection.close()


def _attack(address: tuple[str, int], key: str, ended: Event, found: "SimpleQueue[Any]") -> None:
    messages = [{"role": "user", "content": _TEXT}]
    body = json.dumps({"model": "default", "max_tokens": 1, "messages": messages}).encode()
    told: Counter[str] = Counter()
    threads = [
        threading.Thread(target=_send, args=(address, key, body, ended, told))
        for _ in range(CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.put(dict(told))


@contextmanager
def _beside(address: tuple[str, int], key: str) -> Generator[Counter[str]]:
    """Send oversized prompts while the block runs, and count the codes of the refusals."""
    spawning = multiprocessing.get_context("spawn")
    ended, found, codes = spawning.Event(), spawning.SimpleQueue(), Counter[str]()
    process = spawning.Process(target=_attack, args=(address, key, ended, found))
    process.start()
    time.sleep(2.0)  # by then the limit of three requests is used up
    try:
        yield codes
    finally:
        ended.set()
        process.join(_TIMEOUT_S)
        process.kill()
    codes.update(found.get())


def _times(client: httpx.Client, path: str, body: dict[str, Any]) -> list[float]:
    took_ms: list[float] = []
    for _ in range(REQUESTS):
        began_s = time.perf_counter()
        client.post(path, json=body).raise_for_status()
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    return took_ms


def main() -> None:
    """Measure alternating rounds with and without the other tenant, and write the result."""
    took_ms: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in _KINDS} for name in ("alone", "beside")
    }
    codes: Counter[str] = Counter()
    with started("sim", "--no-embeddings") as stack:
        host, _, port = stack.env["OPENAI_BASE_URL"].split("/")[2].partition(":")
        other, key = stack.tenant_key(_TENANT, "--rpm", "3"), stack.env["OPENAI_API_KEY"]
        time.sleep(2.0)  # wait until the gateway has the key
        headers = {"authorization": f"Bearer {key}"}
        url = f"http://{host}:{port}"
        with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client:
            _round(client, {kind: [] for kind in _KINDS})
            for _ in range(ROUNDS):
                _round(client, took_ms["alone"])
                with _beside((host, int(port)), other) as found:
                    _round(client, took_ms["beside"])
                codes += found
    figures: dict[str, Any] = {
        name: {
            kind: {
                "p50_ms": round(statistics.median(times), 1),
                "p99_ms": round(statistics.quantiles(times, n=100)[98], 1),
                "max_ms": round(max(times), 1),
            }
            for kind, times in kinds.items()
        }
        for name, kinds in took_ms.items()
    }
    figures["refusals"] = dict(codes)
    print(write_result("refused_prompts", __doc__ or "", figures), json.dumps(figures, indent=1))


def _round(client: httpx.Client, took_ms: dict[str, list[float]]) -> None:
    for kind, (path, body) in _KINDS.items():
        took_ms[kind] += _times(client, path, body)


if __name__ == "__main__":
    main()
