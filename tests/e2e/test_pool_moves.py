"""Requests that wait in one pool are answered by another pool of their model that has woken.

Run with -rP for the figures of the run.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import openai
import pytest
import pytest_asyncio
import structlog

from sluice.deadlines import DEADLINE_MS_MAX
from tests.e2e.conftest import Stack

log = structlog.get_logger(__name__)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

OWN, FAR, MODEL = "moves-own", "moves-far", "moves"
# Two requests at once, 20 ms per step: an answer takes two seconds.
OPTIONS = {"sequences_max": "2", "cost_step_s": "0.02"}
TOKENS, REQUESTS = 100, 16
BOUNDS = {"replicas_max": 1, "minute_worth": 0.0, "hold_s": 60.0}
PATIENCE_S = 90.0
_MOVES = re.compile(rf'gateway_pool_choices_total{{pool="{FAR}",reason="move"}} (\S+)')


class TwoPools:
    """Two pools of one model on the stack. One serves, and the only replica of the other sleeps."""

    def __init__(self, admin: httpx.AsyncClient) -> None:
        self.admin = admin
        self.fields: dict[str, object] = {"engine": "sim", "engine_options": OPTIONS}

    async def put(self, path: str, **body: object) -> None:
        (await self.admin.put(f"/v1/{path}", json=body)).raise_for_status()

    async def create(self) -> None:
        pools = (await self.admin.get("/v1/pools")).raise_for_status().json()["data"]
        base = next(pool["base_digest"] for pool in pools if pool["id"].startswith("tiny-"))
        self.fields["base_digest"] = base
        for pool_id in (OWN, FAR):
            await self.put(f"pools/{pool_id}", **self.fields, replicas_wanted=1)
        await self.put(f"models/{MODEL}", base_digest=base, pool_id=OWN)
        await self.put(f"model-pools/{MODEL}", pools=[{"pool_id": OWN}, {"pool_id": FAR}])
        await self.put(f"pools/{OWN}/scaling", **BOUNDS, replicas_min=1, sleepers_share=0.0)
        await self.put(f"pools/{FAR}/scaling", **BOUNDS, replicas_min=0, sleepers_min=1, idle_s=1)

    async def remove(self) -> None:
        paths = (f"model-pools/{MODEL}", f"models/{MODEL}", f"pools/{OWN}/scaling")
        for path in (*paths, f"pools/{FAR}/scaling"):
            (await self.admin.delete(f"/v1/{path}")).raise_for_status()
        for pool_id in (OWN, FAR):
            await self.put(f"pools/{pool_id}", **self.fields, replicas_wanted=0)
        await _until("the replicas are gone", self.is_empty)

    async def states(self) -> Counter[tuple[str, str]]:
        rows = (await self.admin.get("/v1/replicas")).raise_for_status().json()["data"]
        return Counter((it["pool_id"], it["state"]) for it in rows if it["pool_id"] in (OWN, FAR))

    async def is_empty(self) -> bool:
        return not await self.states()

    async def rests(self) -> bool:
        return await self.states() == Counter({(OWN, "ready"): 1, (FAR, "sleeping"): 1})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pools(stack: Stack) -> AsyncIterator[TwoPools]:
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    async with httpx.AsyncClient(base_url=stack.admin_url, headers=headers, timeout=60) as admin:
        found = TwoPools(admin)
        await found.create()
        yield found
        await found.remove()


async def _until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    began_at = time.monotonic()
    while not await holds():
        assert time.monotonic() < began_at + PATIENCE_S, f"never happened: {what}"
        await asyncio.sleep(0.2)


async def _moves(stack: Stack) -> float:
    """Return the number of moves to the other pool that the gateways have counted."""
    url = f"http://127.0.0.1:{stack.ports()['gateway_ops']}/metrics"
    async with httpx.AsyncClient(timeout=60) as client:
        return sum(map(float, _MOVES.findall((await client.get(url)).text)))


async def test_requests_that_wait_are_answered_by_the_pool_that_wakes(
    stack: Stack, pools: TwoPools
) -> None:
    await _until("one pool serves, and the other sleeps", pools.rests)
    key = stack.new_key("mover", tier={"priority": 5, "ttft_deadline_ms": DEADLINE_MS_MAX})
    client = openai.AsyncOpenAI(
        base_url=stack.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S
    )

    async def ask() -> int:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What does the river carry?"}],
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
        return answer.usage.completion_tokens if answer.usage else 0

    began_at = time.monotonic()
    async with client:
        tokens = await asyncio.gather(*(ask() for _ in range(REQUESTS)))
    moved = await _moves(stack)
    log.info("burst_ended", seconds=round(time.monotonic() - began_at, 1), moved=moved)
    assert tokens == [TOKENS] * REQUESTS, "no answer is lost, cut or refused"
    assert moved >= 1
