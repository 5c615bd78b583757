"""A burst of three tiers against one replica and a sleeper: who is refused, and when help comes.

Run with -rP for the figures of the run.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import structlog

from tests.e2e.conftest import Stack

log = structlog.get_logger(__name__)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

POOL = MODEL = "burst"
# Four requests at once, 20 ms per step: a full replica gives 200 tokens, so 5 answers, per second.
OPTIONS = {"sequences_max": "4", "cost_step_s": "0.02"}
TOKENS = 40  # of an answer
USUAL, FACTOR, QUIET = 0.8, 5, 0.3  # requests per second of each tier
CALM_S, BURST_S = 25.0, 60.0  # the usual load is learned for so long before the burst
BOUNDS = {
    "replicas_min": 1,
    "replicas_max": 4,
    "sleepers_min": 1,
    "minute_worth": 0.0,
    "hold_s": 5.0,
}
PATIENCE_S = 90.0  # of each phase; only a failing test takes so long
# Bounds of a promise in seconds since the burst began, with room for a machine that is busy.
AWAKE_S = 20.0
TOP, FREE, BATCH = "burst-top", "burst-free", "burst-batch"
TIERS = {
    TOP: {"priority": 20, "ttft_deadline_ms": 30_000},
    FREE: {"priority": 1, "ttft_deadline_ms": 1_500},
    BATCH: {"priority": 0, "ttft_deadline_ms": 1_500, "is_preemptible": True},
}


@dataclass
class Refusal:
    """A refused request; `after_s` are the seconds since the burst began."""

    after_s: float
    status: int
    code: str
    retry_after: str


@dataclass
class TierLoad:
    """Requests of one tier at a rate that may change, and how they ended."""

    client: openai.AsyncOpenAI
    rate: float = USUAL
    done: int = 0
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    burst_at: float = math.inf

    async def run(self) -> None:
        async with self.client, asyncio.TaskGroup() as tasks:
            while self.rate:
                tasks.create_task(self._ask())
                await asyncio.sleep(1 / self.rate)

    async def _ask(self) -> None:
        try:
            await self.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "What does the river carry?"}],
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
        except openai.APIStatusError as error:
            after = error.response.headers.get("retry-after", "")
            after_s = time.monotonic() - self.burst_at
            self.refusals.append(Refusal(after_s, error.status_code, str(error.code), after))
        else:
            self.done += 1


class BurstPool:
    """A pool of its own on the stack, with one sleeper."""

    def __init__(self, admin: httpx.AsyncClient) -> None:
        self.admin = admin
        self.fields: dict[str, object] = {"engine": "sim", "engine_options": OPTIONS}

    async def put(self, path: str, **body: object) -> None:
        (await self.admin.put(f"/v1/{path}", json=body)).raise_for_status()

    async def rows(self, kind: str) -> list[dict[str, Any]]:
        return (await self.admin.get(f"/v1/{kind}")).raise_for_status().json()["data"]

    async def create(self) -> None:
        pools = await self.rows("pools")
        base = next(pool["base_digest"] for pool in pools if pool["id"].startswith("tiny-"))
        self.fields["base_digest"] = base
        await self.put(f"pools/{POOL}", **self.fields, replicas_wanted=1)
        await self.put(f"models/{MODEL}", base_digest=base, pool_id=POOL)
        await self.put(f"pools/{POOL}/scaling", **BOUNDS)

    async def remove(self) -> None:
        for path in (f"models/{MODEL}", f"pools/{POOL}/scaling"):
            (await self.admin.delete(f"/v1/{path}")).raise_for_status()
        await self.put(f"pools/{POOL}", **self.fields, replicas_wanted=0)
        await _until("the pool's replicas are gone", self.is_empty)

    async def is_empty(self) -> bool:
        """Return whether no replica of the pool is left; later tests count those of the stack."""
        return not await self.states()

    async def states(self) -> Counter[str]:
        rows = await self.rows("replicas")
        return Counter(
            "draining" if row["is_draining"] else row["state"]
            for row in rows
            if row["pool_id"] == POOL
        )

    async def sleepers(self) -> set[str]:
        """Return the ids of the replicas that sleep."""
        rows = await self.rows("replicas")
        return {it["id"] for it in rows if it["pool_id"] == POOL and it["state"] == "sleeping"}

    async def is_calm(self) -> bool:
        """Return whether one replica serves, one sleeps, and the demand is known."""
        decided = next(row for row in await self.rows("scaling") if row["pool_id"] == POOL)
        is_known = decided["speed"] and decided["cause"] == "demand"
        return is_known and await self.states() == Counter(ready=1, sleeping=1)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(stack: Stack) -> AsyncIterator[BurstPool]:
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    async with httpx.AsyncClient(base_url=stack.admin_url, headers=headers, timeout=60) as admin:
        found = BurstPool(admin)
        await found.create()
        yield found
        await found.remove()


async def _until(what: str, holds: Callable[[], Awaitable[bool]]) -> float:
    """Wait until something holds; return the seconds that it took."""
    began_at = time.monotonic()
    while not await holds():
        assert time.monotonic() < began_at + PATIENCE_S, f"never happened: {what}"
        await asyncio.sleep(0.2)
    return time.monotonic() - began_at


def _client(stack: Stack, tier: str) -> openai.AsyncOpenAI:
    key = stack.new_key(tier, tier=TIERS[tier])
    return openai.AsyncOpenAI(
        base_url=stack.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S
    )


async def test_a_burst_refuses_lower_tiers_alone_wakes_a_sleeper_and_passes(
    stack: Stack, pool: BurstPool
) -> None:
    loads = {tier: TierLoad(_client(stack, tier)) for tier in TIERS}
    await _until("a replica serves", lambda: _serves(pool, 1))
    async with asyncio.TaskGroup() as tasks:
        for load in loads.values():
            tasks.create_task(load.run())
        await _until("one replica serves and one sleeps", pool.is_calm)
        await asyncio.sleep(CALM_S)
        sleepers, burst_at = await pool.sleepers(), time.monotonic()
        for load in loads.values():
            load.rate, load.burst_at = USUAL * FACTOR, burst_at

        async def is_awake() -> bool:
            return not sleepers <= await pool.sleepers()

        awake_s = await _until("a sleeper wakes", is_awake)
        await _until("a replica boots and serves", lambda: _serves(pool, 3))
        three_s = time.monotonic() - burst_at
        await asyncio.sleep(burst_at + BURST_S - time.monotonic())
        most = (await pool.states())["ready"]
        for load in loads.values():
            load.rate = QUIET
        down_s = await _until("the pool is at one again", lambda: _is_one(pool))
        for load in loads.values():
            load.rate = 0.0
    ends = {tier: (load.done, len(load.refusals)) for tier, load in loads.items()}
    # Lower tiers have 1.5 s for a first token, and a busy machine may refuse one before the burst.
    low = [it for tier in (FREE, BATCH) for it in loads[tier].refusals if it.after_s >= 0]
    first_s = min(refusal.after_s for refusal in low)
    log.info(
        "burst_ended",
        answers_and_refusals=ends,
        first_refusal_s=round(first_s, 2),
        awake_s=round(awake_s, 1),
        three_serve_s=round(three_s, 1),
        most=most,
        down_again_s=round(down_s, 1),
    )
    assert loads[TOP].refusals == []
    assert any(refusal.after_s >= 0 for refusal in loads[BATCH].refusals)
    assert {refusal.status for refusal in low} <= {429, 503}
    assert all(int(refusal.retry_after) >= 1 for refusal in low), low
    assert awake_s < AWAKE_S


async def _serves(pool: BurstPool, replicas: int) -> bool:
    return (await pool.states())["ready"] >= replicas


async def _is_one(pool: BurstPool) -> bool:
    states = await pool.states()
    return states["ready"] + states["draining"] == 1
