"""Measures the speed of a replica: engine alone, behind Triton, with adapters, with its cache.

One operation is one new token of one sequence. In the case *alone* this process calls `step()` of
the driver. In the case *served* the same engine runs inside a real Triton, with client and server
on the same cores. Its tokens are counted in the frames of one attachment. Both cases have the same
prompts of 64 random tokens, of which none is cached. Answers have 100 tokens and are greedy. Rounds
alternate, and the result is the median of the ratios of the rounds. `adapters` compares 32
sequences of the base alone with a batch that mixes the base and the shipped adapters. `hot_add` is
the time from the submission of a sequence to its first token when its adapter is only on disk.
`ttft` compares a prompt of 1,024 uncached tokens with a prompt of which 1,000 tokens are cached.
`step` is the part of a step's time outside the call of the model's graph. `sim` has 1,000 sequences
on the simulated engine, with steps that take no time. Not measured: routers, gateways, a network.
Run: `python -m benchmarks.load.replica [served] [sim] [adapters] [step]`.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openvino as ov

from benchmarks.engine_alone import SHIPPED_BASE, prompt, run
from benchmarks.results import RESULTS, write_result
from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL
from replica.drivers.openvino import load_openvino
from replica.drivers.registry import load_driver
from replica.engine.driver import Driver
from replica.engine.types import SequenceRequest
from router.sent_spans import SentSpans
from sluice.artifacts import import_directory
from sluice.kserve import HostStream
from sluice.prompt_spans import SPAN_BYTES, SPAN_TOKENS
from sluice.token_ids import packed_ids
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.tritons import running_triton

_BATCHES = (1, 8, 32, 64, 256)
_NEW_TOKENS = 100
_PROMPT_TOKENS = 64
_ROUNDS = 5
_SIM_SEQUENCES = 1000
_SIM_NEW_TOKENS = 300
_DEADLINE_S = 60.0
_CREDIT_FRAMES = 64
_SPANS_BLOCKS = 200_000
ROOT = b"benchmark's root"  # of prompts' block hashes


class Attached:
    """An attachment to a served engine, like a router's."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._epoch = time.time_ns()
        self._sequences = 0
        self._frames = 0
        self._sent = SentSpans(_SPANS_BLOCKS)

    async def attach(self) -> None:
        """Open the attachment."""
        attach = wire.Attach(
            router_id="benchmark", epoch=self._epoch, credit_frames=2 * _CREDIT_FRAMES
        )
        await self._stream.send(wire.HostRequest(attach=attach))
        first = await self._stream.receive(_DEADLINE_S)
        assert first is not None
        assert first.HasField("attached"), first

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        adapters: Sequence[str] = ("",),
        hashes: Sequence[bytes] = (),
    ) -> tuple[float, float]:
        """Run one sequence per prompt. Returns the seconds to the first token and to the end."""
        began_s = time.perf_counter()
        await self.submit(prompts, new_tokens, adapters, hashes)
        left, tokens, first_s = len(prompts), 0, 0.0
        while left:
            step = await self.next_step()
            tokens += len(step.token)
            first_s = first_s or (time.perf_counter() - began_s if tokens else 0.0)
            for finished in step.finished:
                assert finished.reason == wire.FINISH_REASON_LENGTH, finished
                left -= 1
        assert tokens == len(prompts) * new_tokens, tokens
        return first_s, time.perf_counter() - began_s

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        adapters: Sequence[str] = ("",),
        hashes: Sequence[bytes] = (),
    ) -> None:
        """Send one sequence per prompt, with ids that count up from 0.

        With `hashes`, each prompt's block hashes from the root `ROOT`, known spans are not sent.
        """
        first_id = self._sequences
        self._sequences += len(prompts)
        sequences = [
            wire.Sequence(
                id=first_id + index,
                prompt_ids=packed_ids(ids),
                output_tokens_max=new_tokens,
                ignore_eos=True,
                adapter_digest=adapters[index % len(adapters)],
            )
            for index, ids in enumerate(prompts)
        ]
        for sequence, of_blocks in zip(sequences, hashes, strict=False):
            sequence.cache_root = ROOT
            if known := self._sent.send(of_blocks):
                sequence.known_span, sequence.known_tokens = known[-1], len(known) * SPAN_TOKENS
                sequence.prompt_ids = sequence.prompt_ids[len(known) * SPAN_BYTES :]
        submit = wire.Submit(epoch=self._epoch, sequences=sequences)
        await self._stream.send(wire.HostRequest(submit=submit))

    async def next_step(self) -> wire.StepFrame:
        """Return the next step frame, and regularly grant the engine credit for further frames."""
        frame = await self._stream.receive(_DEADLINE_S)
        assert frame is not None
        self._frames += 1
        if self._frames % _CREDIT_FRAMES == 0:
            credit = wire.Credit(epoch=self._epoch, frames=_CREDIT_FRAMES)
            await self._stream.send(wire.HostRequest(credit=credit))
        return frame.step


@asynccontextmanager
async def served(
    engine: str, options: dict[str, str], others: Sequence[Path] = ()
) -> AsyncGenerator[tuple[Attached, list[str]]]:
    """Start a Triton for the shipped base. Yields an attachment and the digests of `others`."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        home = Path(folder)
        digest = import_directory(SHIPPED_BASE, home / "artifacts")
        digests = [import_directory(path, home / "artifacts") for path in others]
        spec = EngineSpec(engine, digest, tuple(sorted(options.items())))
        async with (
            running_triton(home, spec) as triton,
            HostStream(triton.address, MODEL, silence_s=_DEADLINE_S) as stream,
        ):
            await stream.open(timeout_s=_DEADLINE_S)
            attached = Attached(stream)
            await attached.attach()
            yield attached, digests


def prompts(count: int, tokens: int = _PROMPT_TOKENS) -> list[list[int]]:
    """Return random prompts, all different."""
    return [prompt(tokens) for _ in range(count)]


async def compare(
    driver: Driver, attached: Attached, sequences: int, new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return tokens per second alone and served, from alternating rounds."""
    alone: list[float] = []
    behind: list[float] = []
    for _ in range(rounds):
        _, wall_s = await asyncio.to_thread(run, driver, prompts(sequences), new_tokens)
        alone.append(sequences * new_tokens / wall_s)
        _, wall_s = await attached.generate(prompts(sequences), new_tokens)
        behind.append(sequences * new_tokens / wall_s)
    ratios = [served / own for served, own in zip(behind, alone, strict=True)]
    return {
        "alone_tok_s": round(statistics.median(alone)),
        "served_tok_s": round(statistics.median(behind)),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


async def measure_served() -> dict[str, Any]:
    """Compare the CPU engine alone and behind Triton, and served TTFT with and without cache."""
    driver = load_driver("openvino", SHIPPED_BASE, "benchmark", {})
    async with served("openvino", {}) as (attached, _):
        await attached.generate(prompts(8), 16)  # compiles the kernels
        run(driver, prompts(8), 16)
        figures: dict[str, Any] = {
            str(batch): await compare(driver, attached, batch, _NEW_TOKENS, _ROUNDS)
            for batch in _BATCHES
        }
        cold_s: list[float] = []
        cached_s: list[float] = []
        for _ in range(_ROUNDS * 2):
            long = prompt(1024)
            cold_s.append((await attached.generate([long], 1))[0])
            cached_s.append((await attached.generate([long[:1000] + prompt(24)], 1))[0])
    ttft = {
        "cold_ms": round(statistics.median(cold_s) * 1e3, 1),
        "cached_1000_ms": round(statistics.median(cached_s) * 1e3, 1),
        "times_faster": round(statistics.median(cold_s) / statistics.median(cached_s), 1),
    }
    return {"sequences": figures, "ttft_1024": ttft}


async def measure_sim() -> dict[str, Any]:
    """Measure tokens per second of an engine host. Its simulated engine costs almost no time."""
    options = {"cost_step_s": "0", "cost_decode_row_s": "0", "cost_context_token_s": "0"}
    options |= {"cost_prefill_token_s": "0"}
    driver = load_driver("sim", SHIPPED_BASE, "benchmark", options)
    async with served("sim", options) as (attached, _):
        await attached.generate(prompts(_SIM_SEQUENCES), 16)
        return await compare(driver, attached, _SIM_SEQUENCES, _SIM_NEW_TOKENS, _ROUNDS)


async def measure_adapters() -> dict[str, Any]:
    """Compare a batch of the base with a mixed batch, and time the load of a new adapter."""
    adapters = sorted(
        path.parent for path in SHIPPED_BASE.parent.glob("adapters/*/adapter_config.json")
    )
    async with served("openvino", {}, adapters) as (attached, digests):
        await attached.generate(prompts(16), 16)
        gaps = [await _hot_add(attached, digest) for digest in digests]
        mixes: dict[str, list[str]] = {"base": [""], "mixed": ["", *digests]}
        walls_s: dict[str, list[float]] = {name: [] for name in mixes}
        for names in mixes.values():
            await attached.generate(prompts(32), 16, names)
        for _ in range(_ROUNDS):
            for name, names in mixes.items():
                walls_s[name].append((await attached.generate(prompts(32), _NEW_TOKENS, names))[1])
    rates = {name: 32 * _NEW_TOKENS / statistics.median(walls) for name, walls in walls_s.items()}
    return {
        "sequences": 32,
        "adapters": len(digests),
        "base_tok_s": round(rates["base"]),
        "mixed_tok_s": round(rates["mixed"]),
        "ratio": round(rates["mixed"] / rates["base"], 3),
        "hot_add_first_token_ms": [round(first_s * 1e3, 1) for first_s in gaps],
    }


async def _hot_add(attached: Attached, digest: str) -> float:
    """Return the seconds from submission to first token with an adapter that is not yet loaded."""
    first_s, _ = await attached.generate(prompts(1, 16), 1, [digest])
    return first_s


def measure_step() -> dict[str, Any]:
    """Return the time of a step outside the graph call, by number of sequences."""
    figures: dict[str, Any] = {}
    for batch in _BATCHES:
        driver = load_openvino(SHIPPED_BASE, "benchmark", {})
        run(driver, prompts(batch), 16)
        for key, ids in enumerate(prompts(batch)):
            driver.add(SequenceRequest(key, ids, _NEW_TOKENS, ignore_eos=True))
        steps_s: list[float] = []
        with _timed_graphs() as graph_s:
            while driver.has_work:
                began_s = time.perf_counter()
                driver.step()
                steps_s.append(time.perf_counter() - began_s)
        outside = [step - graph for step, graph in zip(steps_s, graph_s, strict=True)]
        figures[str(batch)] = {
            "step_us": round(statistics.median(steps_s) * 1e6),
            "outside_graph_us": round(statistics.median(outside) * 1e6),
        }
    return figures


@contextmanager
def _timed_graphs() -> Generator[list[float]]:
    """Collect the duration of each graph call in seconds, including the wait for its result."""
    spent_s: list[float] = []
    started_s = 0.0
    start, wait = ov.InferRequest.start_async, ov.InferRequest.wait

    def timed_start(request: Any, *arguments: Any) -> None:
        nonlocal started_s
        started_s = time.perf_counter()
        start(request, *arguments)

    def timed_wait(request: Any) -> None:
        wait(request)
        spent_s.append(time.perf_counter() - started_s)

    with (
        patch.object(ov.InferRequest, "start_async", timed_start),
        patch.object(ov.InferRequest, "wait", timed_wait),
    ):
        yield spent_s


MEASURES: dict[str, Callable[[], Any]] = {
    "served": measure_served,
    "sim": measure_sim,
    "adapters": measure_adapters,
    "step": measure_step,
}


def main() -> None:
    """Run the named measurements and write `benchmarks/results/replica.json`."""
    names = sys.argv[1:] or list(MEASURES)
    previous = RESULTS / "replica.json"
    figures = json.loads(previous.read_text())["figures"] if previous.exists() else {}
    for name in names:
        measured = MEASURES[name]()
        figures[name] = asyncio.run(measured) if asyncio.iscoroutine(measured) else measured
        print(name, json.dumps(figures[name]), flush=True)
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    write_result("replica", operation, {"figures": figures})


if __name__ == "__main__":
    main()
