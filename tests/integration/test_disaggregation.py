"""A prompt on one real engine, its answer on another: the KV blocks travel, the tokens are right."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL
from sluice import shared_secret
from sluice.artifacts import import_directory
from sluice.hashing import BLOCK_TOKENS, cache_root, chained_hashes
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub
from tests.links import trusted_channel
from tests.support.random_models import write_random_model
from tests.support.tritons import Triton, running_tritons

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CELL, ROUTER = "cell-1", "router-1"
ROLES = {"replica-1": "prefill", "replica-2": "decode"}
WAIT_S = 90.0
PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 24
REQUESTS = 6
ATTEMPTS = 5
OPTIONS = (("precision", "f32"), ("blocks", "512"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tritons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Triton]]:
    home = tmp_path_factory.mktemp("replicas")
    # A prompt takes longer than its transfer is predicted to take, on a fast machine, too.
    write_random_model(home / "base", changes={"intermediate_size": 8192})
    digest = import_directory(home / "base", home / "artifacts")
    spec = EngineSpec("openvino", digest, OPTIONS)
    async with running_tritons(home, dict.fromkeys(ROLES, spec)) as running:
        yield running


@asynccontextmanager
async def running_router(home: Path, tritons: list[Triton]) -> AsyncIterator[str]:
    """A router whose control plane is away: it starts from its snapshot."""
    objects = control.Objects(
        cells=[control.Cell(id=CELL, pool_id="pool", router_id=ROUTER, epoch=1)],
        replicas=[
            control.Replica(
                id=triton.replica_id,
                cell_id=CELL,
                grpc_address=triton.launch.grpc_address,
                triton_model=MODEL,
                state=control.REPLICA_STATE_READY,
                role=ROLES[triton.replica_id],
            )
            for triton in tritons
        ],
    )
    snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=objects)
    write_snapshot(iter([snapshot.SerializeToString()]), home / "router-snapshot.bin")
    port = free_port()
    env = {
        "PATH": "/usr/bin:/bin",
        **shared_secret.environment(),
        "ROUTER__INSTANCE_ID": ROUTER,
        "ROUTER__GRPC_ADDRESS": f"127.0.0.1:{port}",
        "ROUTER__HTTP_ADDRESS": f"127.0.0.1:{free_port()}",
        "ROUTER__CONTROL_ADDRESS": f"127.0.0.1:{free_port()}",
        "ROUTER__STATE_DIR": str(home),
    }
    spec = ProcessSpec(
        name="router",
        command=[sys.executable, "-m", "router"],
        env=env,
        log_file=home / "router.log",
        ready=lambda: port_answers("127.0.0.1", port),
    )
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(WAIT_S)
        yield f"127.0.0.1:{port}"
    finally:
        await child.stop()


async def answers(address: str, submits: list[wire.Submit]) -> dict[int, list[int]]:
    """Send everything at once; return the tokens by handle when all have ended."""
    tokens: dict[int, list[int]] = {submit.handle: [] for submit in submits}
    left = set(tokens)
    ready = 0
    async with trusted_channel(address) as channel, asyncio.timeout(WAIT_S):
        call = RouterServiceStub(channel).Connect()
        await call.write(wire.ConnectRequest(hello=wire.Hello(gateway_id="gateway")))
        while ready < len(ROLES):
            message = await call.read()
            ready = max((cell.replicas_ready for cell in message.cells), default=ready)
        await call.write(wire.ConnectRequest(submits=submits))
        while left:
            message = await call.read()
            told = iter(message.token)
            for handle, count in zip(message.handle, message.count, strict=True):
                tokens[handle].extend(next(told) for _ in range(count))
            for outcome in message.outcomes:
                assert outcome.kind == wire.OUTCOME_KIND_LENGTH, outcome
                left.remove(outcome.handle)
        call.cancel()
    return tokens


def submits(salt: bytes, *, is_split: bool) -> list[wire.Submit]:
    """The same prompts every time; without hashes nothing can be transferred."""
    root = cache_root("base", "", salt)
    out = []
    for handle in range(1, REQUESTS + 1):
        prompt = [3 + (7 * handle + 11 * position) % 400 for position in range(PROMPT_TOKENS)]
        out.append(
            wire.Submit(
                handle=handle,
                cell_id=CELL,
                tenant_id="tenant",
                prompt=prompt,
                output_tokens_max=OUTPUT_TOKENS,
                ignore_eos=True,
                cache_root=root,
                block_hashes=chained_hashes(prompt, root) if is_split else b"",
            )
        )
    return out


async def counter(triton: Triton, name: str, label: str) -> float:
    async with httpx.AsyncClient() as client:
        lines = (await client.get(triton.metrics_url)).text.splitlines()
    found = [line for line in lines if line.startswith(name) and f'"{label}"' in line]
    assert found, f"{name} has no {label}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def test_blocks_travel_and_the_answer_is_the_same(
    tritons: list[Triton], tmp_path: Path
) -> None:
    prefiller, decoder = tritons
    prefix, moved = "llm_prefix_cache_tokens_total", "llm_kv_transfer_blocks_total"
    async with running_router(tmp_path, tritons) as address:
        undisturbed = await answers(address, submits(b"one", is_split=False))
        assert await counter(prefiller, prefix, "miss") < PROMPT_TOKENS  # probes alone
        hits_before = await counter(decoder, prefix, "hit")
        # On a machine that stalls all transfers of a round may miss their deadline: right answers,
        # no blocks, and a pause before the next try.
        for attempt in range(ATTEMPTS):
            split = await answers(address, submits(b"two%d" % attempt, is_split=True))
            assert split == undisturbed
            imported = await counter(decoder, moved, "import")
            if imported:
                break
            await asyncio.sleep(2.0**attempt)
    assert {len(tokens) for tokens in undisturbed.values()} == {OUTPUT_TOKENS}
    assert imported > 0
    # Each engine refreshes its metrics four times a second: those of the import may be there first.
    for engine, metric, kind, wanted in (
        (prefiller, prefix, "miss", PROMPT_TOKENS),
        (prefiller, moved, "export", imported),
        (decoder, prefix, "hit", hits_before + BLOCK_TOKENS * imported),
    ):
        async with asyncio.timeout(10):
            while await counter(engine, metric, kind) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
