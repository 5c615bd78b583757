"""The telemetry service as a process of its own, for tests that stop, kill and ask it."""

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx

from sluice import shared_secret
from sluice.process import ChildProcess, ProcessSpec, free_port

WAIT_S = 120.0  # a broker lets a member that ended uncleanly go after 30 s or more
ADMIN_KEY = "admin-key-of-the-test"
_DATABASES = count(1)


class Telemetry:
    """`python -m telemetry`, which a test may stop, kill and start again."""

    def __init__(self, home: Path, broker: Any, tracestore: Any) -> None:
        self.database = f"telemetry_{next(_DATABASES)}"
        self._tracestore = tracestore
        self._port = free_port()
        self._child: ChildProcess | None = None
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port}",
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            timeout=60,
        )
        self._spec = ProcessSpec(
            name="telemetry",
            command=[sys.executable, "-m", "telemetry"],
            env={
                "PATH": os.environ["PATH"],
                **shared_secret.environment(),
                "TELEMETRY__KAFKA_BOOTSTRAP": broker.address,
                "TELEMETRY__CLICKHOUSE_URL": f"http://{tracestore.address}",
                "TELEMETRY__CLICKHOUSE_DATABASE": self.database,
                "TELEMETRY__HTTP_ADDRESS": f"127.0.0.1:{self._port}",
                "TELEMETRY__CLOSING_SETTLE_S": "0",
                "TELEMETRY__BATCH_WAIT_S": "0.25",
                "TELEMETRY__ADMIN_KEY_SHA256": hashlib.sha256(ADMIN_KEY.encode()).hexdigest(),
            },
            log_file=home / "telemetry.log",
            ready=self._alive,
        )

    async def _alive(self) -> None:
        (await self.http.get("/healthz")).raise_for_status()

    async def start(self) -> None:
        self._child = await ChildProcess.start(self._spec)
        await self._child.wait_ready(60)

    async def stop(self, *, kill: bool = False) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        if kill:
            os.kill(child.pid, 9)
        await child.stop()
        return await child.wait()

    async def is_ready(self) -> bool:
        return (await self.http.get("/readyz")).status_code == 200

    async def metric(self, name: str) -> float:
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    async def ids(self) -> list[str]:
        """Return the event ids as a reader sees them: one per event."""
        return await self.column("SELECT event_id FROM requests FINAL ORDER BY event_id")

    async def column(self, sql: str) -> list[str]:
        client = await clickhouse_connect.get_async_client(
            host="127.0.0.1", port=self._tracestore.port, database=self.database
        )
        try:
            return [row[0] for row in (await client.query(sql)).result_rows]
        finally:
            await client.close()


@asynccontextmanager
async def running(home: Path, broker: Any, tracestore: Any) -> AsyncIterator[Telemetry]:
    service = Telemetry(home, broker, tracestore)
    try:
        await service.start()
        yield service
    finally:
        await service.stop()
        await service.http.aclose()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - the state of another process
            await asyncio.sleep(0.05)
