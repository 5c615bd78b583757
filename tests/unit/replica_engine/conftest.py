from collections.abc import Callable
from pathlib import Path

import pytest

from replica.engine.core import ScheduledEngine
from replica.engine.types import StepEvents
from tests.support.memory_engine import Clock, logprob, marked, memory_engine, next_token
from tests.support.random_models import write_random_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_random_model(directory)
    return directory


@pytest.fixture(scope="session")
def expected_output() -> Callable[..., list[int]]:
    """Return the answer without cache, batch, drafts and preemptions."""

    def expected(
        prompt: list[int], count: int, *, stop: frozenset[int], adapter: int = 0, seed: int = 0
    ) -> list[int]:
        values = [marked(token, adapter) for token in prompt]
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(next_token(values, seed))
            if tokens[-1] in stop:
                break
            values.append(marked(tokens[-1], adapter))
        return tokens

    return expected


@pytest.fixture(scope="session")
def expected_logprobs() -> Callable[..., list[float]]:
    """Return the logprobs of the tokens from `first` on, each given all tokens before it."""

    def expected(tokens: list[int], first: int, adapter: int = 0) -> list[float]:
        values = [marked(token, adapter) for token in tokens]
        return [logprob(values[:end], tokens[end]) for end in range(first, len(tokens))]

    return expected


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., ScheduledEngine]:
    return memory_engine


@pytest.fixture(scope="session")
def run_to_end() -> Callable[..., dict[int, list[int]]]:
    """Run steps until no sequence is living, and return the tokens of each key."""

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
