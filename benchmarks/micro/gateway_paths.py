"""CPU of the gateway's own work: per streamed token, per request, per limit check.

Three operations, all without the socket of the client. `token`: one token of a step frame for 500
open streams, from the router's message as bytes to the chunk handed to a transport that drops it;
not measured: the `send()` that follows in production (5 to 10 us). `prompt`: a short chat body
parsed, validated, rendered with a ChatML template and tokenized. `limit_check`: one reservation
with its headers on a real Valkey, 64 tasks started in the same tick; client CPU only. Read the
medians of the rounds, in microseconds. Run: `python -m benchmarks.micro.gateway_paths`.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import uvloop

from benchmarks.results import write_result
from cli.stack.valkey import valkey_spec, valkey_url
from gateway.bases.assets import BaseAssets, load_base
from gateway.bodies.chat import parse_chat_request
from gateway.directory import Principal
from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.pace import NeverLags, Pace
from gateway.dispatch.router_link import RouterLink
from gateway.dispatch.streamed import StreamedGeneration
from gateway.limits.limiter import Limiter, Reservation
from gateway.limits.valkey import ValkeyClient
from gateway.metrics import FastHistogram
from gateway.text.pipe import TextPipe
from gateway.text.sse import ChatChunks, StreamHead
from replica.engine.testing import write_random_model
from sluice.process import ChildProcess, free_port
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

_ROUNDS = 7
_STREAMS = 500
_STEPS = 200
_PROMPTS = 2000
_CHECKS = 20_000
_BATCH = 64
_BODY = orjson.dumps(
    {
        "model": "sluice-tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a river and a gate."}],
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
)
_SPEC = GenerationSpec(
    request_id="r",
    tenant_id="t",
    tier_priority=0,
    tenant_weight=0,
    pool_id="p",
    adapter_digest="",
    cache_root=b"",
    prompt=[1],
    output_tokens_max=1 << 20,
    end_ids=frozenset(),
    sampling=engine.Sampling(),
    session_hash=0,
    deadline_ms=0,
    ignore_eos=True,
    traceparent="",
)


class _Drop(asyncio.WriteTransport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop it."""

    def get_write_buffer_size(self) -> int:
        return 0


def _median_us(operations: int, run: Callable[[], None]) -> float:
    found: list[float] = []
    for _ in range(_ROUNDS):
        started = time.process_time_ns()
        run()
        found.append((time.process_time_ns() - started) / 1e3 / operations)
    return round(statistics.median(found), 2)


def token_us(assets: BaseAssets) -> float:
    """Return the cost of one token of a step frame for `_STREAMS` streams."""
    pace = Pace(NeverLags())
    link = RouterLink("nobody:1", "g", lambda: None, pace)
    itl = FastHistogram("x", "x", (0.01, 0.02, 0.05, 0.1, 0.5, 1.0))
    link.is_up = True
    for number in range(_STREAMS):
        head = StreamHead(
            "chat.completion.chunk", f"chatcmpl-{number:032}", "sluice-tiny", 1_790_000_000
        )
        chunks = ChatChunks(head)
        pipe = TextPipe(assets.table)
        stream = StreamedGeneration(_SPEC, pipe, chunks, itl, pace)
        link.submit(stream, "cell", 0)
        stream.go_live(_Drop(), is_chunked=True)
    words = [i for i, fragment in enumerate(assets.table.fragments) if fragment]
    frame = wire.ConnectResponse(
        handle=range(1, _STREAMS + 1),
        count=[1] * _STREAMS,
        token=[words[i % len(words)] for i in range(_STREAMS)],
    ).SerializeToString()

    def steps() -> None:
        for step in range(_STEPS):
            link.deliver(wire.ConnectResponse.FromString(frame), step * 0.02)

    return _median_us(_STREAMS * _STEPS, steps)


async def prompt_us(assets: BaseAssets) -> float:
    """Return the cost of making token ids of a body."""
    found: list[float] = []
    for _ in range(_ROUNDS):
        started = time.process_time_ns()
        for _ in range(_PROMPTS):
            await assets.encode_chat(parse_chat_request(_BODY).messages, (), b"r" * 16)
        found.append((time.process_time_ns() - started) / 1e3 / _PROMPTS)
    return round(statistics.median(found), 2)


def _check(limiter: Limiter, caller: Principal) -> Awaitable[Reservation]:
    return limiter.reserve(caller, "m", prompt_tokens=50, output_tokens_max=50, is_bounded=True)


async def limit_check_us(home: Path) -> float:
    """Return the client's CPU per reservation."""
    port = free_port()
    server = await ChildProcess.start(valkey_spec(port, home / "valkey", home / "log", {}))
    client = ValkeyClient(valkey_url(port), deadline_s=5.0)
    limiter = Limiter(client, local_share=1.0, clock=time.monotonic)
    caller = Principal(
        control.ApiKey(id="k"),
        control.Tenant(id="t"),
        control.Tier(rpm=1_000_000_000, tpm=2_000_000_000),
    )
    found: list[float] = []
    try:
        await server.wait_ready(10)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run())
            while not limiter.is_shared:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            for _ in range(_ROUNDS):
                started = time.process_time_ns()
                for _ in range(_CHECKS // _BATCH):
                    await asyncio.gather(*(_check(limiter, caller) for _ in range(_BATCH)))
                found.append((time.process_time_ns() - started) / 1e3 / _CHECKS)
            running.cancel()
        assert limiter.local_decisions == 0, "the server was too slow for the deadline"
    finally:
        await server.stop()
    return round(statistics.median(found), 2)


async def _run() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_random_model(home / "base")
        assets = load_base(home / "base")
        return {
            "token_us": token_us(assets),
            "prompt_us": await prompt_us(assets),
            "limit_check_us": await limit_check_us(home),
        }


def main() -> None:
    """Run all cases and write `benchmarks/results/gateway_paths.json`."""
    results = uvloop.run(_run())
    parameters = {
        "streams": _STREAMS,
        "prompts": _PROMPTS,
        "checks": _CHECKS,
        "checks_per_tick": _BATCH,
        "rounds": _ROUNDS,
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("gateway_paths", operation, {"parameters": parameters, **results})
    print(path.read_text())


if __name__ == "__main__":
    main()
