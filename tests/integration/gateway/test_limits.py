"""Limits as clients of a whole gateway see them: exact under parallel starts, never down."""

import asyncio
import json
import os
import signal
import time

import openai
import pytest

from sluice.priority import queue_priority
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
LIMITED = "sk-limited"


async def call(sdk, **options) -> object:
    return await sdk.chat.completions.create(model="tiny", messages=HELLO, **options)


def check_granted(count: int, allowance: float, per_minute: float, began_s: float) -> None:
    """All of the allowance, and no more than what has come since on a machine that is busy."""
    assert int(allowance) <= count <= allowance + (time.monotonic() - began_s) * per_minute / 60


async def test_parallel_starts_never_pass_the_request_limit(world) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk, w.http(LIMITED) as http:
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(call(sdk, max_tokens=5) for _ in range(20)), return_exceptions=True
        )
        refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
        served = len(answers) - len(refused)
        check_granted(served, 5, 5, began_s)
        assert {error.code for error in refused} == {"rate_limit_requests"}
        body = {"model": "tiny", "messages": HELLO}
        while (response := await http.post("/v1/chat/completions", json=body)).is_success:
            served += 1  # what has come since
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 12
        assert response.headers["x-ratelimit-limit-requests"] == "5"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert response.headers["x-ratelimit-limit-tokens"] == "1000"
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        assert len(w.router.submits) == served


async def test_tokens_are_reserved_before_and_settled_after(world, eventually) -> None:
    async with world() as w, w.http(LIMITED) as http:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "stop": "zzz"}
        used, began_s = 0, time.monotonic()
        for index in range(3):
            response = await http.post("/v1/chat/completions", json=body)
            usage = response.json()["usage"]
            remaining = int(response.headers["x-ratelimit-remaining-tokens"])
            # Reserved: the prompt and, until an answer was seen, all of max_tokens.
            reserved = 1000 - used - remaining
            refilled = 1 + (time.monotonic() - began_s) * 1000 / 60
            assert usage["prompt_tokens"] <= reserved + refilled
            assert reserved <= usage["prompt_tokens"] + 200
            assert (reserved > 150) == (index == 0)
            used += usage["total_tokens"]
            await asyncio.sleep(0.05)


async def test_a_refused_request_costs_nothing(world) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk:
        for _ in range(10):
            with pytest.raises(openai.InternalServerError):
                await sdk.chat.completions.create(
                    model="nowhere", messages=HELLO, max_tokens=200, timeout=60
                )
            break
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(call(sdk, max_tokens=5) for _ in range(8)), return_exceptions=True
        )
        check_granted(sum(not isinstance(a, Exception) for a in answers), 5, 5, began_s)


def padded(**body) -> bytes:
    """A body that may take work before its tokens are known, by its size."""
    return json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 1} | body).encode() + (
        b" " * (17 << 10)
    )


async def test_a_gate_refuses_before_any_work_and_never_the_highest_tier(world, eventually) -> None:
    async with world() as w, w.http() as http, w.http("sk-two") as top:
        objects = w.feed.objects
        objects.tiers.add(id="top", priority=5)
        next(it for it in objects.tenants if it.id == "two").tier_id = "top"
        w.feed.replace(objects)
        await eventually(lambda: "top" in w.gateway.watcher.state.tiers)
        for priority in (1, 5):
            w.router.cells[0].tier_gates.add(
                priority=queue_priority(priority), passing_permille=250, retry_ms=4000
            )
        await eventually(lambda: w.gateway.links.is_gated)
        path, body = "/v1/chat/completions", {"model": "tiny", "messages": HELLO}
        answers = [await http.post(path, json=body) for _ in range(8)]
        assert [it.status_code for it in answers] == [200, 503, 503, 503] * 2
        assert answers[1].json()["error"]["code"] == "overloaded"
        assert 1 <= int(answers[1].headers["retry-after"]) <= 4
        assert (await http.post(path, json=body)).status_code == 200
        too_long = {**body, "messages": [{"role": "user", "content": "word " * 1000}]}
        assert (await http.post(path, json=too_long)).status_code == 503, "it is not tokenized"
        patient = [await http.post(path, json={**body, "deadline_ms": 30_000}) for _ in range(4)]
        others = [await top.post(path, json=body) for _ in range(4)]
        assert {it.status_code for it in (*patient, *others)} == {200}
        await eventually(lambda: w.router.turned_away == 7)
        assert len(w.router.submits) == 11


async def test_a_large_body_is_one_request_and_used_when_it_is_refused(world) -> None:
    async with world() as w, w.http(LIMITED) as http:
        began_s = time.monotonic()
        response = await http.post("/v1/chat/completions", content=padded())
        assert response.is_success
        assert response.headers["x-ratelimit-remaining-requests"] == "4"
        text = [{"role": "user", "content": "the river and the gate " * 100_000}]
        refused = 0
        while True:
            response = await http.post("/v1/chat/completions", content=padded(messages=text))
            if response.status_code == 429:
                break
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "characters" in response.json()["error"]["message"]
            refused += 1
        check_granted(1 + refused, 5, 5, began_s)
        assert response.json()["error"]["code"] == "rate_limit_requests"


async def test_a_large_body_without_tokens_left_is_used_as_well(world) -> None:
    async with world() as w, w.http(LIMITED) as http:
        began_s = time.monotonic()
        text = [{"role": "user", "content": "the river and the gate " * 20}]
        codes: list[str] = []
        for _ in range(8):
            response = await http.post("/v1/chat/completions", content=padded(messages=text))
            codes.append("" if response.is_success else response.json()["error"]["code"])
        assert "rate_limit_tokens" in codes
        worked_at = [code for code in codes if code != "rate_limit_requests"]
        check_granted(len(worked_at), 5, 5, began_s)


async def test_a_caller_that_hangs_up_has_used_a_request(world, eventually) -> None:
    async with world() as w, w.http(LIMITED) as http:
        w.router.plan = lambda _: Plan([[]], None)  # a replica is at it, and no token comes
        submits, body = w.router.submits, {"model": "tiny", "messages": HELLO, "max_tokens": 5}
        began_s = time.monotonic()
        for _ in range(12):
            before = len(submits)
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(http.post("/v1/chat/completions", json=body))
                await eventually(lambda: call.done() or len(submits) > before)  # noqa: B023
                call.cancel()
            await eventually(lambda: len(w.router.cancelled) == len(submits))
        check_granted(len(submits), 5, 5, began_s)


async def test_without_valkey_a_bounded_allowance_remains(world, eventually) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk:
        await call(sdk, max_tokens=5)
        os.kill(w.valkey.pid, signal.SIGKILL)
        await eventually(lambda: not w.gateway.valkey.is_connected)
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(call(sdk, max_tokens=5) for _ in range(20)), return_exceptions=True
        )
        granted = sum(not isinstance(a, Exception) for a in answers)
        check_granted(granted, 2.5, 2.5, began_s)  # half of 5
        assert w.gateway.limiter.local_decisions == 20


async def test_a_frozen_valkey_costs_only_the_deadline(world, eventually) -> None:
    async with world(limit_deadline_s=0.5) as w, w.sdk(LIMITED) as sdk:
        await call(sdk, max_tokens=5)
        await eventually(lambda: w.gateway.limiter.is_shared)
        before = w.gateway.limiter.local_decisions  # some, if the machine was busy
        os.kill(w.valkey.pid, signal.SIGSTOP)
        try:
            await call(sdk, max_tokens=5)
            assert w.gateway.limiter.local_decisions == before + 1
            assert not w.gateway.limiter.is_shared, "nobody waits for it any more"
            await call(sdk, max_tokens=5)
            assert w.gateway.limiter.local_decisions == before + 2
        finally:
            os.kill(w.valkey.pid, signal.SIGCONT)
