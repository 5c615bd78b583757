"""The gateway as a process, with the real router and real Tritons (engine `sim`) behind it.

The control plane is away all the time: gateway and router start from their snapshots.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from cli.stack.broker import broker_spec
from replica.agent.replica_state import EngineSpec
from replica.agent.triton import MODEL
from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from sluice.watch import write_snapshot
from sluice.wire.control.v1 import control_pb2 as control
from tests.integration.conftest import child_environment
from tests.integration.gateway.ledger import Ledger
from tests.support.tritons import Triton, running_tritons

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

KEY = "sk-process"
HELLO = [{"role": "user", "content": "hello"}]
WAIT_S = 60.0
NOBODY = "127.0.0.1:1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tritons(
    tmp_path_factory: pytest.TempPathFactory, artifacts
) -> AsyncIterator[list[Triton]]:
    root, digest, _ = artifacts
    spec = EngineSpec("sim", digest, (("blocks", "4096"), ("cost_step_s", "0.01")))
    async with running_tritons(
        tmp_path_factory.mktemp("replicas"),
        {"replica-1": spec, "replica-2": spec},
        artifacts_dir=root,
    ) as found:
        yield found


@dataclass
class Site:
    """A router and a gateway process; ports and files stay when they are started again."""

    home: Path
    objects: control.Objects
    artifacts: Path
    valkey_url: str
    kafka: str
    router_port: int
    http_port: int

    def spec(self, name: str, port: int, **settings: str) -> ProcessSpec:
        state = self.home / name
        snapshot = control.WatchResponse(version=1, is_snapshot=True, upserts=self.objects)
        for file in ("router-snapshot.bin", "control.snapshot"):
            write_snapshot(iter([snapshot.SerializeToString()]), state / file)
        shared = {"CONTROL_ADDRESS": NOBODY, "STATE_DIR": str(state)} | settings
        return ProcessSpec(
            name=name,
            command=[sys.executable, "-m", name],
            env={"PATH": "/usr/bin:/bin", **shared_secret.environment()}
            | {f"{name.upper()}__{key}": value for key, value in shared.items()},
            log_file=self.home / f"{name}.log",
            ready=lambda: port_answers("127.0.0.1", port),
        )

    def router(self) -> ProcessSpec:
        return self.spec(
            "router",
            self.router_port,
            INSTANCE_ID="router-1",
            GRPC_ADDRESS=f"127.0.0.1:{self.router_port}",
            HTTP_ADDRESS=f"127.0.0.1:{free_port()}",
        )

    def gateway(self, **settings: str) -> ProcessSpec:
        return self.spec(
            "gateway",
            self.http_port,
            INSTANCE_ID="g",
            HTTP_ADDRESS=f"127.0.0.1:{self.http_port}",
            ARTIFACTS_DIR=str(self.artifacts),
            VALKEY_URL=self.valkey_url,
            KAFKA_BOOTSTRAP=self.kafka,
            FLUSH_S="1",
            **settings,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S
        )

    async def until_ready(self) -> None:
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient() as http:
            while True:
                try:
                    if (await http.get(f"{self.url}/readyz")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="module")
async def site(tmp_path: Path, tritons, artifacts, valkey) -> AsyncIterator[Callable[..., Site]]:
    root, digest, _ = artifacts
    router_port, http_port = free_port(), free_port()
    objects = control.Objects(
        tenants=[control.Tenant(id="one")],
        keys=[
            control.ApiKey(
                id="k", tenant_id="one", secret_sha256=hashlib.sha256(KEY.encode()).digest()
            )
        ],
        bases=[control.Base(digest=digest, context_tokens_max=2048)],
        models=[control.Model(id="tiny", base_digest=digest, pool_id="pool")],
        cells=[
            control.Cell(
                id="cell", pool_id="pool", router_id="router-1",
                router_address=f"127.0.0.1:{router_port}", epoch=1,
            )
        ],
        replicas=[
            control.Replica(
                id=triton.replica_id, cell_id="cell", grpc_address=triton.launch.grpc_address,
                triton_model=MODEL, state=control.REPLICA_STATE_READY,
            )
            for triton in tritons
        ],
    )  # fmt: skip

    def make(kafka: str = NOBODY) -> Site:
        return Site(tmp_path, objects, root, valkey[1], kafka, router_port, http_port)

    return make


@asynccontextmanager
async def running(spec: ProcessSpec) -> AsyncIterator[ChildProcess]:
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(WAIT_S)
        yield child
    finally:
        await child.stop()


async def streamed(
    sdk: openai.AsyncOpenAI, number: int, tokens: int, begun: asyncio.Semaphore
) -> tuple[str, int]:
    stream = await sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"tell me about {number}"}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [await anext(aiter(stream))]
    begun.release()
    chunks += [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks[-1].usage.completion_tokens


async def many(sdk: openai.AsyncOpenAI, tokens: int, disturb=None) -> list[tuple[str, int]]:
    begun = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(streamed(sdk, number, tokens, begun)) for number in range(16)]
        if disturb is not None:
            for _ in calls:
                await begun.acquire()
            await disturb()
    return [call.result() for call in calls]


async def test_sigterm_finishes_streams_and_exits_0(site) -> None:
    place = site()
    async with running(place.router()), running(place.gateway()) as gateway, place.sdk() as sdk:
        await place.until_ready()

        async def terminate() -> None:
            os.kill(gateway.pid, signal.SIGTERM)

        assert {count for _, count in await many(sdk, 150, terminate)} == {150}
        async with asyncio.timeout(WAIT_S):
            assert await gateway.wait() == 0


async def test_workers_share_the_port_and_all_end(site) -> None:
    place = site()
    spec = place.gateway(WORKERS="2")
    async with running(place.router()), running(spec) as parent:
        await place.until_ready()
        seen: set[str] = set()
        async with asyncio.timeout(WAIT_S):
            while len(seen) < 2:  # each connection may reach another worker
                async with place.sdk() as sdk:
                    await streamed(sdk, 1, 2, asyncio.Semaphore(0))
                # One log for all: a container's, or the file of the supervisor.
                lines = (place.home / "gateway.log").read_text().splitlines()
                seen = {json.loads(line)["worker"] for line in lines if "request_ended" in line}
        os.kill(parent.pid, signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await parent.wait() == 0
    with pytest.raises(OSError):  # noqa: PT011 - refused; nobody is left
        await port_answers("127.0.0.1", place.http_port)


async def begun(sdk: openai.AsyncOpenAI, number: int) -> tuple[str, openai.AsyncStream]:
    """Begin an answer that takes long; return its id, too."""
    stream = await sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"tell me about {number}"}],
        stream=True,
        max_tokens=1500,
        n=1 + number % 2,
        extra_body={"ignore_eos": True},
    )
    first = await anext(aiter(stream))
    return first.id.partition("-")[2], stream


async def is_whole(stream: openai.AsyncStream) -> bool:
    """Read a stream to its end; False when it is cut."""
    try:
        async for _ in stream:
            pass
    except (httpx.TransportError, openai.APIError):
        return False
    return True


async def test_open_requests_of_a_killed_gateway_are_reported_once_and_in_full(
    site, broker
) -> None:
    place = site(broker.address)
    spec = place.router()
    async with running(spec) as router, running(place.gateway()) as gateway, place.sdk() as sdk:
        await place.until_ready()
        streams = await asyncio.gather(*(begun(sdk, number) for number in range(16)))
        whole = await asyncio.gather(
            *(
                sdk.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
                for _ in range(4)
            )
        )
        os.kill(gateway.pid, signal.SIGKILL)  # with events of the last four in its memory
        await gateway.stop()
        cut = [uid for uid, stream in streams if not await is_whole(stream)]
        async with running(place.gateway()):  # brings the router's closings to the broker
            await place.until_ready()
            ids = {uid for uid, _ in streams} | {it.id.partition("-")[2] for it in whole}
            ledger = Ledger(broker.address)
            await asyncio.to_thread(ledger.read_until, {f"evt_{uid}" for uid in ids})
            page = await fetch(spec.env["ROUTER__HTTP_ADDRESS"], "/metrics")
            await router.stop()
            await asyncio.to_thread(ledger.read_until, set(), has_last_word=True)
    assert len(ids) == 20
    lost = {f"evt_{uid}" for uid in cut}
    assert lost, "all were over before it was killed"
    assert set(ledger.closings) >= lost
    assert not set(ledger.told) & lost
    [made] = [line for line in page.splitlines() if line.startswith("router_tokens_total ")]
    assert sum(ledger.tokens().values()) == float(made.split()[1])
    counts = [event.count for event in ledger.counts.values()]
    certain = sum(count.output_tokens for count in counts)
    assert certain + sum(count.uncertain_tokens for count in counts) == float(made.split()[1])
    for parts in (ledger.closings[event_id] for event_id in lost):
        assert {event.outcome for event in parts.values()} == {"gateway_lost"}
        assert parts[0].prompt_tokens > 0
        assert parts[0].replica_id.startswith("replica-")
        assert parts[0].output_tokens > 0
        assert (parts[0].tenant_id, parts[0].key_id, parts[0].model) == ("one", "k", "tiny")


@pytest.mark.parametrize("is_router_lost", [False, True])
async def test_a_finished_answer_is_told_although_its_event_was_in_a_killed_gateways_memory(
    site, tmp_path: Path, is_router_lost: bool
) -> None:
    """Its client has the last byte, its event is not at the broker, which is away: then the kill.

    The router tells of it; where that was lost first, the gateway has put the event on disk.
    """
    port = free_port()
    place = site(f"127.0.0.1:{port}")
    async with running(place.router()) as router, running(place.gateway()) as gateway:
        await place.until_ready()
        async with place.sdk() as sdk:
            answers = [
                await sdk.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=20, **options
                )
                for options in ({}, {"stop": ["a", "e", "t"]}, {"n": 2})
            ]
        ids = {f"evt_{answer.id.partition('-')[2]}" for answer in answers}
        if is_router_lost:
            os.kill(router.pid, signal.SIGKILL)
            await until_spooled(place.home / "gateway" / "events")
        os.kill(gateway.pid, signal.SIGKILL)
        await gateway.stop()
        broker = broker_spec(port, tmp_path / "broker.log", child_environment())
        async with AsyncExitStack() as again:
            await again.enter_async_context(running(broker))
            if is_router_lost:
                await router.stop()
                await again.enter_async_context(running(place.router()))
            await again.enter_async_context(running(place.gateway()))
            await place.until_ready()
            await asyncio.to_thread(Ledger(place.kafka).read_until, ids)


async def until_spooled(directory: Path) -> None:
    """Wait for less time than a gateway leaves events in memory while its broker is away."""
    for _ in range(60):
        if any(path.stat().st_size for path in directory.glob("*/*.spool")):
            return
        await asyncio.sleep(0.05)


async def test_each_accepted_request_is_reported_once_with_the_tokens_of_engines(
    site, broker
) -> None:
    place = site(broker.address)
    async with running(place.gateway()), place.sdk() as sdk:
        async with running(place.router()):
            await place.until_ready()
            with pytest.raises(openai.NotFoundError):  # never accepted
                await sdk.chat.completions.create(model="no", messages=HELLO)
            whole = asyncio.gather(
                *(streamed(sdk, it, 40, asyncio.Semaphore(0)) for it in range(4))
            )
            streams = await asyncio.gather(*(begun(sdk, number) for number in range(8)))
            for _, stream in streams:
                await stream.close()
            for number in range(8):  # some of which end at a stop string, in the middle of a step
                await sdk.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=60, seed=number, stop=["a", "e", "t"]
                )
            await whole
        ledger = Ledger(broker.address)
        ids = {f"evt_{uid}" for uid, _ in streams}
        await asyncio.to_thread(ledger.read_until, ids, has_last_word=True, told=20)
    assert len(ledger.told) == 20
    assert not ledger.closings
    streamed_to_the_end = [
        event for event in ledger.told.values() if event.is_stream and event.outcome == "length"
    ]
    assert len(streamed_to_the_end) == 4
    for event in streamed_to_the_end:
        assert (event.output_tokens, event.status) == (40, 200)
        assert (event.cell_id, event.router_id) == ("cell", "router-1")
        assert event.replica_id.startswith("replica-")
        assert 0 < event.gateway_us <= event.ttft_us <= event.total_us
        assert event.itl_max_us > 0
        assert event.prompt_tokens > 0
    told = sum(event.output_tokens for event in ledger.told.values())
    counts = [event.count for event in ledger.counts.values()]
    assert sum(count.output_tokens for count in counts) == told > 4 * 40
    assert sum(count.uncertain_tokens for count in counts) == 0


async def fetch(address: str, path: str) -> str:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return (await http.get(f"http://{address}{path}")).text
