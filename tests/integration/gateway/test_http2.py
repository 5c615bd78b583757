"""HTTP/2 at a real gateway: what is promised over HTTP/1.1 holds, and what HTTP/2 adds."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from h2.errors import ErrorCodes

from tests.integration.gateway import test_answers, test_choices, test_faults, test_parameters
from tests.integration.gateway.test_tls import CHAT, client_of, plan
from tests.support.http2_peer import SocketPeer
from tests.support.own_certificate import write_certificate
from tests.support.scripted_router import Plan

pytestmark = pytest.mark.real

OVER_2 = {"http1": False, "http2": True}
SAME: list[Callable[..., Any]] = [
    test_answers.test_a_whole_answer,
    test_answers.test_a_stream_with_an_interval_says_the_same,
    test_answers.test_errors_have_one_shape,
    test_answers.test_request_ids_and_traces_are_passed_on,
    test_answers.test_tool_calls_become_openai_deltas,
    test_answers.test_stop_strings_cut_exactly_and_cancel_upstream,
    test_choices.test_streamed_answers_are_told_apart_by_their_index,
    test_choices.test_a_failure_after_a_sign_of_life_is_told_in_band,
    test_faults.test_the_third_loss_is_told_in_band_and_without_done,
    test_parameters.test_n_and_lists_of_prompts,
]


@pytest.fixture
def over_2(world: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(*given: Any, **settings: Any) -> AsyncIterator[Any]:
        async with world(*given, **settings) as w:
            w.versions = OVER_2
            yield w

    return start


@pytest.mark.parametrize("test", SAME, ids=lambda it: it.__name__)
async def test_it_is_as_over_http_1(over_2: Any, eventually: Any, test: Callable[..., Any]) -> None:
    given = {"world": over_2, "eventually": eventually}
    await test(**{name: given[name] for name in inspect.signature(test).parameters})


def ask(client: SocketPeer, number: int, **more: Any) -> None:
    more_fields = [("authorization", "Bearer sk-one"), ("content-type", "application/json")]
    body = json.dumps(CHAT | more).encode()
    client.ask(number, body, "/v1/chat/completions", more_fields)


async def test_many_streams_of_one_connection_and_one_that_leaves(world, eventually) -> None:
    async with world() as w:
        w.router.plan, w.router.step_s = plan, 0.01
        client = await SocketPeer.connect(w.gateway.settings.port)
        numbers = range(1, 40, 2)
        for number in numbers:
            ask(client, number)
        await client.until(lambda: all(client.body(it) for it in numbers))
        page = w.gateway.metrics.page()
        assert b"gateway_open_http2_connections 1.0" in page
        assert b"gateway_open_http2_streams 20.0" in page
        assert b"gateway_open_connections 1.0" in page
        client.state.reset_stream(1, ErrorCodes.CANCEL)
        client.send()
        await client.until(lambda: all(client.has_ended(it) for it in numbers[1:]))
        await eventually(lambda: len(w.router.cancelled) == 1)
        for number in numbers[1:]:
            assert client.body(number).count(b'"content":') >= 150
            assert client.body(number).endswith(b"data: [DONE]\n\n")
        assert b"gateway_open_http2_streams 0.0" in w.gateway.metrics.page()
        await client.close()


async def test_a_stream_that_is_not_read_is_cut_alone(world, eventually) -> None:
    async with world() as w:
        endless = Plan([[65, 66, 67] * 400] * 1_000_000, None)
        w.router.plan = lambda s: endless if s.output_tokens_max == 200 else plan(s)
        client = await SocketPeer.connect(w.gateway.settings.port)
        client.state.increment_flow_control_window(2**30)
        ask(client, 1, max_tokens=200)
        await client.until(lambda: client.was_reset(1) is not None, credit=False)
        await eventually(lambda: w.router.cancelled)
        assert b'code="slow_reader"' in w.gateway.metrics.page()
        ask(client, 3)
        await client.until(lambda: client.has_ended(3))
        assert client.body(3).endswith(b"data: [DONE]\n\n")
        await client.close()


async def test_drain_asks_clients_to_go_and_finishes_their_requests(world) -> None:
    async with world(drain_s=2.0) as w:
        endless = Plan([[65]] * 1_000_000, None)
        w.router.plan = lambda s: endless if s.output_tokens_max == 200 else plan(s)
        w.router.step_s = 0.005
        client = await SocketPeer.connect(w.gateway.settings.port)
        idle = await SocketPeer.connect(w.gateway.settings.port)
        ask(client, 1)
        ask(client, 3, max_tokens=200)
        await client.until(lambda: client.body(1) and client.body(3))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(w.gateway.stop())
            await idle.until(lambda: idle.is_over)
            assert [it.last_stream_id for it in idle.goodbyes()] == [2**31 - 1, 0]
            await client.until(lambda: client.is_over)
        assert [it.last_stream_id for it in client.goodbyes()] == [2**31 - 1, 3]
        assert client.body(1).endswith(b"data: [DONE]\n\n")
        assert b'"code":"draining"' in client.body(3)
        assert client.has_ended(1)
        assert client.has_ended(3)
        await idle.close()
        await client.close()


async def test_large_bodies_and_bodies_that_are_too_large(over_2) -> None:
    async with over_2() as w, w.http() as http:
        long = {"model": "tiny", "messages": [{"role": "user", "content": "a " * 1_500_000}]}
        answers = await asyncio.gather(
            *(http.post("/v1/chat/completions", json=long) for _ in range(3)),
            http.post("/v1/chat/completions", content=b" " * (5 << 20)),
            http.post("/v1/chat/completions", content=json.dumps(CHAT | {"stream": False})),
        )
        assert [it.status_code for it in answers] == [400, 400, 400, 413, 200]
        assert answers[0].json()["error"]["code"] == "context_length_exceeded"
        assert answers[3].json()["error"]["code"] == "request_too_large"
        assert (await http.head("/healthz")).status_code == 200
        assert (await http.options("/v1/models")).status_code == 405
        assert w.gateway.http.server.body_bytes == 0


async def test_over_tls_a_client_chooses_and_the_setting_switches_it_off(world, tmp_path) -> None:
    cert, key = write_certificate(tmp_path)
    for settings, version in (({}, "HTTP/2"), ({"http2": False}, "HTTP/1.1")):
        async with world(tls_cert=cert, tls_key=key, **settings) as w:
            url = w.base_url.replace("http://", "https://")
            for offered, got in (({"http2": True}, version), ({}, "HTTP/1.1")):
                async with httpx.AsyncClient(
                    base_url=url, verify=client_of(cert), timeout=60, **offered
                ) as http:
                    answer = await http.get("/healthz")
                    assert (answer.status_code, answer.http_version) == (200, got)
