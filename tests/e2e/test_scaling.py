"""A burst of five times the usual load takes a pool up and down again: real engines, real agents."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

POOL = MODEL = "scaled"
# Four requests at once, 20 ms per step: 200 tokens per second of a full replica.
OPTIONS = {"sequences_max": "4", "cost_step_s": "0.02"}
TOKENS = 40  # of an answer, so that one request is 0.2 seconds of a replica
USUAL, BURST_FACTOR = 1.5, 5  # requests per second
BOUNDS = {"replicas_min": 1, "replicas_max": 3, "minute_worth": 0.0, "hold_s": 10.0}
TIMEOUT_S = 180.0  # of each phase; only a failing test takes so long


class Load:
    """Requests at a rate that may change, and how they ended."""

    def __init__(self, base_url: str, key: str) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=base_url, api_key=key, max_retries=0, timeout=TIMEOUT_S
        )
        self.rate = USUAL
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while self.rate:
                number += 1
                tasks.create_task(self._ask(number))
                await asyncio.sleep(1 / self.rate)

    async def _ask(self, number: int) -> None:
        message = {"role": "user", "content": f"Request {number}"}
        try:
            await self.client.chat.completions.create(
                model=MODEL, messages=[message], max_tokens=TOKENS
            )
        except openai.APIStatusError as error:
            self.ends[str(error.code)] += 1
        else:
            self.ends["done"] += 1


async def _until(what: str, holds) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.5)


class ScaledPool:
    """A pool of its own on the stack, within bounds."""

    def __init__(self, admin: httpx.AsyncClient) -> None:
        self.admin = admin
        self.other = ""  # another pool of the same base, which the stack has
        self.fields: dict[str, object] = {"engine": "sim", "engine_options": OPTIONS}

    async def put(self, path: str, **body: object) -> None:
        (await self.admin.put(f"/v1/{path}", json=body)).raise_for_status()

    async def create(self) -> None:
        pools = (await self.admin.get("/v1/pools")).json()["data"]
        base = next(pool["base_digest"] for pool in pools if pool["id"].startswith("tiny-"))
        self.fields["base_digest"] = base
        self.other = next(pool["id"] for pool in pools if pool["id"].startswith("tiny-"))
        await self.put(f"pools/{POOL}", **self.fields, replicas_wanted=1)
        await self.put(f"models/{MODEL}", base_digest=base, pool_id=POOL)
        await self.put(f"pools/{POOL}/scaling", **BOUNDS)

    async def remove(self) -> None:
        for path in (f"models/{MODEL}", f"pools/{POOL}/scaling"):
            (await self.admin.delete(f"/v1/{path}")).raise_for_status()
        await self.put(f"pools/{POOL}", **self.fields, replicas_wanted=0)

    async def ready(self) -> int:
        """Return how many replicas serve or still finish what they have."""
        found = (await self.admin.get(f"/v1/pools/{POOL}/status")).json()
        return found["ready"] + found["draining"]

    async def serves(self, replicas: int) -> bool:
        return await self.ready() >= replicas

    async def is_smallest(self) -> bool:
        return await self.ready() == BOUNDS["replicas_min"]

    async def decided(self) -> dict:
        rows = (await self.admin.get("/v1/scaling")).json()["data"]
        return next(row for row in rows if row["pool_id"] == POOL)

    async def is_known(self) -> bool:
        row = await self.decided()
        return bool(row["speed"]) and row["cause"] == "demand" and row["demand"] > 0.1


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(stack) -> AsyncIterator[ScaledPool]:
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    async with httpx.AsyncClient(base_url=stack.admin_url, headers=headers, timeout=60) as admin:
        found = ScaledPool(admin)
        await found.create()
        yield found
        await found.remove()


async def test_a_burst_takes_a_pool_up_and_down_again_without_refusals(stack, pool) -> None:
    await _until("the first replica serves", lambda: pool.serves(1))
    load = Load(stack.base_url, stack.api_key)
    async with load.client, asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await _until("the demand is known", pool.is_known)
        assert (await pool.decided())["wanted"] == 1
        load.rate = USUAL * BURST_FACTOR
        await _until("a burst brings replicas that serve", lambda: pool.serves(2))
        explained = stack.sluice("scaling", "explain", POOL)
        assert "work-seconds" in explained.stdout, explained.stdout + explained.stderr
        load.rate = USUAL / 3
        await _until("the pool is at its minimum again", pool.is_smallest)
        load.rate = 0.0
    changes = (await pool.admin.get(f"/v1/pools/{POOL}/scaling/changes")).json()["data"]
    numbers = [change["after"] for change in changes]
    assert numbers[0] == BOUNDS["replicas_min"]
    assert max(numbers) <= BOUNDS["replicas_max"]
    assert set(load.ends) == {"done"}, json.dumps(load.ends)


async def test_a_second_pool_of_a_model_answers_where_it_costs_less(stack, pool) -> None:
    await _until("the first replica serves", lambda: pool.serves(1))
    metrics = f"{stack.base_url.removesuffix('/v1')}/metrics"
    chosen = f'gateway_pool_choices_total{{pool="{pool.other}",reason="wait"}}'
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.api_key) as client:

        async def is_elsewhere() -> bool:
            message = {"role": "user", "content": "Where?"}
            await client.chat.completions.create(model=MODEL, messages=[message], max_tokens=2)
            return chosen in (await pool.admin.get(metrics)).text

        assert not await is_elsewhere(), "its own pool alone serves it"
        assert stack.sluice("models", "pools", "set", MODEL, f"{POOL}=1,100", pool.other)
        await _until("the cheaper pool answers", is_elsewhere)
    assert POOL in stack.sluice("models", "pools", "show", MODEL).stdout
    assert stack.sluice("models", "pools", "remove", MODEL).returncode == 0
