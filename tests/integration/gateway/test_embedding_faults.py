"""Real replicas that make embeddings, killed and frozen under load: nobody's answer is wrong."""

import asyncio
import random
import signal
from pathlib import Path

import numpy as np
import openai
import pytest

from replica.agent.replica_state import EngineSpec
from replica.embedding.engine import load_embedding
from sluice.artifacts import artifact_path, import_directory
from sluice.wire.control.v1 import control_pb2 as control
from tests.support.random_bert import TINY, write_random_bert
from tests.support.scripted_embedder import ready_replica, write_embedding_base
from tests.support.tritons import running_tritons

pytestmark = pytest.mark.real

MODEL = "vectors"
_random = random.Random(7)


class Load:
    """Clients that ask without a pause; every answer is compared."""

    def __init__(self, sdk: openai.AsyncOpenAI, engine) -> None:
        self.answered = 0
        self.is_over = False
        self._sdk = sdk
        self._engine = engine

    async def client(self, texts_max: int) -> None:
        while not self.is_over:
            texts = [
                _random.choices(range(5, 190), k=_random.randint(1, TINY.tokens_max))
                for _ in range(_random.randint(1, texts_max))
            ]
            answer = await self._sdk.embeddings.create(model=MODEL, input=texts)
            computed = self._engine.embed([np.array([ids], np.int32) for ids in texts])
            found = np.array([item.embedding for item in answer.data])
            assert np.abs(found - np.concatenate(computed.outcomes)).max() < 1e-5
            self.answered += 1

    async def more(self, count: int) -> None:
        """Wait until so many more requests have been answered."""
        wanted = self.answered + count
        async with asyncio.timeout(100):
            while self.answered < wanted:  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.01)


async def test_a_replica_killed_and_another_frozen_cost_no_request(
    world, artifacts, tmp_path: Path, eventually
) -> None:
    base = tmp_path / "base"
    write_embedding_base(base, dimensions=TINY.hidden)
    write_random_bert(base)  # its config.json replaces the other
    digest = import_directory(base, artifacts[0])
    specs = {name: EngineSpec("embed", digest) for name in ("e1", "e2")}
    async with world() as w, running_tritons(tmp_path, specs, artifacts_dir=artifacts[0]) as both:
        objects = control.Objects()
        objects.CopyFrom(w.feed.objects)
        objects.bases.add(digest=digest, context_tokens_max=TINY.tokens_max)
        objects.pools.add(id="embedders", base_digest=digest, engine="embed")
        objects.models.add(id=MODEL, base_digest=digest, pool_id="embedders")
        for triton in both:
            objects.replicas.append(ready_replica(triton.replica_id, "embedders", triton.address))
        w.feed.replace(objects)
        usable = lambda: w.gateway.embedders.usable  # noqa: E731
        await eventually(lambda: usable() == 2)
        engine = load_embedding(artifact_path(artifacts[0], digest), {})
        async with w.sdk() as sdk, asyncio.TaskGroup() as tasks:
            load = Load(sdk, engine)
            for texts_max in (1, 1, 1, 8, 8, 100):
                tasks.create_task(load.client(texts_max))
            await load.more(20)
            both[0].signal(signal.SIGKILL)
            await eventually(lambda: usable() == 1)
            await load.more(50)
            await both[0].restart()
            await eventually(lambda: usable() == 2)
            await load.more(20)
            both[1].signal(signal.SIGSTOP)
            await eventually(lambda: usable() == 1)
            await load.more(50)
            both[1].signal(signal.SIGCONT)
            # Triton 24.10 may end on waking up ("lock_exception": what it shares with its stub was
            # held for too long); then its agent starts it again.
            await eventually(lambda: usable() == 2 or not both[1].child.is_running)
            if not both[1].child.is_running:
                await both[1].restart()
            await eventually(lambda: usable() == 2)
            await load.more(20)
            load.is_over = True
