"""The drivers under contract, each with what it needs, and what is checked at every step of all.

`test_drivers.py` and `test_driver_features.py` run every rule on each of them: openvino with a tiny
random base in f32, sim in virtual time, trtllm over `fake_trtllm.py`.
"""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replica.drivers import openvino
from replica.drivers.openvino_backend import OpenvinoBackend
from replica.drivers.sim import load_sim
from replica.drivers.trtllm import load_trtllm
from replica.drivers.trtllm_api import TrtllmApi
from replica.engine.backend import StepFailedError
from replica.engine.driver import Driver
from replica.engine.types import (
    FinishedEvent,
    PromptLogprobs,
    SequenceRequest,
    StepEvents,
    TokenLogprobs,
)
from tests.support.memory_engine import Clock
from tests.support.random_models import write_random_adapter, write_random_model

SIZE = {"sequences_max": 8, "step_tokens_max": 64, "context_tokens_max": 512}
ADAPTERS = {"adapter_slots": 2, "adapter_rank": 8}
BLOCKS = 96
ADAPTER_COUNT = 4
STILL_S = 60.0  # a driver that has work and says nothing for so long stands still


def load_beside(name: str):
    """Import a module of this folder, which is no package."""
    full = f"contract_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


@dataclass
class Outcome:
    """What became of sequences; everything that holds at every step is asserted here."""

    driver: Driver
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishedEvent] = field(default_factory=dict)
    admitted: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # of admission
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompts: dict[int, list[PromptLogprobs]] = field(default_factory=dict)

    def note(self, events: StepEvents) -> None:
        vocabulary = self.driver.limits.vocabulary
        if not events.has_runs:
            assert len(set(events.keys)) == len(events.keys)
        for fact in events.admitted:
            assert fact.key not in self.admitted
            assert fact.queue_s >= 0
            assert fact.cached_tokens >= 0
            self.admitted[fact.key] = fact.cached_tokens
            self.order.append(fact.key)
        for key, token in zip(events.keys, events.tokens, strict=True):
            assert key not in self.finished, "a token behind the end"
            assert key in self.admitted, "a token before the admission"
            assert 0 <= token < vocabulary
            self.tokens.setdefault(key, []).append(token)
        for entry in events.logprobs:
            self.logprobs.setdefault(entry.key, []).append(entry)
        for entry in events.prompt_logprobs:
            self.prompts.setdefault(entry.key, []).append(entry)
        for event in events.finished:
            assert event.key not in self.finished, "a second end"
            assert event.output_tokens == len(self.tokens.get(event.key, ()))
            assert event.prefill_s >= 0
            self.finished[event.key] = event

    def reason(self, key: int):
        return self.finished[key].reason


class Stepper:
    """Steps one driver; keeps the sum of its cache events."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.outcome = Outcome(driver)
        self._cached = dict.fromkeys(driver.cached_blocks())

    def step(self) -> StepEvents:
        events = self.driver.step()
        self.outcome.note(events)
        for key, is_cached in events.kv.items():
            if is_cached:
                self._cached[key] = None
            else:
                assert key in self._cached, "a block was removed that was never stored"
                del self._cached[key]
        assert set(self.driver.cached_blocks()) == self._cached.keys()
        load = self.driver.load()
        assert load == self.driver.load()
        assert 0 <= load.kv_blocks_used <= self.driver.limits.kv_blocks
        assert min(load.running, load.waiting, load.prefill_tokens_owed) >= 0
        assert load.cached_tokens <= load.prompt_tokens
        assert 0 <= load.prefilling <= load.running
        return events

    def until(self, condition: Callable[[Outcome], bool]) -> None:
        ends_at_s = time.monotonic() + STILL_S
        while not condition(self.outcome):
            assert self.driver.has_work, f"no work left: {self.outcome}"
            self.step()
            assert time.monotonic() < ends_at_s, f"stands still: {self.driver.load()}"

    def cached(self, count: int) -> list[bytes]:
        """Return the cached blocks when at least so many were told; that may come late."""
        ends_at_s = time.monotonic() + STILL_S
        while len(self._cached) < count:
            self.step()
            assert time.monotonic() < ends_at_s, self._cached
            time.sleep(0.001)
        return list(self._cached)

    def run(self, *requests: SequenceRequest) -> Outcome:
        """Add requests and step until all of them, and those before, have ended."""
        for request in requests:
            self.driver.add(request)
        ends_at_s = time.monotonic() + STILL_S
        while self.driver.has_work:
            self.step()
            assert time.monotonic() < ends_at_s, f"stands still: {self.driver.load()}"
        load = self.driver.load()
        assert (load.running, load.waiting, load.prefill_tokens_owed) == (0, 0, 0)
        return self.outcome


@dataclass
class Subject:
    """A kind of driver.

    Attributes:
        make: Options -> a loaded driver; `SIZE` and `BLOCKS` unless overridden.
        make_failing: A driver whose first computed step, or first request, fails.
        now: Its clock.
        is_sampled: Whether logits exist: bias, penalties and grammars have an effect.
        adapters: Digest -> directory.
    """

    name: str
    make: Callable[..., Driver]
    make_failing: Callable[[], Driver]
    now: Callable[[], float]
    adapters: dict[str, Path]
    is_sampled: bool

    def stepper(self, **options) -> Stepper:
        return Stepper(self.make(**options))

    def run(self, *requests: SequenceRequest, **options) -> Outcome:
        return self.stepper(**options).run(*requests)


class Shelf:
    """Compiled graphs, to be used again by later tests: compiling is most of what they cost."""

    def __init__(self) -> None:
        self.free: dict[tuple, list[OpenvinoBackend]] = {}
        self.lent: list[tuple[tuple, OpenvinoBackend]] = []

    def lend(self, *arguments, **named) -> OpenvinoBackend:
        """Return a backend that no other engine of this test uses."""
        key = tuple(sorted(named.items(), key=lambda item: item[0]))
        shelf = self.free.setdefault(key, [])
        backend = shelf.pop() if shelf else OpenvinoBackend(*arguments, **named)
        self.lent.append((key, backend))
        return backend

    def take_back(self) -> None:
        for key, backend in self.lent:
            self.free[key].append(backend)
        self.lent = []


_shelf = Shelf()


def _openvino(base: Path, adapters: dict[str, Path]) -> Subject:
    fixed = {"precision": "f32", "kv_precision": "f32", "threads": 1, "base_graph": "off"}

    def make(**options) -> Driver:
        return openvino.load_openvino(base, "base", {**SIZE, **fixed, "blocks": BLOCKS, **options})

    def make_failing() -> Driver:
        driver = make(adapter_slots=0)
        run = driver._backend.run

        def fail(_):
            driver._backend.run = run
            raise StepFailedError("the graph call failed")

        driver._backend.run = fail
        return driver

    return Subject("openvino", make, make_failing, time.monotonic, adapters, True)


def _sim(base: Path, adapters: dict[str, Path]) -> Subject:
    clock = Clock()

    def make(**options) -> Driver:
        options = {**SIZE, "blocks": BLOCKS, "adapter_slots": 0, **options}
        return load_sim(base, "base", options, clock=clock, sleep=clock.sleep)

    def make_failing() -> Driver:
        return make(faults=json.dumps([{"kind": "fail"}]))

    return Subject("sim", make, make_failing, clock, adapters, False)


def _trtllm(base: Path, adapters: dict[str, Path], opened: list) -> Subject:
    fake = load_beside("fake_trtllm")

    def make(*, blocks: int = BLOCKS, faults=None, **options) -> Driver:
        # A few iterations for loading; then one for each step of the driver, however busy this
        # machine is.
        permits = threading.Semaphore(20)
        attributes = {"blocks": blocks, "faults": faults or {}, "permits": permits}
        llm = type("LLM", (fake.LLM,), attributes)
        driver = load_trtllm(
            base,
            "base",
            {**SIZE, **options},
            make_api=lambda: TrtllmApi(fake.importer(llm=llm)),
        )
        opened.append(driver)
        step = driver.step

        def paced_step() -> StepEvents:
            permits.release()
            return step()

        driver.step = paced_step
        return driver

    def make_failing() -> Driver:
        return make(faults={2: "Executor failed process requestId 2 due to: CUDA error"})

    return Subject("trtllm", make, make_failing, time.monotonic, adapters, False)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("contract") / "base"
    write_random_model(directory)
    return directory


@pytest.fixture(scope="session")
def adapters(base: Path) -> dict[str, Path]:
    made = {
        f"adapter-{index}": base.with_name(f"adapter-{index}") for index in range(ADAPTER_COUNT)
    }
    for index, directory in enumerate(made.values()):
        write_random_adapter(directory, base, index)
    return made


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(openvino, "OpenvinoBackend", _shelf.lend)
    yield
    _shelf.take_back()


@pytest.fixture(params=["openvino", "sim", "trtllm"])
def subject(request, base: Path, adapters: dict[str, Path], shelf) -> Iterator[Subject]:
    opened: list = []
    if request.param == "trtllm":
        yield _trtllm(base, adapters, opened)
    else:
        yield {"openvino": _openvino, "sim": _sim}[request.param](base, adapters)
    for driver in opened:
        driver.close()


@pytest.fixture(params=["openvino", "sim"])  # TensorRT-LLM 1.2 has one seed for all requests
def seeded_subject(request, base: Path, adapters: dict[str, Path], shelf) -> Subject:
    """Drivers that claim that (seed, position, logits) alone decide a token."""
    return {"openvino": _openvino, "sim": _sim}[request.param](base, adapters)
