"""Measures the time to parse a valid or hostile body, and how long other requests stall meanwhile.

One operation is `parse_*` of one body, and for a valid body (`good`) also `sampling`. `us` is the
time of a parse in the best round, without other work. `stall_ms` is for a large body, which is
parsed in a thread as in the gateway. It is the longest gap between two iterations of the event loop
in the same process, as the median of the rounds. Each call into C holds the interpreter lock. So
the stall is as long as the longest of these calls, but at least the interpreter's switch interval
(5 ms). Not measured: the socket.
Run: `python -m benchmarks.micro.bodies`.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.results import write_result
from gateway.bodies.chat import parse_chat_request
from gateway.bodies.embeddings import parse_embedding_request
from gateway.bodies.parsing import BODY_BYTES_MAX, COMMAS_MAX, PARTS_MAX, Body
from sluice.errors import BadRequestError

_ROUNDS = 9
_GOOD_REPEATS = 2000
_HEAD, _TAIL = b'{"model":"m","messages":[{"role":"user","content":"', b'"}]}'
_UNKNOWN = _HEAD + b'"}],"x":['
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_CHAT: dict[str, object] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are a helper."},
        {"role": "user", "content": "Tell me a story about a river and a gate."},
    ],
    "max_tokens": 100,
    "temperature": 0.7,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_GOOD = {
    "short chat": _CHAT,
    "with a tool": _CHAT | {"tools": [_TOOL]},
    "with a schema": _CHAT
    | {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": _TOOL["function"]},
        }
    },
}


@dataclass(frozen=True)
class _Defaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def _filled(unit: bytes, head: bytes = _HEAD, tail: bytes = _TAIL) -> bytes:
    return head + unit * ((BODY_BYTES_MAX - len(head) - len(tail)) // len(unit)) + tail


def _fields(count: int, head: bytes, tail: bytes) -> bytes:
    return head + b",".join(b'"k%05d":1' % number for number in range(count)) + tail


def _large() -> Mapping[str, tuple[bytes, Callable[[bytes], Body]]]:
    chats = {
        "text of 220 KB": _HEAD + b"word, " * 36_000 + _TAIL,
        "text": _filled(b"word, "),
        "text of escapes": _filled(b'\\"'),
        "numbers": _filled(b"1,", _UNKNOWN, b"1]}"),
        "lists": _filled(b"[],", _UNKNOWN, b"1]}"),
        "numbers, as many as may be": _UNKNOWN + b"1," * (COMMAS_MAX - 9) + b"1]}",
        "lists, as many as may be": _UNKNOWN + b"[]," * (PARTS_MAX - 19) + b"1]}",
        "unknown fields, as many as may be": _fields(PARTS_MAX - 9, b"{", b"}"),
        "depth": b"[" * BODY_BYTES_MAX,
    }
    ids = b'{"model":"m","input":[' + b"12345," * 299_999 + b"1]}"
    return {name: (body, parse_chat_request) for name, body in chats.items()} | {
        "300,000 token ids": (ids, parse_embedding_request)
    }


def _good_us(body: bytes) -> dict[str, float]:
    defaults = _Defaults()
    request = parse_chat_request(body)

    def best(operation: Callable[[], object]) -> float:
        rounds: list[float] = []
        for _ in range(_ROUNDS):
            began_at_s = time.perf_counter()
            for _ in range(_GOOD_REPEATS):
                operation()
            rounds.append((time.perf_counter() - began_at_s) / _GOOD_REPEATS)
        return round(min(rounds) * 1e6, 2)

    return {
        "parse": best(lambda: parse_chat_request(body)),
        "sampling": best(lambda: request.sampling(defaults)),
    }


def _attempt(parse: Callable[[bytes], Body], body: bytes) -> float:
    began_at_s = time.perf_counter()
    with suppress(BadRequestError):
        parse(body)
    return time.perf_counter() - began_at_s


async def _stall_s(parse: Callable[[bytes], Body], body: bytes) -> float:
    longest = last = 0.0

    async def watch() -> None:
        nonlocal longest, last
        while True:
            now = time.perf_counter()
            longest, last = max(longest, now - (last or now)), now
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(watch())
        await asyncio.to_thread(_attempt, parse, body[:9])  # starts the thread
        longest = 0.0
        await asyncio.to_thread(_attempt, parse, body)
        await asyncio.sleep(0)
        watcher.cancel()
    return longest


def main() -> None:
    """Run all cases and write `benchmarks/results/bodies.json`."""
    good = {name: _good_us(json.dumps(body).encode()) for name, body in _GOOD.items()}
    large: dict[str, dict[str, float]] = {}
    for name, (body, parse) in _large().items():
        stalls = [asyncio.run(_stall_s(parse, body)) for _ in range(_ROUNDS)]
        large[name] = {
            "kib": len(body) >> 10,
            "us": round(min(_attempt(parse, body) for _ in range(_ROUNDS)) * 1e6),
            "stall_ms": round(statistics.median(stalls) * 1e3, 1),
        }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    figures = {"parameters": {"rounds": _ROUNDS}, "good_us": good, "large": large}
    print(write_result("bodies", operation, figures).read_text())


if __name__ == "__main__":
    main()
