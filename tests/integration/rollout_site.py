"""What the tests of rollouts share: a model with two releases, a gateway, a telemetry service.

The telemetry service is a script: it tells windows in which canary is as good as control, or not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import grpc.aio
from aiohttp import web
from sqlalchemy import make_url

from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.links import trusted_channel

BASE = "d1" * 32
NEW, OLD = "d2" * 32, "d3" * 32  # adapters
KEY = "sk-sluice-admin-for-telemetry"
SHORT = {
    "stages": [
        {"share_percent": 10, "duration_min_s": 1, "sample_min": 100},
        {"share_percent": 100, "duration_min_s": 1, "sample_min": 0},
    ]
}
LONG = {"stages": [{"share_percent": 10, "duration_min_s": 600}, {"share_percent": 100}]}
_REQUESTS = 200  # of each arm in a window
_CONFIRM_S = 0.2


def _arm(errors: int) -> dict[str, Any]:
    return {
        "requests": _REQUESTS,
        "errors": {"engine_failed": errors} if errors else {},
        "refusals": 0,
        **{name: {"20": _REQUESTS - errors} for name in ("ttft_ms", "tpot_us", "output_tokens")},
    }


@dataclass
class Telemetry:
    """Says of every window what the test wants it to say."""

    port: int = 0  # once it listens
    is_bad: bool = False
    asked: int = 0
    # Rollouts of which it takes requests and answers none, until this is set.
    silent: dict[str, asyncio.Event] = field(default_factory=dict)
    unanswered: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CONTROL_PLANE__TELEMETRY_URL": f"http://127.0.0.1:{self.port}",
            "CONTROL_PLANE__TELEMETRY_KEY": KEY,
            "CONTROL_PLANE__ROLLOUT_WINDOW_S": "1",
        }

    def hang(self, rollout: str) -> None:
        self.silent[rollout] = asyncio.Event()

    def answer(self) -> None:
        for answers in self.silent.values():
            answers.set()
        self.silent.clear()

    async def windows(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        self.asked += 1
        if (answers := self.silent.get(request.match_info["id"])) is not None:
            self.unanswered += 1
            await answers.wait()
        after, until, length = (
            int(request.query[name]) for name in ("after_ms", "until_ms", "window_ms")
        )
        data = [
            {
                "start_ms": start,
                "end_ms": start + length,
                "control": _arm(2),
                "canary": _arm(100 if self.is_bad else 2),
            }
            for start in range(after, until - length + 1, length)
        ]
        now_ms = int(time.time() * 1000)
        return web.json_response({"ingested_until_unix_ms": now_ms, "data": data})


@asynccontextmanager
async def running_telemetry() -> AsyncIterator[Telemetry]:
    telemetry = Telemetry()
    application = web.Application()
    application.router.add_get("/v1/rollouts/{id}/windows", telemetry.windows)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        telemetry.port = runner.addresses[0][1]
        yield telemetry
    finally:
        telemetry.answer()
        await runner.cleanup()


@dataclass
class Gateway:
    """Watches splits, and confirms what it has seen."""

    watcher: ControlWatcher
    address: str
    shares: list[int] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # bases that it says it cannot serve

    def take(self, response: wire.WatchResponse) -> None:
        self.shares += [split.share for split in response.upserts.splits]

    @property
    def splits(self) -> dict[str, wire.Split]:
        return dict(self.watcher.state.splits)

    async def run(self) -> None:
        async with trusted_channel(self.address) as channel:
            stub = ControlServiceStub(channel)
            while True:
                version = self.watcher.state.version
                told = wire.ConfirmRequest(
                    gateway_id="gateway-1", version=version, missing_bases=self.missing
                )
                with suppress(grpc.aio.AioRpcError):  # it says it again anyway
                    await stub.Confirm(told, timeout=5)
                await asyncio.sleep(_CONFIRM_S)


@asynccontextmanager
async def running_gateway(address: str) -> AsyncIterator[Gateway]:
    watcher = ControlWatcher(address, wire.ROLE_GATEWAY, "gateway-1", "", None)
    gateway = Gateway(watcher, address)
    watcher.on_change(gateway.take)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in (watcher.run(), gateway.run())]
        try:
            assert await watcher.wait_synced(30)
            yield gateway
        finally:
            for task in running:
                task.cancel()


async def begin(plane: Any, model: str, **more: Any) -> str:
    """Begin the rollout of a model's release `new`; returns its id."""
    body = {"model_id": model, "release": "new"} | more
    made = await plane.admin.post("/v1/rollouts", json=body)
    assert made.status_code == 201, made.text
    return made.json()["id"]


async def shown(plane: Any, rollout: str) -> dict[str, Any]:
    """A rollout as everybody sees it."""
    answer = await plane.admin.get(f"/v1/rollouts/{rollout}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def reaches(plane: Any, rollout: str, **wanted: Any) -> Callable[[], Awaitable[bool]]:
    """A condition: a rollout shows these values."""

    async def check() -> bool:
        found = await shown(plane, rollout)
        return all(found[name] == value for name, value in wanted.items())

    return check


async def make_model(plane: Any, model: str, pool_id: str = "main", **more: str) -> None:
    """A model that stands for `old`, with a release `new` beside it."""
    for release, digest in (("new", NEW), ("old", OLD)):
        await plane.put(
            f"models/{model}",
            base_digest=BASE,
            pool_id=pool_id,
            adapter_digest=digest,
            release=release,
            **more,
        )


async def make_fleet(plane: Any) -> None:
    """A pool with a replica that is ready, on a node that is not lost for a day.

    Its profile is one that needs no router: there is none here.
    """
    await plane.put(f"bases/{BASE}", context_tokens_max=64)
    await plane.put("pools/main", base_digest=BASE, engine="sim", replicas_wanted=1)
    url = make_url(plane.spec.env["CONTROL_PLANE__DATABASE_URL"])
    connection = await asyncpg.connect(
        url.set(drivername="postgresql").render_as_string(hide_password=False), timeout=20
    )
    try:
        await connection.execute(
            # No engine runs here: every canary counts as tried on the node at once.
            "CREATE FUNCTION try_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO rollout_trials (rollout_id, node_id) VALUES (NEW.id, 'node');"
            " RETURN NULL; END $$;"
            " CREATE TRIGGER tried AFTER INSERT ON rollouts FOR EACH ROW EXECUTE FUNCTION try_it();"
            " INSERT INTO nodes (id, engines, cpu_count, seen_at)"
            " VALUES ('node', '{sim}', 8, now() + interval '1 day')"
        )
        await connection.execute(
            "INSERT INTO replicas (id, pool_id, cell_id, node_id, state, profile, triton_model)"
            f" VALUES ('replica', 'main', 'main-0', 'node', {wire.REPLICA_STATE_READY}, 'embed',"
            " 'embed') ON CONFLICT DO NOTHING"
        )
    finally:
        await connection.close()
