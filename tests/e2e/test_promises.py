"""One test per promise that the platform makes when something goes wrong."""

import asyncio
import json
import os
import re
import signal
import socket
import struct
import time

import httpx
import openai
import pytest

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
MESSAGES = [{"role": "user", "content": "Tell me a story about a river and a gate."}]


def sdk(stack, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=stack.base_url, api_key=key or stack.api_key, max_retries=0, timeout=60
    )


async def eventually(check, timeout_s: float = 60.0) -> None:
    """Wait until `check` returns something true; its last error or value is the message."""
    deadline, last = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline:
        try:
            last = await asyncio.to_thread(check)
            if last:
                return
        except (httpx.HTTPError, openai.APIError, KeyError, AttributeError) as error:
            last = error
        await asyncio.sleep(0.1)
    pytest.fail(f"not within {timeout_s} s: {last!r}")


async def shared_truth(stack, name: str, tier: dict[str, int], count: int, ask) -> list:
    """Let new tenants ask at once, in turns; return what they got when Valkey decided about all.

    On a busy machine it may answer late, and the gateway decides alone: then others try again.
    """

    port = json.loads((stack.home / "ports.json").read_text())["gateway_ops"]

    def alone() -> float:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
        return float(re.search(r"^gateway_limit_local_decisions\S* (\S+)$", page, re.MULTILINE)[1])

    for attempt in range(10):
        keys = [stack.new_key(f"{name}-{attempt}-{i}", tier=tier) for i in range(count)]
        for key in keys:
            await eventually(lambda key=key: sdk(stack, key).models.list())
        before = alone()
        answers = await asyncio.gather(
            *(asyncio.to_thread(ask, keys[i % count]) for i in range(16))
        )
        if alone() == before:
            return answers
    pytest.fail("Valkey was late each time")


async def test_two_tenants_at_their_request_limits_do_not_touch_each_other(stack) -> None:
    def call(key: str) -> int | float:
        try:
            with sdk(stack, key) as client:
                client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
        except openai.RateLimitError as error:
            assert error.code == "rate_limit_requests"
            assert int(error.response.headers["retry-after"]) >= 1
            assert error.response.headers["x-ratelimit-limit-requests"] == "3"
            return 429
        return 200

    answers = await shared_truth(stack, "rpm", {"rpm": 3}, 2, call)
    for tenant in (0, 1):
        assert sorted(answers[tenant::2]) == [200] * 3 + [429] * 5


async def test_a_token_limit_holds_under_parallel_starts(stack) -> None:
    began_s = time.monotonic()

    def call(key: str) -> int:
        try:
            with sdk(stack, key) as client:
                return client.chat.completions.create(
                    model=MODEL,
                    messages=MESSAGES,
                    max_tokens=40,
                    extra_body={"ignore_eos": True},
                ).usage.total_tokens
        except openai.RateLimitError as error:
            assert error.code == "rate_limit_tokens"
            return 0

    used = await shared_truth(stack, "tpm", {"tpm": 200}, 1, call)
    assert 0 < sum(used) <= 200 * (1 + (time.monotonic() - began_s) / 60)


def kv_blocks_used(stack) -> float:
    with stack.admin() as http:
        replica = http.get("/v1/replicas").json()["data"][0]
    text = httpx.get(f"http://{replica['metrics_address']}/metrics", timeout=60).text
    found = re.search(
        r'nv_trt_llm_kv_cache_block_metrics\{[^}]*kv_cache_block_type="used"[^}]*\} (\S+)', text
    )
    assert found, text[-2000:]
    return float(found[1])


async def test_a_client_that_leaves_frees_its_kv_blocks(stack) -> None:
    await eventually(lambda: kv_blocks_used(stack) == 0)
    client = openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.api_key, max_retries=0)
    async with client:
        streams = [
            await client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                max_tokens=3900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(4)
        ]
        for stream in streams:
            await anext(aiter(stream))
        await eventually(lambda: kv_blocks_used(stack) >= 4)
        for stream in streams:
            await stream.close()
        # Before the eight seconds have passed after which they would have ended by themselves.
        await eventually(lambda: kv_blocks_used(stack) == 0, timeout_s=6)


async def test_clients_that_reset_their_connections_cost_other_clients_nothing(stack) -> None:
    gateway = stack.pid("gateway")
    client = openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.api_key, max_retries=0)
    host, _, port = stack.base_url.split("/")[2].partition(":")
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2000, "stream": True}
    request = httpx.Request(
        "POST",
        f"{stack.base_url}/chat/completions",
        json={**body, "ignore_eos": True},
        headers={"authorization": f"Bearer {stack.api_key}"},
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    raw = f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content

    async def reset_mid_stream() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        await reader.readuntil(b'"content":"')
        linger = struct.pack("ii", 1, 0)  # closing then sends RST, as a crashed client does
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async with client:
        stream = await client.chat.completions.create(
            **body, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
        for _ in range(5):
            await asyncio.gather(*(reset_mid_stream() for _ in range(16)))
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 2000
    assert stack.pid("gateway") == gateway


async def test_it_serves_and_restarts_from_disk_while_control_plane_and_database_are_frozen(
    stack,
) -> None:
    frozen = [stack.pid("postgres"), stack.pid("control-plane")]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        with sdk(stack) as client:
            assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
        os.kill(stack.pid("gateway"), signal.SIGKILL)
        os.kill(stack.pid("router"), signal.SIGKILL)

        def served_again() -> bool:
            with sdk(stack) as client:
                return bool(
                    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
                )

        await eventually(served_again, timeout_s=60)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


async def test_a_callers_trace_names_the_decision_of_the_router(stack) -> None:
    trace_id = os.urandom(16).hex()
    with sdk(stack) as client:
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=7,
            extra_body={"ignore_eos": True},
            extra_headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        )
    await eventually(lambda: stack.trace(answer.headers["x-request-id"]))
    trace = stack.trace(answer.headers["x-request-id"])
    row = trace["request"]
    assert (row["outcome"], row["output_tokens"], row["tenant_id"]) == ("length", 7, "demo")
    assert row["trace_id"] == trace_id
    [attempt] = trace["attempts"]
    assert attempt["decision"]["chosen"] == attempt["replica_id"] == row["replica_id"]
