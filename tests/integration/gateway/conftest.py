"""A real gateway worker on real Valkey and real gRPC, with a control feed and a scripted router."""

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import psutil
import pytest
from tokenizers import Tokenizer

from cli.stack.valkey import valkey_spec, valkey_url
from control_plane.database import Database
from control_plane.records.service import RecordService
from control_plane.responses.service import StateService
from gateway.app import Gateway, running_gateway
from gateway.settings import GatewaySettings
from sluice import shared_secret
from sluice.artifacts import import_directory
from sluice.process import ChildProcess, ProcessSpec, free_port
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.state.v1 import state_pb2 as state
from sluice.wire.state.v1.state_pb2_grpc import (
    BatchServiceServicer,
    RecordServiceServicer,
    StateServiceServicer,
)
from tests.integration.gateway.tool_site import tools
from tests.support.random_models import write_random_model
from tests.support.scripted_router import BaseFiles, ControlFeed, Plan, ScriptedRouter, serve
from tests.support.warm_sdk import warm_sdk
from tests.waiting import until as eventually

__all__ = ["tools"]  # a fixture

KEY, OTHER_KEY, LIMITED_KEY, DEAD_KEY = "sk-one", "sk-two", "sk-limited", "sk-dead"
TIER_DEADLINE_MS = 1_500  # of `small`
PASSWORD = "test-secret_1"


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Tokenizer]:
    home = tmp_path_factory.mktemp("bases")
    write_random_model(home / "base")
    digest = import_directory(home / "base", home / "artifacts")
    return home / "artifacts", digest, Tokenizer.from_file(str(home / "base/tokenizer.json"))


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[tuple[ChildProcess, str]]:
    port = free_port()
    spec = valkey_spec(port, tmp_path / "valkey", tmp_path / "valkey.log", {}, password=PASSWORD)
    child = await ChildProcess.start(spec)
    try:
        await child.wait_ready(60)
        yield child, valkey_url(port, PASSWORD)
    finally:
        await child.stop()


Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class World:
    """Everything a gateway needs, and clients for it."""

    def __init__(self, digest: str, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.digest = digest
        self.text = "Hello héllo 你好 😀 world, the router owns a cell."
        self.router = ScriptedRouter(self.default_plan)
        self.feed = ControlFeed(control.Objects())
        self.base_files = BaseFiles()
        self.gateway: Gateway
        self.settings: GatewaySettings
        self.valkey: ChildProcess
        self.base_url = self.router_address = ""
        self.versions: dict[str, bool] = {}  # of HTTP that clients speak; empty: as they are

    async def raw(self, body: dict[str, object], version: str = "1.1", **limits: int) -> Raw:
        """Send a chat request over a bare connection; return its reader and writer."""
        host, port = self.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), **limits)
        content = json.dumps(body).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/%b\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
            b"Content-Length: %d\r\n\r\n%b"
            % (version.encode(), KEY.encode(), len(content), content)
        )
        return reader, writer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def default_plan(self, submit: wire.Submit) -> Plan:
        ids = self.ids(self.text)[: submit.output_tokens_max]
        is_all = len(ids) == len(self.ids(self.text))
        if is_all and len(ids) < submit.output_tokens_max:
            ids.append(2)  # <|im_end|>
            outcome = wire.Outcome(kind=wire.OUTCOME_KIND_STOP)
        else:
            outcome = wire.Outcome(kind=wire.OUTCOME_KIND_LENGTH)
        return Plan([[token] for token in ids], outcome, cached_tokens=3)

    def objects(self, router_address: str) -> control.Objects:
        def key(name: str, tenant: str, **fields: object) -> control.ApiKey:
            secret = hashlib.sha256(name.encode()).digest()
            return control.ApiKey(
                id=f"key-{name}", tenant_id=tenant, secret_sha256=secret, **fields
            )

        return control.Objects(
            tiers=[
                control.Tier(id="free", priority=1),
                control.Tier(
                    id="small", priority=1, rpm=5, tpm=1000, ttft_deadline_ms=TIER_DEADLINE_MS
                ),
            ],
            tenants=[
                control.Tenant(id="one", tier_id="free", cache_salt=b"1"),
                control.Tenant(id="two", tier_id="free", cache_salt=b"2"),
                control.Tenant(id="limited", tier_id="small"),
            ],
            keys=[
                key(KEY, "one"),
                key(OTHER_KEY, "two"),
                key(LIMITED_KEY, "limited"),
                key(DEAD_KEY, "one", is_disabled=True),
            ],
            bases=[control.Base(digest=self.digest, context_tokens_max=256)],
            models=[
                control.Model(id="tiny", base_digest=self.digest, pool_id="pool", release="1"),
                control.Model(
                    id="one/own", base_digest=self.digest, pool_id="pool", owner_tenant_id="one"
                ),
                control.Model(id="nowhere", base_digest=self.digest, pool_id="empty"),
            ],
            pools=[control.Pool(id="pool", base_digest=self.digest)],
            cells=[
                control.Cell(
                    id="cell", pool_id="pool", router_id="scripted", router_address=router_address
                )
            ],
        )

    def sdk(self, key: str = KEY) -> openai.AsyncOpenAI:
        client = openai.DefaultAsyncHttpxClient(**self.versions) if self.versions else None
        return openai.AsyncOpenAI(
            base_url=f"{self.base_url}/v1",
            api_key=key,
            max_retries=0,
            timeout=60,
            http_client=client,
        )

    def http(self, key: str = KEY) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=60, **self.versions
        )


MakeWorld = Callable[..., object]


@pytest.fixture
def world(tmp_path: Path, artifacts, valkey) -> MakeWorld:
    root, digest, tokenizer = artifacts

    @asynccontextmanager
    async def start(
        *servicers: StateServiceServicer | RecordServiceServicer | BatchServiceServicer,
        **settings: object,
    ) -> AsyncIterator[World]:
        made = World(digest, tokenizer)
        made.valkey = valkey[0]
        async with (
            serve(made.router) as router_address,
            serve(made.feed, made.base_files, *servicers) as control_address,
        ):
            made.router_address = router_address
            made.feed.replace(made.objects(router_address))
            port = free_port()
            config = GatewaySettings(
                **{
                    "instance_id": "gateway-test",
                    "http_address": f"127.0.0.1:{port}",
                    "control_address": control_address,
                    "state_dir": tmp_path / "state",
                    "artifacts_dir": root,
                    "valkey_url": valkey[1],
                    "kafka_bootstrap": "127.0.0.1:1",  # nobody: events go to the spool
                    "flush_s": 0.05,
                    "idle_grace_s": 0.0,
                    "limit_deadline_s": 5.0,  # nobody decides locally since the machine is busy
                    **settings,
                }
            )
            made.settings = config
            async with running_gateway(config) as made.gateway:
                made.base_url = f"http://127.0.0.1:{port}"
                await eventually(lambda: not made.gateway.not_ready_because())
                await eventually(lambda: made.gateway.limiter.is_shared)
                yield made

    return start


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[None]]:
    return eventually


def environment(settings: object, **changes: object) -> dict[str, str]:
    """The settings of the world's own gateway, for a process beside it."""
    values = {**settings.model_dump(exclude_none=True), **changes}
    values["valkey_url"] = settings.valkey_url.get_secret_value()
    names = {f"GATEWAY__{k.upper()}": str(v) for k, v in values.items()}
    return {"PATH": "/usr/bin:/bin", **shared_secret.environment(), **names}


@dataclass
class Fleet:
    """A parent with its workers."""

    parent: ChildProcess
    port: int
    ops_port: int
    log_file: Path

    @property
    def workers(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.parent.pid).children()]

    async def ops(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.get(f"http://127.0.0.1:{self.ops_port}{path}")

    async def until(self, check: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    if await check():
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.ops("/readyz")).status_code == 200

        await self.until(is_ready)

    async def until_names(self, wanted: set[str]) -> None:
        """Wait until these workers run, and no others."""

        async def are_there() -> bool:
            return await self.names() == wanted

        await self.until(are_there)

    async def names(self) -> set[str]:
        page = (await self.ops("/metrics")).text
        lines = [x for x in page.splitlines() if x.startswith("gateway_open_connections{")]
        return {line.split('worker="')[1].split('"')[0] for line in lines}


@asynccontextmanager
async def running_fleet(settings: object, home: Path, **changes: object) -> AsyncIterator[Fleet]:
    port, ops_port = free_port(), free_port()

    async def ready() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", ops_port)
        writer.close()

    spec = ProcessSpec(
        name="fleet",
        command=[sys.executable, "-m", "gateway"],
        env=environment(
            settings,
            **{
                "instance_id": "fleet",
                "http_address": f"127.0.0.1:{port}",
                "ops_address": f"127.0.0.1:{ops_port}",
                "state_dir": home / "fleet",
                "workers": 2,
                "idle_grace_s": 1.0,
                **changes,
            },
        ),
        log_file=home / "fleet.log",
        ready=ready,
        stop_grace_s=30,
    )
    parent = await ChildProcess.start(spec)
    try:
        await parent.wait_ready(60)
        fleet = Fleet(parent, port, ops_port, spec.log_file)
        await fleet.until_ready()
        yield fleet
    finally:
        family = psutil.Process(parent.pid).children() if parent.is_running else []
        await parent.stop()
        assert not psutil.wait_procs(family, timeout=60)[1]


@pytest.fixture
def fleets(tmp_path: Path) -> Callable[..., object]:
    """Starts a gateway of processes beside the world's own: `fleets(w.settings, workers=2)`."""
    return partial(running_fleet, home=tmp_path)


class Records(RecordService):
    """The control plane's own, which a test may cut off."""

    is_away = False

    async def _run(self, work: Any, context: Any) -> Any:
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off by the test")
        return await super()._run(work, context)


class Service(StateService):
    """The control plane's own, which a test may cut off."""

    is_away = False
    kept: int = 0
    records: Records

    async def _run(self, work: Any, context: Any) -> Any:
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off by the test")
        return await super()._run(work, context)

    async def Keep(self, request: state.KeepRequest, context: Any) -> state.KeepResponse:  # noqa: N802
        answer = await super().Keep(request, context)
        self.kept += len(request.responses)
        return answer


@pytest.fixture
async def service(database_url: str) -> AsyncIterator[Service]:
    database = Database(database_url)
    made = Service(database)
    made.records = Records(database)
    yield made
    await database.close()


@pytest.fixture(scope="session")
def warmed_sdk() -> None:
    """Build the SDK's types outside of the loop that the servers share."""
    warm_sdk()


@pytest.fixture
def stateful(warmed_sdk: None, world: Any, service: Service, eventually: Any) -> Any:
    del warmed_sdk

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Any]:
        async with world(service, service.records, **settings) as w:
            await eventually(lambda: w.gateway.stateful.responses.can_keep)
            yield w

    return start
