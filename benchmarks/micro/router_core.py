"""Measures the CPU time of the router's core, per request and per token.

One operation of "request" begins with a parsed message, which has a prompt of 1,000 tokens and its
block hashes. The operation converts the message, calls `submit` and `tick`, and converts the
dispatch into the message to the engine. Three of four prompts repeat an earlier prompt. In "idle"
all engines are idle. In "half" each engine decodes half of its maximal number of sequences. "long"
is the same operation for a prompt of 55,000 tokens (220 KB of text). The gateway's time to hash the
blocks of this prompt is a separate figure. "tick_*" is the part of "request" that chooses request
and replica, and updates the counts. One operation of "token" parses a HostFrame, calls `on_frame`
and `tick`, and builds and serializes the messages to gateways. Its time is divided by the number of
tokens in the frame, and 64 replicas send frames in turn. All figures are CPU time of one core. Not
measured: gRPC, sockets, the parsing of submits. If the core is compiled, the result is
`router_core_compiled`. Run: `python -m benchmarks.micro.router_core`.
"""

import gc
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.results import write_result
from router import wire as convert
from router.core import router
from router.core.router import RouterCore
from router.core.types.actions import Actions
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from sluice.hashing import BLOCK_TOKENS, block_hashes
from sluice.token_ids import packed_ids, unpacked_ids
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

if TYPE_CHECKING:
    from router.core.types.request import Dispatch

CELL = "cell"
LIMITS = EngineLimits(131_072, 256, 2048, 65_536, 32)
GATEWAYS = 4
PROMPT_TOKENS = 1000
LONG_TOKENS = 55_000
SHORT_TOKENS = 20  # tokens of a prompt shorter than a block, which is never cached
ROOT = bytes(16)
STEP_S = 0.02
REQUESTS = 4096
FRAMES = 2048


class CoreBench:
    """A router core with engines that compute all submitted work in one step of `STEP_S`."""

    def __init__(self, replicas: int, limits: EngineLimits = LIMITS) -> None:
        self.core = RouterCore(CoreConfig())
        self.now = 0.0
        self.handles = 0
        self.dispatches: dict[str, list[Dispatch]] = {f"replica-{n}": [] for n in range(replicas)}
        for key in range(GATEWAYS):
            self.core.on_gateway(key, self.now)
        plans = [ReplicaPlan(name, CELL) for name in self.dispatches]
        self.core.on_cells([CELL], plans)
        for name in self.dispatches:
            self.core.on_attached(name, 1, limits, self.now)

    def message(self, tokens: int = PROMPT_TOKENS) -> wire.Submit:
        """Return the next request, in the form that gateways send."""
        self.handles += 1
        start = self.handles - self.handles % 4  # four requests share a prompt
        prompt = [start % 30_000, *range(1, tokens)]
        hashes = block_hashes(prompt, ROOT, tokens // BLOCK_TOKENS)
        return wire.Submit(
            handle=self.handles,
            request_id=f"req-{self.handles}",
            cell_id=CELL,
            tenant_id=f"tenant-{self.handles % 20}",
            prompt_ids=packed_ids(prompt),
            output_tokens_max=256,
            cache_root=ROOT,
            block_hashes=b"".join(hashes),
        )

    def submit(self, message: wire.Submit) -> tuple[float, float]:
        """Admit, place and convert one request. Returns CPU seconds in total, and in `tick`."""
        started_s = time.process_time()
        self.core.submit(message.handle % GATEWAYS, convert.request(message), self.now)
        admitted_s = time.process_time()
        actions = self.core.tick(self.now)
        placed_s = time.process_time()
        for dispatches in actions.dispatches.values():
            convert.submit_message(1, dispatches, reads_prompt_ids=True)
        spent_s = time.process_time() - started_s
        self._sent(actions)
        return spent_s, placed_s - admitted_s

    def _sent(self, actions: Actions) -> None:
        for name, dispatches in actions.dispatches.items():
            self.dispatches[name] += dispatches

    def frames(self, *, kept: int, tokens: int = 1) -> list[tuple[str, bytes]]:
        """Return a frame per replica with `tokens` per sequence. All but `kept` sequences end."""
        frames: list[tuple[str, bytes]] = []
        for name, dispatches in self.dispatches.items():
            prompts = sum(dispatch.prefill_owed for dispatch in dispatches)
            frame = engine.StepFrame(step=1, steps=tokens)
            frame.sequence.extend(dispatch.sequence for dispatch in dispatches)
            frame.count.extend([tokens] * len(dispatches))
            frame.token.extend(range(1000, 1000 + tokens * len(dispatches)))
            for dispatch in dispatches[: max(0, len(dispatches) - kept)]:
                frame.finished.add(
                    sequence=dispatch.sequence,
                    reason=engine.FINISH_REASON_STOP,
                    output_tokens=dispatch.emitted + tokens,
                )
                dispatches.remove(dispatch)
            state = engine.EngineState(
                running=len(dispatches),
                step_us=round(STEP_S * 1e6),
                step_prompt_tokens=prompts,
                kv_blocks_used=40 * len(dispatches),
            )
            frame.state.CopyFrom(state)
            frames.append((name, engine.HostFrame(step=frame).SerializeToString()))
        return frames

    def frame(self, name: str, data: bytes) -> float:
        """Handle one frame, from its bytes to those for gateways, and return the CPU seconds."""
        self.now += STEP_S / len(self.dispatches)
        started_s = time.process_time()
        self.core.on_frame(name, 1, engine.HostFrame.FromString(data).step, self.now)
        actions = self.core.tick(self.now)
        for _, batch in actions.batches:
            convert.connect_response(batch).SerializeToString()
        spent_s = time.process_time() - started_s
        self._sent(actions)
        return spent_s

    def step(self, *, kept: int) -> None:
        """Run one step of all engines."""
        for name, data in self.frames(kept=kept):
            self.frame(name, data)


def per_request_us(replicas: int, decoding: int) -> dict[str, Any]:
    """Return the CPU time of "request" in µs, while each replica decodes `decoding` sequences."""
    bench = CoreBench(replicas)
    for _ in range(decoding):
        for _ in range(replicas):
            bench.submit(bench.message())
        bench.step(kept=decoding)
    samples: list[tuple[float, float]] = []
    while len(samples) < REQUESTS:
        samples += [bench.submit(bench.message()) for _ in range(replicas)]
        assert not bench.core.cells[CELL].queue.requests, "placement was held back"
        bench.step(kept=decoding)
    whole, placing = (sorted(column) for column in zip(*samples, strict=True))
    return {
        "replicas": replicas,
        "decoding": decoding,
        "requests": len(samples),
        "mean_us": round(1e6 * sum(whole) / len(whole), 1),
        "p50_us": round(1e6 * whole[len(whole) // 2], 1),
        "p99_us": round(1e6 * whole[len(whole) * 99 // 100], 1),
        "tick_p50_us": round(1e6 * placing[len(placing) // 2], 1),
        "tick_p99_us": round(1e6 * placing[len(placing) * 99 // 100], 1),
    }


def long_prompt_us() -> dict[str, Any]:
    """Return the core's CPU time for a long prompt, and the time to hash the prompt, in µs."""
    bench = CoreBench(64)
    router: list[float] = []
    hashing: list[float] = []
    for _ in range(40):
        message = bench.message(LONG_TOKENS)
        prompt = unpacked_ids(message.prompt_ids)
        started_s = time.process_time()
        block_hashes(prompt, ROOT, len(prompt) // BLOCK_TOKENS)
        hashing.append(time.process_time() - started_s)
        router.append(bench.submit(message)[0])
        bench.step(kept=0)
    router.sort()
    hashing.sort()
    return {
        "replicas": 64,
        "prompt_tokens": LONG_TOKENS,
        "router_p50_us": round(1e6 * router[len(router) // 2], 1),
        "hashing_once_p50_us": round(1e6 * hashing[len(hashing) // 2], 1),
    }


def per_token_us(sequences: int, tokens: int) -> dict[str, Any]:
    """Return the CPU time per token of frames with `sequences` rows of `tokens` tokens, in µs."""
    bench = CoreBench(64, replace(LIMITS, sequences_max=sequences))  # full engines
    for _ in range(sequences):
        for _ in bench.dispatches:
            bench.submit(bench.message(SHORT_TOKENS))
        bench.step(kept=sequences)
    assert all(len(dispatches) == sequences for dispatches in bench.dispatches.values())
    samples: list[float] = []
    while len(samples) < FRAMES:
        samples += [bench.frame(*frame) for frame in bench.frames(kept=sequences, tokens=tokens)]
    return {
        "replicas": 64,
        "sequences": sequences,
        "tokens_per_sequence": tokens,
        "gateways": GATEWAYS,
        "us_per_token": round(1e6 * sum(samples) / (len(samples) * sequences * tokens), 3),
        "us_per_frame": round(1e6 * sum(samples) / len(samples), 1),
    }


def main() -> None:
    """Measure, print and write the result."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    half = LIMITS.sequences_max // 2
    requests = [per_request_us(n, busy) for busy in (0, half) for n in (16, 64, 256)]
    tokens = [per_token_us(s, t) for s, t in ((8, 1), (64, 1), (256, 1), (256, 8))]
    long = long_prompt_us()
    figures = {"per_request": requests, "long": long, "per_token": tokens}
    operation = (
        "per_request: conversion + submit + tick + conversion of one 1,000-token request with"
        " hashes, and of these the tick alone; long: the same with 55,000 tokens; per_token: one"
        " frame from bytes to the gateways' bytes. CPU time of one core; no gRPC, no sockets."
    )
    is_compiled = not str(router.__file__).endswith(".py")
    name = "router_core_compiled" if is_compiled else "router_core"
    path = write_result(name, operation, figures)
    for row in (*requests, long, *tokens):
        print(row)
    print(path)


if __name__ == "__main__":
    main()
