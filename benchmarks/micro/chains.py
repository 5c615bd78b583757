"""Measures the gateway's CPU time for a turn of a long chain, from stored turns to the prompt.

One operation is a turn with 1,200 new tokens that continues stored turns. `read_us` is the time to
read the chain from a real Valkey, and to convert its items into messages. `encoded_us` is the time
to render, tokenize, hash and pack these messages. `turn_2` continues one turn. `turn_50` continues
between 37 and 61 turns, 49 on average. In both cases the same worker has answered the previous
turn, so it has cached the chain. In `other_worker` the worker has cached no part of the chain, but
the stored turns include their tokens. In `other_worker_renders` the stored turns include no tokens.
The figures to read are the medians of the rounds. Not measured: limits, the router, the stream.
Run: `python -m benchmarks.micro.chains`.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import orjson

from benchmarks.results import write_result
from cli.stack.valkey import valkey_spec, valkey_url
from gateway.bases.assets import BaseAssets, load_base
from gateway.bodies.response_items import MessageItem, stored_items
from gateway.bodies.responses import ResponseRequest
from gateway.content.seals import ContentSeals
from gateway.limits.valkey import ValkeyClient
from gateway.limits.valkey_commands import ValkeyCommands
from gateway.responses.compaction_seal import CompactionSeals
from gateway.responses.context import ContextReader
from gateway.responses.hot_store import COMMANDS_MAX, HotStore
from gateway.responses.store import ResponseStore
from gateway.responses.task import response_task
from sluice.process import ChildProcess, free_port
from sluice.response_ids import new_response_id
from sluice.shared_secret import SharedSecret
from sluice.watch import ControlState
from sluice.wire.state.v1 import state_pb2 as wire
from tests.support.random_models import write_random_model

_ROUNDS, _LONG, _OTHERS, _REPEATS = 25, 50, 5, 40
_TENANT, _SECRET = "one", SharedSecret(["s" * 32])
_SEALS = ContentSeals(ControlState(), _SECRET)
_MODEL: Any = SimpleNamespace(
    cache_root=b"r" * 16, tenant_id=_TENANT, context_tokens_max=0, warm_prompts=None
)
_GC_THRESHOLDS = (10_000, 20, 100)  # the thresholds of `gateway.__main__`
_WORDS = " tell me of the river"


class _Site:
    """A Valkey with responses, and one worker's reader of them."""

    def __init__(self, url: str, base: Path) -> None:
        self._base = base
        self._client = ValkeyClient(url)
        commands = ValkeyCommands(self._client, commands_max=COMMANDS_MAX)
        self._writer = HotStore(commands, idle_s=3600.0)
        self._store = ResponseStore(url, "127.0.0.1:9", idle_s=3600.0, secret=_SECRET, seals=_SEALS)
        self.new_worker()

    def new_worker(self) -> None:
        """Clear the state of a worker."""
        self._reader = ContextReader(
            self._store, cast("Any", None), CompactionSeals(_SECRET, _SEALS)
        )
        self._assets: BaseAssets = load_base(self._base)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.run())
            tasks.create_task(self._store.run())

    async def ready(self) -> None:
        while not (  # noqa: ASYNC110
            self._client.is_connected and self._store.is_hot
        ):
            await asyncio.sleep(0.01)  # poll, because writes to the store have no event

    async def keep(self, ancestors: list[str], text: str, record: bytes = b"") -> str:
        """Store a turn, with the part of the prompt that it added, and return its id."""
        response_id = new_response_id(_TENANT, _SECRET)
        said = MessageItem(role="user", content=text)
        part = {"type": "output_text", "text": f"answer {response_id}:" + _WORDS * _REPEATS}
        answer = {"type": "message", "role": "assistant", "content": [part], "id": "msg"}
        stored = wire.StoredResponse(
            id=response_id,
            tenant_id=_TENANT,
            created_at_unix_ms=time.time_ns() // 1_000_000,
            ancestors=ancestors,
            input_items=orjson.dumps(stored_items([said], response_id)),
            response=orjson.dumps({"output": [answer]}),
            prompt=record,
        )
        await self._writer.keep(stored)
        return response_id

    async def turn(self, previous: str | None, text: str) -> "_Prepared":
        """Prepare a turn."""
        wanted = ResponseRequest(model="m", input=text, previous_response_id=previous)
        started_ns = time.process_time_ns()
        context = await self._reader.read(_TENANT, wanted)
        task = response_task(wanted, "", context=context, session=context.session)
        read_ns = time.process_time_ns()
        (prompt,) = await task.encoded(self._assets, _MODEL)
        ended_ns = time.process_time_ns()
        return _Prepared(
            len(prompt.ids),
            (read_ns - started_ns) / 1e3,
            (ended_ns - read_ns) / 1e3,
            prompt.record,
        )


class _Prepared(NamedTuple):
    """A turn whose prompt is ready.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        read_us: CPU time to read its chain, in microseconds.
        encoded_us: CPU time to encode the prompt, in microseconds.
        record: Part of the prompt that the turn stores.
    """

    prompt_tokens: int
    read_us: float
    encoded_us: float
    record: bytes


def _user_text(name: str) -> str:
    return f"{name}:" + _WORDS * _REPEATS


async def _measured(site: _Site, turns: int, per_chain: int) -> dict[str, float]:
    """Return the median figures of turn `turns`, over `per_chain` turns around it in each chain."""
    found = list[_Prepared]()
    chain = list[str]()
    for number in range(_ROUNDS):
        if number % per_chain == 0:
            chain = [await site.keep([], _user_text("first"))]
            while len(chain) < turns - 1 - per_chain // 2:
                chain.append(await site.keep(chain, _user_text(f"question {len(chain)}")))
            await site.turn(
                chain[-2] if chain[1:] else None, _user_text(f"question {len(chain) - 1}")
            )
        now = _user_text(f"now {number}") + _WORDS * _REPEATS
        found.append(await site.turn(chain[-1], now))
        chain.append(await site.keep(chain, now, found[-1].record))
    figures = {
        "prompt_tokens": round(statistics.median([it.prompt_tokens for it in found])),
        "read_us": round(statistics.median([it.read_us for it in found])),
        "encoded_us": round(statistics.median([it.encoded_us for it in found])),
    }
    return {**figures, "total_us": figures["read_us"] + figures["encoded_us"]}


async def _of_another_worker(site: _Site, turns: int, *, stores: bool) -> dict[str, float]:
    """Return the figures of a turn in a worker without any part of the chain.

    With `stores`, the previous turns have stored their tokens.
    """
    chain, found, stored = list[str](), list[_Prepared](), list[int]()
    for number in range(turns - 1):
        said = _user_text(f"question {number}")
        made = await site.turn(chain[-1] if chain else None, said)
        record = made.record if stores else b""
        stored.append(len(record))
        chain.append(await site.keep(chain, said, record))
    for _ in range(_OTHERS):
        site.new_worker()
        found.append(await site.turn(chain[-1], _user_text("now")))
    return {
        "stored_bytes_per_turn": round(statistics.median(stored)),
        "total_us": round(statistics.median([it.read_us + it.encoded_us for it in found])),
    }


@asynccontextmanager
async def _running_site(home: Path) -> AsyncGenerator[_Site]:
    port = free_port()
    server = await ChildProcess.start(valkey_spec(port, home / "valkey", home / "log", {}))
    write_random_model(home / "base")
    try:
        await server.wait_ready(10)
        site = _Site(valkey_url(port), home / "base")
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(site.run())
            await site.ready()
            yield site
            running.cancel()
    finally:
        await server.stop()


async def _run() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        async with _running_site(Path(folder)) as site:
            return {
                "turn_2": await _measured(site, 2, 1),
                "turn_50": await _measured(site, _LONG, _ROUNDS),
                "other_worker": await _of_another_worker(site, _LONG, stores=True),
                "other_worker_renders": await _of_another_worker(site, _LONG, stores=False),
            }


def main() -> None:
    """Measure all kinds of turns and write `benchmarks/results/chains.json`."""
    gc.set_threshold(*_GC_THRESHOLDS)
    figures = asyncio.run(_run())
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("chains", operation, {"rounds": _ROUNDS, **figures}).read_text())


if __name__ == "__main__":
    main()
