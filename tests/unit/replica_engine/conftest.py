from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from replica.engine.core import ScheduledEngine
from replica.engine.plan import StepOutput, StepPlan
from replica.engine.scheduler import Scheduler
from replica.engine.testing import write_random_model
from replica.engine.types import Limits, StepEvents
from sluice.hashing import BLOCK_TOKENS

ROOT = b"r" * 16
VOCABULARY = 200
EOS = 7


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_random_model(directory)
    return directory


class MemoryBackend:
    """A model whose KV cache is real memory: it writes ids into the blocks it is given, and the
    next token is a hash of what it reads back. A wrong, shared or stale block changes the output."""

    def __init__(self, blocks: int) -> None:
        self.memory = [[-1] * BLOCK_TOKENS for _ in range(blocks)]

    def run(self, plan: StepPlan) -> StepOutput:
        for sequence, count in [(s, 1) for s in plan.decode] + plan.prefill:
            for position in range(sequence.computed, sequence.computed + count):
                block = sequence.blocks[position // BLOCK_TOKENS]
                self.memory[block][position % BLOCK_TOKENS] = sequence.tokens[position]
        return StepOutput([self._next(s.blocks, len(s.tokens)) for s in plan.sampled])

    def _next(self, blocks: list[int], count: int) -> int:
        read = [self.memory[blocks[i // BLOCK_TOKENS]][i % BLOCK_TOKENS] for i in range(count)]
        return next_token(read)


def next_token(tokens: list[int]) -> int:
    return crc32(repr(tokens).encode()) % VOCABULARY


@pytest.fixture(scope="session")
def expected_output() -> Callable[..., list[int]]:
    def expected(prompt: list[int], count: int, *, stop: frozenset[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(next_token(tokens))
            if tokens[-1] in stop:
                break
        return tokens[len(prompt) :]

    return expected


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., ScheduledEngine]:
    def make(
        *, blocks: int = 64, sequences: int = 8, step_tokens: int = 64, context: int = 1000
    ) -> ScheduledEngine:
        limits = Limits(context, sequences, step_tokens, blocks, VOCABULARY)
        scheduler = Scheduler(limits, root=ROOT, eos_ids=frozenset({EOS}))
        return ScheduledEngine("memory", scheduler, MemoryBackend(blocks), Clock())

    return make


@pytest.fixture(scope="session")
def run_to_end() -> Callable[..., dict[int, list[int]]]:
    """Step until nothing lives; returns the tokens of each key."""

    def run(engine: ScheduledEngine, on_step: Callable[[StepEvents], None] | None = None) -> dict:
        tokens: dict[int, list[int]] = {}
        for _ in range(20_000):
            if not engine.has_work:
                return tokens
            events = engine.step()
            for key, token in zip(events.keys, events.tokens, strict=True):
                tokens.setdefault(key, []).append(token)
            if on_step:
                on_step(events)
        raise AssertionError(f"stands still: {engine.load()}")

    return run
