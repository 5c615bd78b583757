"""Defines a driver of plain dictionaries with predictable tokens, and routers for its host."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replica.engine.types import (
    URGENT_PRIORITY,
    AdapterState,
    AdmittedEvent,
    Capabilities,
    EngineLoad,
    Finish,
    FinishedEvent,
    KvBlocks,
    Limits,
    PromptLogprobs,
    RefusedError,
    SequenceRequest,
    StepEvents,
    TokenLogprobs,
)
from replica.host import EngineHost
from replica.host.core import HostCore
from replica.host.frames import FrameEncoder
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS, block_hashes
from sluice.wire.engine.v1 import engine_pb2 as wire

WAIT_S = 60.0
VOCABULARY = 1000
LAYOUT = "fake u8[8]"


def token_at(seed: int, position: int) -> int:
    """Return the token that a sequence with this seed emits at a position."""
    return (seed * 31 + position * 7) % VOCABULARY


def logprob_at(seed: int, position: int) -> float:
    return -0.5 - token_at(seed, position) / 1024  # exact as a 32-bit float


def top_of(count: int, seed: int, position: int) -> tuple[tuple[int, float], ...]:
    token, logprob = token_at(seed, position), logprob_at(seed, position)
    return tuple((token + index, logprob - index) for index in range(count))


class _Running:
    def __init__(self, request: SequenceRequest, key: int, seed: int) -> None:
        self.request, self.key, self.seed = request, key, seed
        self.emitted = 0
        self.is_admitted = False


class FakeDriver:
    """A `Driver` that emits one token per step, or `1 + draft_tokens_max` with drafts."""

    name = "fake"

    def __init__(
        self, *, step_s: float = 0.0, sequences_max: int = 64, adapters_max: int = 4, **can: Any
    ) -> None:
        self.step_s = step_s
        self.limits = Limits(4096, sequences_max, 4096, 512, VOCABULARY)
        capabilities = Capabilities(8, 16, 20, *[True] * 5)
        self.capabilities = replace(capabilities, **can)
        self.adapters_max = adapters_max
        self.running: dict[int, _Running] = {}
        self.requests: list[SequenceRequest] = []
        self.events = StepEvents()
        self.blocks: dict[bytes, bytes] = {}
        self.held: dict[str, AdapterState] = {}
        self.reads: list[str] = []
        self.compiled: list[Any] = []
        self.resident: tuple[str, ...] = ()
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.events.finished or self.events.kv)

    def add(self, request: SequenceRequest) -> None:
        if not request.prompt or max(request.prompt) >= VOCABULARY:
            raise RefusedError(ErrorCode.INVALID_REQUEST, "the prompt is not in the vocabulary")
        if request.adapter_digest and not self.capabilities.adapter_slots:
            raise RefusedError(ErrorCode.UNSUPPORTED_PARAMETER, "no adapters here")
        assert not request.adapter_digest or self.has_adapter(request.adapter_digest)
        self.requests.append(request)
        seeds = [(request.key, request.sampling.seed), *((f.key, f.seed) for f in request.forks)]
        for key, seed in seeds:
            assert key not in self.running
            self.running[key] = _Running(request, key, seed)

    def check_grammar(self, request: SequenceRequest) -> None:
        grammar = request.sampling.grammar
        self.compiled.append(grammar)
        if grammar.text == "bad":
            raise RefusedError(ErrorCode.INVALID_REQUEST, "the grammar is bad")
        if grammar.text == "bug":
            raise ZeroDivisionError

    def cancel(self, key: int) -> None:
        if key in self.running:
            self._finish(self.running[key], Finish.CANCELLED)

    def step(self) -> StepEvents:
        self.steps += 1
        self.on_step()
        time.sleep(self.step_s)
        running = list(self.running.values())
        urgent = [one for one in running if one.request.priority >= URGENT_PRIORITY]
        for one in urgent + [r for r in running if r not in urgent][: self.limits.sequences_max]:
            self._advance(one)
        events, self.events = self.events, StepEvents()
        return events

    def load(self) -> EngineLoad:
        running = min(len(self.running), self.limits.sequences_max)
        return EngineLoad(
            running=running,
            waiting=len(self.running) - running,
            step_s=self.step_s,
            adapters_resident=self.resident,
            kv_blocks_pinned=0,
        )

    def cached_blocks(self) -> list[bytes]:
        return list(self.blocks)

    def read_adapter(self, digest: str, directory: Path) -> Any:
        self.reads.append(digest)
        content = (directory / "adapter").read_text()
        if content == "bad":
            raise RefusedError(ErrorCode.ADAPTER_INVALID, "its rank is 99; at most 16")
        if content == "busy":
            raise RefusedError(ErrorCode.ENGINE_BUSY, "too many at once")
        if content == "bug":
            raise ZeroDivisionError
        return content

    def put_adapter(self, digest: str, adapter: Any) -> None:
        if len(self.held) >= self.adapters_max:
            raise RefusedError(ErrorCode.ENGINE_BUSY, "the memory for adapters is full")
        self.held[digest] = AdapterState(digest, False, 8, len(adapter))

    def drop_adapter(self, digest: str) -> None:
        self.held.pop(digest, None)

    def has_adapter(self, digest: str) -> bool:
        return digest in self.held

    def adapters(self) -> list[AdapterState]:
        return list(self.held.values())

    def export_blocks(self, hashes: Any) -> KvBlocks:
        leading = []
        for name in hashes:
            if name not in self.blocks:
                break
            leading.append(name)
        return KvBlocks(LAYOUT, tuple(leading), tuple(self.blocks[name] for name in leading))

    def import_blocks(self, blocks: KvBlocks) -> int:
        if blocks.layout != LAYOUT:
            raise RefusedError(ErrorCode.CONFLICT, f"layout {blocks.layout}; here {LAYOUT}")
        self.blocks.update(zip(blocks.hashes, blocks.data, strict=True))
        self.events.kv.update(dict.fromkeys(blocks.hashes, True))
        return len(blocks.hashes)

    def _advance(self, one: _Running) -> None:
        events, request = self.events, one.request
        if not one.is_admitted:
            one.is_admitted = True
            events.admitted.append(AdmittedEvent(one.key, 0.25, 0))
            self._store(request)
            if request.prompt_logprobs >= 0:
                part = [
                    TokenLogprobs(one.key, float(-i), top_of(request.prompt_logprobs, 1, i))
                    for i in range(1, len(request.prompt))
                ]
                events.prompt_logprobs.append(PromptLogprobs(one.key, 1, tuple(part)))
        for _ in range(1 + request.draft_tokens_max):
            token = token_at(one.seed, one.emitted)
            events.keys.append(one.key)
            events.tokens.append(token)
            events.has_runs |= request.draft_tokens_max > 0
            if (wanted := request.sampling.logprobs) >= 0:
                events.logprobs.append(
                    TokenLogprobs(
                        one.key,
                        logprob_at(one.seed, one.emitted),
                        top_of(wanted, one.seed, one.emitted),
                    )
                )
            one.emitted += 1
            if one.emitted >= request.output_tokens_max:
                self._finish(one, Finish.LENGTH)
                return

    def _store(self, request: SequenceRequest) -> None:
        root = request.cache_root or b"r" * 16
        for name in block_hashes(request.prompt, root, len(request.prompt) // BLOCK_TOKENS):
            if name not in self.blocks:
                self.blocks[name] = name[:8]
                self.events.kv[name] = True

    def _finish(self, one: _Running, reason: Finish) -> None:
        del self.running[one.key]
        self.events.finished.append(
            FinishedEvent(
                one.key,
                reason,
                prompt_tokens=len(one.request.prompt),
                output_tokens=one.emitted,
                prefill_s=0.125,
            )
        )


class FakeResponder:
    """Records frames, and fails where Triton would crash."""

    def __init__(self) -> None:
        self.frames: list[wire.HostFrame] = []
        self.is_finished = False
        self.is_gone = False
        self.errors: list[str] = []
        self._changed = threading.Condition()

    def send(self, frame: bytes) -> None:
        with self._changed:
            if self.is_finished:
                self.errors.append("send after finish")
            self.frames.append(wire.HostFrame.FromString(frame))
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            if self.is_finished:
                self.errors.append("finished twice")
            self.is_finished = True
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        if self.is_finished:
            self.errors.append("is_cancelled after finish")
        return self.is_gone

    def wait(self, predicate: Callable[["FakeResponder"], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: predicate(self), WAIT_S), self.frames[-3:]

    @property
    def steps(self) -> list[wire.StepFrame]:
        return [frame.step for frame in self.frames if frame.HasField("step")]

    @property
    def tokens(self) -> dict[int, list[int]]:
        got: dict[int, list[int]] = defaultdict(list)
        for step in self.steps:
            tokens = iter(step.token)
            assert len(set(step.sequence)) == len(step.sequence)
            for sequence, count in zip(step.sequence, step.count, strict=True):
                got[sequence] += [next(tokens) for _ in range(count)]
        return dict(got)

    @property
    def finished(self) -> dict[int, wire.Finished]:
        ended = [finished for step in self.steps for finished in step.finished]
        by_id = {finished.sequence: finished for finished in ended}
        assert len(by_id) == len(ended)
        return by_id


class Router:
    """A router with one attachment to the host."""

    def __init__(
        self, host: EngineHost, epoch: int, name: str = "r1", credit: int = 1000, resumed: int = 0
    ) -> None:
        self.host, self.epoch = host, epoch
        self.attached = FakeResponder()
        attach = wire.Attach(
            router_id=name, epoch=epoch, credit_frames=credit, resumed_epoch=resumed
        )
        self.host.handle(wire.HostRequest(attach=attach).SerializeToString(), self.attached)
        self.attached.wait(lambda r: len(r.frames) > 0)

    @property
    def hello(self) -> wire.Attached:
        return self.attached.frames[0].attached

    def send(self, **kind: Any) -> FakeResponder:
        responder = FakeResponder()
        self.host.handle(wire.HostRequest(**kind).SerializeToString(), responder)
        return responder

    def ask(self, **kind: Any) -> wire.HostFrame:
        responder = self.send(**kind)
        responder.wait(lambda r: r.is_finished)
        assert responder.errors == []
        (frame,) = responder.frames
        return frame

    def submit(self, *ids: int, count: int = 5, **options: Any) -> FakeResponder:
        values = {"prompt": [5, 6, 7], "output_tokens_max": count, **options}
        return self.submit_messages(*(wire.Sequence(id=number, **values) for number in ids))

    def submit_messages(self, *sequences: wire.Sequence) -> FakeResponder:
        return self.send(submit=wire.Submit(epoch=self.epoch, sequences=sequences))

    def cancel(self, *ids: int) -> None:
        self.send(cancel=wire.Cancel(epoch=self.epoch, sequences=ids))

    def credit(self, frames: int) -> None:
        self.send(credit=wire.Credit(epoch=self.epoch, frames=frames))

    def wait_finished(self, *ids: int) -> dict[int, wire.Finished]:
        self.attached.wait(lambda r: set(ids) <= r.finished.keys())
        return self.attached.finished


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[..., EngineHost]]:
    """Make a host with a new FakeDriver, which is its `_core._driver`."""
    hosts: list[EngineHost] = []

    def make(waiting_max: int = 1024, *, has_artifacts: bool = True, **options: Any) -> EngineHost:
        driver = FakeDriver(**{"step_s": 0.001, **options})
        directory = tmp_path if has_artifacts else None
        host = EngineHost(driver, "base", waiting_max=waiting_max, artifacts_dir=directory)
        host.start()
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.close(0.0)
        assert not host._loop.is_alive()
        assert not host._replier.is_alive()
        assert not any(sender.is_alive() for sender in host._senders)
        pools = (host._workers, host._compilers)
        assert not any(worker.is_alive() for pool in pools for worker in pool._threads)


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., str]:
    """Put an adapter of the fake driver into the artifact folder, and return its digest."""

    def make(letter: str, content: str = "good") -> str:
        folder = tmp_path / (letter * 64)
        folder.mkdir()
        (folder / "adapter").write_text(content)
        return folder.name

    return make


@pytest.fixture
def attach_router() -> Callable[..., Router]:
    return Router


@pytest.fixture
def make_responder() -> type[FakeResponder]:
    return FakeResponder


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return until


class ManualBackground:
    """Background work whose jobs end when the test ends them."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.is_full = False

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> bool:
        if not self.is_full:
            self.jobs.append((work, done))
        return not self.is_full

    def finish(self, index: int = 0) -> None:
        work, done = self.jobs.pop(index)
        try:
            outcome = work()
        except (RefusedError, ZeroDivisionError, OSError) as error:
            outcome = error
        done(outcome)


class Bench:
    """A host's core without threads, and one attached router that reads every frame."""

    def __init__(
        self,
        directory: Path | None,
        waiting_max: int = 1024,
        shelf: Any = None,
        **options: Any,
    ) -> None:
        self.now_s = 0.0
        self.driver = FakeDriver(**options)
        self.background, self.compilers = ManualBackground(), ManualBackground()
        self.seeds = iter(range(1000, 10**9))
        self.core = HostCore(
            self.driver,
            "base",
            waiting_max=waiting_max,
            entropy=lambda: next(self.seeds),
            background=self.background,
            compilers=self.compilers,
            artifacts_dir=directory,
            shelf=shelf,
            clock=lambda: self.now_s,
        )
        self.attachment, self.attached = self.attach("r1", 1)
        self.encoder = FrameEncoder(512)
        self.finished: dict[int, wire.Finished] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.frames: list[wire.StepFrame] = []

    def attach(self, name: str, epoch: int, *, credit: int = 10**6, resumed: int = 0):
        message = wire.Attach(
            router_id=name, epoch=epoch, credit_frames=credit, resumed_epoch=resumed
        )
        return self.core.attach(message, self.now_s)

    def submit(self, *sequences: wire.Sequence, epoch: int = 1) -> None:
        self.core.submit(epoch, sequences, self.now_s)

    def step(self) -> wire.StepFrame | None:
        """Run a step of the core, and return the frame that the router reads, if there is one."""
        events = self.core.step()
        self.now_s += 0.001
        self.core.publish(events, self.now_s)
        news, _ = self.attachment.outbox.take(0)
        if news is None:
            return None
        frame = wire.HostFrame.FromString(self.encoder.encode(news)).step
        tokens = iter(frame.token)
        for sequence, count in zip(frame.sequence, frame.count, strict=True):
            assert sequence not in self.finished
            self.tokens[sequence] += [next(tokens) for _ in range(count)]
        for finished in frame.finished:
            assert finished.sequence not in self.finished
            self.finished[finished.sequence] = finished
        self.frames.append(frame)
        return frame

    def run(self) -> None:
        self.step()
        while self.driver.has_work:
            self.step()


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(*, has_artifacts: bool = True, **options: Any) -> Bench:
        return Bench(tmp_path if has_artifacts else None, **options)

    return make


@pytest.fixture(scope="session")
def bench_class() -> type[Bench]:
    return Bench


@pytest.fixture(scope="session")
def expected_tokens() -> Callable[[int, int], list[int]]:
    def expected(seed: int, count: int) -> list[int]:
        return [token_at(seed, position) for position in range(count)]

    return expected
