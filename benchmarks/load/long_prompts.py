"""Sends two prompts of 220 KB per second from another process, or causes an equal amount of work.

The kind `gateway` sends the prompts through the whole platform. `engine` sends an equal number of
token ids directly to the same Triton, without gateway and router. `tokenizer` only tokenizes the
prompts in the other process, which represents any other work on the shared cores.
"""

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from benchmarks.engine_alone import SHIPPED_BASE, prompt
from benchmarks.load.replica import Attached
from benchmarks.load.sse_client import StreamLoad
from sluice import shared_secret
from sluice.kserve import HostStream
from sluice.shared_secret import SharedSecret

_BYTES = 220_000
_SENTENCE = "The river ran past the mill and the gate was shut. "
_EVERY_S = 0.5
_PROMPTS_MAX = 40
_TIMEOUT_S = 30.0
KINDS = ("gateway", "engine", "tokenizer")


class OwnEngine(NamedTuple):
    """An engine of the measured stack: address and model of its Triton, and the stack's secret."""

    address: str
    model: str
    secret: str


@contextmanager
def sent(kind: str, load: StreamLoad, engine: OwnEngine) -> Generator[list[float]]:
    """Send prompts while the block runs. At the end the list has each prompt's time in ms.

    Args:
        kind: One of `KINDS`.
        load: Load of the other clients, which has the gateway's address.
        engine: The engine that receives the prompts of the kind `engine`.

    Raises:
        RuntimeError: An answer was refused, or the process failed.
    """
    spawning = multiprocessing.get_context("spawn")
    begun, ended, found = spawning.Event(), spawning.Event(), spawning.SimpleQueue()
    process = spawning.Process(target=_run, args=(kind, load, engine, begun, ended, found))
    took_ms: list[float] = []
    process.start()
    try:
        if not begun.wait(_TIMEOUT_S):
            raise RuntimeError(f"{kind}: no prompt was sent within {_TIMEOUT_S:g} s")
        yield took_ms
    finally:
        ended.set()
        process.join(_TIMEOUT_S)
        process.kill()
    if process.exitcode or found.empty():
        raise RuntimeError(f"{kind}: the process that sends prompts ended with {process.exitcode}")
    took_ms += found.get()


def _run(
    kind: str, load: StreamLoad, engine: OwnEngine, begun: Event, ended: Event, found: Any
) -> None:
    if kind == "engine":
        took_s = asyncio.run(_to_engine(engine, begun, ended))
    else:
        prepare = {"gateway": _through_gateway, "tokenizer": _tokenized}[kind]
        took_s = _in_threads(prepare(load), begun, ended)
    found.put([round(each * 1e3, 1) for each in took_s])


def _texts() -> list[str]:
    """Return texts with unique first words, so that no prefix is cached from earlier processes."""
    first = time.time_ns() // 1_000_000
    return [
        f"{first + index} {_SENTENCE * (_BYTES // len(_SENTENCE))}" for index in range(_PROMPTS_MAX)
    ]


def _through_gateway(load: StreamLoad) -> Callable[[int], object]:
    # All texts are generated before the first is sent, because each costs a millisecond.
    bodies = [
        json.dumps(
            {
                "model": load.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 1,
            }
        ).encode()
        for text in _texts()
    ]
    url = f"http://{load.host}:{load.port}/v1/chat/completions"
    headers = {"authorization": f"Bearer {load.key}", "content-type": "application/json"}
    http = httpx.Client(timeout=_TIMEOUT_S, headers=headers)
    return lambda index: http.post(url, content=bodies[index]).raise_for_status()


def _tokenized(_load: StreamLoad) -> Callable[[int], object]:
    tokenizer = Tokenizer.from_file(str(SHIPPED_BASE / "tokenizer.json"))
    texts = _texts()
    return lambda index: tokenizer.encode_batch_fast([texts[index]])


def _in_threads(work: Callable[[int], object], begun: Event, ended: Event) -> list[float]:
    """Repeat the work in threads until `ended` is set, and return each repetition's seconds."""
    took_s: list[float] = []

    def one(index: int) -> None:
        began_s = time.monotonic()
        work(index)
        took_s.append(time.monotonic() - began_s)

    threads: list[threading.Thread] = []
    for index in range(_PROMPTS_MAX):
        threads.append(threading.Thread(target=one, args=(index,)))
        threads[-1].start()
        begun.set()
        if ended.wait(_EVERY_S):
            break
    for thread in threads:
        thread.join()
    if len(took_s) < len(threads):
        raise RuntimeError(f"{len(threads) - len(took_s)} of {len(threads)} prompts failed")
    return took_s


async def _to_engine(engine: OwnEngine, begun: Event, ended: Event) -> list[float]:
    tokenizer = Tokenizer.from_file(str(SHIPPED_BASE / "tokenizer.json"))
    tokens = len(tokenizer.encode_batch_fast(_texts()[:1])[0].ids)
    took_s: list[float] = []
    shared_secret.install(SharedSecret([engine.secret]))  # this is a process of its own
    async with HostStream(engine.address, engine.model, silence_s=_TIMEOUT_S) as stream:
        await stream.open(timeout_s=_TIMEOUT_S)
        attached = Attached(stream)
        await attached.attach()
        begun.set()
        while not ended.is_set():
            ids = prompt(tokens)
            took_s.append((await attached.generate([ids], 1))[0])
            await asyncio.sleep(max(0.0, _EVERY_S - took_s[-1]))
    return took_s
