"""More is asked for than can be served, through everything real: the lowest tier gives way first."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import structlog

from tests.integration.gateway.real_site import WAIT_S, Site, all_serve, running_site

pytestmark = pytest.mark.real
log = structlog.get_logger(__name__)

PLACES = 4  # of each of two engines
TOKENS = 100  # of an answer, which takes about two seconds: a busy machine stands still for one
DEADLINE_MS = 2500  # of the low tier: two rounds of answers may wait, a crowd may not
CROWD = 10 * PLACES
IMPORTANT = PLACES  # half of what can run at once
ROUNDS = 4
# What the router and a gate of its say.
EARLY = ("the first token would take", "More requests of your tier")


class Caller:
    """One tenant's client, and what became of its requests."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"authorization": f"Bearer {key}"}
        self.served = 0
        self.refusals: list[tuple[httpx.Response, float]] = []  # with the seconds that it took

    async def ask(self, number: int) -> httpx.Response:
        began_at = time.monotonic()
        response = await self._http.post(
            "/v1/completions",
            headers=self._headers,
            json={
                "model": "tiny",
                "prompt": f"request {number}",
                "max_tokens": TOKENS,
                "ignore_eos": True,
            },
        )
        if response.status_code == 200:
            self.served += 1
        else:
            self.refusals.append((response, time.monotonic() - began_at))
        return response

    async def insist(self, number: int, is_over: asyncio.Event) -> None:
        """Ask again and again, after as long as it is told to wait."""
        while not is_over.is_set():
            response = await self.ask(number)
            await asyncio.sleep(float(response.headers.get("retry-after", 0)))


@asynccontextmanager
async def callers(plane, site: Site, eventually) -> AsyncIterator[tuple[Caller, Caller]]:
    """Make a tenant in a high tier, and one in a low tier."""
    keys: list[str] = []
    for name, fields in (
        ("high", {"priority": 10}),
        ("low", {"priority": 1, "ttft_deadline_ms": DEADLINE_MS}),
    ):
        await plane.put(f"tiers/{name}", **fields)
        await plane.put(f"tenants/{name}", tier_id=name)
        made = await plane.admin.post(f"/v1/tenants/{name}/keys", json={})
        keys.append(made.json()["key"])
    known = site.gateway.watcher.state
    await eventually(lambda: {"high", "low"} <= {key.tenant_id for key in known.keys.values()})
    address = f"http://{site.gateway.settings.http_address}"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=WAIT_S, limits=limits) as http:
        high, low = (Caller(http, key) for key in keys)
        yield high, low


async def test_the_lowest_tier_is_refused_first_and_before_it_waits(
    control_plane, artifacts, valkey, eventually, tmp_path
) -> None:
    shape = {"cell_replicas_max": 0, "places": PLACES}
    async with (
        running_site(control_plane, artifacts, valkey, tmp_path, **shape) as site,
        callers(control_plane, site, eventually) as (high, low),
    ):
        await eventually(lambda: all_serve(site), timeout_s=WAIT_S)
        for _ in range(2):  # the router learns how fast answers end
            await asyncio.gather(*(low.ask(number) for number in range(2 * PLACES)))
        assert not low.refusals, "what fits is not refused"
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(CROWD):
                tasks.create_task(low.insist(number, is_over))
            await eventually(lambda: low.refusals)
            for _ in range(ROUNDS):
                await asyncio.gather(*(high.ask(number) for number in range(IMPORTANT)))
            is_over.set()

        assert (high.served, high.refusals) == (ROUNDS * IMPORTANT, [])
        assert low.served > 4 * PLACES, "what the high tier leaves is used"
        at_once = []
        for response, took_s in low.refusals:
            error = response.json()["error"]
            assert response.status_code == 503
            assert error["code"] in {"overloaded", "deadline_exceeded"}
            assert int(response.headers["retry-after"]) >= 1
            if error["message"].startswith(EARLY):
                at_once.append(took_s)
        assert len(at_once) > len(low.refusals) / 2, "most know before they wait"
        log.info(  # `pytest -rP` shows it
            "saturation_measured",
            refused=len(low.refusals),
            refused_at_once=len(at_once),
            refused_by_a_gate=sum(EARLY[1] in it.text for it, _ in low.refusals),
            median_ms=round(1000 * sorted(at_once)[len(at_once) // 2], 1),
            low_served=low.served,
        )
