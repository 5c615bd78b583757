"""Measures the CPU time of the gateway's own work, per streamed token and per request.

Two operations are measured, both without the socket of the client. `token` is one token of a step
frame for 500 open streams. It begins with the bytes of the router's message, and ends with the
chunk for the client, which a substitute of the transport drops. `prompt` parses, validates and
tokenizes a short chat body, rendered with a ChatML template. The gateway caches tokens of repeated
text. So `prompt_us` is measured with a new text each time, and `repeated_prompt_us` with the same
text. `benchmarks.micro.limiter` measures limits. Figures are medians of the rounds, in
microseconds. Not measured: the `send()` that follows in production (5 to 10 us).
Run: `python -m benchmarks.micro.gateway_paths`.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson
import uvloop

from benchmarks.results import write_result
from gateway.bases.assets import BaseAssets, load_base
from gateway.bodies.chat import parse_chat_request
from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.router_link import RouterLink
from gateway.dispatch.streamed import StreamedGeneration
from gateway.metrics import FastHistogram
from gateway.text.pipe import TextPipe
from gateway.text.sse import ChatChunks, StreamHead
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.random_models import write_random_model
from tests.support.scripted_router import NeverLags

_ROUNDS = 7
_STREAMS = 500
_STEPS = 200
_PROMPTS = 2000
_BODY = orjson.dumps(
    {
        "model": "sluice-tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a river and a gate."}],
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
)


def _spec(assets: BaseAssets) -> GenerationSpec:
    return GenerationSpec(
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
        new_pipe=partial(TextPipe, assets.table),
    )


class _Drop(asyncio.WriteTransport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the chunk."""

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
    """Return the µs of one token of a step frame for `_STREAMS` streams."""
    pace = AttemptPace(NeverLags())
    link = RouterLink("nobody:1", "g", lambda: None, pace)
    itl = FastHistogram("x", "x", (0.01, 0.02, 0.05, 0.1, 0.5, 1.0))
    link.is_up = True
    spec = _spec(assets)
    for number in range(_STREAMS):
        head = StreamHead(
            "chat.completion.chunk", f"chatcmpl-{number:032}", "sluice-tiny", 1_790_000_000
        )
        chunks = ChatChunks(head)
        stream = StreamedGeneration(spec, chunks, itl, pace)
        link.submit(stream, "cell", 0, 0)
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


async def prompt_us(assets: BaseAssets, *, is_new: bool) -> float:
    """Return the µs to encode a body as token ids, with a new text each time or the same text."""
    found: list[float] = []
    for turn in range(_ROUNDS):
        bodies = [
            _BODY.replace(b"gate", b"gate %d %d" % (turn, number) if is_new else b"gate")
            for number in range(_PROMPTS)
        ]
        started = time.process_time_ns()
        for body in bodies:
            await assets.encode_chat(parse_chat_request(body).messages, (), b"r" * 16)
        found.append((time.process_time_ns() - started) / 1e3 / _PROMPTS)
    return round(statistics.median(found), 2)


async def _run() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_random_model(home / "base")
        assets = load_base(home / "base")
        return {
            "token_us": token_us(assets),
            "prompt_us": await prompt_us(assets, is_new=True),
            "repeated_prompt_us": await prompt_us(assets, is_new=False),
        }


def main() -> None:
    """Run all cases and write `benchmarks/results/gateway_paths.json`."""
    results = uvloop.run(_run())
    parameters = {
        "streams": _STREAMS,
        "prompts": _PROMPTS,
        "rounds": _ROUNDS,
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("gateway_paths", operation, {"parameters": parameters, **results})
    print(path.read_text())


if __name__ == "__main__":
    main()
