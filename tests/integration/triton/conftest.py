"""Real Tritons with the model `llm`, and routers that keep what they are told."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio

from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL
from sluice.artifacts import artifact_path, import_directory
from sluice.kserve import HostStream
from sluice.process import ChildProcess
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.random_models import write_random_model
from tests.support.tritons import running_triton

WAIT_S = 60.0
ENGINES: dict[str, tuple[tuple[str, str], ...]] = {
    "openvino": (("precision", "f32"), ("blocks", "512")),
    "sim": (("blocks", "4096"),),
}


@dataclass(frozen=True)
class Served:
    """A running Triton."""

    child: ChildProcess
    engine: str
    digest: str
    directory: Path  # of the base
    artifacts: Path
    address: str
    metrics_url: str
    blocks: int


@asynccontextmanager
async def running(home: Path, engine: str) -> AsyncGenerator[Served]:
    write_random_model(home / "base")
    digest = import_directory(home / "base", home / "artifacts")
    spec = EngineSpec(engine, digest, ENGINES[engine])
    async with running_triton(home, spec) as triton:
        yield Served(
            triton.child,
            engine,
            digest,
            artifact_path(home / "artifacts", digest),
            home / "artifacts",
            triton.address,
            triton.metrics_url,
            int(dict(ENGINES[engine])["blocks"]),
        )


@pytest.fixture(scope="session")
def run_triton() -> Callable[[Path, str], AbstractAsyncContextManager[Served]]:
    """Run a Triton in a folder, with an engine."""
    return running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start_triton(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Callable[[str], Awaitable[Served]]]:
    """Start a Triton with an engine; it runs until the module ends, and must still run then."""
    async with AsyncExitStack() as stack:

        async def start_one(engine: str) -> Served:
            home = tmp_path_factory.mktemp("triton")
            return await stack.enter_async_context(running(home, engine))

        yield start_one


class Router:
    """An attached stream that keeps what it was told."""

    epochs = iter(range(1, 1_000_000))

    def __init__(
        self, served: Served, name: str = "router", *, credit: int = 10_000, resumes: int = 0
    ) -> None:
        self.stream = HostStream(served.address, MODEL, silence_s=WAIT_S)
        self.name, self.credit, self.resumes = name, credit, resumes
        self.epoch = next(self.epochs)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, wire.Finished] = {}
        self.admitted: dict[int, wire.Admitted] = {}
        self.steps: list[wire.StepFrame] = []

    async def __aenter__(self) -> Self:
        await self.stream.open(timeout_s=WAIT_S)
        attach = wire.Attach(
            router_id=self.name,
            epoch=self.epoch,
            credit_frames=self.credit,
            resumed_epoch=self.resumes,
        )
        await self.stream.send(wire.HostRequest(attach=attach))
        frame = await self.stream.receive(WAIT_S)
        assert frame is not None
        self.attached = frame.attached
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stream.close(timeout_s=WAIT_S)

    async def submit(self, *sequences: wire.Sequence) -> None:
        submit = wire.Submit(epoch=self.epoch, sequences=sequences)
        await self.stream.send(wire.HostRequest(submit=submit))

    async def cancel(self, *ids: int) -> None:
        cancel = wire.Cancel(epoch=self.epoch, sequences=ids)
        await self.stream.send(wire.HostRequest(cancel=cancel))

    async def read_until(self, condition: Callable[["Router"], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                frame = await self.stream.receive(WAIT_S)
                assert frame is not None
                self.note(frame.step)

    async def finish(self, *sequences: wire.Sequence) -> None:
        """Submit, and read until all have ended, their forks among them."""
        ids = {message.id for message in sequences}
        ids |= {fork.id for message in sequences for fork in message.forks}
        await self.submit(*sequences)
        await self.read_until(lambda r: ids <= r.finished.keys())

    def note(self, step: wire.StepFrame) -> None:
        tokens = iter(step.token)
        for sequence, count in zip(step.sequence, step.count, strict=True):
            assert sequence not in self.finished
            self.tokens.setdefault(sequence, []).extend(next(tokens) for _ in range(count))
        self.finished.update({finished.sequence: finished for finished in step.finished})
        self.admitted.update({admitted.sequence: admitted for admitted in step.admitted})
        self.steps.append(step)


@pytest.fixture(scope="session")
def router_of() -> type[Router]:
    return Router


@pytest.fixture(scope="session")
def make_sequence() -> Callable[..., wire.Sequence]:
    """Make a sequence whose length is known."""

    def make(number: int, prompt: list[int], count: int, **options: Any) -> wire.Sequence:
        options = {"ignore_eos": True, **options}
        return wire.Sequence(id=number, prompt=prompt, output_tokens_max=count, **options)

    return make
