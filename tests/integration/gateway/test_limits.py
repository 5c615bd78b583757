"""Limits on real Valkey: exact under parallel starts, the same arithmetic as in Python, never down."""

import asyncio
import os
import signal
import time

import openai
import pytest

from gateway.limits.buckets import (
    RESERVE_SCRIPT,
    SETTLE_SCRIPT,
    LocalBuckets,
    Scope,
    level_now,
    waits_s,
)
from gateway.limits.valkey import ValkeyClient, ValkeyError

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
LIMITED = "sk-limited"


async def call(sdk, **options) -> object:
    return await sdk.chat.completions.create(model="tiny", messages=HELLO, **options)


async def test_parallel_starts_never_pass_the_request_limit(world) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk, w.http(LIMITED) as http:
        answers = await asyncio.gather(
            *(call(sdk, max_tokens=5) for _ in range(20)), return_exceptions=True
        )
        refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
        assert len(answers) - len(refused) == 5
        assert {error.code for error in refused} == {"rate_limit_requests"}
        response = await http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HELLO}
        )
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 12
        assert response.headers["x-ratelimit-limit-requests"] == "5"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert response.headers["x-ratelimit-limit-tokens"] == "1000"
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        assert len(w.router.submits) == 5


async def test_tokens_are_reserved_before_and_settled_after(world, eventually) -> None:
    async with world() as w, w.http(LIMITED) as http:
        for expected in (800, 600):
            response = await http.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": HELLO, "max_tokens": 200, "stop": "zzz"},
            )
            prompt = response.json()["usage"]["prompt_tokens"]
            remaining = int(response.headers["x-ratelimit-remaining-tokens"])
            # Reserved: prompt + 200; what the answer before did not use came back.
            assert remaining >= expected - 2 * prompt - 60
            assert remaining <= 1000 - prompt - 200 + 30
            await asyncio.sleep(0.05)


async def test_a_refused_request_costs_nothing(world) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk:
        for _ in range(10):
            with pytest.raises(openai.InternalServerError):
                await sdk.chat.completions.create(
                    model="nowhere", messages=HELLO, max_tokens=200, timeout=10
                )
            break
        await asyncio.sleep(0.05)
        answers = await asyncio.gather(
            *(call(sdk, max_tokens=5) for _ in range(8)), return_exceptions=True
        )
        assert sum(not isinstance(a, Exception) for a in answers) == 5


async def test_without_valkey_a_bounded_allowance_remains(world, eventually) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk:
        await call(sdk, max_tokens=5)
        os.kill(w.valkey.pid, signal.SIGKILL)
        await eventually(lambda: not w.gateway.valkey.is_connected)
        answers = await asyncio.gather(
            *(call(sdk, max_tokens=5) for _ in range(20)), return_exceptions=True
        )
        assert sum(not isinstance(a, Exception) for a in answers) == 2  # half of 5, rounded down
        assert w.gateway.limiter.local_decisions == 20


async def test_a_frozen_valkey_costs_only_the_deadline(world) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk:
        await call(sdk, max_tokens=5)
        os.kill(w.valkey.pid, signal.SIGSTOP)
        try:
            await call(sdk, max_tokens=5)
            assert w.gateway.limiter.local_decisions == 1
        finally:
            os.kill(w.valkey.pid, signal.SIGCONT)


async def test_flushed_scripts_are_sent_again(world, eventually) -> None:
    async with world() as w, w.sdk(LIMITED) as sdk:
        await call(sdk, max_tokens=5)
        await w.gateway.valkey.call("SCRIPT", "FLUSH")
        await call(sdk, max_tokens=5)
        assert w.gateway.limiter.local_decisions == 0
        assert w.gateway.limiter.lost_settlements == 0


@pytest.fixture
async def client(valkey):
    client = ValkeyClient(valkey[1], deadline_s=5)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        async with asyncio.timeout(10):
            while not client.is_connected:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        yield client
        run.cancel()


async def test_script_and_python_agree(client) -> None:
    """The script's clock moves during the test, so limits are chosen whose refill is below 1."""
    import random

    rng = random.Random(7)
    for case in range(200):
        scopes = [
            Scope(f"t{case}:{i}", rng.choice((0, 1, 3, 5)), rng.choice((0, 10, 40)))
            for i in range(rng.choice((1, 2)))
        ]
        local = LocalBuckets(share=1.0)
        now = time.time()
        for _ in range(8):
            limits = [limit for s in scopes for limit in (s.rpm, s.tpm)]
            names = [s.name for s in scopes]
            if rng.random() < 0.7:
                need = rng.randrange(0, 50)
                waits = [
                    waits_s(s, level_now(s, local.levels.get(s.name), now), need) for s in scopes
                ]
                requests_s, tokens_s = (max(column) for column in zip(*waits, strict=True))
                verdict = local.reserve(scopes, need, now)
                reply = await client.call("EVAL", RESERVE_SCRIPT, len(names), *names, need, *limits)
                assert reply[0] == verdict.is_granted
                assert abs(reply[2] / 1000 - verdict.wait_s) < 1.0
                if abs(requests_s - tokens_s) > 1.0:  # else the script's later clock decides
                    assert reply[1] == verdict.is_request_limit
            else:
                reserved, used, requests = rng.randrange(50), rng.randrange(80), rng.randrange(2)
                local.settle(scopes, reserved, used, requests, now)
                await client.call(
                    "EVAL", SETTLE_SCRIPT, len(names), *names, reserved, used, requests, *limits
                )


async def test_many_calls_of_one_tick_are_answered_in_order(client) -> None:
    replies = await asyncio.gather(*(client.call("ECHO", str(i)) for i in range(2000)))
    assert replies == [str(i).encode() for i in range(2000)]


async def test_errors_of_the_server_belong_to_their_call(client) -> None:
    first, bad, last = client.call("PING"), client.call("NOSUCH"), client.call("PING")
    assert await first == await last == b"PONG"
    with pytest.raises(ValkeyError, match="unknown command"):
        await bad


async def test_a_wrong_password_is_an_error_not_a_hang(valkey) -> None:
    url = valkey[1].replace("test-secret_1", "wrong")
    client = ValkeyClient(url)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(client.run())
        await asyncio.sleep(0.3)
        assert not client.is_connected
        with pytest.raises(ValkeyError):
            client.call("PING")
        run.cancel()
