"""CPU of the router's core: per request (admission, queue, placement) and per token (frames).

One operation, "request": conversion of a parsed message with a 1,000-token prompt and its block
hashes, `submit`, `tick`, and the conversion of the dispatch into the engine's message; a quarter of
the prompts continue an earlier one, replicas hold up to half of what they can.
One operation, "long": the same for a prompt of 55,000 tokens (220 KB of text), beside what hashing
its blocks takes the gateway, once.
One operation, "token": parse a HostFrame, `on_frame`, `tick`, build and serialize the gateways'
messages, divided by the frame's tokens. Not measured: gRPC, sockets, the parsing of submits.
Read both as process CPU time of one core. Run: `python -m benchmarks.micro.router_core`.
"""

import gc
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.results import write_result
from router import wire as convert
from router.core.model import CoreConfig, EngineLimits, ReplicaPlan, Slot
from router.core.router import RouterCore
from sluice.hashing import BLOCK_TOKENS, block_hashes
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

CELL = "cell"
LIMITS = EngineLimits(131_072, 256, 2048, 65_536, 32)
GATEWAYS = 4
PROMPT_TOKENS = 1000
LONG_TOKENS = 55_000
ROOT = bytes(16)


class Bench:
    """A core with replicas that are fed and drained by hand."""

    def __init__(self, replicas: int) -> None:
        self.core = RouterCore(CoreConfig())
        self.now = 0.0
        self.handles = 0
        self.slots: dict[str, list[Slot]] = {f"replica-{n}": [] for n in range(replicas)}
        for key in range(GATEWAYS):
            self.core.on_gateway(key, self.now)
        plans = [ReplicaPlan(name, CELL) for name in self.slots]
        self.core.on_cells([CELL], plans)
        for name in self.slots:
            self.core.on_attached(name, 1, LIMITS, self.now)
        # A fast engine, so that the window never holds a request back: what is measured is
        # placement among all replicas, its most expensive case.
        for book in self.core.replicas.values():
            book.speed.decode_step_s = book.speed.token_s = 1e-7

    def message(self, tokens: int = PROMPT_TOKENS) -> wire.Submit:
        """Return the next request as it comes from a gateway."""
        self.handles += 1
        start = self.handles - self.handles % 4  # of four, the first makes what three find
        prompt = [start % 30_000, *range(1, tokens)]
        hashes = block_hashes(prompt, ROOT, tokens // BLOCK_TOKENS)
        return wire.Submit(
            handle=self.handles,
            request_id=f"req-{self.handles}",
            cell_id=CELL,
            tenant_id=f"tenant-{self.handles % 20}",
            prompt=prompt,
            output_tokens_max=256,
            cache_root=ROOT,
            block_hashes=b"".join(hashes),
        )

    def submit(self, message: wire.Submit) -> None:
        """Admit, place and convert one request."""
        self.core.submit(message.handle % GATEWAYS, convert.request(message), self.now)
        actions = self.core.tick(self.now)
        for name, slots in actions.dispatches.items():
            convert.submit_message(1, slots)
            self.slots[name] += slots

    def frames(self, tokens: int = 1) -> Iterator[tuple[str, bytes]]:
        """Yield one serialized frame per replica: every sequence has `tokens` new ones."""
        for name, slots in self.slots.items():
            frame = engine.StepFrame(step=1, steps=tokens)
            frame.sequence.extend(slot.sequence for slot in slots)
            frame.count.extend([tokens] * len(slots))
            frame.token.extend(range(1000, 1000 + tokens * len(slots)))
            frame.state.CopyFrom(engine.EngineState(running=len(slots), step_us=20_000))
            yield name, engine.HostFrame(step=frame).SerializeToString()

    def frame(self, name: str, data: bytes) -> None:
        """Handle one frame from bytes to bytes."""
        self.core.on_frame(name, 1, engine.HostFrame.FromString(data).step, self.now)
        for _, batch in self.core.tick(self.now).batches:
            convert.connect_response(batch).SerializeToString()

    def finish(self) -> None:
        """End everything that runs."""
        for name, slots in self.slots.items():
            frame = engine.StepFrame(step=1, steps=1)
            for slot in slots:
                frame.finished.add(
                    sequence=slot.sequence,
                    reason=engine.FINISH_REASON_STOP,
                    output_tokens=slot.emitted,
                )
            self.core.on_frame(name, 1, frame, self.now)
            slots.clear()
        self.core.tick(self.now)


def per_request_us(replicas: int) -> dict[str, Any]:
    """Return the CPU of admission, placement and conversion."""
    bench = Bench(replicas)
    samples: list[float] = []
    # Waves of 4 per replica, so that the window stays open for all of them; then everybody has a
    # first token, and half of the capacity is reached after a few waves.
    wave = 4 * replicas
    for _ in range(max(4, 4000 // wave)):
        if sum(map(len, bench.slots.values())) > 128 * replicas:
            bench.finish()
        for message in [bench.message() for _ in range(wave)]:
            started_s = time.process_time()
            bench.submit(message)
            samples.append(time.process_time() - started_s)
        for name, data in list(bench.frames()):
            bench.frame(name, data)
    placed = sum(map(len, bench.slots.values()))
    assert placed, "nothing was placed"
    assert not bench.core.cells[CELL].queue.requests, "placement was held back"
    samples.sort()
    return {
        "replicas": replicas,
        "requests": len(samples),
        "mean_us": round(1e6 * sum(samples) / len(samples), 1),
        "p50_us": round(1e6 * samples[len(samples) // 2], 1),
        "p99_us": round(1e6 * samples[len(samples) * 99 // 100], 1),
    }


def long_prompt_us() -> dict[str, Any]:
    """Return the CPU of a long prompt, and of hashing it."""
    bench = Bench(64)
    router: list[float] = []
    hashing: list[float] = []
    for _ in range(40):
        message = bench.message(LONG_TOKENS)
        prompt = list(message.prompt)
        started_s = time.process_time()
        block_hashes(prompt, ROOT, len(prompt) // BLOCK_TOKENS)
        hashed_s = time.process_time()
        bench.submit(message)
        hashing.append(hashed_s - started_s)
        router.append(time.process_time() - hashed_s)
        bench.finish()
    router.sort()
    hashing.sort()
    return {
        "replicas": 64,
        "prompt_tokens": LONG_TOKENS,
        "router_p50_us": round(1e6 * router[len(router) // 2], 1),
        "hashing_once_p50_us": round(1e6 * hashing[len(hashing) // 2], 1),
    }


def per_token_us(sequences: int, tokens: int) -> dict[str, Any]:
    """Return the CPU of frames with `sequences` rows of `tokens` tokens."""
    bench = Bench(1)
    while len(bench.slots["replica-0"]) < sequences:
        bench.submit(bench.message())
        for name, data in list(bench.frames()):
            bench.frame(name, data)
    frames = [data for _ in range(2000) for _, data in bench.frames(tokens)][:2000]
    started_s = time.process_time()
    for data in frames:
        bench.frame("replica-0", data)
    spent_s = time.process_time() - started_s
    return {
        "sequences": sequences,
        "tokens_per_sequence": tokens,
        "gateways": GATEWAYS,
        "us_per_token": round(1e6 * spent_s / (len(frames) * sequences * tokens), 3),
        "us_per_frame": round(1e6 * spent_s / len(frames), 1),
    }


def main() -> None:
    """Measure, print and record."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    requests = [per_request_us(replicas) for replicas in (16, 64, 256)]
    tokens = [per_token_us(s, t) for s, t in ((8, 1), (64, 1), (256, 1), (256, 8))]
    long = long_prompt_us()
    figures = {"per_request": requests, "long": long, "per_token": tokens}
    operation = (
        "per_request: conversion + submit + tick + conversion of one 1,000-token request with"
        " hashes; long: the same with 55,000 tokens; per_token: one frame from bytes to the"
        " gateways' bytes. CPU time of one core; no gRPC, no sockets."
    )
    path = write_result("router_core", operation, figures)
    for row in (*requests, long, *tokens):
        print(row)
    print(path)


if __name__ == "__main__":
    main()
